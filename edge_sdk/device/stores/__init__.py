"""Movements and residuals that a device keeps on disk."""
