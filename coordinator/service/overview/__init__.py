"""The overview of a run: what its operator sees."""
