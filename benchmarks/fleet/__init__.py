"""Training speed of fleets in one process."""
