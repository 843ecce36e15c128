"""Benchmarks over a real broker."""
