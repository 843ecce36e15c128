"""Settings in words: files to start from, and the pages of docs/configuration.md.

Everything comes from the settings classes: types, defaults, and the text below every field.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from edge_sdk.program.settings.types import (
    Example,
    FieldType,
    SettingKey,
    Spelling,
    Within,
    entries,
    keys,
    kind_of,
    kinds,
)
from edge_sdk.protocol.errors import ConfigError

WIDTH = 100


# -- meanings -------------------------------------------------------------------------------------


def meanings(cls: type[Any]) -> dict[str, str]:
    """The text below every field of a dataclass; that of the field it is the `same_as` else."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if is_dataclass(owner):
            found |= _texts(owner)
    for name, entry in entries(cls).items():
        if name not in found and "same_as" in entry.metadata:
            other, field = entry.metadata["same_as"]
            found[name] = meanings(other).get(field, "")
    return found


def summary(cls: type[Any]) -> str:
    """Return a class's own description, up to the errors it raises."""
    text = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return re.sub(r" (Raises|Made by) .*", "", text)


@cache
def _texts(cls: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # the program is there without its source
        return {}
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101
    found = {}
    for entry, text in itertools.pairwise(definition.body):
        if (
            isinstance(entry, ast.AnnAssign)
            and isinstance(entry.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[entry.target.id] = " ".join(str(text.value.value).split())
    return found


# -- files to start from --------------------------------------------------------------------------


def write_example(path: str | Path, text: str) -> None:
    """Write a file to start from. Raises `ConfigError` if something already exists there."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} already exists and is left as it is") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def render_example(cls: type[Any], given: Mapping[str, Any], opening: str) -> str:
    """A TOML file that sets the keys of `given` and shows all others, with what they mean.

    `opening`: what the file says first. A key with a default shows it, another one an example.
    """
    lines = [*_comment(opening), ""]
    for table, group in _tables(cls).items():
        if table:
            optional = table in _optional(cls) and not any(
                name.startswith(f"{table}.") for name in given
            )
            lines += [*_comment(summary(group[0].owner)), f"{'# ' if optional else ''}[{table}]"]
        for key in group:
            lines += _comment(meanings(key.owner).get(key.path[-1], ""))
            lines += [_line(key, given), ""]
    return "\n".join(lines).rstrip() + "\n"


def _line(key: SettingKey, given: Mapping[str, Any]) -> str:
    name = key.path[-1]
    if key.dotted in given:
        return f"{name} = {to_toml(given[key.dotted])}"
    default = _default(key.entry)
    if default is MISSING or default in (None, {}, "", ()):
        example = key.kind.mark(Example)
        shown = "…" if example is None else example.value
        return f"# {name} = {to_toml(shown)}  # an example; not set by default"
    return f"# {name} = {to_toml(_spelt(key.kind, default))}"


def _tables(cls: type[Any]) -> dict[str, list[SettingKey]]:
    """All keys by table, those without one first."""
    found: dict[str, list[SettingKey]] = {"": []}
    for key in keys(cls):
        found.setdefault(".".join(key.path[:-1]), []).append(key)
    return {table: group for table, group in found.items() if group}


def _optional(cls: type[Any]) -> set[str]:
    return {name for name, kind in kinds(cls).items() if kind.table is not None and kind.optional}


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _spelt(kind: FieldType, value: Any) -> Any:
    spelling = kind.mark(Spelling)
    return value if spelling is None else spelling.write(value)


def to_toml(value: Any) -> str:
    """A value as TOML spells it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {to_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    # JSON's escapes are TOML's; JSON alone lets a raw DEL pass.
    plain = str(value) if isinstance(value, Path) else value
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> list[str]:
    return [
        f"# {line}".rstrip()
        for paragraph in text.splitlines()
        for line in textwrap.wrap(paragraph, WIDTH - 2) or [""]
    ]


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], names: Iterable[str]) -> None:
    """Flags for these keys; the reader checks what they are given."""
    known = {key.dotted: key for key in keys(cls)}
    for name in names:
        key = known[name]
        allowed = get_args(key.kind.plain) if get_origin(key.kind.plain) is Literal else None
        meaning = meanings(key.owner).get(key.path[-1], "")
        words = (meaning[:1].lower() + meaning[1:].rstrip(".")).replace("%", "%%")
        default = key.entry.default
        shown = isinstance(default, str | int | float) and not isinstance(default, bool)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar=key.path[-1].upper() if allowed is None else None,
            choices=allowed,
            help=words + (f" (default {default})" if shown and default != "" else ""),
        )


# -- documentation --------------------------------------------------------------------------------


def render_tables(cls: type[Any], *, variables: bool) -> str:
    """Markdown: a table of keys for every table of a file, with their variables or without."""
    parts = []
    for table, group in _tables(cls).items():
        if table:
            parts.append(f"### `[{table}]`\n\n{summary(group[0].owner)}")
        parts.append(_rows(group, variables))
    for name, kind in kinds(cls).items():
        if kind.rows is not None:
            also = f" A row may be its `{kind.short}` alone." if kind.short is not None else ""
            parts.append(f"### `[[{name}]]`\n\n{summary(kind.rows)}{also}")
            parts.append(_rows(list(keys(kind.rows)), variables=False, dotted=True))
    return "\n\n".join(parts)


def _rows(group: list[SettingKey], variables: bool, *, dotted: bool = False) -> str:
    heads = ["key", "type", "default", "meaning", *(["variable"] if variables else [])]
    rows = [heads, ["---"] * len(heads)]
    for key in group:
        cells = [
            f"`{key.dotted if dotted else key.path[-1]}`",
            type_words(key.kind),
            _default_words(key),
            meanings(key.owner).get(key.path[-1], ""),
            *([f"`{key.variable}`"] if variables else []),
        ]
        rows.append([cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _default_words(key: SettingKey) -> str:
    default = _default(key.entry)
    if default is MISSING:
        return "required"
    if default in (None, {}, "", ()):
        return "–"
    return f"`{to_toml(_spelt(key.kind, default))}`"


def type_words(kind: FieldType) -> str:
    """A type, and the values it allows, in words."""
    spelling, within, plain = kind.mark(Spelling), kind.mark(Within), kind.plain
    if spelling is not None:
        return f"text: {spelling.words}"
    if get_origin(plain) is Literal:
        return ", ".join(f'`"{each}"`' for each in get_args(plain))
    if get_origin(plain) is tuple:
        return f"list: each {type_words(kind_of(get_args(plain)[0]))}"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
    words = names.get(plain, "table of names and values")
    if kind.table is not None:
        return f"table with {', '.join(entries(kind.table))}; value {within}"
    return words if within is None else f"{words}, {within}"
