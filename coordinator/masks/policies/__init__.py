"""Mask policies, one file each."""
