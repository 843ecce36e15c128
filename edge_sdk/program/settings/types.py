"""The types of settings: what a field may say besides its type, and what values that allows."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from edge_sdk.protocol.errors import ConfigError

PREFIX = "TESSERA_"
"""The beginning of every variable."""

T = TypeVar("T")


# -- marks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """The range of a number: `least` and `most` belong to it, `above` and `below` do not."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """True if a number is in the range; NaN never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """The range in words, such as `from 1 to 65535`, to put behind *must be*."""
        if self.least is not None and self.most is not None:
            return f"from {_plain(self.least)} to {_plain(self.most)}"
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return " and ".join(f"{word} {_plain(it)}" for word, it in bounds.items() if it is not None)


@dataclass(frozen=True, slots=True)
class Spelling:
    """A value that a file spells as text: how it is read and written.

    `read` gets the value and the folder that paths are relative to. For what is none it raises
    `TypeError` or `ValueError`, and the user reads `words` behind *must be*, or a `TesseraError`
    that says more.
    """

    read: Callable[[Any, Path], Any]
    words: str
    write: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Example:
    """A value for the files that `init` writes, where there is no default to show."""

    value: Any


@dataclass(frozen=True, slots=True)
class Short:
    """Lets a row of an array of tables be given as the value of this one key."""

    key: str


class Flat:
    """Puts the keys of a dataclass beside those of the one that has it as a field."""


NOT_A_KEY = {"not_a_key": True}
"""Metadata of a field that no file gives."""

Count = Annotated[int, Within(least=1)]
Natural = Annotated[int, Within(least=0)]
Seconds = Annotated[float, Within(above=0)]
Share = Annotated[float, Within(above=0, most=1)]
Percent = Annotated[float, Within(least=0, most=100)]


def same_as(owner: type[Any], name: str) -> Any:
    """A field with the default and the meaning of a field of another class."""
    entry = entries(owner)[name]
    metadata = {"same_as": (owner, name)}
    if entry.default_factory is not MISSING:
        return field(default_factory=entry.default_factory, metadata=metadata)
    return field(default=entry.default, metadata=metadata)


# -- keys ----------------------------------------------------------------------------------------


class FieldType(NamedTuple):
    """The type of a field, taken apart."""

    plain: Any
    marks: tuple[Any, ...]
    optional: bool

    def mark(self, wanted: type[T]) -> T | None:
        """Return the type's annotation of this class; None: there is none."""
        return next((each for each in self.marks if isinstance(each, wanted)), None)

    @property
    def flat(self) -> bool:
        """True if its keys stand beside those of its owner."""
        return Flat in self.marks

    @property
    def table(self) -> type[Any] | None:
        """The class of a table; None: it is none."""
        is_table = is_dataclass(self.plain) and self.mark(Spelling) is None
        return self.plain if is_table else None

    @property
    def short(self) -> str | None:
        """The key that a row of an array of tables may be given as; None: there is none."""
        mark = kind_of(get_args(self.plain)[0]).mark(Short)
        return None if mark is None else mark.key

    @property
    def rows(self) -> type[Any] | None:
        """The class of the tables in an array of tables; None: it is none."""
        if get_origin(self.plain) is not tuple or self.mark(Spelling) is not None:
            return None
        return kind_of(get_args(self.plain)[0]).table


