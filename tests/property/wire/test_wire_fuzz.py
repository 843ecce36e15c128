"""Whatever bytes arrive, decoders return a message that is written alike, or `MessageError`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.chunks import HASH_BYTES, Blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.local_rule import LocalRule, Widths
from edge_sdk.protocol.messages.movement import decode_movement, encode_movement
from edge_sdk.protocol.messages.round import (
    MAX_SAMPLES,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import (
    MAX_SURVEY_SAMPLES,
    WANTS,
    Survey,
    SurveyFinding,
    decode_statistics,
    encode_statistics,
)
from edge_sdk.protocol.messages.transfer import (
    Credit,
    Evaluation,
    Offer,
    Presence,
    TaskNotice,
    Want,
)
from edge_sdk.protocol.messages.wire import ControlMessage, decode_message, encode_message
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from edge_sdk.train.statistics import read_moments
from edge_sdk.transport.uploads import Uploads
from tests.property.plan.test_plan_codec_fuzz import damaged, structures

DATA = Path(__file__).parents[2] / "unit" / "edge_sdk" / "protocol" / "golden"
GOLDEN = {path.name: path.read_bytes() for path in sorted(DATA.glob("message_*_v1.bin"))}
MOVEMENT = (DATA / "movement_v1.bin").read_bytes()

law = settings(max_examples=60)

# -- messages of any content ---------------------------------------------------------------------

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)
hexes = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")
runs = st.one_of(st.just(""), hexes)
rounds = st.integers(1, 2**53)
counts = st.integers(0, 2**53)
positive = st.floats(0, exclude_min=True, allow_infinity=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
levels = st.floats(0, 1, exclude_min=True)
hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
sha256s = st.binary(min_size=32, max_size=32)
reasons = st.text(st.characters(codec="utf-8"), min_size=1, max_size=500)
chunk_sizes = st.integers(2**10, 2**20)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    chunks = tuple(draw(st.lists(hashes, max_size=4)))
    return Blob(draw(st.integers(len(chunks), 2**40)) if chunks else 0, chunks)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    ends = sorted(draw(st.sets(st.integers(0, 2**53), min_size=2, max_size=20)))
    return tuple((ends[n], ends[n + 1]) for n in range(0, len(ends) - 1, 2))


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    round = draw(st.integers(1, 2**40))
    return Offer(
        device=draw(names),
        run=draw(hexes),
        upload=draw(hashes),
        round=round,
        answers=draw(st.one_of(st.none(), st.integers(round + 1, 2**53))),
        size=draw(st.integers(1, 2**40)),
        chunk_bytes=draw(chunk_sizes),
        sha256=draw(sha256s),
    )


rules = st.builds(
    LocalRule,
    learning_rate=positive,
    momentum=st.floats(0, 1, exclude_max=True),
    weight_decay=positive,
    clip_norm=st.one_of(st.none(), positive),
    rescale=positive,
    widths=st.sampled_from(get_args(Widths)),
)
encodings = st.one_of(
    st.builds(Encoding, kind=st.sampled_from(["fp32", "fp16", "int8"]), zstd=st.booleans()),
    st.builds(Encoding, kind=st.just("top-k"), keep=levels, zstd=st.booleans()),
)
groups = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.lists(st.integers(0, 63), min_size=1, max_size=64, unique=True).map(tuple),
    max_size=5,
)
floats = st.lists(st.floats(width=32), max_size=4).map(
    lambda values: np.array(values, "<f4").tobytes()
)
messages: st.SearchStrategy[ControlMessage] = st.one_of(
    st.builds(
        TaskNotice,
        task=names,
        run=hexes,
        plan=blobs(),
        manifest=blobs(),
        graphs=st.dictionaries(sha256s.map(bytes.hex), blobs(), max_size=3),
        chunk_bytes=chunk_sizes,
    ),
    st.builds(
        RoundOpen,
        round=rounds,
        plan_hash=sha256s.map(bytes.hex),
        local_rule=rules,
        steps=rounds,
        batch_size=rounds,
        bid_s=positive,
        train_deadline_s=positive,
        whole=st.booleans(),
        warmup=st.booleans(),
        replay_within=counts,
        up=encodings,
        run=runs,
        model=st.one_of(st.none(), blobs()),
        levels=st.lists(levels, max_size=5, unique=True).map(
            lambda found: tuple(sorted(found, reverse=True))
        ),
    ),
    st.builds(
        Bid,
        device=names,
        round=counts,
        level=levels,
        reason=reasons,
        samples=st.integers(0, MAX_SAMPLES),
        compute=st.one_of(st.none(), positive),
        run=runs,
    ),
    st.builds(
        Assignment,
        device=names,
        round=counts,
        groups=groups,
        run=runs,
        widths=st.lists(groups, max_size=3).map(tuple),
    ),
    st.builds(
        Receipt, device=names, round=counts, outcome=st.sampled_from(Outcome), reason=reasons
    ),
    st.builds(Presence, name=names, session=counts, online=st.booleans()),
    offers(),
    st.builds(Credit, device=names, upload=hashes, missing=ranges(), window=st.integers(0, 1024)),
    st.builds(
        Condition,
        device=names,
        battery=st.one_of(st.none(), st.floats(0, 1)),
        charging=st.one_of(st.none(), st.booleans()),
        temperature_c=st.one_of(st.none(), st.floats(-100, 300)),
        memory_free_mb=st.one_of(st.none(), st.floats(0, 2**30)),
        memory_mb=st.one_of(st.none(), st.floats(0, 2**30)),
        energy_today_j=st.one_of(st.none(), st.floats(0, 1e9)),
        energy_budget_j=st.one_of(st.none(), st.floats(0, 1e9)),
        labels=st.dictionaries(
            names.filter(lambda name: not name.endswith("-bulk")),
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=64).filter(str.isprintable),
            max_size=4,
        ),
        profile=st.one_of(st.none(), names),
        version=st.one_of(
            st.none(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
        ),
        last_error=st.one_of(st.none(), reasons),
    ),
    st.builds(Want, device=names, chunks=st.lists(hashes, min_size=1, max_size=64).map(tuple)),
    st.builds(
        Evaluation,
        device=names,
        run=hexes,
        round=rounds,
        samples=st.integers(1, 2**40),
        loss=st.floats(-1e9, 1e9),
        accuracy=st.one_of(st.none(), st.floats(0, 1)),
    ),
    st.builds(
        lambda known, **fields: Survey(
            levels=tuple(sorted(known, reverse=True)), groups=tuple(known.values()), **fields
        ),
        known=st.dictionaries(levels, groups, min_size=1, max_size=3),
        round=rounds,
        plan_hash=sha256s.map(bytes.hex),
        wants=st.sampled_from(WANTS),
        rescale=positive,
        samples=st.integers(1, MAX_SURVEY_SAMPLES),
        batch_size=rounds,
        wait_s=positive,
        devices=st.lists(names.filter(lambda name: not name.endswith("-bulk")), max_size=3).map(
            tuple
        ),
        run=runs,
        model=st.one_of(st.none(), blobs()),
        statistics=st.one_of(st.none(), blobs()),
    ),
    st.builds(
        SurveyFinding,
        device=names,
        round=rounds,
        wants=st.sampled_from(WANTS),
        level=levels,
        samples=st.integers(1, MAX_SAMPLES),
        run=runs,
        reason=reasons,
        means=st.dictionaries(st.text(max_size=8), floats, max_size=3),
        m2s=st.dictionaries(st.text(max_size=8), floats, max_size=3),
        accuracy=st.one_of(st.none(), st.floats(0, 1)),
    ),
)


@settings(law, max_examples=400)
@given(message=messages)
def test_message_that_is_read_is_the_one_that_was_written(message: ControlMessage) -> None:
    assert decode_message(encode_message(message)) == message


@law
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_movement_that_is_read_is_the_one_that_was_written(data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtypes = st.sampled_from(["float32", "float64", "int64", "bool", "uint8", "float16"])
    statistics = {}
    for number in range(data.draw(st.integers(0, 4))):
        shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
        dtype = np.dtype(data.draw(dtypes))
        bits = rng.integers(0, 2 if dtype.kind == "b" else 256, size=(*shape, dtype.itemsize))
        statistics[f"s{number}"] = bits.astype(np.uint8).view(dtype).reshape(shape)
    movement = Movement(
        device=data.draw(names),
        round=data.draw(rounds),
        plan_hash=data.draw(sha256s).hex(),
        payload=data.draw(st.binary(max_size=100)),
        statistics=statistics,
        learning_rate=data.draw(positive),
        level=data.draw(levels),
        samples=data.draw(st.integers(0, MAX_SAMPLES)),
        loss=data.draw(finite),
        train_s=data.draw(positive),
        keeps_copy=data.draw(st.booleans()),
    )
    written = encode_movement(movement)
    read = decode_movement(written)
    assert encode_movement(read) == written
    assert read.payload == movement.payload
    assert list(read.statistics) == list(statistics)
    for name, array in statistics.items():
        assert read.statistics[name].tobytes() == array.tobytes()


# -- foreign bytes -------------------------------------------------------------------------------


def accept_or_refuse(data: bytes) -> None:
    """What is accepted can be written, and is then read as the same."""
    with suppress(MessageError):
        message = decode_message(data)
        assert decode_message(encode_message(message)) == message


def accept_or_refuse_movement(data: bytes) -> None:
    with suppress(MessageError):
        written = encode_movement(decode_movement(data))
        assert encode_movement(decode_movement(written)) == written


@settings(law, max_examples=200)
@given(data=st.binary(max_size=200))
def test_decoders_refuse_random_bytes(data: bytes) -> None:
    for attempt in (data, len(data).to_bytes(4, "little") + data):
        with pytest.raises(MessageError):
            decode_message(attempt)
        with pytest.raises(MessageError):
            decode_movement(attempt)


@pytest.mark.parametrize("name", GOLDEN)
@law
@given(data=st.data())
def test_decoder_checks_damaged_messages(name: str, data: st.DataObject) -> None:
    accept_or_refuse(data.draw(damaged(GOLDEN[name])))


@settings(law, max_examples=300)
@given(data=damaged(MOVEMENT))
def test_decoder_checks_damaged_movements(data: bytes) -> None:
    accept_or_refuse_movement(data)


def swaps(tree: Any, branch: Any) -> list[Any]:
    """All trees made from `tree` by putting `branch` in the place of one node."""
    made = [branch]
    if isinstance(tree, dict):
        made += [tree | {key: new} for key, node in tree.items() for new in swaps(node, branch)]
    elif isinstance(tree, list):
        made += [
            [*tree[:at], new, *tree[at + 1 :]]
            for at, node in enumerate(tree)
            for new in swaps(node, branch)
        ]
    return made


def check_swaps(
    golden: bytes, branch: Any, check: Callable[[bytes], None], wrap: Callable[[bytes], bytes]
) -> None:
    for tree in swaps(msgpack.unpackb(golden), branch):
        check(wrap(msgpack.packb(tree)))


@pytest.mark.parametrize("name", GOLDEN)
@law
@given(branch=structures)
def test_decoder_checks_every_node_of_a_message(name: str, branch: Any) -> None:
    check_swaps(GOLDEN[name], branch, accept_or_refuse, bytes)


def deep_swaps(golden: bytes, opening: bytes) -> list[bytes]:
    """Messages with deeply nested values in the place of one node; Python cannot even show them."""
    deep = opening * 1000 + b"\xc0"
    trees = swaps(msgpack.unpackb(golden), "here")
    return [msgpack.packb(tree).replace(msgpack.packb("here"), deep) for tree in trees]


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
@pytest.mark.parametrize("name", GOLDEN)
def test_decoder_checks_deep_nesting_at_every_node(name: str, opening: bytes) -> None:
    for data in deep_swaps(GOLDEN[name], opening):
        accept_or_refuse(data)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
def test_decoder_checks_deep_nesting_in_movements_and_statistics(opening: bytes) -> None:
    length = int.from_bytes(MOVEMENT[:4], "little")
    header, tail = MOVEMENT[4 : 4 + length], MOVEMENT[4 + length :]
    for data in deep_swaps(header, opening):
        accept_or_refuse_movement(len(data).to_bytes(4, "little") + data + tail)
    for data in deep_swaps(STATISTICS, opening):
        with suppress(MessageError):
            decode_statistics(NORM, LEVEL_GROUPS, data)


@law
@given(branch=structures)
def test_decoder_checks_every_node_of_a_movement(branch: Any) -> None:
    length = int.from_bytes(MOVEMENT[:4], "little")
    header, tail = MOVEMENT[4 : 4 + length], MOVEMENT[4 + length :]
    check_swaps(
        header,
        branch,
        accept_or_refuse_movement,
        lambda data: len(data).to_bytes(4, "little") + data + tail,
    )


@law
@given(
    offered=offers(),
    numbers=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    pieces=st.lists(st.binary(max_size=60), max_size=5),
)
def test_uploads_refuse_foreign_chunks(
    offered: Offer, numbers: list[int], pieces: list[bytes]
) -> None:
    """No bytes on a device's chunk topic raise anything else, or complete what is not right."""
    uploads = Uploads(allocate=lambda size: bytearray(min(size, 2**16)))
    uploads.offered(offered.device, offered, 0.0)
    heads = [offered.upload + number.to_bytes(4, "little") for number in numbers]
    for payload in [*pieces, *(head + piece for head in heads for piece in pieces)]:
        with suppress(MessageError):
            assert uploads.received(offered.device, payload, 0.0).upload is None


