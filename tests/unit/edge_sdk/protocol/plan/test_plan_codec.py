"""The wire form of plans: version 1, to the byte."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import pytest

from edge_sdk.protocol.errors import PlanError
from edge_sdk.protocol.plan.codec import MAX_PLAN_BYTES, decode_plan, encode_plan, plan_hash
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import MacTerm

GOLDEN = (Path(__file__).parents[1] / "golden" / "plan_v1.bin").read_bytes()
GOLDEN_HASH = "867a027a0f69e383655370f986f3e36a00be475ea86ac6f5aa7fe2185c7dc303"
GOLDEN_BODY: list[Any] = [
    "width",
    [["hidden", [2, 1, 1]], ["heads", [1, 1]]],
    [
        ["fc.weight", "float32", [[4, 0, 1, 1], [3]]],
        ["qkv.weight", "float32", [[12, 1, 3, 2], [4, 0, 1, 1]]],
        ["mix.weight", "float32", [[4, 0, 1, 1], [4, 0, 1, 1]]],
        ["temperature", "float32", []],
    ],
    [["norm.mean", "float32", [[4, 0, 1, 1]], True], ["norm.steps", "int64", [], False]],
    [],
]
GOLDEN_COSTS: list[Any] = [[3, [0]], [6, [1, 0]], [1, [0, 0]]]


BODY: bytes = msgpack.packb(GOLDEN_BODY)
COSTS: bytes = msgpack.packb(GOLDEN_COSTS)


def sealed(body: bytes, costs: bytes = COSTS, *, version: object = 1) -> bytes:
    """An envelope with the right hashes around any body and costs."""
    hashes = [hashlib.sha256(part).digest() for part in (body, costs)]
    packed: bytes = msgpack.packb(["tessera-plan", version, hashes[0], body, hashes[1], costs])
    return packed


def test_golden_file_decodes_to_the_plan(plan: ModelPlan) -> None:
    assert decode_plan(GOLDEN) == plan
    assert decode_plan(GOLDEN, expected_hash=GOLDEN_HASH).hash == GOLDEN_HASH


def test_encoding_is_the_golden_file(plan: ModelPlan) -> None:
    assert encode_plan(plan) == plan.encoded == GOLDEN
    assert plan_hash(plan) == plan.hash == GOLDEN_HASH
    assert encode_plan(decode_plan(GOLDEN)) == GOLDEN


def test_golden_file_is_as_the_format_is_described() -> None:
    assert sealed(BODY) == GOLDEN
    assert hashlib.sha256(BODY).hexdigest() == GOLDEN_HASH


def test_alternatives_are_a_third_entry_of_their_axis(plan: ModelPlan) -> None:
    """All other plans stay as they were, to the byte."""
    first, second = plan.axes
    marked = replace(plan, axes=(first, replace(second, alternatives=True)))
    body = [GOLDEN_BODY[0], [GOLDEN_BODY[1][0], ["heads", [1, 1], True]], *GOLDEN_BODY[2:]]
    assert marked.encoded == sealed(msgpack.packb(body))
    assert decode_plan(marked.encoded) == marked
    assert marked.hash != plan.hash
    for wrong, why in (([False], "canonical"), ([1], "structure"), ([True, True], "structure")):
        body[1] = [GOLDEN_BODY[1][0], ["heads", [1, 1], *wrong]]
        with pytest.raises(PlanError, match=why):
            decode_plan(sealed(msgpack.packb(body)))


def test_wrong_hash_in_the_envelope_is_refused() -> None:
    digest, costs = (hashlib.sha256(part).digest() for part in (BODY, COSTS))
    for wrong in (bytes(32), digest[:-1], digest.hex(), b"", None, list(digest)):
        with pytest.raises(PlanError, match="hash does not match"):
            decode_plan(msgpack.packb(["tessera-plan", 1, wrong, BODY, costs, COSTS]))
        with pytest.raises(PlanError, match="hash does not match"):
            decode_plan(msgpack.packb(["tessera-plan", 1, digest, BODY, wrong, COSTS]))


def test_hash_does_not_depend_on_how_costs_are_counted(plan: ModelPlan) -> None:
    recounted = replace(plan, macs=(MacTerm(1, ()),))
    assert recounted.hash == plan.hash
    assert recounted.encoded != plan.encoded
    assert decode_plan(recounted.encoded) == recounted


def test_every_altered_byte_of_the_body_is_noticed() -> None:
    starts = (GOLDEN.index(BODY), GOLDEN.index(COSTS))
    ranges = [range(at, at + len(part)) for at, part in zip(starts, (BODY, COSTS), strict=True)]
    for at in chain(*ranges):
        altered = bytearray(GOLDEN)
        altered[at] ^= 1
        with pytest.raises(PlanError, match="hash does not match"):
            decode_plan(bytes(altered))


@pytest.mark.parametrize("version", [0, 2, 255, "1", None, [1]])
def test_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(PlanError, match="version"):
        decode_plan(sealed(BODY, version=version))


@pytest.mark.parametrize("version", [True, 1.0])
def test_version_of_another_type_is_not_canonical(version: object) -> None:
    with pytest.raises(PlanError, match="canonical"):
        decode_plan(sealed(BODY, version=version))


def test_plan_with_another_hash_than_expected_is_refused() -> None:
    with pytest.raises(PlanError, match=f"plan {GOLDEN_HASH[:12]}…, not 000000000000…"):
        decode_plan(GOLDEN, expected_hash="0" * 64)


def rewritten(old: bytes, new: bytes) -> bytes:
    assert old in BODY
    return sealed(BODY.replace(old, new, 1))


def with_body(at: tuple[int, ...], value: object) -> bytes:
    body = msgpack.unpackb(BODY)
    node = body
    for step in at[:-1]:
        node = node[step]
    node[at[-1]] = value
    return sealed(msgpack.packb(body))


NOT_CANONICAL = {
    "long integer": rewritten(b"\x93\x02\x01\x01", b"\x93\xcc\x02\x01\x01"),
    "signed integer": rewritten(b"\x93\x02\x01\x01", b"\x93\xd0\x02\x01\x01"),
    "long string": rewritten(b"\xa5width", b"\xd9\x05width"),
    "long array": rewritten(b"\x95\xa5width", b"\xdc\x00\x05\xa5width"),
    "long bytes": GOLDEN.replace(b"\xc4\x20", b"\xc5\x00\x20", 1),
    "long envelope": b"\xdc\x00\x06" + GOLDEN[1:],
    "dimension without its defaults": with_body((2, 0, 2, 0), [4, 0]),
    "bytes for an array": with_body((1, 0, 1), b"\x02\x01\x01"),
    "map for an array": with_body((4,), {}),
    "bytes for no dimensions": with_body((2, 3, 2), b""),
}


@pytest.mark.parametrize("data", NOT_CANONICAL.values(), ids=list(NOT_CANONICAL))
def test_other_encoding_of_the_same_plan_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="canonical"):
        decode_plan(data)


STRUCTURE = {
    "nothing": sealed(b"\xc0"),
    "four parts": sealed(msgpack.packb(GOLDEN_BODY[:4])),
    "six parts": sealed(msgpack.packb([*GOLDEN_BODY, []])),
    "axis without groups": with_body((1, 0), ["hidden"]),
    "number for a name": with_body((1, 0, 0), 1),
    "bytes for a name": with_body((2, 0, 0), b"w"),
    "negative atoms": with_body((1, 0, 1), [5, -1]),
    "atoms in halves": with_body((1, 0, 1), [2.5, 1.5]),
    "boolean for a count": with_body((1, 0, 1), [2, True, 1]),
    "dimension of five": with_body((2, 0, 2, 0), [4, 0, 1, 1, 1]),
    "dimension of none": with_body((2, 0, 2, 0), []),
    "number for a flag": with_body((3, 0, 3), 1),
    "buffer without a flag": with_body((3, 0), ["norm.mean", "float32", []]),
    "negative cost": sealed(BODY, msgpack.packb([[-3, [0]]])),
}


@pytest.mark.parametrize("data", STRUCTURE.values(), ids=list(STRUCTURE))
def test_body_of_another_structure_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="structure"):
        decode_plan(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (with_body((0,), "depth"), "regions by depth"),
        (with_body((2,), []), "at least one tensor"),
        (with_body((1, 0, 1), [3, 2]), "is not 4"),
        (with_body((2, 0, 1), "float64"), "weights are float32"),
        (with_body((2, 3, 2), [[2**63]]), "too many parameters"),
        (with_body((3, 1, 1), "banana"), "banana"),
        (with_body((3, 1, 2), [[2**60], [2**60]]), "too many parameters"),
        (with_body((1,), [*GOLDEN_BODY[1], ["unused", [2**50]]]), "atoms"),
    ],
    ids=["regions", "no tensors", "sizes", "dtype", "huge", "buffer", "huge buffer", "atoms"],
)
def test_plan_that_cannot_work_says_so(data: bytes, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        decode_plan(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0",
        GOLDEN[:-1],
        GOLDEN + b"\xc0",
        GOLDEN * 2,
        b"\x94\xa1x\x01\xc4\x00\xc4\x00",
    ],
    ids=["empty", "reserved", "nil", "truncated", "trailing", "doubled", "other magic"],
)
def test_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        decode_plan(data)


def test_message_too_large_for_a_plan_is_not_read() -> None:
    with pytest.raises(PlanError, match="too many for a plan"):
        decode_plan(GOLDEN + bytes(MAX_PLAN_BYTES))


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\x91", b"\xc0"])
def test_bytes_that_would_become_far_more_are_refused_before_they_do(filler: bytes) -> None:
    """16 MiB of empty arrays would take a GB."""
    many = b"".join(b"\xdc\xff\xff" + filler * 0xFFFF for _ in range(200))
    body = b"\xdc\x00\xc8" + many
    digest = hashlib.sha256(body).digest()
    empty = msgpack.packb([])
    data = msgpack.packb(["tessera-plan", 1, digest, body, hashlib.sha256(empty).digest(), empty])
    tracemalloc.start()
    try:
        with pytest.raises(PlanError):
            decode_plan(data)
        assert tracemalloc.get_traced_memory()[1] < len(data) + 2**25
    finally:
        tracemalloc.stop()
