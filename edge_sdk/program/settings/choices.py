"""Choices by name: rules and mask policies as configuration and the command line spell them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from edge_sdk.program.settings.reader import nearest, read_table
from edge_sdk.protocol.errors import ConfigError

T = TypeVar("T")


def make_named(kind: str, known: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """The choice called `name` with these options.

    Raises `ConfigError`: an unknown name with all known ones, an unknown option with the nearest.
    """
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}{nearest(name, known)}")
    return read_table(known[name], options, label=f"{kind} {name!r}: ")


def listing(known: Mapping[str, type[Any]]) -> str:
    """One line a choice: its name, and the first line of what its docstring says."""
    width = max(map(len, known))
    return "\n".join(f"  {name:<{width}}  {_first_line(known[name])}" for name in known)


def _first_line(choice: type[Any]) -> str:
    return (inspect.getdoc(choice) or "").partition("\n")[0]
