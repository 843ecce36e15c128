"""Maps of named fields, the wire form of messages: `{"v": 1, …fields by name}` in msgpack.

Every field has a *form*: its representation on the wire, and a way to read that back. Unknown
fields are ignored, and missing ones take the default of their class, so either side may be newer.
Everything read is checked: a wrong version, type or range raises `MessageError`, and nothing else
does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.canonical import count as natural
from edge_sdk.protocol.canonical import flag, text
from edge_sdk.protocol.chunks import HASH_BYTES, Blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import EncodingError, MessageError, ProtocolError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import MAX_LEVELS, MAX_REASON_CHARACTERS
from edge_sdk.protocol.messages.topics import check_name
from edge_sdk.protocol.messages.transfer import check_run
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.specs import MAX_GROUPS

VERSION = 1
MAX_COUNT = 2**53
"""Largest whole number: every language has it, and it is exact as float64."""
MAX_ENTRIES = 2**14
"""Most entries of any array or map."""
MAX_DEPTH = 32
"""Most arrays and maps within each other. Python cannot even show a thousand in an error."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NESTING = (list, dict)


class Form(NamedTuple):
    """Writer and reader of a field's value.

    `read` raises `TypeError`, `ValueError` or a `ProtocolError` for an invalid value. `name` is the
    field's name on the wire; None: as in its class. `omits` is the default that is not written:
    fields that version 1 gained later leave all other messages as they were, to the byte.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    name: str | None = None
    omits: Any = MISSING


Forms = Mapping[str, Form]
"""Forms of all fields of a class, by name."""


# -- maps ----------------------------------------------------------------------------------------


def pack_map(kind: str, content: Mapping[str, Any]) -> bytes:
    """Write the map in msgpack, with version and kind in front. Raises `MessageError`."""
    try:
        data: bytes = msgpack.packb({"v": VERSION, "type": kind, **content}, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{kind} cannot be written: {error}") from error
    return data


def unpack_map(data: bytes | memoryview, what: str, max_bytes: int) -> dict[str, Any]:
    """Read the map in these bytes, of this version. Raises only `MessageError`.

    The size is checked before anything else; the result takes at most about 80 times as much
    memory.
    """
    if len(data) > max_bytes:
        raise MessageError(f"{len(data)} bytes are too many for {what} (at most {max_bytes})")
    try:
        content = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_without_duplicates,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_ENTRIES,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"these bytes are not {what}: {error}") from error
    if not isinstance(content, dict) or "v" not in content:
        raise MessageError(f"these bytes are not {what}: no map with a version")
    if _is_deep(content):
        raise MessageError(f"these bytes are not {what}: over {MAX_DEPTH} values in each other")
    if content["v"] != VERSION or type(content["v"]) is not int:
        theirs = repr(content["v"])[:40]
        raise MessageError(f"version {theirs} of {what} is unknown; this side has {VERSION}")
    return content


def _is_deep(content: dict[str, Any]) -> bool:
    """True if arrays and maps are deeper in each other than in any message."""
    layer: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for each in layer
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, _NESTING)
        ]
        if not layer:
            return False
    return True


def write_fields(message: Any, forms: Forms) -> dict[str, Any]:
    """Write every field of a message in its form. Raises `MessageError` for an invalid value."""
    return {
        form.name or name: _converted(form.write, getattr(message, name), form.name or name)
        for name, form in forms.items()
        if form.omits is MISSING or getattr(message, name) != form.omits
    }


def read_fields(cls: type[Any], content: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    """Read the arguments that make a message of this class. Raises `MessageError`."""
    known = {each.name: each for each in fields(cls)}
    arguments = {}
    for name, form in forms.items():
        key = form.name or name
        if key in content:
            arguments[name] = _converted(form.read, content[key], key)
        elif _required(known[name]):
            raise MessageError(f"the field {key!r} is missing")
    return arguments


def _required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _converted(convert: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, ProtocolError) as error:
        raise MessageError(f"the field {name!r} is wrong: {str(error)[:200]}") from error


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a field occurs twice")
    return content


# -- forms ---------------------------------------------------------------------------------------


def count(value: Any) -> int:
    """Check a whole number from 0 to 2⁵³."""
    if natural(value) > MAX_COUNT:
        raise ValueError(f"{value} is above 2⁵³")
    return int(value)


def number(value: Any) -> float:
    """Check a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not finite")
    return float(value)


def binary(value: Any) -> bytes:
    """Bytes."""
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} is not bytes")
    return value


def _sha256(value: Any) -> str:
    if not _SHA256.fullmatch(text(value)):
        raise ValueError(f"{value!r} is not 64 hex digits")
    return text(value)


def _reason(value: Any) -> str:
    if len(text(value)) > MAX_REASON_CHARACTERS:
        raise ValueError(f"a reason has at most {MAX_REASON_CHARACTERS} characters")
    return text(value)


def _cut_reason(value: str) -> str:
    """Shorten a reason: system messages may have any length, and may not be Unicode."""
    return value.encode("utf-8", "replace").decode()[:MAX_REASON_CHARACTERS]


def _run(value: Any) -> str:
    return check_run(text(value)) if value != "" else ""


