"""Asynchronous runs over a broker: collected movements, early stops and staleness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.aggregate.rules.fed_raa import FedRaa
from coordinator.masks import make_masks
from coordinator.run.folder import read_checkpoint
from coordinator.service.store import SAVE_S
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.round import RoundClosed
from edge_sdk.protocol.packs.index import decode_index, unpack_model
from tests.unit.coordinator.service.service_world import (
    PLAN,
    TOPICS,
    ScriptedDevice,
    World,
    Worlds,
    fragments_config,
)

FEDBUFF = {
    "rule": FedBuff(size=3),
    "masks": make_masks("random"),
    "updates": 5,
    "min_devices": 2,
    "train_deadline_s": 1e6,
}


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    made = Worlds(tmp_path)
    yield made
    made.stop()


def two_devices(world: World) -> tuple[ScriptedDevice, ScriptedDevice]:
    """Two that send when they are told to; all their movements differ in size and sign."""
    found = world.add("one", sends=False, value=0.01), world.add("two", sends=False, value=-0.03)
    world.settle()
    return found


def send_newest(device: ScriptedDevice) -> int:
    round = max(device.movements)
    device.send(round)
    return round


def test_fedbuff_moves_the_model_once_it_has_collected_enough(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(**FEDBUFF))
    one, two = two_devices(world)
    model = world.service.model
    start, versions, waiting = model.theta.copy(), [], []
    for device in (one, two, one, one, two):
        send_newest(device)
        versions.append(model.version)
        waiting.append(None if model.pending is None else model.pending.number)
    assert versions == [0, 0, 1, 1, 2]
    assert waiting == [1, 2, None, 1, None]
    # Of the last two, the second was made before the model changed: it is one change old.
    first = (0.01 - 0.03 + 0.01) / 3
    last = (0.01 + 2**-0.5 * -0.03) / 2
    assert np.abs(model.theta - (start + first + last)).max() < 1e-6
    assert world.service.finished
    assert isinstance(world.retained(TOPICS.round), RoundClosed)
    assert [line["round"] for line in world.history] == [2, 4, 5]


def finish(world: World, devices: tuple[ScriptedDevice, ...], turns: str) -> GlobalModel:
    for turn in turns:
        send_newest(devices[int(turn)])
    assert world.service.finished
    return world.service.model


def test_movement_that_fedbuff_collected_survives_a_crash_to_the_same_bits(worlds: Worlds) -> None:
    calm = worlds.make(fragments_config(**FEDBUFF), "calm")
    expected = finish(calm, two_devices(calm), "01010")
    world = worlds.make(fragments_config(**FEDBUFF), "crashed")
    devices = two_devices(world)
    round = send_newest(devices[0])
    assert devices[0].receipts == []  # no checkpoint has it
    world.wait(SAVE_S)
    assert devices[0].receipts == [(round, "counted")]
    world.restart()
    assert world.service.model.pending is not None
    assert world.service.model.pending.number == 1
    send_newest(devices[1])
    world.restart()
    finish(world, devices, "010")
    assert world.service.model.digest == expected.digest
    assert world.service.model.version == expected.version


def test_movement_without_a_receipt_is_in_no_sum_after_a_crash(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(**FEDBUFF))
    devices = two_devices(world)
    send_newest(devices[0])
    world.restart()
    assert world.service.model.pending is None
    assert [device.receipts for device in devices] == [[], []]


def test_collected_movements_are_left_out_by_another_rule(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(fragments_config(**FEDBUFF))
    devices = two_devices(world)
    send_newest(devices[0])
    world.stop()
    world.machine = fragments_config(updates=5, train_deadline_s=1e6)
    world.start()
    assert world.service.model.pending is None
    assert "1 movement that was collected for fedbuff is left out" in caplog.text


def test_checkpoint_has_the_sums_that_were_collected(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(**FEDBUFF))
    devices = two_devices(world)
    for device in devices:
        send_newest(device)
    had = world.service.model.pending
    world.stop()
    read = read_checkpoint(world.folder / "checkpoints" / "00000002.safetensors", PLAN).pending
    assert had is not None
    assert read is not None
    assert np.array_equal(read.total, had.total)
    assert np.array_equal(read.held, had.held)
    assert (read.number, read.whole, read.trust) == (had.number, had.whole, had.trust) == (2, 2, 2)
    assert {name: array.tolist() for name, array in read.statistics.items()} == {
        name: array.tolist() for name, array in had.statistics.items()
    }


def scored(levels: LevelScores, accuracy: float) -> LevelScores:
    return replace(levels, levels=(replace(levels.levels[0], accuracy=accuracy),))


def test_accuracy_stops_an_asynchronous_run_for_good(worlds: Worlds) -> None:
    said = iter([0.2, 0.6, 0.9])
    config = fragments_config(updates=50, target_accuracy=0.85)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, next(said)))
    one, two = world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    assert [(line["round"], line["accuracy"]) for line in world.history] == [
        (2, 0.2), (4, 0.6), (6, 0.9),
    ]  # fmt: skip
    assert isinstance(world.retained(TOPICS.round), RoundClosed)
    counted = [outcome for each in (one, two) for _, outcome in each.receipts]
    assert counted.count("counted") == 6
    world.restart()
    assert world.service.finished
    assert len(world.history) == 3


def test_patience_of_an_asynchronous_run_outlasts_a_restart(worlds: Worlds) -> None:
    said = iter([0.5, 0.4, 0.4, 0.9])
    config = fragments_config(updates=50, patience=2, train_deadline_s=1e6)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, next(said)))
    devices = two_devices(world)
    for device in (*devices, *devices):
        send_newest(device)
    assert len(world.history) == 2
    world.restart()
    for device in devices:
        send_newest(device)
    assert world.service.finished
    assert [line["accuracy"] for line in world.history] == [0.5, 0.4, 0.4]


def test_reports_say_how_stale_movements_were(worlds: Worlds) -> None:
    config = fragments_config(rule=FedRaa(), updates=20, train_deadline_s=1e6)
    world = worlds.make(config)
    quick, slow = two_devices(world)
    for _ in range(3):
        send_newest(quick)
    send_newest(slow)  # made from the first version
    first, second = world.history
    assert (first["staleness_mean"], first["staleness_max"]) == (0.0, 0)
    assert (second["staleness_mean"], second["staleness_max"]) == (1.5, 3)
    ages = {each["device"]: each["staleness"] for each in second["devices"]}
    assert ages == {"one": 0, "two": 3}


def test_published_models_are_versions_of_the_model_after_restarts_too(worlds: Worlds) -> None:
    world = worlds.make(
        fragments_config(
            rule=FedBuff(size=2, fragments=True, staleness="constant"),
            masks=make_masks("gre-raa"),
            updates=40,
            min_devices=3,
            train_deadline_s=1e6,
        )
    )
    sent = {"one": 0.01, "two": -0.03, "three": 0.02}
    devices = [world.add(name, sends=False, value=value) for name, value in sent.items()]
    world.settle()
    versions = [world.service.model.theta.copy()]
    published = set()
    for turn in range(12):
        if turn in (3, 5, 9):  # with one movement collected
            world.wait(SAVE_S)
            world.restart()
            world.settle()
        device = devices[turn % 3]
        send_newest(device)
        world.settle()
        versions.append(world.service.model.theta.copy())
        blob = device.opened[max(device.opened)].model
        assert blob is not None
        index = decode_index(PLAN, b"".join(world.chunks[each] for each in blob.chunks))
        blocks, _ = unpack_model(PLAN, index, PLAN.full_groups(), world.chunks)
        assert any(np.array_equal(blocks.values, theta) for theta in versions)
        published.add(blocks.values.tobytes())
    assert len(published) > 3
