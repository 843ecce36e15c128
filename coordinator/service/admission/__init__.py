"""Limits on incoming messages, applied before they are read."""
