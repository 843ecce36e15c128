"""Costs of a level in seconds, bytes and joules: predicted, measured, corrected."""
