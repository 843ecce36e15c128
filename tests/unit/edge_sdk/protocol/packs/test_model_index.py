"""The model in packs: version 1 to the byte, what a submodel pulls of it, and what is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from edge_sdk.protocol.chunks import join_blob, split_blob
from edge_sdk.protocol.encoding.codec import decode_blocks, part_specs
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import BlockError, GroupError, MessageError, TensorError
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.packs.index import (
    MAX_INDEX_BYTES,
    SCATTERED,
    ModelIndex,
    Unpacking,
    _scatter,
    decode_index,
    encode_index,
    needed_chunks,
    pack_model,
    unpack_model,
)
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor

DATA = Path(__file__).parents[1] / "golden"
CHUNK = 32


def theta_of(plan: ModelPlan) -> Array:
    theta: Array = (np.arange(plan.parameters) * 37 % 101 - 50).astype(np.float32)
    return theta


def packed(
    plan: ModelPlan, buffers: dict[str, Array], encoding: str = "fp32", chunk_bytes: int = CHUNK
) -> tuple[ModelIndex, dict[bytes, bytes]]:
    encoded = encode_model(plan, theta_of(plan), Encoding.parse(encoding), np.random.default_rng(7))
    return pack_model(plan, encoded, buffers, chunk_bytes)


# -- version 1 -----------------------------------------------------------------------------------


def test_index_is_the_golden_file(plan: ModelPlan, buffers: dict[str, Array]) -> None:
    golden = (DATA / "model_index_v1.bin").read_bytes()
    index = packed(plan, buffers)[0]
    assert encode_index(plan, index) == golden
    assert decode_index(plan, golden) == index


def test_golden_index_is_as_the_format_is_described(
    plan: ModelPlan, buffers: dict[str, Array]
) -> None:
    """Packs found by asking for one block's signature after the other."""
    theta = theta_of(plan)
    packs: dict[Any, bytes] = {}
    for block in range(plan.block_count):
        start, end = plan.block_offsets[block : block + 2].tolist()
        key = ("moving", frozenset(plan.signature(block)))
        packs[key] = packs.get(key, b"") + theta[start:end].astype("<f4").tobytes()
    first = 0
    for group, atoms in enumerate(plan.axes[0].groups):  # norm.mean, along "hidden"
        part = buffers["norm.mean"][first : first + atoms].astype("<f4").tobytes()
        packs["moving", frozenset({("hidden", group)})] += part
        first += atoms
    packs["constant", frozenset()] = buffers["norm.steps"].astype("<i8").tobytes()
    hashes = b"".join(
        hashlib.sha256(data[at : at + CHUNK]).digest()[:16]
        for data in packs.values()
        for at in range(0, len(data), CHUNK)
    )
    golden = (DATA / "model_index_v1.bin").read_bytes()
    fields = ["tessera-model", 1, bytes.fromhex(plan.hash), "fp32", CHUNK, None, hashes]
    assert golden == msgpack.packb(fields)


def test_constants_are_apart_from_what_changes(
    plan: ModelPlan, buffers: dict[str, Array], groups: Groups
) -> None:
    """Another model with the same constants leaves their chunks as they are."""
    encoded = encode_model(
        plan, theta_of(plan) + np.float32(1), Encoding(), np.random.default_rng(7)
    )
    moved = buffers | {"norm.mean": buffers["norm.mean"] + np.float32(1)}
    before = needed_chunks(plan, packed(plan, buffers)[0], groups)
    after = needed_chunks(plan, pack_model(plan, encoded, moved, CHUNK)[0], groups)
    assert set(before) & set(after) == {
        hashlib.sha256(buffers["norm.steps"].tobytes()).digest()[:16]
    }


# -- what is pulled ------------------------------------------------------------------------------

CNN = ModelPlan(
    axes=(Axis("0", (8,) * 4), Axis("2", (16,) * 4), Axis("6", (32,) * 4)),
    tensors=(
        Tensor("0.weight", "float32", (Dim(32, 0), Dim(1), Dim(3), Dim(3))),
        Tensor("0.bias", "float32", (Dim(32, 0),)),
        Tensor("2.weight", "float32", (Dim(64, 1), Dim(32, 0), Dim(3), Dim(3))),
        Tensor("2.bias", "float32", (Dim(64, 1),)),
        Tensor("6.weight", "float32", (Dim(128, 2), Dim(1024, 1, 1, 16))),
        Tensor("6.bias", "float32", (Dim(128, 2),)),
        Tensor("8.weight", "float32", (Dim(10), Dim(128, 2))),
        Tensor("8.bias", "float32", (Dim(10),)),
    ),
)
"""The demo's CNN."""

