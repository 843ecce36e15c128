"""The wire form of plans: versions 1 to 3, to the byte."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from edge_sdk.protocol.errors import PlanError, TensorError
from edge_sdk.protocol.plan.codec import MAX_PLAN_BYTES, decode_plan, encode_plan, plan_hash
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, MacTerm, Segment, Tensor

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


SEGMENTS = ModelPlan(
    axes=(Axis("left", (2, 1)), Axis("right", (2, 2))),
    tensors=(
        Tensor("left.weight", "float32", (Dim(3, 0), Dim(5))),
        Tensor("right.weight", "float32", (Dim(4, 1), Dim(5))),
        Tensor(
            "both.weight",
            "float32",
            (
                Dim(2),
                Dim(20, segments=(Segment(6, 0, 2), Segment(2), Segment(8, 1, 2), Segment(4, 1))),
            ),
        ),
    ),
)
GOLDEN_2 = (Path(__file__).parents[1] / "golden" / "plan_v2.bin").read_bytes()


def test_plan_with_segments_is_version_two_to_the_byte() -> None:
    assert encode_plan(SEGMENTS) == GOLDEN_2
    assert decode_plan(GOLDEN_2) == SEGMENTS
    envelope = msgpack.unpackb(GOLDEN_2)
    both = msgpack.unpackb(envelope[3])[2][2]
    assert envelope[1] == 2
    assert both[2] == [[2], [20, [[6, 0, 2], [2], [8, 1, 2], [4, 1, 1]]]]


DEPTH = ModelPlan(
    axes=(Axis("blocks.*.fc", (2, 1)), Axis("blocks", (1, 1, 1), depth=True)),
    tensors=(
        Tensor("in.weight", "float32", (Dim(2), Dim(5))),
        Tensor(
            "blocks.*.fc.weight",
            "float32",
            (Dim(3, 1), Dim(3, 0), Dim(2)),
            ("blocks.0.fc.weight", "blocks.1.fc.weight", "blocks.2.fc.weight"),
        ),
    ),
    buffers=(
        Buffer("blocks.*.mean", "float32", (Dim(3, 1),), ("m.0", "m.1", "m.2"), statistic=True),
    ),
    macs=(MacTerm(10, ()), MacTerm(2, (0, 1))),
)
GOLDEN_3 = (Path(__file__).parents[1] / "golden" / "plan_v3.bin").read_bytes()


def test_plan_by_depth_is_version_three_to_the_byte() -> None:
    assert encode_plan(DEPTH) == GOLDEN_3
    assert decode_plan(GOLDEN_3) == DEPTH
    envelope = msgpack.unpackb(GOLDEN_3)
    regions, axes, tensors, _, depth = msgpack.unpackb(envelope[3])
    assert (envelope[1], regions) == (3, "both")
    assert axes == [["blocks.*.fc", [2, 1]], ["blocks", [1, 1, 1]]]
    assert tensors[1] == ["blocks.*.fc.weight", "float32", [[3, 1, 1, 1], [3, 0, 1, 1], [2]]]
    stacks = [[each.name, list(each.members)] for each in (DEPTH.tensors[1], *DEPTH.buffers)]
    assert depth == [[1, stacks]]


def test_blocks_are_left_out_of_stacks_alone() -> None:
    groups = {"blocks.*.fc": (1,), "blocks": (0, 2)}
    weights = {t.name: np.zeros(t.shape, dtype=np.float32) for t in DEPTH.tensors}
    weights["blocks.*.fc.weight"][:] = np.arange(18).reshape(3, 3, 2)
    part = DEPTH.cut(weights, groups)
    assert part["in.weight"].shape == (2, 5)
    assert part["blocks.*.fc.weight"].tolist() == [[[4, 5]], [[16, 17]]]
    assert DEPTH.submodel_parameters(groups) == 10 + 4
    assert DEPTH.submodel_macs(groups) == 10 + 2 * 1 * 2
    assert DEPTH.levels(groups) == {"blocks.*.fc": 1 / 3, "blocks": 2 / 3}
    assert DEPTH.cost_at(0.5).parameters == 10 + 1 * 2 * 2  # one block, the larger group


def test_stacks_have_the_names_of_the_module_outside() -> None:
    """A submodel's blocks are called as the first ones, as in a module with fewer blocks."""
    rows = {f"blocks.{n}.fc.weight": np.full((3, 2), n, dtype=np.float32) for n in range(3)}
    whole = {"in.weight": np.ones((2, 5), dtype=np.float32), **rows}
    stacked = DEPTH.stacked(whole)
    DEPTH.check(stacked)
    assert DEPTH.stacked(stacked).keys() == stacked.keys()
    back = DEPTH.unstacked(stacked)
    assert back.keys() == whole.keys()
    assert all(np.array_equal(back[name], whole[name]) for name in whole)
    narrow = DEPTH.unstacked(DEPTH.cut(stacked, {"blocks.*.fc": (0, 1), "blocks": (2,)}))
    assert sorted(narrow) == ["blocks.0.fc.weight", "in.weight"]
    assert narrow["blocks.0.fc.weight"].tolist() == [[2, 2]] * 3
    with pytest.raises(TensorError, match=r"'blocks\.1\.fc\.weight' is missing"):
        DEPTH.stacked({name: rows[name] for name in list(rows)[::2]})
    with pytest.raises(TensorError, match="differ in shape"):
        DEPTH.stacked({**rows, "blocks.1.fc.weight": np.zeros((3, 3), dtype=np.float32)})


