"""The one reader of settings: TOML, then `TESSERA_…` variables, then flags, into dataclasses.

A settings class is a frozen dataclass. A field's type says what is allowed, its default is written
there and nowhere else, and the text below it says what it means (`edge_sdk.program.reference` makes
the documentation from that). To add a key is to add a field. Rules:

- A field that is a dataclass is a table; `Flat` puts the keys of one beside those of its owner; a
  tuple of dataclasses is an array of tables, whose rows may be the value of one key (`Short`). An
  optional table of a program's file that is empty is
  absent.
- A key has the variable `TESSERA_<KEY>`, that of a table `TESSERA_<TABLE>_<KEY>`.
- Paths in a file are relative to its folder, others to the present one.
- An unknown key or variable is an error that suggests the nearest known one.
- Every error is one line that names the file, variable or flag, the key and what is allowed. A
  class that checks itself raises `ConfigError` with a text that begins with the key.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edge_sdk.program.settings.types import (
    PREFIX,
    FieldType,
    convert,
    entries,
    keys,
    kinds,
)
from edge_sdk.protocol.errors import ConfigError, TesseraError

T = TypeVar("T")


# -- files, variables, flags ----------------------------------------------------------------------


class Given(NamedTuple):
    """A value as it was given, and the variable, the flag or the file's key that gives it."""

    value: Any
    where: str


Preset = Callable[[Mapping[str, Given]], Mapping[str, Any]]
"""Returns values by key, such as `run.rounds`, from what was given; given values go before them."""


class _Source(NamedTuple):
    """Where a table is from: what errors begin with, what paths are relative to, all its keys.

    `variables`: keys can also be set by variables.
    """

    label: str
    base: Path
    places: Mapping[str, str]
    variables: bool = False


def load_settings(
    cls: type[T],
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    others: Collection[str] = (),
    absent: str = "",
    preset: Preset = lambda _: {},
) -> T:
    """The settings in a file, as variables and flags change them. Raises `ConfigError`.

    `environment` None: that of the process. `flags`: by key; None is a flag that was not given.
    `others`: variables that other programs read; one that ends in `_` stands for all that begin
    with it. `absent`: advice for a file that is not there. `preset`: values in place of defaults.
    """
    found = os.environ if environment is None else environment
    content = {} if path is None else read_toml(path, absent)
    known = {each.variable: each for each in keys(cls)}
    for name, value in found.items():
        if name in known:
            _put(content, known[name].path, Given(value, name))
        elif name.startswith(PREFIX) and not _belongs(name, others):
            raise ConfigError(f"{name} is not a known variable{nearest(name, known)}")
    for name, value in (flags or {}).items():
        if value is not None:
            _put(content, tuple(name.split(".")), Given(value, f"--{name.replace('_', '-')}"))
    label = "" if path is None else f"{path}: "
    base = Path() if path is None else Path(path).absolute().parent
    _preset(content, label, preset)
    return _table(cls, content, "", _Source(label, base, _places(cls), variables=True))


def read_keys(
    cls: type[T],
    values: Mapping[str, Any],
    *,
    label: str = "",
    base: Path | None = None,
    preset: Preset = lambda _: {},
) -> T:
    """The settings that values by key, such as `run.rounds`, stand for. Raises `ConfigError`.

    `label` and `base` are those of `read_table`, `preset` that of `load_settings`.
    """
    content: dict[str, Any] = {}
    for name, value in values.items():
        _put(content, tuple(name.split(".")), value)
    _preset(content, label, preset)
    return read_table(cls, content, label=label, base=base)


def read_table(
    cls: type[T], content: Any, *, where: str = "", label: str = "", base: Path | None = None
) -> T:
    """The dataclass that a table stands for. `where`: the table's name. Raises `ConfigError`.

    Errors begin with `label`; paths are relative to `base`, None: to the present folder.
    """
    return _table(cls, content, where, _Source(label, base or Path(), _places(cls)))


def _preset(content: dict[str, Any], label: str, preset: Preset) -> None:
    """Add values in place of defaults to what was given."""
    given = _flat(content)
    try:
        values = preset(given)
    except ConfigError as error:
        raise type(error)(f"{label}{error}") from error
    for name, value in values.items():
        if name not in given:
            _put(content, tuple(name.split(".")), value)


def read_toml(path: str | Path, absent: str = "") -> dict[str, Any]:
    """The content of a TOML file. Raises `ConfigError`; `absent`: advice if there is no file."""
    # JetPack's Python 3.10 has no tomllib; tomli is the same under its old name.
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        toml = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path} cannot be read: Python 3.10 needs the package tomli (pip install tomli)"
        ) from error
    try:
        content: dict[str, Any] = toml.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there{absent and f'; {absent}'}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not TOML: {error}") from error
    return content


