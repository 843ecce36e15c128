"""The plan of a model: axes, groups, tensors, and the blocks they make."""

from __future__ import annotations

LEVELS = (1.0, 0.75, 0.5, 0.25)
"""Levels that devices choose from and graphs are made for, where nobody says otherwise."""
