"""The wire form of blocks: version 1, to the byte; and what is not blocks."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from edge_sdk.protocol.encoding.codec import (
    decode_blocks,
    decode_header,
    decode_payload,
    encode_blocks,
    encoded_size,
)
from edge_sdk.protocol.encoding.encoded_model import compression_noise, encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import BlockError, EncodingError, GroupError
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

DATA = Path(__file__).parents[1] / "golden"
GROUPS = {"hidden": (0, 2), "heads": (1,)}
MASKS = [0b101, 0b10]
SIZES = [6, 3, 12, 6, 4, 2, 2, 1, 1]
"""Of the submodel's blocks: of fc, qkv, mix and temperature of the plan in `conftest.py`."""

VALUES = ((np.arange(37) * 37 % 101 - 50) / np.float32(8)).astype(np.float32)
KINDS = {
    "fp32": Encoding(),
    "fp16": Encoding(kind="fp16"),
    "int8": Encoding(kind="int8"),
    "top-k": Encoding(kind="top-k", keep=0.25),
}


def golden(kind: str) -> bytes:
    return (DATA / f"blocks_{kind}_v1.bin").read_bytes()


def encoded(plan: ModelPlan, encoding: Encoding) -> bytes:
    blocks = Blocks(plan.block_ids(plan.choose(GROUPS)), VALUES)
    return encode_blocks(plan, GROUPS, blocks, encoding, np.random.default_rng(7))


