"""Emulated devices: fleets of profiles, and how their time and batteries pass."""