# -- statistics ----------------------------------------------------------------------------------

NORM = ModelPlan(
    axes=(Axis("a", (1, 1)),),
    tensors=(Tensor("w", "float32", (Dim(2, 0),)),),
    buffers=tuple(
        Buffer(f"n.{name}", "float32", (Dim(2, 0),), statistic=True)
        for name in ("running_mean", "running_var")
    ),
)
LEVEL_GROUPS: dict[float, dict[str, tuple[int, ...]]] = {1.0: {"a": (0, 1)}, 0.5: {"a": (1,)}}
STATISTICS = encode_statistics(
    {1.0: {"n.running_mean": np.zeros(2)}, 0.5: {"n.running_var": np.ones(1)}}
)


@settings(law, max_examples=200)
@given(
    means=st.dictionaries(st.sampled_from(["n.running_mean", "n.running_var", "x"]), floats),
    m2s=st.dictionaries(st.sampled_from(["n.running_mean", "n.running_var", "x"]), floats),
    samples=st.integers(1, 9),
    level=st.sampled_from(list(LEVEL_GROUPS)),
)
def test_moments_that_are_read_are_sound(
    means: dict[str, bytes], m2s: dict[str, bytes], samples: int, level: float
) -> None:
    finding = SurveyFinding(
        device="d", round=1, wants="statistics", level=level, samples=samples, means=means, m2s=m2s
    )
    with suppress(MessageError):
        moments = read_moments(NORM, LEVEL_GROUPS[level], finding)
        assert (moments.count, list(moments.means)) == (samples, ["n.running_mean"])
        (mean,), (m2,) = moments.means.values(), moments.m2s.values()
        assert mean.shape == m2.shape == (2 * level,)
        assert np.isfinite([*mean, *m2]).all()
        assert (m2 >= 0).all()


@settings(law, max_examples=200)
@given(data=damaged(STATISTICS))
def test_decoder_checks_damaged_statistics(data: bytes) -> None:
    with suppress(MessageError):
        found = decode_statistics(NORM, LEVEL_GROUPS, data)
        assert (
            decode_statistics(NORM, LEVEL_GROUPS, encode_statistics(found)).keys() == found.keys()
        )
        for arrays in found.values():
            assert all(np.isfinite(array).all() for array in arrays.values())


@law
@given(branch=structures)
def test_decoder_checks_every_node_of_statistics(branch: Any) -> None:
    def check(data: bytes) -> None:
        with suppress(MessageError):
            decode_statistics(NORM, LEVEL_GROUPS, data)

    check_swaps(STATISTICS, branch, check, bytes)
