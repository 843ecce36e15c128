"""Interruptions of real programs on a real broker; `world.py` says how a case is written."""