class SettingKey(NamedTuple):
    """A key that a file may have."""

    path: tuple[str, ...]
    kind: FieldType
    entry: Field[Any]
    owner: type[Any]

    @property
    def dotted(self) -> str:
        """The key with its tables in front, such as `broker.host`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """The variable that sets it."""
        return PREFIX + "_".join(self.path).upper()


def kinds(cls: type[Any]) -> dict[str, FieldType]:
    """The type of every field of a dataclass that a file may give."""
    owner: Any = cls
    return _kinds(owner)


@cache
def _kinds(cls: Any) -> dict[str, FieldType]:
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: kind_of(hints[name])
        for name, each in entries(cls).items()
        if each.init and "not_a_key" not in each.metadata
    }


def kind_of(hint: Any) -> FieldType:
    """A type taken apart."""
    marks: tuple[Any, ...] = ()
    optional = False
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            marks += tuple(more)
        elif get_origin(hint) in (types.UnionType, Union):
            optional = True
            hint = next(each for each in get_args(hint) if each is not types.NoneType)
        else:
            return FieldType(hint, marks, optional)


def keys(cls: type[Any], *, above: tuple[str, ...] = ()) -> Iterator[SettingKey]:
    """Every key of a file, in the order of the fields, but arrays of tables.

    A table that has a range is a number with what is known of it, and one key.
    """
    for name, kind in kinds(cls).items():
        if kind.rows is not None:
            continue
        if kind.table is not None and kind.mark(Within) is None:
            yield from keys(kind.table, above=above if kind.flat else (*above, name))
        else:
            yield SettingKey((*above, name), kind, entries(cls)[name], cls)


def entries(cls: type[Any]) -> dict[str, Field[Any]]:
    """The fields of a dataclass by name."""
    return {each.name: each for each in fields(cls)}


# -- values --------------------------------------------------------------------------------------


def check_fields(settings: Any) -> None:
    """Raise `ConfigError` for the first field of a dataclass that its type does not allow."""
    for name, kind in kinds(type(settings)).items():
        value = getattr(settings, name)
        if value is None and kind.optional:
            continue
        within = kind.mark(Within)
        if within is not None and not (_finite(value) and within.holds(value)):
            raise ConfigError(f"{name} = {value!r:.80}: must be {within}")
        if get_origin(kind.plain) is Literal and value not in get_args(kind.plain):
            raise ConfigError(f"{name} = {value!r:.80}: must be {choices(kind.plain)}")


def convert(kind: FieldType, value: Any, base: Path, spelt: bool) -> Any:
    """The value that is meant. `spelt`: everything is text, as in variables and flags.

    Raises errors whose text stands behind *must be*.
    """
    form, within, plain = kind.mark(Spelling), kind.mark(Within), kind.plain
    if form is not None:
        try:
            return form.read(value, base)
        except (TypeError, ValueError) as error:
            raise ValueError(form.words) from error
    if get_origin(plain) is Literal:
        if value not in get_args(plain):
            raise ValueError(choices(plain))
        return value
    if get_origin(plain) is tuple:
        return _items(kind_of(get_args(plain)[0]), value, base, spelt)
    if plain in (int, float):
        number = _number(plain, value, spelt)
        if within is not None and not within.holds(number):
            raise ValueError(str(within))
        return number
    if plain is bool:
        return _switch(value, spelt)
    if plain in (str, Path):
        if not isinstance(value, str) or (plain is Path and not value):
            raise TypeError("a text in quotes")
        return value if plain is str else base / Path(value).expanduser()
    return _mapping(kind_of(get_args(plain)[1]), value, base, spelt)


def _items(kind: FieldType, value: Any, base: Path, spelt: bool) -> tuple[Any, ...]:
    if spelt:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise TypeError("a list")
    try:
        return tuple(convert(kind, each, base, spelt) for each in value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a list, each item {error}") from error


def _mapping(kind: FieldType, value: Any, base: Path, spelt: bool) -> dict[str, Any]:
    if spelt:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError('a table of names and values, such as {"name": 1}') from error
    if not isinstance(value, Mapping):
        raise TypeError("a table of names and values")
    if kind.plain is Any:
        return dict(value)
    try:
        return {str(key): convert(kind, each, base, spelt=False) for key, each in value.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"a table, each value {error}") from error


def _number(plain: type[int] | type[float], value: Any, spelt: bool) -> float:
    words = "a whole number" if plain is int else "a number"
    if spelt:
        try:
            value = plain(value)
        except ValueError as error:
            raise ValueError(words) from error
    fits = int if plain is int else int | float
    if isinstance(value, bool) or not isinstance(value, fits):
        raise TypeError(words)
    if not _finite(value):
        raise ValueError("a finite number")
    return plain(value)


def _switch(value: Any, spelt: bool) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if spelt and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def choices(plain: Any) -> str:
    """The texts that a `Literal` allows, to put behind *must be*."""
    return f"one of {', '.join(map(str, get_args(plain)))}"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and bool(abs(value) <= sys.float_info.max)


def _plain(number: float) -> str:
    return f"{int(number)}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:g}"
