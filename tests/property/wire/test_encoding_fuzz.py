"""Whatever bytes arrive, `decode_blocks` returns blocks that fit the plan, or `BlockError`."""

from __future__ import annotations

import struct
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.protocol.encoding.codec import decode_blocks, encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.property.plan.test_plan_codec_fuzz import damaged, grafts, structures
from tests.property.strategies import law

PLAN = ModelPlan(
    axes=(Axis("hidden", (20, 12)), Axis("heads", (1, 1, 1))),
    tensors=(
        Tensor("in", "float32", (Dim(32, 0), Dim(9))),
        Tensor("qkv", "float32", (Dim(18, 1, 3, 2), Dim(32, 0))),
        Tensor("scale", "float32", ()),
    ),
)
GROUPS = {"hidden": (0, 1), "heads": (0, 2)}
HEADER = ["tessera-blocks", 1, "top-k", 0.1, False, bytes.fromhex(PLAN.hash), [3, 5]]


def message_in(encoding: Encoding) -> bytes:
    ids = PLAN.block_ids(PLAN.choose(GROUPS))
    values = np.random.default_rng(1).standard_normal(int(PLAN.block_sizes[ids].sum()))
    blocks = Blocks(ids, values.astype(np.float32))
    return encode_blocks(PLAN, GROUPS, blocks, encoding, np.random.default_rng(2))


ENCODINGS = ["fp32", "fp16", "int8", "top-k:0.1", "top-k:0.01"] + (
    ["fp32+zstd", "fp16+zstd", "int8+zstd", "top-k:0.1+zstd"] if find_spec("zstandard") else []
)
MESSAGES = [message_in(Encoding.parse(text)) for text in ENCODINGS]


def framed(header: bytes, payload: bytes) -> bytes:
    start = struct.pack("<I", len(header)) + header
    return start + bytes(-len(start) % 16) + payload


def accept_or_refuse(data: bytes) -> None:
    with suppress(BlockError):
        groups, blocks = decode_blocks(PLAN, data)
        blocks.check(PLAN.block_ids(PLAN.choose(groups)), PLAN.block_sizes)


@pytest.mark.parametrize("data", MESSAGES, ids=ENCODINGS)
def test_messages_here_are_right(data: bytes) -> None:
    assert decode_blocks(PLAN, data)[0] == GROUPS


@law
@given(data=st.binary(max_size=200), payload=st.binary(max_size=50))
def test_decode_refuses_random_bytes(data: bytes, payload: bytes) -> None:
    for attempt in (data, framed(data, payload)):
        with pytest.raises(BlockError):
            decode_blocks(PLAN, attempt)


@law
@given(data=st.sampled_from(MESSAGES).flatmap(damaged))
def test_decode_accepts_or_refuses_damaged_bytes(data: bytes) -> None:
    accept_or_refuse(data)


def payload_start(message: bytes) -> int:
    """Where the payload begins; the headers here are shorter than 256 bytes."""
    return -(-(4 + message[0]) // 16) * 16


@law
@given(message=st.sampled_from(MESSAGES), data=st.data())
def test_decode_accepts_or_refuses_damaged_payloads(message: bytes, data: st.DataObject) -> None:
    start = payload_start(message)
    accept_or_refuse(message[:start] + data.draw(damaged(message[start:])))


@law
@given(structure=structures)
def test_decode_refuses_random_structures_for_a_header(structure: Any) -> None:
    with pytest.raises(BlockError):
        decode_blocks(PLAN, framed(msgpack.packb(structure), b""))


@law
@given(branch=structures, payload=st.binary(max_size=40))
def test_decode_checks_every_node_of_the_header(branch: Any, payload: bytes) -> None:
    for fields in grafts(HEADER, branch):
        accept_or_refuse(framed(msgpack.packb(fields), payload))


@law
@given(
    kind=st.sampled_from(["fp32", "fp16", "int8", "top-k"]),
    keep=st.one_of(st.none(), st.floats()),
    zstd=st.booleans(),
    masks=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    size=st.integers(0, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_decode_accepts_or_refuses_any_payload(
    kind: str, keep: float | None, zstd: bool, masks: list[int], size: int, seed: int
) -> None:
    fields = ["tessera-blocks", 1, kind, keep, zstd, bytes.fromhex(PLAN.hash), masks]
    accept_or_refuse(framed(msgpack.packb(fields), np.random.default_rng(seed).bytes(size)))


@law
@given(seed=st.integers(0, 2**32 - 1), message=st.sampled_from(MESSAGES[:5]))
def test_decode_takes_any_bits_for_values(seed: int, message: bytes) -> None:
    """Payloads of the right length: scales and values of any bits never crash the decoder."""
    start = payload_start(message)
    bits = np.random.default_rng(seed).bytes(len(message) - start)
    accept_or_refuse(message[:start] + bits)
    if b"top-k" not in message[:start]:
        decode_blocks(PLAN, message[:start] + bits)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
@pytest.mark.parametrize("depth", [10, 60, 511, 1025, 100_000])
def test_decode_refuses_deep_nesting(opening: bytes, depth: int) -> None:
    with pytest.raises(BlockError):
        decode_blocks(PLAN, framed(opening * depth + b"\xc0", b""))


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_decode_refuses_a_length_that_is_not_there(header: bytes) -> None:
    with pytest.raises(BlockError):
        decode_blocks(PLAN, framed(header + b"\xff\xff\xff\xff" + b"\x00" * 8, b""))
