"""Fleets: devices that are emulated together, and their initial states."""
