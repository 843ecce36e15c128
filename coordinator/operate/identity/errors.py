"""The error of this package."""

from __future__ import annotations

from coordinator.errors import CoordinatorError


class IdentityError(CoordinatorError):
    """A certificate or a file that cannot be had; the text says why and what to do."""
