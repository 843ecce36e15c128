"""What `wire` measures, one case a file."""
