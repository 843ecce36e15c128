"""Places where cohorts are trained: this process, others, or a Ray cluster."""
