"""The commands of `tessera-bench` that measure devices."""