def _groups(value: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a map of groups")
    return {text(axis): _group_ids(ids) for axis, ids in value.items()}


def _group_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple)) or not 1 <= len(ids) <= MAX_GROUPS:
        raise TypeError(f"{ids!r} is not a list of 1 to {MAX_GROUPS} groups")
    chosen = tuple(count(each) for each in ids)
    if max(chosen) >= MAX_GROUPS or len(set(chosen)) != len(chosen):
        raise ValueError(f"{ids!r} are not different groups below {MAX_GROUPS}")
    return chosen


def _several_groups(value: Any) -> tuple[dict[str, tuple[int, ...]], ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LEVELS:
        raise TypeError(f"{value!r} is not a list of up to {MAX_LEVELS} choices of groups")
    return tuple(_groups(each) for each in value)


def _levels(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LEVELS:
        raise TypeError(f"{value!r} is not a list of up to {MAX_LEVELS} levels")
    return tuple(number(each) for each in value)


def _numbers(value: Any) -> tuple[float | None, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LEVELS:
        raise TypeError(f"{value!r} is not a list of up to {MAX_LEVELS} numbers")
    return tuple(None if each is None else number(each) for each in value)


def _hashes(value: Any) -> tuple[bytes, ...]:
    data = binary(value)
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not hashes of {HASH_BYTES} bytes each")
    return tuple(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))


def _read_blob(value: Any) -> Blob:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a map of a blob's fields")
    return Blob(**read_fields(Blob, value, BLOB_FORMS))


def _read_blobs(value: Any) -> dict[str, Blob]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a map of blobs")
    return {text(name): _read_blob(each) for name, each in value.items()}


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is not a list of names")
    return tuple(check_name(text(each)) for each in value)


def _bytes_by_name(value: Any) -> dict[str, bytes]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{str(value)[:40]!r} is not a map of bytes")
    return {text(name): binary(each) for name, each in value.items()}


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{str(value)[:40]!r} is not a map of texts")
    return {text(name): text(each) for name, each in value.items()}


def _read_rule(value: Any) -> LocalRule:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a map of a rule's fields")
    return LocalRule(**read_fields(LocalRule, value, RULE_FORMS))


def _read_encoding(value: Any) -> Encoding:
    if len(text(value)) > 80:
        raise EncodingError("the text of an encoding is too long")
    return Encoding.parse(value)


def _read_ranges(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is not a list of ranges")
    ranges = []
    for each in value:
        if not isinstance(each, (list, tuple)) or len(each) != 2:
            raise TypeError(f"{each!r} is not a range [first, behind the last]")
        ranges.append((count(each[0]), count(each[1])))
    return tuple(ranges)


def read_array(
    data: memoryview | NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> Array:
    """Copy an array out of foreign bytes of the right length. Raises `MessageError`."""
    array = np.frombuffer(bytes(data), dtype=dtype.newbyteorder("<")).reshape(shape)
    if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise MessageError(f"{name!r} holds bytes that are neither true nor false")
    return array.astype(dtype)


def optional(form: Form) -> Form:
    """Return the same form, with nil for None."""
    return Form(
        lambda value: None if value is None else form.write(value),
        lambda value: None if value is None else form.read(value),
    )


def called(name: str, form: Form) -> Form:
    """The same, under another name on the wire than in its class."""
    return form._replace(name=name)


COUNT = Form(count, count)
NUMBER = Form(number, number)
FLAG = Form(flag, flag)
NAME = Form(lambda value: check_name(text(value)), lambda value: check_name(text(value)))
RUN = Form(_run, _run)
REASON = Form(_cut_reason, _reason)
SHA256 = Form(_sha256, _sha256)
BINARY = Form(binary, binary)
HASHES = Form(b"".join, _hashes)
RANGES = Form(lambda value: [list(each) for each in value], _read_ranges)
GROUPS = Form(lambda value: {axis: list(ids) for axis, ids in value.items()}, _groups)
WIDTHS = Form(lambda value: [GROUPS.write(each) for each in value], _several_groups)
LEVELS = Form(lambda value: [number(each) for each in value], _levels)
NUMBERS = Form(lambda value: list(_numbers(value)), _numbers)
ENCODING = Form(str, _read_encoding)
TEXT = Form(text, text)
NAMES = Form(lambda value: [NAME.write(each) for each in value], _names)
BYTES_BY_NAME = Form(dict, _bytes_by_name)
TEXTS = Form(lambda value: dict(sorted(_texts(value).items())), _texts)

BLOB_FORMS: Forms = {"size": COUNT, "chunks": HASHES}
BLOB = Form(lambda value: write_fields(value, BLOB_FORMS), _read_blob)
BLOBS = Form(lambda value: {name: BLOB.write(each) for name, each in value.items()}, _read_blobs)

RULE_FORMS: Forms = {
    "learning_rate": NUMBER,
    "momentum": NUMBER,
    "weight_decay": NUMBER,
    "clip_norm": optional(NUMBER),
    "sam_radius": NUMBER,
    "proximal": NUMBER,
    "rescale": NUMBER,
    "widths": TEXT,
    "distillation": NUMBER,
    "classes": Form(text, text, omits="all"),
}
RULE = Form(lambda value: write_fields(value, RULE_FORMS), _read_rule)
