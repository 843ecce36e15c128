"""Laws of encoded blocks, for any plan, choice of groups and values."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.protocol.encoding.codec import (
    decode_blocks,
    decode_header,
    decode_payload,
    encode_blocks,
    encoded_size,
)
from edge_sdk.protocol.encoding.encoded_model import compression_noise, encode_model
from edge_sdk.protocol.encoding.encoding import Encoding, Kind
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan
from tests.property.strategies import Choice, choices, law, plans, seeds

zstd = pytest.param(
    True,
    id="zstd",
    marks=pytest.mark.skipif(
        find_spec("zstandard") is None, reason="the extra zstd is not installed"
    ),
)
compressed_or_not = pytest.mark.parametrize("zstd", [pytest.param(False, id="plain"), zstd])

shares = st.one_of(st.floats(1e-9, 1), st.sampled_from([0.01, 0.1, 0.25, 0.5, 1.0]))


@st.composite
def encodings(draw: st.DrawFn, zstd: bool) -> Encoding:
    if draw(st.booleans()):
        return Encoding(kind="top-k", keep=draw(shares), zstd=zstd)
    kinds: list[Kind] = ["fp32", "fp16", "int8"]
    return Encoding(kind=draw(st.sampled_from(kinds)), zstd=zstd)


@st.composite
def values_for(draw: st.DrawFn, sizes: Indices) -> Float32:
    """Finite values whose magnitude differs from block to block; some blocks and values are 0."""
    rng = np.random.default_rng(draw(seeds))
    low, high = draw(st.sampled_from([(-20, 4), (-149, 127), (0, 1)]))
    scales = 2.0 ** rng.integers(low, high, size=len(sizes)) * (rng.random(len(sizes)) > 0.1)
    each = rng.uniform(-1, 1, int(sizes.sum())) * 2.0 ** -rng.exponential(5, int(sizes.sum()))
    values = (each * np.repeat(scales, sizes)).astype(np.float32)
    return np.where(rng.random(len(values)) > 0.05, values, np.float32(0))


@st.composite
def cases(draw: st.DrawFn, zstd: bool) -> tuple[ModelPlan, Choice, Blocks, Encoding]:
    plan = draw(plans())
    groups = draw(choices(plan))
    ids = plan.block_ids(plan.choose(groups))
    blocks = Blocks(ids, draw(values_for(plan.block_sizes[ids])))
    return plan, groups, blocks, draw(encodings(zstd))


def check_within_bound(encoding: Encoding, block: Float32, back: Float32) -> None:
    """One block against the bound of its encoding, as the modules' docstrings state it."""
    exact, decoded = block.astype(np.float64), back.astype(np.float64)
    peak = float(np.abs(exact).max())
    fp16 = np.maximum(2.0**-11 * np.abs(exact), 2.0**-39 * peak)
    error = np.abs(decoded - exact)
    match encoding.kind:
        case "fp32":
            assert block.tobytes() == back.tobytes()
        case "fp16":
            assert (error <= fp16).all()
        case "int8":
            assert (error <= max(peak / 127, 2.0**-126) * (1 + 2.0**-15)).all()
        case "top-k":
            count = max(1, int(encoding.keep * len(block) + 1e-9))
            order = sorted(range(len(block)), key=lambda i: (-abs(block[i]), i))
            kept, dropped = order[:count], order[count:]
            assert (error[kept] <= fp16[kept]).all()
            assert not decoded[dropped].any()


@compressed_or_not
@law
@given(data=st.data(), seed=seeds)
def test_encoding_is_within_its_bound_and_size_and_repeats(
    data: st.DataObject, seed: int, zstd: bool
) -> None:
    plan, groups, blocks, encoding = data.draw(cases(zstd))
    message = encode_blocks(plan, groups, blocks, encoding, np.random.default_rng(seed))
    decoded_groups, decoded = decode_blocks(plan, message)
    assert decoded_groups == {axis: tuple(sorted(chosen)) for axis, chosen in groups.items()}
    decoded.check(blocks.ids, plan.block_sizes)
    start = 0
    for size in plan.block_sizes[blocks.ids].tolist():
        span = slice(start, start + size)
        check_within_bound(encoding, blocks.values[span], decoded.values[span])
        start += size
    announced = encoded_size(plan, groups, encoding)
    written = decode_header(plan, message).encoding
    assert (written.kind, written.keep) == (encoding.kind, encoding.keep)
    assert len(message) < announced if written.zstd else len(message) == announced
    again = encode_blocks(plan, groups, blocks, encoding, np.random.default_rng(seed))
    assert message == again


@compressed_or_not
@law
@given(data=st.data(), seed=seeds)
def test_cut_out_of_the_encoded_model_is_the_decoded_model(
    data: st.DataObject, seed: int, zstd: bool
) -> None:
    plan = data.draw(plans())
    theta = data.draw(values_for(plan.block_sizes))
    encoding = data.draw(encodings(zstd))
    model = encode_model(plan, theta, encoding, np.random.default_rng(seed))
    whole = plan.all_groups()
    blocks = Blocks(np.arange(plan.block_count), theta)
    message = encode_blocks(plan, whole, blocks, encoding, np.random.default_rng(seed))
    assert model.cut(whole) == message
    assert model.decoded.tobytes() == decode_blocks(plan, message)[1].values.tobytes()
    groups = data.draw(choices(plan))
    expected = plan.select(model.decoded, groups)
    got_groups, got = decode_blocks(plan, model.cut(groups))
    assert got_groups == {axis: tuple(sorted(chosen)) for axis, chosen in groups.items()}
    assert got.ids.tolist() == expected.ids.tolist()
    assert got.values.tobytes() == expected.values.tobytes()
    plain = Encoding(kind=encoding.kind, keep=encoding.keep)
    payload = model.payload(expected.ids)
    assert decode_payload(plan, expected.ids, plain, payload).values.tobytes() == (
        expected.values.tobytes()
    )
    noise = compression_noise(theta, model.decoded)
    if encoding.kind == "fp32":
        assert noise == 0
    elif encoding.kind == "top-k" and (theta != 0).any():
        assert 0 <= noise < 1
