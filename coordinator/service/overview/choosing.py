"""Rows of devices, filtered and sorted by what people write: `battery<0.3`, `label.site=berlin`.

A filter is a key, one of `= != < <= > >=` and a value; a row stays if all of them hold. Numbers are
compared as numbers, `true` and `false` are meant as such, and text is compared without case.
Nothing but `!=` holds for a value that is unknown; `none` stands for it (`battery=none`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from coordinator.errors import ConfigError
from coordinator.service.overview.rows import COLUMNS
from edge_sdk.program.settings.reader import nearest

LABEL = "label."
"""What stands before the name of a label."""

_FILTER = re.compile(r"\s*([\w.-]+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": eq,
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}
_WORDS = {"true": True, "yes": True, "false": False, "no": False}

Rows = list[dict[str, Any]]


def choose_rows(
    rows: Rows, filters: Iterable[str] = (), sort: str | None = None
) -> list[dict[str, Any]]:
    """Return the rows for which all filters hold, sorted by a key; `-key`: the largest first.

    Rows whose value is unknown come last. Raises `ConfigError` for what cannot be understood.
    """
    for each in filters:
        holds = parse_filter(each)
        rows = [row for row in rows if holds(row)]
    if not sort:
        return rows
    backwards, key = sort.startswith("-"), check_key(sort.removeprefix("-"))
    known = [row for row in rows if value_of(row, key) is not None]
    known.sort(key=lambda row: _ordered(value_of(row, key)), reverse=backwards)
    return known + [row for row in rows if value_of(row, key) is None]


def parse_filter(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test of rows. Raises `ConfigError`."""
    if (found := _FILTER.fullmatch(text)) is None:
        raise ConfigError(
            f"the filter {text[:80]!r} is not KEY=VALUE: write state=skipped, battery<0.3 or "
            "label.site=berlin"
        )
    key, sign, wanted = check_key(found[1]), found[2], found[3]
    compare = _OPERATORS[sign]

    def holds(row: Mapping[str, Any]) -> bool:
        value = value_of(row, key)
        if value is None or wanted.lower() == "none":
            same = value is None and wanted.lower() == "none"
            return same if compare is eq else compare is ne and not same
        if isinstance(value, bool):
            return compare in (eq, ne) and compare(value, _WORDS.get(wanted.lower()))
        if isinstance(value, int | float):
            return compare(float(value), _number(text, wanted))
        return compare(str(value).lower(), wanted.lower())

    return holds


def check_key(key: str) -> str:
    """Return the key if rows have it. Raises `ConfigError`, which names the nearest one."""
    if key.startswith(LABEL) or key in COLUMNS:
        return key
    raise ConfigError(
        f"devices have no {key[:40]!r}{nearest(key, COLUMNS)} (a label is {LABEL}NAME)"
    )


def value_of(row: Mapping[str, Any], key: str) -> Any:
    """Return a row's value; that of a label, too."""
    if key.startswith(LABEL):
        return row["labels"].get(key.removeprefix(LABEL))
    value = row[key]
    if key == "quarantined":
        return value is not None
    return ", ".join(f"{k}={v}" for k, v in sorted(value.items())) if key == "labels" else value


def _number(text: str, wanted: str) -> float:
    try:
        return float(wanted)
    except ValueError as error:
        raise ConfigError(f"the filter {text[:80]!r} compares with a number: {wanted!r}") from error


def _ordered(value: Any) -> tuple[float, str]:
    if isinstance(value, int | float):
        return float(value), ""
    return 0.0, str(value).lower()
