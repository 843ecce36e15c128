"""Fleets: which devices are emulated together, and in what state they start."""
