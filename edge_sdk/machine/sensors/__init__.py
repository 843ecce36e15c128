"""Sensors: what each kind of machine shows of cores, memory, battery, heat and power."""
