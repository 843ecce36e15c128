"""The cases of `wire`, one per file."""
