"""Whatever bytes arrive, `decode_plan` returns a plan with exactly these bytes, or `PlanError`."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.protocol.errors import PlanError
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, MacTerm, Tensor
from tests.property.strategies import law, plans

PLAN = ModelPlan(
    axes=(Axis("hidden", (2, 1)), Axis("heads", (1, 1, 1))),
    tensors=(
        Tensor("in", "float32", (Dim(3, 0), Dim(4))),
        Tensor("qkv", "float32", (Dim(18, 1, 3, 2), Dim(3, 0))),
    ),
    buffers=(Buffer("mean", "float32", (Dim(3, 0),), statistic=True),),
    macs=(MacTerm(12, (0,)), MacTerm(18, (1, 0))),
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-2, 3),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    st.builds(msgpack.Timestamp, st.integers(0, 2**34 - 1), st.integers(0, 10**9 - 1)),
)


def structures_of(words: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Anything that msgpack can say, with these words in it."""
    return st.recursive(
        scalars | words,
        lambda inner: st.one_of(
            st.lists(inner, max_size=8), st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=25,
    )


structures = structures_of(st.sampled_from(["tessera-plan", "width", "float32"]))


def sealed(body: bytes) -> bytes:
    """An envelope whose hash is right, so that only the body can be at fault."""
    costs = msgpack.packb([])
    hashes = [hashlib.sha256(part).digest() for part in (body, costs)]
    packed: bytes = msgpack.packb(["tessera-plan", 1, hashes[0], body, hashes[1], costs])
    return packed


def body_of(plan: ModelPlan) -> bytes:
    body: bytes = msgpack.unpackb(plan.encoded)[3]
    return body


def accept_or_refuse(data: bytes) -> None:
    with suppress(PlanError):
        assert decode_plan(data).encoded == data


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes with one to three of them flipped, lost or added."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(out) - 1))
        match draw(st.sampled_from(["flip", "truncate", "insert", "remove"])):
            case "flip":
                out[at] ^= draw(st.integers(1, 255))
            case "truncate":
                del out[max(at, 1) :]
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=4))
            case _:
                del out[at : at + draw(st.integers(1, 4))]
                out = out or bytearray(b"\x00")
    return bytes(out)


def grafts(tree: Any, branch: Any) -> list[Any]:
    """All trees made from `tree` by putting `branch` in the place of one node."""
    if not isinstance(tree, list):
        return [branch]
    return [branch] + [
        [*tree[:n], grown, *tree[n + 1 :]]
        for n, node in enumerate(tree)
        for grown in grafts(node, branch)
    ]


@law
@given(plan=plans())
def test_decode_of_encode_is_the_plan(plan: ModelPlan) -> None:
    decoded = decode_plan(plan.encoded, expected_hash=plan.hash)
    assert decoded == plan
    assert decoded.encoded == plan.encoded
    assert plan.hash == hashlib.sha256(body_of(plan)).hexdigest()


@law
@given(data=st.binary(max_size=200))
def test_decode_refuses_random_bytes(data: bytes) -> None:
    for attempt in (data, sealed(data)):
        with pytest.raises(PlanError):
            decode_plan(attempt)


@law
@given(data=damaged(PLAN.encoded))
def test_decode_refuses_damaged_bytes(data: bytes) -> None:
    if data != PLAN.encoded:
        with pytest.raises(PlanError):
            decode_plan(data)


@law
@given(body=damaged(body_of(PLAN)))
def test_decode_checks_a_damaged_body_under_a_right_hash(body: bytes) -> None:
    accept_or_refuse(sealed(body))


@law
@given(structure=structures)
def test_decode_refuses_random_structures(structure: Any) -> None:
    data = msgpack.packb(structure)
    for attempt in (data, sealed(data)):
        with pytest.raises(PlanError):
            decode_plan(attempt)


@law
@given(branch=structures)
def test_decode_checks_every_node_of_the_body(branch: Any) -> None:
    for body in grafts(msgpack.unpackb(body_of(PLAN)), branch):
        accept_or_refuse(sealed(msgpack.packb(body)))


@law
@given(branch=structures)
def test_decode_refuses_any_other_envelope(branch: Any) -> None:
    for envelope in grafts(msgpack.unpackb(PLAN.encoded), branch):
        data = msgpack.packb(envelope)
        if data != PLAN.encoded:
            with pytest.raises(PlanError):
                decode_plan(data)


@pytest.mark.parametrize("depth", [1, 10, 511, 1023, 1024, 1025, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
def test_decode_refuses_deep_nesting(opening: bytes, depth: int) -> None:
    data = opening * depth + b"\xc0"
    for attempt in (data, sealed(data)):
        with pytest.raises(PlanError):
            decode_plan(attempt)


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_decode_refuses_a_length_that_is_not_there(header: bytes) -> None:
    data = header + b"\xff\xff\xff\xff" + b"\x00" * 8
    for attempt in (data, sealed(data)):
        with pytest.raises(PlanError):
            decode_plan(attempt)


@pytest.mark.parametrize("depth", [500, 1000])
def test_decode_checks_deep_nesting_at_every_node(depth: int) -> None:
    for body in grafts(msgpack.unpackb(body_of(PLAN)), "here"):
        deep = b"\x91" * depth + b"\xc0"
        accept_or_refuse(sealed(msgpack.packb(body).replace(msgpack.packb("here"), deep)))
