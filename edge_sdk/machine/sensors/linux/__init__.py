"""Sensors of any Linux machine, read from /proc and /sys."""
