"""`tessera-bench operate`: the cost of being looked at."""
