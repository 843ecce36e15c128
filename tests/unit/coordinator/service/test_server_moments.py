"""A served run with a server optimiser: its moments are those of the checkpoint, to the bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.memory import DiskMemory
from coordinator.aggregate.optimizer import OptimizerName, RamMoments, ServerOptimizer
from coordinator.aggregate.rules import RULES
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import CHECKPOINTS, Run, RunError
from coordinator.run.moments import DiskMoments
from tests.unit.coordinator.service.service_world import PLAN, World, rounds_config

ADAM = ServerOptimizer(name="adam", tau=0.01)


class Crash(Exception):
    """The process ends here."""


def config_of(rule: str = "ra-fed", optimizer: ServerOptimizer = ADAM, **more: Any) -> RoundsConfig:
    masks = make_masks("static")
    return rounds_config(rule=RULES[rule](), masks=masks, server_optimizer=optimizer, **more)


def begin(folder: Path, config: RoundsConfig) -> World:
    """A run in which the first device trains everything only in the first of three rounds."""
    world = World(folder, config)
    world.add("a", value=0.25, level=lambda number: 1.0 if number % 3 == 1 else 0.5)
    world.add("b", value=-0.5, level=lambda _: 0.5)
    return world


def finish(world: World) -> str:
    for _ in range(20):
        world.settle()
        if world.service.finished:
            break
        world.wait(101)
    world.stop()
    return world.service.model.digest


@pytest.mark.parametrize(
    ("rule", "name", "where"),
    [
        ("ram-fed", "adam", "moments"),
        ("ram-fed", "adam", "save"),
        ("ram-fed", "adam", "memory"),
        ("ra-fed", "yogi", "prune"),
        ("ra-fed", "momentum", "save"),
    ],
)
def test_crash_inside_a_commit_ends_with_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, name: OptimizerName, where: str
) -> None:
    config = config_of(rule, ServerOptimizer(name=name), rounds=3)
    expected = finish(begin(tmp_path / "calm", config))
    owner: Any = {"moments": DiskMoments, "memory": DiskMemory}.get(where, Run)
    method = {"moments": "_open", "memory": "commit"}.get(where, where)
    works, calls = getattr(owner, method), []

    def crashes(*arguments: Any, **options: Any) -> Any:
        calls.append(where)
        if len(calls) == 2:
            raise Crash
        return works(*arguments, **options)

    world = begin(tmp_path / "run", config)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, crashes)
        with pytest.raises(RunError, match="round 2 could not be committed"):
            world.settle()
    world.crash()
    world.start()
    assert finish(world) == expected


def test_moments_lie_beside_their_checkpoints_and_go_with_them(tmp_path: Path) -> None:
    world = begin(tmp_path, config_of(rounds=8))
    finish(world)
    folder = tmp_path / CHECKPOINTS
    rounds = {path.stem for path in folder.glob("*.moments")}
    assert rounds == {f"{round:08}" for round in range(4, 9)}
    assert {path.stem for path in folder.glob("*.safetensors")} == rounds | {"00000000"}
    (folder / "00000009.moments").write_bytes(b"of a round that was never committed")
    with Run(tmp_path) as run:
        run.rollback(6)
    assert {path.stem for path in folder.glob("*.moments")} == {"00000004", "00000005", "00000006"}


def test_rollback_resumes_with_the_moments_of_that_round(tmp_path: Path) -> None:
    config = config_of(rounds=4)
    expected = finish(begin(tmp_path, config))
    with Run(tmp_path) as run:
        run.rollback(1)
        run.opened = 1  # so that the devices answer as they did
    world = begin(tmp_path, config)
    assert finish(world) == expected


def test_run_without_an_optimizer_has_no_moments(tmp_path: Path) -> None:
    plain = config_of(optimizer=ServerOptimizer(), rounds=2)
    finish(begin(tmp_path, plain))
    assert not list((tmp_path / CHECKPOINTS).glob("*.moments"))
    with Run(tmp_path) as run:
        assert run.latest().optimizer == "none"


def test_other_optimizer_starts_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finish(begin(tmp_path, config_of(optimizer=ServerOptimizer(), rounds=1)))
    with caplog.at_level(logging.WARNING):
        finish(begin(tmp_path, config_of(rounds=2)))
        assert "made with server optimiser 'none'; 'adam' starts anew" in caplog.text
        caplog.clear()
        finish(begin(tmp_path, config_of(rounds=3)))
        assert "anew" not in caplog.text


def test_lost_or_damaged_moments_are_named(tmp_path: Path) -> None:
    finish(begin(tmp_path, config_of(rounds=1)))
    with Run(tmp_path) as run:
        start = run.latest()
    path = tmp_path / CHECKPOINTS / "00000001.moments"
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole + b"x",
        whole[:10],
        b"t" + whole,
        whole.replace(b"adam", b"yogi"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"00000001\.moments does not hold the moments"):
            DiskMoments(tmp_path, PLAN, ADAM, start)
    path.unlink()
    with pytest.raises(RunError, match=r"00000001\.moments is missing"):
        DiskMoments(tmp_path, PLAN, ADAM, start)


def test_moments_on_disk_are_those_in_ram(tmp_path: Path) -> None:
    finish(begin(tmp_path, config_of(rounds=1)))
    with Run(tmp_path) as run:
        start = run.latest()
    disk = DiskMoments(tmp_path, PLAN, ServerOptimizer(name="yogi"), start)
    yogi, random = ServerOptimizer(name="yogi"), np.random.default_rng(2)
    ram, moved = RamMoments(yogi, PLAN), np.arange(PLAN.block_count) % 3 > 0
    for round in (2, 3, 4):
        drawn = random.normal(size=PLAN.parameters).astype(np.float32)
        one, other = drawn.copy(), drawn.copy()
        yogi.step(PLAN, one, moved, ram, round=round)
        yogi.step(PLAN, other, moved, disk, round=round, threads=2)
        assert (one == other).all()


def test_rate_of_the_rule_beside_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="set the optimiser's rate instead"):
        rounds_config(rule=RULES["ra-fed"](server_rate=0.5), server_optimizer=ADAM)