def message(fields: Any, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A message with any header, its length and padding as they should be."""
    header: bytes = msgpack.packb(fields)
    start = struct.pack("<I", len(header) if length is None else length) + header
    return start + bytes(-len(start) % 16) + payload


def fields(plan: ModelPlan, **changes: Any) -> list[Any]:
    """A right header, with some of its fields changed."""
    right = {
        "magic": "tessera-blocks",
        "version": 1,
        "kind": "fp32",
        "keep": None,
        "zstd": False,
        "plan_hash": bytes.fromhex(plan.hash),
        "masks": MASKS,
    }
    return list((right | changes).values())


# -- version 1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_is_the_golden_file(plan: ModelPlan, kind: str) -> None:
    assert plan.block_sizes[plan.block_ids(plan.choose(GROUPS))].tolist() == SIZES
    assert encoded(plan, KINDS[kind]) == golden(kind)


def test_golden_fp32_is_as_the_format_is_described(plan: ModelPlan) -> None:
    assert golden("fp32") == message(fields(plan), struct.pack("<37f", *VALUES.tolist()))


def test_golden_fp16_is_as_the_format_is_described(plan: ModelPlan) -> None:
    halves, exponents, start = b"", b"", 0
    for size in SIZES:
        block = VALUES[start : start + size].tolist()
        exponent = math.frexp(max(abs(value) for value in block))[1] - 15
        halves += struct.pack(f"<{size}e", *(value * 2.0**-exponent for value in block))
        exponents += struct.pack("b", exponent)
        start += size
    assert golden("fp16") == message(fields(plan, kind="fp16"), halves + exponents)


def test_golden_int8_is_as_the_format_is_described(plan: ModelPlan) -> None:
    head = message(fields(plan, kind="int8"))
    payload = golden("int8").removeprefix(head)
    assert len(payload) == 4 * len(SIZES) + len(VALUES)
    steps = struct.unpack_from(f"<{len(SIZES)}f", payload)
    counts = struct.unpack_from(f"{len(VALUES)}b", payload, 4 * len(SIZES))
    start = 0
    for size, step in zip(SIZES, steps, strict=True):
        block = VALUES[start : start + size]
        assert step == np.float32(np.abs(block).max() / 127)
        for value, count in zip(block.tolist(), counts[start : start + size], strict=True):
            assert abs(count - value / step) < 1
        start += size


def test_golden_top_k_is_as_the_format_is_described(plan: ModelPlan) -> None:
    halves = exponents = places = b""
    start = 0
    for size in SIZES:
        block = VALUES[start : start + size].tolist()
        count = max(1, size // 4)
        chosen = sorted(sorted(range(size), key=lambda i: (-abs(block[i]), i))[:count])
        exponent = math.frexp(max(abs(value) for value in block))[1] - 15
        halves += struct.pack(f"<{count}e", *(block[i] * 2.0**-exponent for i in chosen))
        exponents += struct.pack("b", exponent)
        bitmap = sum(1 << i for i in chosen).to_bytes((size + 7) // 8, "little")
        places += bitmap if len(bitmap) <= count else bytes(chosen)
        start += size
    head = fields(plan, kind="top-k", keep=0.25)
    assert golden("top-k") == message(head, halves + exponents + places)


def test_golden_zstd_decodes(plan: ModelPlan) -> None:
    """Only decoding is pinned: another version of the library may compress otherwise."""
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    groups, blocks = decode_blocks(plan, golden("fp32+zstd"))
    assert groups == plan.all_groups()
    assert blocks.values.tolist() == [1.5] * plan.parameters


# -- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decode_gives_groups_and_blocks_of_the_plan(plan: ModelPlan, kind: str) -> None:
    groups, blocks = decode_blocks(plan, golden(kind))
    assert groups == GROUPS
    blocks.check(plan.block_ids(plan.choose(GROUPS)), plan.block_sizes)
    assert not blocks.values.flags.writeable
    header = decode_header(plan, golden(kind))
    assert (header.encoding, header.groups) == (KINDS[kind], GROUPS)


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_fp32_is_read_where_it_lies(plan: ModelPlan, container: type) -> None:
    data = container(golden("fp32"))
    values = decode_blocks(plan, data)[1].values
    whole = np.frombuffer(data, dtype=np.uint8)
    assert np.shares_memory(values, whole)
    assert values.tobytes() == VALUES.tobytes()
    assert (values.ctypes.data - whole.ctypes.data) % 16 == 0
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_fp32_in_the_middle_of_other_bytes_is_read(plan: ModelPlan) -> None:
    data = memoryview(b"xyz" + golden("fp32") + b"xyz")[3:-3]
    assert decode_blocks(plan, data)[1].values.tobytes() == VALUES.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_size_is_as_announced(plan: ModelPlan, kind: str) -> None:
    assert encoded_size(plan, GROUPS, KINDS[kind]) == len(golden(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_refused_here(plan: ModelPlan, kind: str) -> None:
    values = VALUES.copy()
    values[3] = np.nan
    blocks = Blocks(plan.block_ids(plan.choose(GROUPS)), values)
    data = encode_blocks(plan, GROUPS, blocks, KINDS[kind], np.random.default_rng(7))
    decoded = decode_blocks(plan, data)[1].values
    assert np.isnan(decoded[3])
    assert np.isfinite(decoded[6:]).all()


# -- writing -----------------------------------------------------------------------------------


def test_encode_refuses_blocks_of_another_submodel(plan: ModelPlan) -> None:
    stream = np.random.default_rng(7)
    blocks = Blocks(plan.block_ids(plan.choose(GROUPS)), VALUES)
    with pytest.raises(BlockError, match="missing"):
        encode_blocks(plan, plan.all_groups(), blocks, Encoding(), stream)
    with pytest.raises(GroupError):
        encode_blocks(plan, {"hidden": (9,), "heads": (0,)}, blocks, Encoding(), stream)
    with pytest.raises(GroupError):
        encoded_size(plan, {"hidden": (0,)}, Encoding())


def test_encode_takes_values_that_are_not_in_one_piece(plan: ModelPlan) -> None:
    spread = np.repeat(VALUES, 2)[::2]
    blocks = Blocks(plan.block_ids(plan.choose(GROUPS)), spread)
    for kind, encoding in KINDS.items():
        data = encode_blocks(plan, GROUPS, blocks, encoding, np.random.default_rng(7))
        assert data == golden(kind)


# -- zstd --------------------------------------------------------------------------------------


@pytest.fixture
def wide() -> ModelPlan:
    """Enough values for compression to pay."""
    axis = Axis("hidden", (16, 16, 16, 16))
    return ModelPlan((axis,), (Tensor("w", "float32", (Dim(64, 0), Dim(64, 0))),))


@pytest.mark.parametrize("kind", KINDS)
def test_zstd_is_smaller_and_changes_no_value(wide: ModelPlan, kind: str) -> None:
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    values = np.random.default_rng(8).standard_normal(wide.parameters).astype(np.float32)
    blocks, plain = Blocks(np.arange(wide.block_count), values), KINDS[kind]
    squeezed = Encoding(kind=plain.kind, keep=plain.keep, zstd=True)
    small = encode_blocks(wide, wide.all_groups(), blocks, squeezed, np.random.default_rng(9))
    large = encode_blocks(wide, wide.all_groups(), blocks, plain, np.random.default_rng(9))
    assert len(small) < len(large) == encoded_size(wide, wide.all_groups(), squeezed)
    assert decode_header(wide, small).encoding == squeezed
    decoded = decode_blocks(wide, small)[1].values
    assert decoded.tobytes() == decode_blocks(wide, large)[1].values.tobytes()
    assert not decoded.flags.writeable


def test_zstd_that_saves_nothing_is_left_out(plan: ModelPlan) -> None:
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    bits = np.random.default_rng(10).integers(0, 2**32, size=37, dtype=np.uint32)
    blocks = Blocks(plan.block_ids(plan.choose(GROUPS)), bits.view(np.float32))
    data = encode_blocks(plan, GROUPS, blocks, Encoding(zstd=True), np.random.default_rng(7))
    assert decode_header(plan, data).encoding == Encoding()
    assert len(data) == encoded_size(plan, GROUPS, Encoding(zstd=True))
    assert np.shares_memory(decode_blocks(plan, data)[1].values, np.frombuffer(data, np.uint8))


def test_zstd_frames_that_lie_are_refused(wide: ModelPlan) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    head = ["tessera-blocks", 1, "fp32", None, True, bytes.fromhex(wide.hash), [15]]
    right = bytes(4 * wide.parameters)

    def decode(frame: bytes) -> Blocks:
        return decode_blocks(wide, message(head, frame))[1]

    def compress(data: bytes, **options: Any) -> bytes:
        frame: bytes = zstandard.ZstdCompressor(**options).compress(data)
        return frame

    assert decode(compress(right)).values.tolist() == [0.0] * wide.parameters
    bomb = compress(bytes(2**26))
    assert len(bomb) < 2**13
    for frame in (bomb, compress(right, write_content_size=False), compress(right[:-4])):
        with pytest.raises(BlockError, match=r"announce -?\d+ bytes, not 16384"):
            decode(frame)
    good = compress(right)
    for frame in (b"", right, good[:-1], good + b"\0", good * 2):
        with pytest.raises(BlockError, match="decompressed"):
            decode(frame)


def test_zstd_frame_that_wants_a_large_window_is_refused(wide: ModelPlan) -> None:
    """Written by hand: magic, 4 bytes of content size, a window of 64 MB, part of a raw block."""
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    size = 4 * wide.parameters
    block = (1 | size << 3).to_bytes(3, "little") + bytes(size - 1)
    frame = b"\x28\xb5\x2f\xfd\x80\x80" + struct.pack("<I", size) + block
    head = ["tessera-blocks", 1, "fp32", None, True, bytes.fromhex(wide.hash), [15]]
    with pytest.raises(BlockError, match="too much memory"):
        decode_blocks(wide, message(head, frame))


def test_zstd_where_it_is_missing_says_what_to_install(
    plan: ModelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what Python does for a missing module
    with pytest.raises(EncodingError, match=r"tessera-fl\[zstd\]"):
        encoded(plan, Encoding(zstd=True))
    with pytest.raises(BlockError, match=r"tessera-fl\[zstd\]"):
        decode_blocks(plan, golden("fp32+zstd"))


# -- what is not blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, 255, "1", None])
def test_unknown_version_is_refused(plan: ModelPlan, version: object) -> None:
    with pytest.raises(BlockError, match="version"):
        decode_blocks(plan, message(fields(plan, version=version)))


def test_blocks_of_another_plan_are_refused(plan: ModelPlan) -> None:
    other = ModelPlan((), (Tensor("w", "float32", (Dim(3),)),))
    with pytest.raises(BlockError, match=f"of plan {plan.hash[:12]}…, not {other.hash[:12]}…"):
        decode_blocks(other, golden("fp32"))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "fp8"},
        {"kind": 1},
        {"keep": 0.5},
        {"kind": "top-k", "keep": 0.0},
        {"kind": "top-k", "keep": float("nan")},
        {"kind": "top-k", "keep": "0.1"},
        {"zstd": 0},
        {"zstd": None},
        {"plan_hash": b""},
        {"plan_hash": "0" * 64},
        {"masks": []},
        {"masks": [5]},
        {"masks": [5, 2, 1]},
        {"masks": [5, 0]},
        {"masks": [5, 4]},
        {"masks": [2**63, 2]},
        {"masks": [5, -1]},
        {"masks": [5, True]},
        {"masks": [5.0, 2.0]},
        {"masks": {"hidden": 5}},
        {"masks": None},
        {"more": 1},
    ],
)
def test_header_of_another_structure_is_refused(plan: ModelPlan, change: dict[str, Any]) -> None:
    with pytest.raises(BlockError, match=r"structure|not blocks"):
        decode_blocks(plan, message(fields(plan, **change), VALUES.tobytes()))


@pytest.mark.parametrize("change", [{"keep": 0.1}, {"kind": "top-k", "keep": 1}, {"version": True}])
def test_header_that_could_be_written_otherwise_is_refused(
    plan: ModelPlan, change: dict[str, Any]
) -> None:
    with pytest.raises(BlockError, match="canonical"):
        decode_blocks(plan, message(fields(plan, **change), VALUES.tobytes()))


def test_padding_other_than_zeros_is_refused(plan: ModelPlan) -> None:
    data = bytearray(golden("fp32"))
    end = len(data) - VALUES.nbytes
    assert data[end - 1] == 0
    data[end - 1] = 1
    with pytest.raises(BlockError, match="canonical"):
        decode_blocks(plan, data)


@pytest.mark.parametrize("length", [0, 1, 2**16, 2**32 - 1])
def test_length_of_the_header_is_not_believed(plan: ModelPlan, length: int) -> None:
    with pytest.raises(BlockError):
        decode_blocks(plan, message(fields(plan), VALUES.tobytes(), length=length))


def test_header_far_too_long_is_not_read(plan: ModelPlan) -> None:
    for header in (fields(plan, masks=[1] * 500), [None] * 10**5):
        with pytest.raises(BlockError, match="header's size"):
            decode_blocks(plan, message(header, VALUES.tobytes()))


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_or_longer_payload_is_refused(plan: ModelPlan, kind: str) -> None:
    data = golden(kind)
    for wrong in (*(data[:end] for end in range(len(data))), data + b"\0", data * 2):
        with pytest.raises(BlockError):
            decode_blocks(plan, wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_payload_is_not_allocated_for_before_it_is_there(kind: str) -> None:
    """A plan of 2⁴⁵ parameters: any allocation for its values would fail at once."""
    huge = ModelPlan((), (Tensor("w", "float32", (Dim(2**45),)),))
    keep = 0.25 if kind == "top-k" else None
    head = ["tessera-blocks", 1, kind, keep, False, bytes.fromhex(huge.hash), []]
    with pytest.raises(BlockError, match="16 bytes of values for blocks that need"):
        decode_blocks(huge, message(head, bytes(16)))
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    head[4] = True
    with pytest.raises(BlockError, match="compressed"):
        decode_blocks(huge, message(head, bytes(16)))


# -- the whole model -----------------------------------------------------------------------------


def test_encoded_model_needs_the_models_vector(plan: ModelPlan) -> None:
    with pytest.raises(BlockError, match="not the model's vector"):
        encode_model(plan, VALUES, Encoding(), np.random.default_rng(1))


def test_encoded_model_gives_some_blocks_without_a_header(plan: ModelPlan) -> None:
    theta = np.random.default_rng(2).standard_normal(plan.parameters).astype(np.float32)
    for encoding in KINDS.values():
        model = encode_model(plan, theta, encoding, np.random.default_rng(3))
        for block in range(plan.block_count):
            ids = np.array([block])
            alone = decode_payload(plan, ids, encoding, model.payload(ids)).values
            start, end = plan.block_offsets[block : block + 2]
            assert alone.tobytes() == model.decoded[start:end].tobytes()
        assert not model.decoded.flags.writeable
    assert theta.flags.writeable


def test_compression_noise_is_the_relative_square_of_what_was_lost() -> None:
    rng = np.random.default_rng(4)
    theta, decoded = (rng.standard_normal(200_000).astype(np.float32) for _ in range(2))
    lost = math.fsum((float(a) - float(b)) ** 2 for a, b in zip(decoded, theta, strict=True))
    total = math.fsum(float(a) ** 2 for a in theta)
    assert compression_noise(theta, decoded) == pytest.approx(lost / total, rel=1e-12)
    assert compression_noise(theta, theta) == 0.0
    assert compression_noise(np.zeros(3, np.float32), np.zeros(3, np.float32)) == 0.0
