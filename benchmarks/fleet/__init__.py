"""Fleets in one process: how fast they train."""
