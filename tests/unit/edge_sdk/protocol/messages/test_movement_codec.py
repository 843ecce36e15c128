"""Movements as bytes: version 1, to the byte; and what is not a movement."""

from __future__ import annotations

import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.movement import (
    MAX_HEADER_BYTES,
    MOVEMENT_FORMS,
    decode_movement,
    encode_movement,
)
from edge_sdk.protocol.messages.round import Movement
from edge_sdk.protocol.plan.layout import Array

DATA = Path(__file__).parents[1] / "golden"
SHA = bytes(range(32))

STATISTICS: dict[str, Array] = {
    "norm.mean": np.array([[1.5, -2.0, 3.25]], dtype=np.float32),
    "norm.count": np.array(7, dtype=np.int64),
}
MOVEMENT = Movement(
    device="pi-4",
    round=7,
    plan_hash=SHA.hex(),
    payload=b"these are the blocks",
    statistics=STATISTICS,
    learning_rate=0.05,
    level=0.5,
    samples=120,
    loss=1.25,
    train_s=3.5,
    keeps_copy=True,
)
HEADER: dict[str, Any] = {
    "v": 1,
    "type": "movement",
    "device": "pi-4",
    "round": 7,
    "plan_hash": SHA.hex(),
    "learning_rate": 0.05,
    "level": 0.5,
    "samples": 120,
    "loss": 1.25,
    "train_s": 3.5,
    "keeps_copy": True,
    "statistics": [["norm.mean", "float32", [1, 3]], ["norm.count", "int64", []]],
}
TAIL = struct.pack("<3fq", 1.5, -2.0, 3.25, 7) + b"these are the blocks"


def message(header: Any, tail: bytes = TAIL, *, length: int | None = None) -> bytes:
    data: bytes = header if isinstance(header, bytes) else msgpack.packb(header)
    return struct.pack("<I", len(data) if length is None else length) + data + tail


def changed(**changes: Any) -> dict[str, Any]:
    """The header with some entries changed; `...` takes one away."""
    return {name: each for name, each in {**HEADER, **changes}.items() if each is not ...}


def check_same(read: Movement, expected: Movement) -> None:
    for entry in fields(Movement):
        if entry.name != "statistics":
            assert getattr(read, entry.name) == getattr(expected, entry.name)
    assert list(read.statistics) == list(expected.statistics)
    for name, array in expected.statistics.items():
        assert read.statistics[name].dtype == array.dtype
        assert read.statistics[name].shape == array.shape
        assert read.statistics[name].tobytes() == array.tobytes()


# -- version 1 -----------------------------------------------------------------------------------


def test_movement_is_the_golden_file() -> None:
    golden = (DATA / "movement_v1.bin").read_bytes()
    assert encode_movement(MOVEMENT) == golden
    check_same(decode_movement(golden), MOVEMENT)


def test_golden_file_is_as_the_format_is_described() -> None:
    assert (DATA / "movement_v1.bin").read_bytes() == message(HEADER)


def test_joules_are_written_only_if_they_are_known() -> None:
    """So movements of devices that do not know them stay as they were, to the byte."""
    known = replace(MOVEMENT, energy_j=12.5)
    header = {name: each for name, each in HEADER.items() if name != "statistics"}
    header |= {"energy_j": 12.5, "statistics": HEADER["statistics"]}
    assert encode_movement(known) == message(header)
    check_same(decode_movement(message(header)), known)
    for wrong in (-1.0, 1.1e9, float("nan"), "3", True):
        with pytest.raises(MessageError):
            decode_movement(message({**header, "energy_j": wrong}))


def test_every_field_of_a_movement_travels() -> None:
    names = {entry.name for entry in fields(Movement)}
    assert {*MOVEMENT_FORMS, "statistics", "payload"} == names


