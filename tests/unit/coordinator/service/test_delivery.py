"""Models for inference, as the coordinator announces and keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.rules.fed_raa import FedAsync
from coordinator.cli import main
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.run.folder import read_result
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.chunks import join_blob
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.delivery import Choice, ModelNotice
from edge_sdk.protocol.messages.epoch import Epoch
from edge_sdk.protocol.messages.wire import ControlMessage, encode_message
from edge_sdk.protocol.packs.index import decode_index, needed_chunks, unpack_model
from edge_sdk.protocol.plan.layout import Array
from tests.unit.coordinator.service.service_world import (
    PLAN,
    TOPICS,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)
from tests.unit.coordinator.service.test_service import scored


def announced(world: World, choice: Choice) -> ModelNotice | None:
    found = world.retained(TOPICS.model(choice))
    assert found is None or isinstance(found, ModelNotice)
    return found


def weights_of(world: World, notice: ModelNotice | None, number: int = 0) -> dict[str, Array]:
    """The weights of a level, out of the chunks that the broker holds."""
    assert notice is not None
    index = decode_index(PLAN, join_blob(notice.model, world.chunks))
    groups = notice.groups[number]
    assert set(needed_chunks(PLAN, index, groups)) <= world.chunks.keys()
    blocks, _ = unpack_model(PLAN, index, groups, world.chunks)
    return dict(PLAN.assemble(blocks, groups))


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


def started(worlds: Worlds, *accuracies: float, folder: str = "run") -> World:
    said = iter(accuracies)
    config = rounds_config(rounds=len(accuracies))
    evaluate = lambda _, levels: scored(levels, next(said), 0.1)  # noqa: E731
    return worlds.make(config, folder, evaluate=evaluate)


def test_newest_and_best_model_are_there_and_stay_after_a_restart(
    worlds: Worlds,
) -> None:
    world = started(worlds, 0.2, 0.6, 0.4, 0.5)
    assert announced(world, "latest") is None  # nobody trained it yet
    world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    for _ in range(2):
        latest, best = announced(world, "latest"), announced(world, "best")
        assert latest is not None
        assert best is not None
        assert (latest.round, best.round) == (4, 2)
        assert latest.levels[0] == 1.0
        assert latest.accuracies[:2] == (0.5, 0.1)
        assert best.accuracies[0] == 0.6
        assert latest.run == world.run.about.run
        assert latest.statistics is None
        for notice, round in ((latest, 4), (best, 2)):
            wanted = read_result(world.folder, round).weights
            assert same(weights_of(world, notice), dict(wanted))
            narrow = PLAN.cut(wanted, notice.groups[1])
            assert same(weights_of(world, notice, 1), narrow)
        # The newest model, the one before it and the best: of older ones nothing is left.
        assert not same(weights_of(world, best), weights_of(world, latest))
        world.restart()


def test_best_is_not_replaced_by_an_equal_one(worlds: Worlds) -> None:
    world = started(worlds, 0.6, 0.6)
    world.add("one"), world.add("two")
    world.settle()
    best = announced(world, "best")
    assert best is not None
    assert best.round == 1
    assert read_result(world.folder, "best").origin is not None


def test_run_without_accuracies_has_no_best(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    world.add("one"), world.add("two")
    world.settle()
    latest = announced(world, "latest")
    assert latest is not None
    assert (latest.round, latest.accuracies[0]) == (2, None)
    assert announced(world, "best") is None


def test_broker_that_lost_everything_gets_the_notices_again(worlds: Worlds) -> None:
    world = started(worlds, 0.5, 0.4)
    world.add("one"), world.add("two")
    world.settle()
    before = announced(world, "latest"), announced(world, "best")
    world.broker.stop()
    world.broker.start(keep_retained=False)
    assert announced(world, "latest") is None
    world.settle()
    assert (announced(world, "latest"), announced(world, "best")) == before
    weights_of(world, before[1])


WHOLE: dict[str, Any] = {"rule": FedAsync(), "masks": make_masks("random")}
"""Every update trains all blocks, so that there is a model to deliver from the first one on."""


def test_model_is_delivered_once_fragments_have_trained_all_of_it(worlds: Worlds) -> None:
    groups = len(PLAN.axes[0].groups)
    config = fragments_config(updates=50, min_devices=1, train_deadline_s=1e6)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, 0.5))
    device = world.add("one", sends=False)
    world.settle()
    delivered = []
    for _ in range(groups):
        assert world.service.course.state.fleet.times_covered.min() == 0
        device.send(max(device.opened))
        world.settle()
        delivered.append(announced(world, "latest") is not None)
    assert delivered == [False] * (groups - 1) + [True]


@pytest.mark.parametrize("updates", [6])
def test_asynchronous_run_announces_its_last_model(worlds: Worlds, updates: int) -> None:
    counted: list[int] = []

    def evaluate(model: object, levels: LevelScores) -> LevelScores:
        counted.append(1)
        return scored(levels, 0.9 if len(counted) == 2 else 0.3)

    config: FragmentsConfig = fragments_config(updates=updates)
    world = worlds.make(config, evaluate=evaluate)
    world.add("one"), world.add("two")
    world.settle()
    for _ in range(30):
        if world.service.finished:
            break
        world.wait(5.0)
    assert world.service.finished
    for _ in range(2):
        latest = announced(world, "latest")
        assert latest is not None
        assert latest.round == updates
        assert same(weights_of(world, latest), dict(read_result(world.folder).weights))
        world.restart()


def test_best_model_that_was_not_published_is_announced_at_the_end(worlds: Worlds) -> None:
    said = iter([0.9, 0.4, 0.3])
    config = fragments_config(updates=6, train_deadline_s=1e6, **WHOLE)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, next(said)))
    world.crash()
    world.clock.slow_s = 1.0
    world.start()  # publishing the first version takes long, so others are not published for long
    world.clock.slow_s = 0.0
    world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    latest, best = announced(world, "latest"), announced(world, "best")
    assert latest is not None
    assert best is not None
    assert (latest.round, best.round, best.accuracies[0]) == (6, 2, 0.9)
    assert same(weights_of(world, best), dict(read_result(world.folder, 2).weights))


def test_restart_of_an_asynchronous_run_announces_no_older_model_as_the_latest(
    worlds: Worlds,
) -> None:
    said = iter([0.9, 0.3])
    config = fragments_config(updates=100, train_deadline_s=1e6, **WHOLE)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, next(said)))
    devices = [world.add(name, sends=False) for name in ("one", "two")]
    world.settle()

    def send(*which: int) -> None:
        for number in which:
            devices[number].send(max(devices[number].opened))
            world.settle()

    def rounds() -> list[tuple[int, float | None]]:
        notices = announced(world, "latest"), announced(world, "best")
        return [(each.round, each.accuracies[0]) for each in notices if each is not None]

    send(0, 1)
    assert rounds() == [(2, 0.9), (2, 0.9)]
    world.restart()
    assert rounds() == [(2, 0.9), (2, 0.9)]
    send(0, 1, 0)
    world.wait(10.0)  # the fifth update is in a checkpoint, but was not evaluated
    world.restart()
    assert rounds() == [(5, None), (2, 0.9)]
    for choice, round in (("latest", 5), ("best", 2)):
        wanted = dict(read_result(world.folder, round).weights)
        assert same(weights_of(world, announced(world, choice)), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", [2, 0])
def test_levels_that_a_message_has_no_room_for_are_not_announced(
    worlds: Worlds,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    levels: int,
) -> None:
    def encode(message: ControlMessage, epoch: Epoch | None = None) -> bytes:
        data = encode_message(message, epoch)
        if isinstance(message, ModelNotice) and len(message.levels) > levels:
            raise MessageError("too large")
        return data

    for module in ("outlet", "sending"):
        monkeypatch.setattr(f"coordinator.service.outgoing.{module}.encode_message", encode)
    world = worlds.make(rounds_config(rounds=2))
    world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    assert caplog.text.count("do not fit into one message") == 1
    world.restart()
    latest = announced(world, "latest")
    assert (latest.levels if latest else ()) == (1.0, 0.75)[:levels]


def test_levels_with_weights_that_nobody_trained_are_not_announced(worlds: Worlds) -> None:
    """Devices train half of the model, always the same; the narrower levels lie within it."""
    config = rounds_config(rounds=2, masks=make_masks("nested"))
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, 0.9, 0.9, 0.9, 0.9))
    for name in ("one", "two"):
        world.add(name, level=lambda _: 0.5)
    world.settle()
    assert world.service.finished
    for _ in range(2):
        latest = announced(world, "latest")
        assert latest is not None
        assert latest.levels == (0.5, 0.25)
        export = ["export", str(world.folder), "--format", "onnx", "--force", "--out"]
        export.append(str(world.folder.parent / "model.onnx"))
        assert main([*export, "--level", "1"]) == 2
        assert main([*export, "--level", "0.5"]) == 0
        world.restart()
