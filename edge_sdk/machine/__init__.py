"""The machine that a device is: sensors, the snapshot they give, energy, and board profiles."""
