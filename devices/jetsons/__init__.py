"""Jetson boards: one profile each."""
