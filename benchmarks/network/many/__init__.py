"""`tessera-bench runs`: one coordinator process with many runs."""
