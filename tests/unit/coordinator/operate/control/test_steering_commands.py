"""The words of the commands that steer a run, in the folder of one that is stopped or served."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.operate.control.forgetting import forget_commands
from coordinator.operate.control.quarantine import quarantine_commands
from coordinator.operate.control.steering import steering_commands
from coordinator.run.folder import Run
from edge_sdk.program.control import ControlSocket, ask_run
from tests.unit.coordinator.service.service_world import World, Worlds, rounds_config

Type = Callable[..., str]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Type:
    """Type a command; what it prints, or its error if it ends with `code`."""

    def type_it(*words: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        found = main([str(word) for word in words])
        said = capsys.readouterr()
        assert found == code, said
        return said.err if code else said.out

    return type_it


@pytest.fixture
def world(worlds: Worlds) -> World:
    """A run in round 1, whose movements are not sent yet."""
    made = worlds.make(rounds_config(rounds=6))
    for name in "ab":
        made.add(name, sends=False)
    made.settle()
    return made


@contextmanager
def answering(world: World) -> Iterator[None]:
    """Serve the run's socket, with a thread for its loop."""
    requests = world.service._requests
    commands = {
        **steering_commands(requests, world.folder),
        **quarantine_commands(requests),
        **forget_commands(requests),
    }
    control, over = ControlSocket(world.folder, commands), threading.Event()

    def loop() -> None:
        while not over.wait(0.01):
            world.service.tick()

    thread = threading.Thread(target=loop)
    thread.start()
    control.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        control.close()


def test_served_run_answers_in_words_and_as_json(world: World, typed: Type) -> None:
    run = world.folder
    with answering(world):
        assert "paused; the open round goes on to its end" in typed("pause", run)
        assert f"tessera-coordinator resume {run}" in typed("pause", run)
        assert "was paused already, by " in typed("pause", run)
        assert "goes on" in typed("resume", run)
        assert "was not paused" in typed("resume", run)
        said = typed("set", run, "learning_rate", "0.05")
        assert "learning_rate = 0.05 from the next round on (was 0.1)" in said
        assert f"to go back: tessera-coordinator set {run} learning_rate 0.1" in said
        assert "is 0.05 already" in typed("set", run, "learning_rate", "0.05")
        assert "run.toml says the same" in typed("set", run, "learning_rate", "0.1")
        assert "16 rounds in all" in typed("rounds", run, "+10")
        assert "a is quarantined: odd (" in typed("quarantine", run, "a", "--reason", "odd")
        (row,) = json.loads(typed("quarantined", run, "--json"))
        assert row["device"] == "a"
        assert "a may take part again" in typed("allow", run, "a")
        assert "no device is quarantined" in typed("quarantined", run)
        assert "once the open round is committed" in typed("stop", run)
        assert json.loads(typed("stop", run, "--now", "--json"))["stopping"] == "now"
        rows = json.loads(typed("audit", run, "--json"))
        assert ask_run(run, "audit", since=len(rows) - 1) == rows[-1:]
    assert [row["what"] for row in rows] == [
        *("pause", "resume", "set", "set", "rounds", "quarantine", "allow", "stop", "stop")
    ]
    lines = typed("audit", run, "--since", "2").splitlines()
    assert len(lines) == len(rows) - 2
    assert lines[0].endswith("learning_rate 0.1 → 0.05")
    assert lines[2].endswith("rounds 6 → 16")
    history = typed("history", run)
    assert "quarantined a: odd (" in history
    assert "stopped now (" in history


def test_stopped_run_is_steered_in_its_folder(world: World, typed: Type) -> None:
    run = world.folder
    for device in world.devices:
        device.send(1)
    world.stop()
    assert "nobody serves it now, and no round opens at its next start" in typed("pause", run)
    assert "nobody serves it now" in typed("resume", run)
    assert "nobody serves it now" in typed("set", run, "quorum", "0.5")
    assert "serve it to go on" in typed("rounds", run, "+2")
    assert "there is nothing to stop" in typed("stop", run, code=2)
    assert "b is quarantined" in typed("quarantine", run, "b")
    assert typed("quarantined", run).startswith("b  since round 2: no reason given (")
    assert "may take part again" in typed("allow", run, "b")
    listed = typed("set", run).splitlines()
    assert any(line.startswith("quorum") and "run.toml: none; by " in line for line in listed)
    assert not any(line.startswith("rounds") for line in listed)  # it cannot be set
    assert "9 rounds in all" in typed("rounds", run, "+1")


def test_commands_to_a_run_that_starts_say_to_wait(world: World, typed: Type) -> None:
    run = world.folder
    world.stop()
    with Run(run) as opened:
        opened.note_starting(True)
        for words in (("resume", run), ("stop", run), ("page", run), ("codes", "list", run)):
            assert "the run is starting; try again in a moment" in typed(*words, code=2)
        assert "starting" in typed("status", run)


def test_status_tells_a_pause_from_the_state(world: World, typed: Type) -> None:
    run = world.folder
    world.stop()
    typed("pause", run)
    lines = [" ".join(line.split()) for line in typed("status", run).splitlines()]
    assert "state stopped" in lines
    (paused,) = (line for line in lines if line.startswith("paused"))
    assert paused.endswith(" UTC: the next start waits for resume")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("set", "{run}", "learning_rat", "1"), "did you mean 'learning_rate'"),
        (("set", "{run}", "learning_rate"), "give a value"),
        (("rounds", "{run}", "many"), "a whole number of rounds to add, such as +20"),
        (("rounds", "{run}", "500"), "{run} +500"),
        (("rounds", "{run}", "-5"), "rounds can only be added"),
        (("allow", "{run}", "a"), "'a' is not quarantined; quarantined devices: none"),
        (("quarantine", "{run}", "x"), "no device 'x'"),
        (("pause", "{run}/checkpoints"), "is not a run's folder"),
        (("audit", "{run}/checkpoints"), "is not a run's folder"),
        (("set", "{run}/checkpoints"), "is not a run's folder"),
    ],
)
def test_mistakes_are_explained(
    world: World, typed: Type, words: tuple[str, ...], error: str
) -> None:
    world.stop()
    said = typed(*(word.format(run=world.folder) for word in words), code=2)
    assert error.format(run=world.folder) in said
    assert "Traceback" not in said


def test_run_that_nobody_steered_says_so(world: World, typed: Type) -> None:
    assert "nobody has steered this run yet" in typed("audit", world.folder)
