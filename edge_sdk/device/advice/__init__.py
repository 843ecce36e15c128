"""Advice for the owner: what keeps the device from taking part, and what it would train now."""
