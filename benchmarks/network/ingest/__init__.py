"""`tessera-bench ingest`: many large movements that arrive at once."""
