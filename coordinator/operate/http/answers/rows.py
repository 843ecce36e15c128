"""Sorting and filtering of the devices' rows, as the API's query asks for.

A filter has terms with commas between them, and a row fits if it fits all:

    state=training,battery<0.3,label.site=berlin,pixel

`KEY=VALUE`, or `KEY:VALUE`, wants that very value, `KEY<NUMBER` and `KEY>NUMBER` compare, and a
bare word is looked for in the device's name. Unknown values (null) fit `KEY=null` and `KEY=none`
alone, and are sorted last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from coordinator.operate.http.refusal import RefusalError
from edge_sdk.program.settings.reader import nearest

DeviceRow = dict[str, Any]

_TERM = re.compile(r"(?P<key>[a-z][a-z_]*(?:\.[^:=<>,]+)?)(?P<sign>[:=<>])(?P<value>.*)", re.DOTALL)
_LABEL = "label."


def arrange(
    rows: list[DeviceRow], keys: Iterable[str], *, wanted: str, order: str
) -> list[DeviceRow]:
    """Return the rows that `wanted` asks for, in this order. Raises `RefusalError`.

    `keys`: those that rows have. `order`: a key, `-` before it turns it round; both may be empty.
    """
    known = list(keys)
    tests = [_test(term.strip(), known) for term in wanted.split(",") if term.strip()]
    found = [row for row in rows if all(test(row) for test in tests)]
    if not order:
        return found
    falls = order.startswith("-")
    key = order[falls:]
    _check(key, known, "sort")
    present = [row for row in found if _value(row, key) is not None]
    present.sort(key=lambda row: _comparable(_value(row, key)), reverse=falls)
    return present + [row for row in found if _value(row, key) is None]


def _test(term: str, known: list[str]) -> Callable[[DeviceRow], bool]:
    match = _TERM.fullmatch(term)
    if match is None:
        return lambda row: term.lower() in str(row["device"]).lower()
    key, sign, value = match["key"], match["sign"], match["value"]
    _check(key, known, "filter")
    if sign in ":=":
        return lambda row: value in _texts(_value(row, key))
    try:
        bound = float(value)
    except ValueError as error:
        raise RefusalError(
            HTTPStatus.BAD_REQUEST, f"filter: {term!r}: behind {sign} must be a number"
        ) from error

    def compares(row: DeviceRow) -> bool:
        number = _value(row, key)
        if not isinstance(number, int | float) or isinstance(number, bool):
            return False
        return number < bound if sign == "<" else number > bound

    return compares


def _check(key: str, known: list[str], what: str) -> None:
    if key not in known and not key.startswith(_LABEL):
        raise RefusalError(
            HTTPStatus.BAD_REQUEST, f"{what}: devices have no {key!r}{nearest(key, known)}"
        )


def _value(row: DeviceRow, key: str) -> Any:
    if key.startswith(_LABEL):
        labels = row.get("labels")
        return labels.get(key.removeprefix(_LABEL)) if isinstance(labels, dict) else None
    return row.get(key)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(value: Any) -> tuple[str, ...]:
    """Return the words for a value; the commands say `none` where JSON says null."""
    return ("null", "none") if value is None else (_text(value),)


def _comparable(value: Any) -> tuple[bool, float, str]:
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, _text(value))
