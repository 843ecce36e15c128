"""The error of this package."""

from __future__ import annotations

from coordinator.errors import CoordinatorError


class IdentityError(CoordinatorError):
    """A certificate or file cannot be made or read; the text says why and what to do."""
