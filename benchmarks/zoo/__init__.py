"""Stock models: which of them trace, narrow, compile and train."""
