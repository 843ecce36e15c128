"""Dataclasses as plain values, for logs, JSON and host apps: read by the types of their fields.

    TesseraError
    └── ProfileError     an impossible value, key or probe name; says which and what to do

None and a missing value are the same: the field's default. Fields are numbers, flags, texts, one
of a few texts (`Literal`), dataclasses, tables and tuples of these, and any of these or None.
"""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edge_sdk.protocol.errors import TesseraError

T = TypeVar("T")


class ProfileError(TesseraError):
    """An impossible value, key or probe name; the text says which and what to do."""


def to_plain(value: Any) -> Any:
    """Return tables, lists, numbers, flags and texts, without fields that are None."""
    if is_dataclass(value):
        items = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: to_plain(content) for name, content in items if content is not None}
    if isinstance(value, tuple):
        return [to_plain(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value


def from_plain(cls: type[T], content: Any, where: str) -> T:
    """Return the dataclass that `content` describes; `where` names it. Raises `ProfileError`."""
    hints = _hints(cls)
    arguments = {}
    for key, value in _table(content, where).items():
        path = f"{where}.{key}" if where else str(key)
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(hints)}"
            raise ProfileError(f"unknown key {path}; {advice}")
        if value is not None:
            arguments[key] = _read(hints[key], value, path)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ProfileError(f"{where}: {error}") from error


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the type of every field, without None."""
    hints = get_type_hints(cls)
    return {each.name: _without_none(hints[each.name]) for each in fields(cls)}


def _without_none(hint: Any) -> Any:
    # `Literal[…] | None` is a Union of typing before Python 3.14, and so is `Optional[…]`.
    if get_origin(hint) in (types.UnionType, Union):
        return next(each for each in get_args(hint) if each is not types.NoneType)
    return hint


def _read(hint: Any, value: Any, path: str) -> Any:
    if is_dataclass(hint):
        return from_plain(hint, value, path)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ProfileError(f"{path} = {value!r:.80}: must be a list")
        return tuple(_read(get_args(hint)[0], each, path) for each in value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            known = ", ".join(map(str, get_args(hint)))
            raise ProfileError(f"{path} = {value!r:.80}: must be one of {known}")
        return value
    if hint in (float, int):
        return _number(hint, value, path)
    if hint in (bool, str):
        if not isinstance(value, hint):
            words = "true or false" if hint is bool else "a text"
            raise ProfileError(f"{path} = {value!r:.80}: must be {words}")
        return value
    content = get_args(hint)[1]
    return {
        str(key): _read(content, each, f"{path}.{key}") for key, each in _table(value, path).items()
    }


def _table(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ProfileError(
            f"{where or 'this'} = {value!r:.80}: must be a table of names and values"
        )
    return value


def _number(kind: type[float] | type[int], value: Any, path: str) -> float:
    fits = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, fits):
        words = "a whole number" if kind is int else "a number"
        raise ProfileError(f"{path} = {value!r:.80}: must be {words}")
    if not abs(value) <= sys.float_info.max:
        raise ProfileError(f"{path}: must be a finite number")
    return kind(value)
