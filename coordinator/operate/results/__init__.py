"""Results of runs: their models, their figures side by side, a page to send."""
