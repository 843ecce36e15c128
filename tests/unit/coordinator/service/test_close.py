"""A round closes over movements where they lie: views of uploads, and encoded ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from coordinator.aggregate.arrivals import Arrival, Expected, MovementRefused, check_arrival
from coordinator.aggregate.contribution import PackedBlocks
from coordinator.aggregate.memory import RamMemory
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.robust import Robust, RobustName
from coordinator.aggregate.rules import RULES
from coordinator.aggregate.screening import Usual
from coordinator.masks import make_masks
from coordinator.rounds.persistent import PersistentSet
from coordinator.rounds.synchronous import Commit, RoundsConfig, start
from coordinator.service.close import close_round, open_memory, weights_of
from edge_sdk.protocol.encoding.encoding import Encoding, available_encodings
from edge_sdk.protocol.messages.movement import decode_movement, encode_movement
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.streams import stream
from tests.messages import make_movement
from tests.unit.coordinator.service.service_world import (
    LEARNING_RATE,
    PLAN,
    rounds_config,
    saved_model,
)

NAMES = ("a", "b", "c")
ENCODINGS = [
    kind + suffix
    for kind in ("fp32", "fp16", "int8", "top-k:0.5")
    for suffix in (("", "+zstd") if "zstd" in available_encodings() else ("",))
]


def values_of(device: str) -> Float32:
    values = stream(5, device).standard_normal(PLAN.parameters, dtype=np.float32)
    values[::3] = 0  # what zstd can shorten
    return values


def upload_of(device: str, values: Float32, encoding: Encoding, *, shift: int = 0) -> memoryview:
    """A movement as bytes at an address that is odd, or not, by `shift`."""
    movement = make_movement(PLAN, None, values, statistic=1.0, encoding=encoding, device=device)
    return memoryview(bytearray(shift) + encode_movement(movement))[shift:]


def arrival_of(upload: memoryview, encoding: Encoding) -> Arrival:
    groups = {axis: tuple(each) for axis, each in PLAN.all_groups().items()}
    expected = Expected(groups, 1.0, 1)
    movement = decode_movement(upload)
    return check_arrival(PLAN, movement, expected, encoding, LEARNING_RATE, Usual(), 100.0)


def close(
    config: RoundsConfig, arrivals: dict[tuple[str, int], Arrival], scratch: Path | None = None
) -> tuple[bytes, bytes]:
    """The model's bits after a round, and those of the memory's sum."""
    saved = saved_model()
    model = GlobalModel(PLAN, saved.weights, saved.buffers)
    memory = open_memory(config, None)
    state = replace(start(config), devices=PersistentSet(NAMES))
    commit = Commit(1, NAMES[:2], (), (), ((NAMES[2], 1),) if memory is not None else ())
    weights = weights_of(config, state, commit)
    close_round(config, weights, commit, model, memory, arrivals, scratch=scratch)
    total = memory.total.tobytes() if isinstance(memory, RamMemory) else b""
    return model.theta.tobytes(), total


def decoded(arrival: Arrival) -> Arrival:
    blocks = arrival.contribution.blocks
    values = np.array(blocks.values)
    return replace(
        arrival, contribution=replace(arrival.contribution, blocks=Blocks(blocks.ids, values))
    )


@pytest.mark.parametrize("shift", range(4))
def test_plain_movement_is_a_view_of_its_upload(shift: int) -> None:
    given = values_of("a")
    upload = upload_of("a", given, Encoding(), shift=shift)
    values = arrival_of(upload, Encoding()).contribution.blocks.values
    assert np.shares_memory(values, np.frombuffer(upload, np.uint8))
    assert not values.flags.writeable
    assert values.tobytes() == given.tobytes()


@pytest.mark.parametrize("text", [each for each in ENCODINGS if each != "fp32"])
def test_encoded_movement_stays_encoded_and_decodes_alike_each_time(text: str) -> None:
    encoding = Encoding.parse(text)
    blocks = arrival_of(upload_of("a", values_of("a"), encoding), encoding).contribution.blocks
    assert isinstance(blocks, PackedBlocks)
    first, again = blocks.values, blocks.values
    assert first.tobytes() == again.tobytes()
    assert not np.shares_memory(first, again)


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize(
    ("bad", "reason"),
    [(np.nan, "not finite"), (np.inf, "not finite"), (-np.inf, "not finite"), (-2e9, "beyond")],
)
def test_one_bad_value_is_found_wherever_the_upload_lies(
    shift: int, bad: float, reason: str
) -> None:
    values = values_of("a")
    values[-1] = bad
    with pytest.raises(MovementRefused, match=reason):
        arrival_of(upload_of("a", values, Encoding(), shift=shift), Encoding())


@pytest.mark.parametrize("rule", ["ra-fed", "ram-fed", "ccfl-2"])
@pytest.mark.parametrize("text", ENCODINGS)
def test_round_is_the_same_to_the_bit_as_of_decoded_movements(
    rule: str, text: str, tmp_path: Path
) -> None:
    encoding = Encoding.parse(text)
    config = rounds_config(rule=RULES[rule]())
    arrivals = {
        (name, 1): arrival_of(upload_of(name, values_of(name), encoding, shift=shift), encoding)
        for shift, name in enumerate(NAMES)
    }
    plain = {key: decoded(arrival) for key, arrival in arrivals.items()}
    assert close(config, arrivals, tmp_path) == close(config, plain)
    assert list(tmp_path.iterdir()) == []


HONEST = tuple(f"honest-{number}" for number in range(8))


@pytest.mark.parametrize("rule", ["ra-fed", "ram-fed", "ccfl-2", "strategy-2", "fedvarp", "fedavg"])
@pytest.mark.parametrize("name", [name for name in get_args(RobustName) if name != "root"])
def test_device_that_sends_the_largest_number_everywhere_is_held_by_every_choice(
    rule: str, name: RobustName
) -> None:
    """One of nine, in the first round, when nothing is known of anybody."""
    arrivals = {}
    for device in (*HONEST, "evil"):
        values = stream(5, device).standard_normal(PLAN.parameters, dtype=np.float32)
        statistic = 1.0
        if device == "evil":
            values, statistic = np.full_like(values, 9.9e8), 9.9e8
        movement = make_movement(PLAN, None, values, statistic=statistic, device=device)
        expected = Expected(dict(PLAN.all_groups()), 1.0, 1)
        arrivals[device, 1] = check_arrival(
            PLAN, movement, expected, Encoding(), LEARNING_RATE, Usual(), None
        )
    masks = make_masks("random")
    robust = Robust(name=name, norm=float(np.sqrt(PLAN.parameters)))
    config = rounds_config(rule=RULES[rule](), masks=masks, robust=robust)
    saved = saved_model()
    model = GlobalModel(PLAN, saved.weights, saved.buffers)
    before, memory = model.theta.copy(), open_memory(config, None)
    names = tuple(sorted((*HONEST, "evil")))
    state = replace(start(config), devices=PersistentSet(names))
    commit = Commit(1, names, (), (), ())
    close_round(config, weights_of(config, state, commit), commit, model, memory, arrivals)
    moved = float(np.abs(model.theta - before).max())
    if name == "none":
        assert moved > 1e8
    else:
        assert moved < 5
        assert model.buffers["mean"].max() == 1.0
        if memory is not None and len(memory.total):
            assert np.abs(memory.total).max() * LEARNING_RATE < 50


def test_round_says_which_blocks_are_only_clipped(caplog: pytest.LogCaptureFixture) -> None:
    robust = Robust(name="median")
    config = rounds_config(robust=robust)
    arrivals = {}
    for device, group in (("a", 0), ("b", 0), ("c", 1)):
        groups = {"hidden": (group,)}
        movement = make_movement(PLAN, groups, device=device)
        expected = Expected(groups, 0.5, 1)
        arrivals[device, 1] = check_arrival(
            PLAN, movement, expected, Encoding(), LEARNING_RATE, Usual(), None
        )
    with caplog.at_level("INFO", "coordinator.service.close"):
        close(config, arrivals)
        saved = saved_model()
        model = GlobalModel(PLAN, saved.weights, saved.buffers)
        commit = Commit(1, NAMES, (), (), ())
        weights = weights_of(config, start(config), commit)
        close_round(config, weights, commit, model, None, arrivals)
    few, thin = caplog.messages
    assert few == "round 1: 2 movements are too few to compare"
    assert thin.startswith("round 1: 6 of 7 trained blocks came from one or two devices")
