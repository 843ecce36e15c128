"""Limits on what anybody may send, applied before it is read."""