MLP = ModelPlan(
    axes=(Axis("1", (50,) * 4), Axis("3", (50,) * 4)),
    tensors=(
        Tensor("1.weight", "float32", (Dim(200, 0), Dim(784))),
        Tensor("1.bias", "float32", (Dim(200, 0),)),
        Tensor("3.weight", "float32", (Dim(200, 1), Dim(200, 0))),
        Tensor("3.bias", "float32", (Dim(200, 1),)),
        Tensor("5.weight", "float32", (Dim(10), Dim(200, 1))),
        Tensor("5.bias", "float32", (Dim(10),)),
    ),
)
"""784-200-200-10."""


def publish_bytes(topic: str, payload: int) -> int:
    """Of an MQTT 3.1.1 PUBLISH with QoS 1 that brings a chunk, and of SUBACK and UNSUBACK."""
    remaining = 2 + len(topic) + 2 + payload
    length = 1 if remaining < 2**7 else 2 if remaining < 2**14 else 3 if remaining < 2**21 else 4
    return 1 + length + remaining + 5 + 4


@pytest.mark.parametrize(("plan", "parameters"), [(CNN, 151_306), (MLP, 199_210)])
@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("chunk_bytes", [96 * 2**10, 256 * 2**10])
def test_pulled_bytes_are_at_most_five_percent_above_the_needed(
    plan: ModelPlan, parameters: int, kept: int, chunk_bytes: int
) -> None:
    """Everything that comes down counts: index, chunks, topics, headers, acknowledgements."""
    assert plan.parameters == parameters
    groups = {axis.name: tuple(range(kept)) for axis in plan.axes}
    index, chunks = packed(plan, {}, "fp32", chunk_bytes)
    index_blob, index_chunks = split_blob(encode_index(plan, index), chunk_bytes)
    pulled = [
        *(index_chunks[name] for name in index_blob.chunks),
        *(chunks[name] for name in needed_chunks(plan, index, groups)),
    ]
    topic = Topics("digits-on-boards").chunk(bytes(16))
    needed = 4 * plan.submodel_parameters(groups)
    assert sum(publish_bytes(topic, len(chunk)) for chunk in pulled) <= 1.05 * needed


# -- many blocks ---------------------------------------------------------------------------------


