"""Dataclasses as plain values, for logs, JSON and host apps: read by the types of their fields.

    TesseraError
    └── ProfileError     an impossible value, key or probe name; says which and what to do

None and a missing value are the same: the field's default. Fields are numbers, flags, texts, one
of a few texts (`Literal`), dataclasses, tables and tuples of these, and any of these or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from edge_sdk.program.settings import read_table
from edge_sdk.protocol.errors import ConfigError, TesseraError

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
    try:
        return read_table(cls, content, where=where)
    except ConfigError as error:
        raise ProfileError(str(error)) from error
