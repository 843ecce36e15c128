"""Crashes that a run survives, the cost of surviving them, and the time until it is back."""