def test_fine_model_is_unpacked_right() -> None:
    """64 groups an axis: thousands of packs of tiny blocks, and runs of every length."""
    plan = ModelPlan(
        axes=(Axis("a", (1,) * 64), Axis("b", (1, 2) * 32), Axis("c", (700, 1))),
        tensors=(
            Tensor("ab", "float32", (Dim(64, 0), Dim(96, 1))),
            Tensor("ba", "float32", (Dim(96, 1), Dim(64, 0))),
            Tensor("aa", "float32", (Dim(64, 0), Dim(64, 0))),
            Tensor("c", "float32", (Dim(701, 2), Dim(3))),
            Tensor("whole", "float32", (Dim(9),)),
        ),
        buffers=(
            Buffer("mean", "float64", (Dim(64, 0),), statistic=True),
            Buffer("cb", "float16", (Dim(701, 2), Dim(96, 1)), statistic=True),
            Buffer("flags", "bool", (Dim(701, 2),)),
        ),
    )
    rng = np.random.default_rng(1)
    buffers: dict[str, Array] = {
        "mean": rng.standard_normal(64),
        "cb": rng.standard_normal((701, 96)).astype(np.float16),
        "flags": rng.random(701) < 0.5,
    }
    encoded = encode_model(plan, theta_of(plan), Encoding(kind="int8"), np.random.default_rng(7))
    index, chunks = pack_model(plan, encoded, buffers, 1024)
    groups = {"a": tuple(range(3, 60, 2)), "b": tuple(range(0, 64, 3)), "c": (0,)}
    blocks, got = unpack_model(plan, index, groups, chunks)
    expected = decode_blocks(plan, encoded.cut(groups))[1]
    assert blocks.values.tobytes() == expected.values.tobytes()
    for name, array in plan.cut_buffers(buffers, groups).items():
        assert got[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("chunk_bytes", [64, 4096, 100_000])
@pytest.mark.parametrize("encoding", ["fp32", "fp16"])
def test_chunks_find_their_places_in_any_order(chunk_bytes: int, encoding: str) -> None:
    """Blocks of one value and of thousands, cut by chunks anywhere, with buffers in some packs."""
    plan = ModelPlan(
        axes=(Axis("a", (1,) * 16), Axis("b", (40, 2) * 4), Axis("c", (700, 1))),
        tensors=(
            Tensor("ab", "float32", (Dim(16, 0), Dim(168, 1))),
            Tensor("c", "float32", (Dim(701, 2), Dim(9))),
            Tensor("whole", "float32", (Dim(5000),)),
        ),
        buffers=(Buffer("mean", "float32", (Dim(701, 2),), statistic=True),),
    )
    buffers: dict[str, Array] = {"mean": np.arange(701, dtype=np.float32)}
    index, chunks = packed(plan, buffers, encoding, chunk_bytes)
    groups = {"a": tuple(range(1, 16, 2)), "b": (0, 1, 2, 5), "c": (0,)}
    expected, means = unpack_model(plan, index, groups, chunks)
    theta = plan.select(theta_of(plan), groups)
    assert np.array_equal(expected.values, theta.values)  # small whole numbers are exact in fp16
    rng = np.random.default_rng(3)
    for _ in range(3):
        unpacking = Unpacking(plan, index, groups)
        for at in rng.permutation(len(unpacking.needed)):
            name = needed_chunks(plan, index, groups)[at]
            unpacking.take(name, chunks[name])
            unpacking.take(name, b"again: nobody waits for it")
        blocks, got = unpacking.result()
        assert blocks.values.tobytes() == expected.values.tobytes()
        assert got["mean"].tobytes() == means["mean"].tobytes()
        assert not blocks.values.flags.writeable


def test_chunk_of_a_wrong_size_or_that_is_missing_is_refused(
    plan: ModelPlan, buffers: dict[str, Array]
) -> None:
    index, chunks = packed(plan, buffers)
    unpacking = Unpacking(plan, index, plan.full_groups())
    first = unpacking.needed[0]
    with pytest.raises(MessageError, match="is missing"):
        unpacking.result()
    with pytest.raises(MessageError, match="do not add up"):
        unpacking.take(first, chunks[first] + b"x")


@pytest.mark.parametrize("size", [1, 300])
def test_scatter_puts_blocks_in_their_places(size: int) -> None:
    """More blocks than are put at a time; by index or in runs, depending on their size."""
    rng = np.random.default_rng(2)
    count = SCATTERED + 100
    order = rng.permutation(2 * count)[:count]
    sizes = np.full(count, size, dtype=np.int64)
    source = rng.standard_normal(count * size).astype(np.float32)
    target = np.zeros(2 * count * size, dtype=np.float32)
    _scatter(source, target, order * size, sizes)
    expected = np.zeros((2 * count, size), dtype=np.float32)
    for number, place in enumerate(order.tolist()):
        expected[place] = source[number * size : (number + 1) * size]
    assert target.tobytes() == expected.tobytes()


def test_packs_of_a_plan_are_found_once() -> None:
    assert find_packs(CNN) is find_packs(replace(CNN))


# -- what is refused -----------------------------------------------------------------------------


def fields_of(plan: ModelPlan, buffers: dict[str, Array], encoding: str = "fp32") -> list[Any]:
    fields: list[Any] = msgpack.unpackb(
        encode_index(plan, packed(plan, buffers, encoding)[0]), strict_map_key=False
    )
    return fields


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, "tessera-plan", "not the index"),
        (1, 2, "version 2 of an index is unknown; this side has 1"),
        (2, bytes(32), "of plan 000000000000…"),
        (2, "x", "hashes must be bytes"),
        (3, "fp8", "unknown encoding"),
        (3, "fp16", "bytes of hashes for"),
        (3, None, "not a string"),
        (4, 0, "1 to 1048576 bytes, not 0"),
        (4, 2**21, "not 2097152"),
        (4, 1, "bytes of hashes for"),
        (4, True, "not a count"),
        (5, [], "0 packs; the plan has"),
        (5, [1, 2], "2 packs; the plan has"),
        (6, b"", "0 bytes of hashes"),
        (6, [], "hashes must be bytes"),
        (6, {"a": 1}, "not the index"),
    ],
)
def test_index_with_a_wrong_field_is_refused(
    plan: ModelPlan, buffers: dict[str, Array], place: int, value: Any, text: str
) -> None:
    fields = fields_of(plan, buffers)
    fields[place] = value
    with pytest.raises(MessageError, match=text):
        decode_index(plan, msgpack.packb(fields))