@pytest.mark.parametrize("buffer", [bytearray, memoryview])
def test_movement_is_read_from_any_buffer(buffer: Any) -> None:
    data = buffer(encode_movement(MOVEMENT))
    read = decode_movement(data)
    check_same(read, MOVEMENT)
    payload = np.frombuffer(read.payload, np.uint8)
    assert np.shares_memory(payload, np.frombuffer(data, np.uint8)), "it is not copied"
    assert not payload.flags.writeable


def test_column_major_and_foreign_byte_order_are_written_alike() -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    written = {
        encode_movement(replace(MOVEMENT, statistics={"m": each}))
        for each in (array, np.asfortranarray(array), array.astype(">f8"))
    }
    assert len(written) == 1
    assert decode_movement(written.pop()).statistics["m"].tolist() == array.tolist()


def test_unknown_fields_are_ignored_and_defaults_taken() -> None:
    header = changed(later=[1], keeps_copy=..., statistics=...)
    read = decode_movement(message(header, b"blocks"))
    check_same(read, replace(MOVEMENT, keeps_copy=False, statistics={}, payload=b"blocks"))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MOVEMENT_FORMS][:-2])
def test_missing_field_is_named(name: str) -> None:
    with pytest.raises(MessageError, match=f"{name!r} is missing"):
        decode_movement(message(changed(**{name: ...})))


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": ...},
        {"type": "bid"},
        {"type": ...},
        {"device": "a/b"},
        {"round": 0},
        {"level": 0.0},
        {"level": float("nan")},
        {"samples": -1},
        {"loss": float("inf")},
        {"learning_rate": 0},
        {"train_s": -1},
        {"plan_hash": "x"},
        {"keeps_copy": 1},
        {"statistics": None},
        {"statistics": 3},
        {"statistics": {"a": 1}},
        {"statistics": ["abc"]},
        {"statistics": [["a", "float32"]]},
        {"statistics": [["a", "object", []]]},
        {"statistics": [["a", "float32", None]]},
        {"statistics": [["a", "float32", [-1]]]},
        {"statistics": [["a", "float32", [0]]]},
        {"statistics": [["a", "float32", [1.0]]]},
        {"statistics": [["a", "float32", [1] * 17]]},
        {"statistics": [[1, "float32", [1]]]},
        {"statistics": [["a", "float32", [1]], ["a", "float32", [1]]]},
        {"statistics": [["a", "float32", [2**20]]]},
        {"statistics": [["a", "float64", [2**53, 2**53, 2**53]]]},
        {"statistics": [["a", "int8", [len(TAIL) + 1]]]},
    ],
)
def test_wrong_header_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        decode_movement(message(changed(**changes)))


def test_bool_that_is_neither_is_refused() -> None:
    header = changed(statistics=[["a", "bool", [2]]])
    assert decode_movement(message(header, b"\x01\x00")).statistics["a"].tolist() == [True, False]
    with pytest.raises(MessageError, match="neither true nor false"):
        decode_movement(message(header, b"\x01\x02"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        message(HEADER, length=len(msgpack.packb(HEADER)) + len(TAIL) + 1),
        message(HEADER, length=len(msgpack.packb(HEADER)) - 1),
        message(b"\xc0" * (MAX_HEADER_BYTES + 1)),
        message([]),
        message(b"\x91" * 5000),
        message(b"\xdd\xff\xff\xff\xff"),
    ],
)
def test_bytes_that_are_no_movement_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_movement(data)


def test_movement_that_would_be_refused_is_not_written() -> None:
    for wrong in (
        replace(MOVEMENT, device="a/b"),
        replace(MOVEMENT, statistics={"a": np.zeros(3, dtype=np.complex64)}),
        replace(MOVEMENT, statistics={"a": np.zeros((0, 3), dtype=np.float32)}),
        replace(MOVEMENT, statistics={str(n) * 50: np.array(1.0) for n in range(9000)}),
    ):
        with pytest.raises(MessageError):
            encode_movement(wrong)
