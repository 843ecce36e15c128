"""Upkeep of a run's folder: looking for damage, and saving what can be saved."""