@pytest.mark.parametrize(
    ("depth", "why"),
    [
        ([[1, []]], "of a stack"),
        ([[0, [["blocks.*.fc.weight", ["a", "b", "c"]]]]], "of a stack"),
        ([[1, [["blocks.*.fc.weight", ["a", "b"]]]]], "stacks 2 arrays"),
        ([[1, [["blocks.*.fc.weight", ["a", "b", "b"]]]]], "used twice"),
        ([[1, [["blocks.*.fc.weight", "abc"], ["blocks.*.mean", ["m.0", "m.1", "m.2"]]]]], "canon"),
        ([[7, []], [1, []]], "of a stack"),
        ([1], "structure"),
    ],
)
def test_depth_that_does_not_fit_the_tensors_is_refused(depth: Any, why: str) -> None:
    body = msgpack.unpackb(msgpack.unpackb(GOLDEN_3)[3])
    costs = msgpack.unpackb(GOLDEN_3)[5]
    with pytest.raises(PlanError, match=why):
        decode_plan(sealed(msgpack.packb([*body[:4], depth]), costs, version=3))


def test_segments_decide_who_owns_a_column() -> None:
    """Columns 0–5 are of `left`, 6 and 7 of everybody, the rest of `right`, twice."""
    weights = {t.name: np.zeros(t.shape, dtype=np.float32) for t in SEGMENTS.tensors}
    weights["both.weight"][:] = np.arange(20)
    part = SEGMENTS.cut(weights, {"left": [1], "right": [0]})
    assert part["both.weight"][0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16, 17]
    blocks = SEGMENTS.scatter(part, {"left": [1], "right": [0]})
    back = SEGMENTS.assemble(blocks, {"left": [1], "right": [0]})
    assert all(np.array_equal(back[name], part[name]) for name in part)
    assert SEGMENTS.submodel_parameters({"left": [1], "right": [0]}) == 5 + 10 + 20


@pytest.mark.parametrize(
    "dim",
    [
        Dim(3, segments=(Segment(3, 0),)),
        Dim(6, segments=(Segment(3), Segment(3))),
        Dim(7, segments=(Segment(3, 0), Segment(2), Segment(2))),
        Dim(8, segments=(Segment(3, 0), Segment(4, 1))),
        Dim(7, segments=(Segment(3, 0), Segment(4, 2))),
        Dim(8, segments=(Segment(3, 0), Segment(5, 1))),
        Dim(7, 0, segments=(Segment(3, 0), Segment(4, 1))),
        Dim(3, segments=(Segment(3, 0), Segment(0))),
    ],
)
def test_segments_that_do_not_make_the_dimension_are_refused(dim: Dim) -> None:
    with pytest.raises(PlanError, match="tensor 'bias'"):
        replace(SEGMENTS, tensors=(*SEGMENTS.tensors, Tensor("bias", "float32", (dim,))))


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


@pytest.mark.parametrize("version", [0, 4, 255, "1", None, [1]])
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
        (with_body((0,), "depth"), "says regions 'depth', but its axes are of 'width'"),
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
