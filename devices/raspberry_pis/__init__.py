"""Raspberry Pis: one profile each."""
