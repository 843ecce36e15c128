"""Rounds as state machines without I/O: synchronous, and asynchronous by fragments."""
