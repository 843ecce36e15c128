"""A device is forgotten, or it is not: served, stopped, and killed at any step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.memory import DiskMemory, Memory, stored_config
from coordinator.aggregate.rules import RULES
from coordinator.checksums import seal_json
from coordinator.cli import main
from coordinator.errors import ConfigError
from coordinator.operate.control.forgetting import forget_commands
from coordinator.run import forgetting
from coordinator.run.folder import MEMORY, MOVEMENTS, Run, RunError, read_history
from coordinator.run.forgetting import FORGET, finish_forgetting, forget_in_folder
from coordinator.service.admission.requests import Requests
from coordinator.service.service import Service
from edge_sdk.program.control import ControlSocket
from edge_sdk.protocol.messages.round import Receipt
from tests.unit.coordinator.service.service_world import (
    PLAN,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)

NAMES = ("a", "b", "c")


@contextmanager
def memory_of(folder: Path) -> Iterator[Memory]:
    """The memory of a stopped run."""
    config = stored_config(folder / MEMORY, PLAN)
    memory = DiskMemory(folder / MEMORY, PLAN, config, reserve_bytes=0)
    yield memory
    memory.close()


def second_round(worlds: Worlds, folder: str = "run", *, bad: bool = True) -> World:
    """A run whose second round waits for c; all others have sent."""
    world = worlds.make(rounds_config(rule=RULES["ram-fed"](), min_devices=3, rounds=3), folder)
    for number, name in enumerate(NAMES):
        world.add(name, value=0.25 * (1 + number), sends=bad or name != "b")
    c = world.devices[-1]
    c.sends = False
    world.settle()
    c.send(1)
    if not bad:
        world.wait(101)
    assert world.state.round == 2
    return world


def forgotten_lines(folder: Path) -> list[dict[str, Any]]:
    return [line["forgotten"] for line in read_history(folder) if "forgotten" in line]


def test_served_run_ends_as_if_the_device_had_left_memory_and_round_alone(worlds: Worlds) -> None:
    world = second_round(worlds)
    assert sorted(path.name for path in (world.folder / MOVEMENTS).iterdir()) == [
        "00000002-a",
        "00000002-b",
    ]
    found = world.service.forget("b", "operator")
    assert (found.device, found.by, found.round) == ("b", "operator", 1)
    assert (found.blocks, found.movements) == (PLAN.block_count, 1)
    assert [path.name for path in (world.folder / MOVEMENTS).iterdir()] == ["00000002-a"]
    assert not (world.folder / FORGET).exists()
    forgotten = world.devices[1]
    world.settle()
    assert forgotten.verdicts[-1] == (2, "rejected")
    assert forgotten.all(Receipt)[-1].reason == "the operator had it forgotten"
    assert set(world.state.kept) == {"a"}
    covered = world.state.fleet.times_covered.copy()
    before = world.service.model.theta.copy()
    world.devices[-1].send(2)
    assert (world.state.fleet.times_covered - covered == 2).all()
    assert forgotten.verdicts[-1] == (2, "rejected")
    assert world.history[-1]["movements"]["counted"] == 2
    assert world.state.round == 3
    # v = ū + mean(D − u): a and c said the same as in round 1, and b is not there.
    assert np.allclose(world.service.model.theta - before, (0.25 + 0.75) / 2, atol=1e-6)
    world.stop()
    (line,) = forgotten_lines(world.folder)
    assert line["device"] == "b"
    with memory_of(world.folder) as memory:
        assert memory.recall("b") == []
        assert (memory.entries == 2).all()


@pytest.mark.parametrize("crash", [False, True])
def test_stopped_run_has_the_memory_of_one_in_which_the_device_never_spoke(
    worlds: Worlds, crash: bool
) -> None:
    world, other = second_round(worlds), second_round(worlds, "other", bad=False)
    for each in (world, other):
        (each.crash if crash else each.stop)()
    forget_in_folder(world.folder, "b", "operator")
    with memory_of(world.folder) as memory, memory_of(other.folder) as never:
        assert memory.now == never.now == 1
        assert np.array_equal(memory.entries, never.entries)
        assert np.array_equal(memory.weight, never.weight)
        assert np.allclose(memory.total, never.total, rtol=1e-14, atol=0)
        for name in NAMES:
            pairs = zip(memory.recall(name), never.recall(name), strict=True)
            assert all(np.array_equal(x.blocks.values, y.blocks.values) for x, y in pairs)
    world.start()
    assert set(world.state.assigned) == {"a", "c"}
    world.settle()
    world.devices[-1].send(2)  # nobody waits for b
    assert world.service.finished or world.state.round == 3


class Killed(BaseException):
    """The process ends here."""


STEPS: list[tuple[Any, str]] = [
    (forgetting, "write_whole"),
    (forgetting, "remove"),
    (forgetting, "sync_folder"),
    (DiskMemory, "forget"),
    (DiskMemory, "commit"),
    (Run, "record"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("owner_and_step", STEPS, ids=[step for _, step in STEPS])
def test_kill_at_any_step_leaves_a_device_that_is_forgotten_or_not(
    worlds: Worlds,
    owner_and_step: tuple[Any, str],
    after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, step = owner_and_step
    world = second_round(worlds)
    world.stop()
    do: Callable[..., Any] = getattr(owner, step)

    def kill(*arguments: Any, **named: Any) -> None:
        if after:
            do(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, kill)
        with pytest.raises(Killed):
            forget_in_folder(world.folder, "b", "operator")
    asked = step != "write_whole" or after
    with Run(world.folder) as run, memory_of(world.folder) as memory:
        finish_forgetting(run, memory)
        finish_forgetting(run, memory)
        held = [bool(memory.rounds(name).any()) for name in NAMES]
        assert held == [True, not asked, True]
        assert np.array_equal(memory.entries, np.full(PLAN.block_count, sum(held)))
        weights = 0.25 * np.array([1, 2, 3])[held] / 0.1
        assert np.allclose(memory.total, weights.sum())
        kept = {path.name[9:] for path in (world.folder / MOVEMENTS).iterdir()}
        assert kept == ({"a"} if asked else {"a", "b"})
    assert len(forgotten_lines(world.folder)) == asked
    assert not (world.folder / FORGET).exists()


def test_next_process_finishes_what_was_begun(worlds: Worlds) -> None:
    world = second_round(worlds)
    world.crash()
    request = {"device": "b", "id": "1", "by": "me", "time": "2030-01-01T00:00:00Z"}
    (world.folder / FORGET).write_bytes(seal_json(request))
    world.start()
    assert [line["by"] for line in forgotten_lines(world.folder)] == ["me"]
    assert "b" not in {path.name[9:] for path in (world.folder / MOVEMENTS).iterdir()}
    world.crash()
    (world.folder / FORGET).write_text("{")
    with pytest.raises(RunError, match=r"forget.json cannot be read: delete it"):
        world.start()


def test_unknown_device_and_runs_that_keep_nothing_are_named(worlds: Worlds) -> None:
    world = second_round(worlds)
    with pytest.raises(ConfigError, match="nothing is kept of 'eve'"):
        world.service.forget("eve", "operator")
    world.stop()
    alone = worlds.make(fragments_config(), "fragments")
    with pytest.raises(ConfigError, match="an asynchronous run keeps nothing of a device"):
        alone.service.forget("a", "operator")


def test_command_asks_the_process_that_serves_the_run(
    worlds: Worlds, capsys: pytest.CaptureFixture[str]
) -> None:
    world = second_round(worlds)
    requests: Requests[Service] = Requests()
    control = ControlSocket(world.folder, forget_commands(requests))
    control.start()
    codes: list[int] = []
    command = ["forget", str(world.folder), "b", "--yes"]
    thread = threading.Thread(target=lambda: codes.append(main(command)))
    thread.start()
    while thread.is_alive():
        requests.serve(world.service)
        thread.join(0.01)
    control.close()
    assert codes == [0]
    assert f"forgot b: {PLAN.block_count} blocks in memory" in capsys.readouterr().out
    assert [line["device"] for line in forgotten_lines(world.folder)] == ["b"]


def test_command_asks_first_and_says_what_stays(
    worlds: Worlds, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = second_round(worlds)
    world.stop()
    command = ["forget", str(world.folder), "b"]
    assert main(command) == 2
    assert "add --yes to confirm" in capsys.readouterr().err
    assert forgotten_lines(world.folder) == []
    assert main([*command, "--yes"]) == 0
    said = capsys.readouterr().out
    assert f"forgot b: {PLAN.block_count} blocks in memory, 1 movements" in said
    assert "did to the model stays there" in said
    assert main([*command, "--yes"]) == 2
    assert "nothing is kept of 'b'" in capsys.readouterr().err
    assert main(["history", str(world.folder)]) == 0
    assert "forgot b after round 1" in capsys.readouterr().out
