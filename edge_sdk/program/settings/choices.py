"""Choices by name: rules, mask policies and encodings, as files and the command line spell them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from edge_sdk.program.settings.reader import nearest, read_table
from edge_sdk.program.settings.types import Spelling
from edge_sdk.protocol.encoding.encoding import KNOWN, Encoding
from edge_sdk.protocol.errors import ConfigError

T = TypeVar("T")

EncodingText = Annotated[Encoding, Spelling(lambda text, _: Encoding.parse(text), KNOWN)]


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
