"""Sensors of each kind of machine: cores, memory, battery, heat and power."""
