"""Fleets of thousands of devices in virtual time: profiles, habits, batteries, heat, traces."""