def test_index_that_is_not_canonical_is_refused(plan: ModelPlan, buffers: dict[str, Array]) -> None:
    index = packed(plan, buffers)[0]
    fields = fields_of(plan, buffers)
    fields[5] = [blob.size for blob in index.packs]
    with pytest.raises(MessageError, match="canonical"):
        decode_index(plan, msgpack.packb(fields))
    with pytest.raises(MessageError, match="not the index"):
        decode_index(plan, encode_index(plan, index) + b"\x00")


@pytest.mark.parametrize(
    "data",
    [
        bytes(MAX_INDEX_BYTES + 1),
        b"\x97" + b"\x90" * 7,
        b"\x97\x97" + b"\x90" * 100,
        b"\xdc\xff\xff" + b"\xc0" * 0xFFFF,
        b"\x80",
        b"",
    ],
)
def test_bytes_that_are_no_index_are_refused(plan: ModelPlan, data: bytes) -> None:
    with pytest.raises(MessageError, match="index"):
        decode_index(plan, data)


def test_index_of_another_plan_is_refused(plan: ModelPlan, buffers: dict[str, Array]) -> None:
    index = packed(plan, buffers)[0]
    with pytest.raises(MessageError, match="packs; the plan has"):
        needed_chunks(CNN, index, CNN.all_groups())


def test_groups_and_buffers_that_do_not_fit_are_refused(
    plan: ModelPlan, buffers: dict[str, Array]
) -> None:
    index, chunks = packed(plan, buffers)
    with pytest.raises(GroupError):
        needed_chunks(plan, index, {"hidden": (0,)})
    with pytest.raises(GroupError):
        unpack_model(plan, index, {"hidden": (9,), "heads": (0,)}, chunks)
    with pytest.raises(TensorError):
        packed(plan, {})


def test_pack_of_another_size_is_refused(
    plan: ModelPlan, buffers: dict[str, Array], groups: Groups
) -> None:
    """An index made by hand may claim sizes that `decode_index` would have refused."""
    index, chunks = packed(plan, buffers)
    for size in (1, 3):
        blob, pieces = split_blob(bytes(size), CHUNK)
        lying = replace(index, packs=(blob,) * len(index.packs))
        with pytest.raises((MessageError, BlockError)):
            unpack_model(plan, lying, groups, pieces)
    assert unpack_model(plan, index, groups, chunks)


def test_buffer_that_is_neither_true_nor_false_is_refused() -> None:
    plan = ModelPlan(
        axes=(),
        tensors=(Tensor("w", "float32", ()),),
        buffers=(Buffer("flag", "bool", ()),),
    )
    index, chunks = packed(plan, {"flag": np.array(True)})
    assert join_blob(index.packs[1], chunks) == b"\x01"
    blob, pieces = split_blob(b"\x02", CHUNK)
    lying = replace(index, packs=(index.packs[0], blob))
    with pytest.raises(MessageError, match="neither true nor false"):
        unpack_model(plan, lying, {}, chunks | pieces)


def test_buffers_cut_too_finely_are_refused_before_they_are_laid_out() -> None:
    plan = ModelPlan(
        axes=(Axis("a", (1,) * 64),),
        tensors=(Tensor("w", "float32", (Dim(64, 0),)),),
        buffers=(Buffer("b", "int8", (Dim(64, 0),) * 5),),
    )
    with pytest.raises(MessageError, match="1073741824 parts"):
        needed_chunks(plan, ModelIndex(Encoding(), CHUNK, ()), plan.all_groups())


def test_plain_sizes_are_those_of_the_packs(plan: ModelPlan, buffers: dict[str, Array]) -> None:
    for encoding in ("fp32", "fp16", "int8", "top-k:0.25"):
        index = packed(plan, buffers, encoding)[0]
        sizes = find_packs(plan).sizes(plan, index.encoding)
        assert [blob.size for blob in index.packs] == list(sizes)
        specs = part_specs(plan.block_sizes, index.encoding)
        total = sum(spec.size_bytes for spec in specs) + sum(b.nbytes for b in buffers.values())
        assert sum(sizes) == total
