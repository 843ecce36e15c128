"""Benchmarks: seconds, joules, megabytes and bytes; each a `tessera-bench` command."""
