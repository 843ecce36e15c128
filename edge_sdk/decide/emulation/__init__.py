"""Emulated devices: fleets of profiles, and the passing of their time and batteries."""
