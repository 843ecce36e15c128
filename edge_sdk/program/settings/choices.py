"""Choices by name: rules, mask policies and encodings, as files and the command line spell them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from edge_sdk.program.settings.reader import nearest, read_table
from edge_sdk.program.settings.types import Spelling
from edge_sdk.protocol.encoding.encoding import KNOWN, Encoding
from edge_sdk.protocol.errors import ConfigError

T = TypeVar("T")

ROUND_LIMIT = 'a whole number of rounds, or "none" for no limit'


def _read_round_limit(value: Any, _: Path) -> Any:
    if value != "none" and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError
    return value


RoundLimit = Annotated[int | Literal["none"], Spelling(_read_round_limit, ROUND_LIMIT)]
"""Rounds after which something is too old; "none": never."""

EncodingText = Annotated[Encoding, Spelling(lambda text, _: Encoding.parse(text), KNOWN)]


def make_named(kind: str, known: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """The choice called `name` with these options.

    Raises `ConfigError`: an unknown name with all known ones, an unknown option with the nearest.
    """
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}{nearest(name, known)}")
    return read_table(known[name], options, label=f"{kind} {name!r}: ")


def check_round_limit(name: str, value: Any) -> None:
    """Raise `ConfigError` unless this is a `RoundLimit` of at least one round."""
    if value == "none":
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r:.80}: must be {ROUND_LIMIT}")
    if value < 1:
        raise ConfigError(f"{name} must be at least 1 round, not {value}")


def listing(known: Mapping[str, type[Any]]) -> str:
    """One line a choice: its name, and the first line of what its docstring says."""
    width = max(map(len, known))
    return "\n".join(f"  {name:<{width}}  {_first_line(known[name])}" for name in known)


def _first_line(choice: type[Any]) -> str:
    return (inspect.getdoc(choice) or "").partition("\n")[0]