def nearest(text: str, known: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """Advice to put behind a complaint: the known text that looks most alike, or all of them.

    `places`: what other tables have, each with the name of its table.
    """
    known, places = list(known), places or {}
    if close := difflib.get_close_matches(text, [*known, *places], n=1, cutoff=0.6):
        table = "" if close[0] in known else f" in [{places[close[0]]}]"
        return f"; did you mean {close[0]!r}{table}?"
    return f"; known are {', '.join(known)}"


def _belongs(name: str, others: Iterable[str]) -> bool:
    return any(name == each or (each.endswith("_") and name.startswith(each)) for each in others)


def _flat(content: Mapping[str, Any], above: str = "", where: str = "") -> dict[str, Given]:
    """Return what was given, by key. `where`: the variable or flag that gives all of it."""
    found: dict[str, Given] = {}
    for name, value in content.items():
        key = f"{above}{name}"
        given = value if isinstance(value, Given) else Given(value, where or key)
        if isinstance(given.value, Mapping):
            own = where or (given.where if isinstance(value, Given) else "")
            found |= _flat(given.value, f"{key}.", own)
        else:
            found[key] = given
    return found


def _put(content: dict[str, Any], path: tuple[str, ...], given: Any) -> None:
    table: Any = content
    for name in path[:-1]:
        if isinstance(whole := table.get(name), Given) and isinstance(whole.value, Mapping):
            table[name] = dict(whole.value)
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            return  # a table is wanted here, and the reader will say so
    table[path[-1]] = given


def _places(cls: type[Any], above: str = "") -> dict[str, str]:
    """The table of every key, for suggestions."""
    found: dict[str, str] = {}
    for name, kind in kinds(cls).items():
        table = kind.rows or kind.table
        if table is not None:
            within = above if kind.flat else f"{above}.{name}".lstrip(".")
            found = _places(table, within) | found
        if above and not kind.flat:
            found[name] = above
    return found


# -- tables and values ----------------------------------------------------------------------------


def _table(cls: type[T], content: Any, where: str, source: _Source) -> T:
    label, prefix = source.label, f"{where}." if where else ""
    if not isinstance(content, Mapping):
        needs = ", ".join(name for name, each in entries(cls).items() if _required(each))
        raise ConfigError(
            f"{label}{where} = {content!r:.80}: must be a table" + (needs and f" with {needs}")
        )
    known = _names(cls)
    for key in content:
        if key not in known:
            # A table that is misspelt is one of the first level's.
            misspelt = not where and isinstance(content[key], Mapping)
            advice = nearest(str(key), known, None if misspelt else source.places)
            raise ConfigError(f"{label}{prefix}{key} is not a known key{advice}")
    arguments = _arguments(cls, content, prefix, source)
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise type(error)(f"{label}{prefix}{error}") from error


def _arguments(
    cls: type[Any], content: Mapping[str, Any], prefix: str, source: _Source
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, kind in kinds(cls).items():
        if kind.flat:
            own = {key: content[key] for key in _names(kind.plain) if key in content}
            arguments[name] = _table(kind.plain, own, prefix.rstrip("."), source)
        elif content.get(name) is None or (
            content[name] == {} and kind.optional and kind.table is not None and source.variables
        ):
            if _required(entries(cls)[name]):
                variable = (PREFIX + f"{prefix}{name}".replace(".", "_")).upper()
                advice = f"; set it in the file, or as {variable}" if source.variables else ""
                raise ConfigError(f"{source.label}{prefix}{name} is missing{advice}")
        else:
            shown = entries(cls)[name].repr  # a password is not
            arguments[name] = _value(kind, content[name], f"{prefix}{name}", source, shown=shown)
    return arguments


def _row(kind: FieldType, value: Any) -> Any:
    """Return a row as a table; it may be given as the value of one key."""
    short = kind.short
    return {short: value} if short is not None and isinstance(value, str) else value


def _names(cls: type[Any]) -> list[str]:
    """The keys of a table, those of flat fields among them."""
    return [
        each
        for name, kind in kinds(cls).items()
        for each in (_names(kind.plain) if kind.flat else [name])
    ]


def _required(entry: Field[Any]) -> bool:
    return entry.init and entry.default is MISSING and entry.default_factory is MISSING


def _value(kind: FieldType, value: Any, where: str, source: _Source, *, shown: bool) -> Any:
    said, base, spelt = source.label + where, source.base, False
    if isinstance(value, Given):
        said, base, spelt = value.where, Path(), isinstance(value.value, str)
        value = value.value
    if kind.rows is not None:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{said} = {value!r:.80}: must be a list of tables [[{where}]]")
        return tuple(
            _table(kind.rows, _row(kind, each), f"{where}[{index}]", source)
            for index, each in enumerate(value)
        )
    if kind.table is not None:
        return _table(kind.table, value, where, source)
    said += f" = {value!r:.80}" if shown else ""
    try:
        return convert(kind, value, base, spelt)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{said}: must be {error}") from error
    except TesseraError as error:
        raise ConfigError(f"{said}: {error}") from error
