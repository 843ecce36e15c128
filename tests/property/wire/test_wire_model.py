"""A submodel pulled in packs is the submodel that is cut out, for any plan and encoding."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.chunks import join_blob, split_blob
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import BlockError, MessageError
from edge_sdk.protocol.packs.index import (
    ModelIndex,
    decode_index,
    encode_index,
    needed_chunks,
    pack_model,
    unpack_model,
)
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from tests.property.plan.test_plan_codec_fuzz import damaged, grafts, structures
from tests.property.strategies import bits_of, choices, plans, seeds

law = settings(max_examples=40)

ENCODINGS = ["fp32", "fp16", "int8", "top-k:0.1"] + (
    ["fp32+zstd", "int8+zstd", "top-k:0.3+zstd"] if find_spec("zstandard") else []
)

PLAN = ModelPlan(
    axes=(Axis("hidden", (20, 12)), Axis("heads", (1, 1, 1))),
    tensors=(
        Tensor("in", "float32", (Dim(32, 0), Dim(9))),
        Tensor("qkv", "float32", (Dim(18, 1, 3, 2), Dim(32, 0))),
        Tensor("scale", "float32", ()),
    ),
    buffers=(
        Buffer("mean", "float32", (Dim(32, 0),), statistic=True),
        Buffer("mask", "bool", (Dim(3, 1),)),
    ),
)


def model_of(plan: ModelPlan, seed: int) -> tuple[Array, dict[str, Array]]:
    """Weights with long stretches of zeros, which compress; and buffers of any bits."""
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(plan.parameters).astype(np.float32)
    theta[: plan.parameters // 2] = 0
    buffers = {}
    for buffer in plan.buffers:
        dtype = np.dtype(buffer.dtype)
        values = rng.integers(0, 2 if dtype.kind == "b" else 100, size=buffer.shape)
        buffers[buffer.name] = np.asarray(values).astype(dtype)
    return theta, buffers


def packed_model(
    plan: ModelPlan, encoding: str, chunk_bytes: int, seed: int
) -> tuple[ModelIndex, dict[bytes, bytes]]:
    theta, buffers = model_of(plan, seed)
    encoded = encode_model(plan, theta, Encoding.parse(encoding), np.random.default_rng(seed))
    return pack_model(plan, encoded, buffers, chunk_bytes)


@law
@given(data=st.binary(max_size=300), chunk_bytes=st.integers(1, 400))
def test_joined_chunks_are_the_blob(data: bytes, chunk_bytes: int) -> None:
    blob, chunks = split_blob(data, chunk_bytes)
    assert join_blob(blob, chunks) == data
    assert all(len(chunk) <= chunk_bytes for chunk in chunks.values())


@law
@given(data=st.data(), seed=seeds)
def test_packs_are_the_blocks_of_one_signature(data: st.DataObject, seed: int) -> None:
    plan = data.draw(plans())
    by_signature: dict[frozenset[tuple[str, int]], list[int]] = {}
    for block in range(plan.block_count):
        by_signature.setdefault(frozenset(plan.signature(block)), []).append(block)
    packs = find_packs(plan)
    found = [ids.tolist() for ids in packs.blocks if len(ids)]
    assert found == list(by_signature.values())
    assert sorted(np.concatenate(packs.parts).tolist()) == list(range(len(packs.part_sizes)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@law
@given(data=st.data(), chunk_bytes=st.sampled_from([1024, 1, 7, 64, 300]), seed=seeds)
def test_unpacked_submodel_is_the_one_that_is_cut_out(
    encoding: str, data: st.DataObject, chunk_bytes: int, seed: int
) -> None:
    plan = data.draw(plans())
    groups = data.draw(choices(plan))
    theta, buffers = model_of(plan, seed)
    encoded = encode_model(plan, theta, Encoding.parse(encoding), np.random.default_rng(seed))
    index, chunks = pack_model(plan, encoded, buffers, chunk_bytes)
    index = decode_index(plan, encode_index(plan, index))

    pulled = {name: chunks[name] for name in needed_chunks(plan, index, groups)}
    blocks, got = unpack_model(plan, index, groups, pulled)

    expected = decode_blocks(plan, encoded.cut(groups))[1]
    blocks.check(expected.ids, plan.block_sizes)
    assert blocks.values.tobytes() == expected.values.tobytes()
    cut = plan.cut_buffers(buffers, groups)
    assert bits_of(got) == bits_of(cut)
    plan.check_buffers(got, groups)
    if encoding == "fp32":  # equal chunks are pulled once, so it may be less
        needed = expected.values.nbytes + sum(array.nbytes for array in cut.values())
        assert sum(map(len, pulled.values())) <= needed


@law
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), seed=seeds)
def test_every_chunk_of_a_submodel_is_needed(data: st.DataObject, encoding: str, seed: int) -> None:
    index, chunks = packed_model(PLAN, encoding, 100, seed)
    groups = data.draw(choices(PLAN))
    needed = needed_chunks(PLAN, index, groups)
    lost = data.draw(st.sampled_from(needed))
    pulled = {name: chunks[name] for name in needed if name != lost}
    with pytest.raises(MessageError, match=f"{lost.hex()} is missing"):
        unpack_model(PLAN, index, groups, pulled)
    pulled[lost] = bytes(len(chunks[lost])) if any(chunks[lost]) else b"\x01" * len(chunks[lost])
    with pytest.raises(MessageError, match="altered"):
        unpack_model(PLAN, index, groups, pulled)


# -- foreign bytes -------------------------------------------------------------------------------

INDEXES = {
    encoding: encode_index(PLAN, packed_model(PLAN, encoding, 100, 1)[0]) for encoding in ENCODINGS
}


def accept_or_refuse(data: bytes) -> None:
    with suppress(MessageError):
        assert encode_index(PLAN, decode_index(PLAN, data)) == data


@law
@given(data=st.binary(max_size=200))
def test_decode_refuses_random_bytes(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_index(PLAN, data)


@pytest.mark.parametrize("encoding", ENCODINGS)
@law
@given(data=st.data())
def test_decode_checks_damaged_bytes(encoding: str, data: st.DataObject) -> None:
    accept_or_refuse(data.draw(damaged(INDEXES[encoding])))


@pytest.mark.parametrize("encoding", ENCODINGS)
@law
@given(branch=structures)
def test_decode_checks_every_node(encoding: str, branch: object) -> None:
    for tree in grafts(msgpack.unpackb(INDEXES[encoding]), branch):
        accept_or_refuse(msgpack.packb(tree))


@pytest.mark.parametrize("encoding", ENCODINGS)
@law
@given(data=st.data())
def test_unpack_checks_foreign_values_under_right_hashes(
    encoding: str, data: st.DataObject
) -> None:
    """A coordinator that lies: hashes are right, sizes too, but the bytes are anything."""
    index, chunks = packed_model(PLAN, encoding, 1024, 1)
    packs, foreign = [], {}
    for blob in index.packs:
        right = join_blob(blob, chunks)
        bytes_ = bytearray(data.draw(damaged(right)))[: blob.size].ljust(blob.size, b"\x00")
        other, pieces = split_blob(bytes(bytes_), 1024)
        packs.append(other)
        foreign.update(pieces)
    lying = ModelIndex(index.encoding, 1024, tuple(packs))
    groups = data.draw(choices(PLAN))
    with suppress(MessageError, BlockError):
        blocks, buffers = unpack_model(PLAN, lying, groups, foreign)
        blocks.check(PLAN.block_ids(PLAN.choose(groups)), PLAN.block_sizes)
        PLAN.check_buffers(buffers, groups)
