"""Phones: one profile each."""
