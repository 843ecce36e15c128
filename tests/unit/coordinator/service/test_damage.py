"""Every file of a run folder is damaged in every way: the run ends with the same bits and the same
history, or is refused with words that name the file and the cure."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.rules import RULES
from coordinator.cli import main
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import ABOUT, CHUNKS, LOCK, MEMORY, MODEL, UPLOADS, read_history
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.messages.round import Movement
from tests.unit.coordinator.service.service_world import (
    ScriptedDevice,
    World,
    fragments_config,
    rounds_config,
)
from tests.unit.coordinator.service.test_service import scored

ROUNDS, OPEN = 4, 3
"""Rounds of a run, and the one that is open when its files are damaged."""


class Growing(ScriptedDevice):
    """A device whose movements differ from round to round."""

    def make_movement(self, round: int, groups: Mapping[str, tuple[int, ...]]) -> Movement:
        value = self.value
        self.value = value * (1 + 0.25 * round)
        made = super().make_movement(round, groups)
        self.value = value
        return made


def evaluate(model: GlobalModel, levels: LevelScores) -> LevelScores:
    accuracy = 0.5 + 0.4 * float(abs(model.theta.sum()) % 1)
    return scored(levels, accuracy, accuracy / 2)


def ram_fed() -> RoundsConfig:
    optimizer = ServerOptimizer(name="adam", tau=0.01)
    return of_rounds("ram-fed", server_optimizer=optimizer)


def of_rounds(rule: str, **more: Any) -> RoundsConfig:
    masks = make_masks("static" if rule.startswith("ra") else "random")
    return rounds_config(rule=RULES[rule](), masks=masks, rounds=ROUNDS, min_devices=3, **more)


def fed_raa() -> FragmentsConfig:
    return fragments_config(updates=12, min_devices=3)


RUNS: dict[str, Callable[[], RoundsConfig | FragmentsConfig]] = {
    "ram-fed": ram_fed,
    "ccfl-2": lambda: of_rounds("ccfl-2"),
    "fed-raa": fed_raa,
}


def begin(
    folder: Path, config: RoundsConfig | FragmentsConfig, last: int = 1000
) -> tuple[World, ScriptedDevice]:
    """A run with two devices that answer at once, up to a last round, and one that answers when it
    is told to."""
    world = World(folder, config, evaluate=evaluate)
    slow = Growing(world, "slow", value=0.75, sends=False)
    first = Growing(world, "a", value=0.25, level=lambda n: 1.0 if n <= last else None)
    second = Growing(world, "b", value=-0.5, level=lambda n: 0.5 if n <= last else None)
    world.devices += [first, second, slow]
    return world, slow


def play(world: World, slow: ScriptedDevice, until: Callable[[World], bool]) -> None:
    for _ in range(40):
        world.settle()
        if until(world) or world.service.finished:
            return
        for round in sorted(slow.movements)[-1:]:
            slow.send(round)
        world.wait(101)
    raise AssertionError("it does not end")


def is_there(world: World) -> bool:
    if isinstance(world.machine, FragmentsConfig):
        return len(world.history) >= 2
    return world.state.round == OPEN and set(world.state.kept) == {"a", "b"}


Result = tuple[str, list[dict[str, Any]]]


def outcome(folder: Path, config: RoundsConfig | FragmentsConfig) -> Result:
    """Start the run in a folder, let it end, and return its model's digest and its history."""
    world, slow = begin(folder, config)
    try:
        play(world, slow, lambda _: False)
        digest = world.service.model.digest
    finally:
        world.stop()
    untimed = {"time", "seconds"}
    lines = [
        {name: value for name, value in line.items() if name not in untimed}
        for line in read_history(folder)
    ]
    return digest, lines


Damage = Callable[[Path], None]


def flip(share: float) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(share * (len(data) - 1))] ^= 0x10
        path.write_bytes(data)

    return damage


def cut(share: float, less: int = 0) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data)) - less])

    return damage


DAMAGES: dict[str, Damage] = {
    "flip first": flip(0.0),
    "flip inside": flip(0.4),
    "flip last": flip(1.0),
    "empty": cut(0.0),
    "cut at 1/2": cut(0.5),
    "cut last": cut(1.0, 1),
    "delete": Path.unlink,
}


def files_of(folder: Path) -> Iterator[Path]:
    """The files that outlive a start, and hold something."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        temporary = inside.parts[0] in (CHUNKS, UPLOADS) or path.name == LOCK
        if path.is_file() and path.stat().st_size and not temporary:
            yield inside


def trial(whole: Path, folder: Path, name: Path, damage: Damage, run: str, expected: Result) -> str:
    """Return what became of a run with one damaged file."""
    shutil.copytree(whole, folder)
    damage(folder / name)
    try:
        ended = outcome(folder, RUNS[run]())
    except TesseraError as error:
        said = f"{error} {error.__cause__ or ''}"
        named = name.name in said or name.parts[0] in said or "checkpoint is missing" in said
        cured = any(word in said for word in ("repair", "backup", "rollback"))
        return "refused" if named and cured else f"refused without a word: {said}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "survived" if ended == expected else "went on silently with other bits"


def repaired(whole: Path, folder: Path, name: Path, damage: Damage, run: str) -> str:
    """Return what became of a run with one damaged file that was repaired."""
    shutil.copytree(whole, folder)
    damage(folder / name)
    try:
        found = main(["verify", str(folder)])
        if main(["repair", str(folder), "--yes"]):
            return "not repaired"
        if main(["verify", str(folder)]):
            return "still damaged"
        outcome(folder, RUNS[run]())
    except TesseraError as error:
        return f"refused after its repair: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "repaired" if found else "whole"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in RAM where there is one: nothing here has to outlive the test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.fixture
def killed(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A run's folder as `kill -9` would leave it in the middle."""
    world, slow = begin(folder / "run", RUNS[request.param](), last=6)
    play(world, slow, is_there)
    shutil.copytree(world.folder, folder / "killed")
    world.stop()
    return folder / "killed"


@pytest.mark.parametrize(("killed", "run"), [(run, run) for run in RUNS], indirect=["killed"])
def test_damaged_file_changes_nothing_silently(
    run: str, killed: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wholes = {"killed": killed}
    if run == "ram-fed":  # one that was stopped has all of memory's index in one file
        wholes["stopped"] = folder / "stopped"
        shutil.copytree(folder / "run", wholes["stopped"])
    shutil.copytree(killed, folder / "calm")
    expected = outcome(folder / "calm", RUNS[run]())
    results: dict[tuple[str, str, str], str] = {}
    for state, whole in wholes.items():
        for name in files_of(whole):
            if state == "stopped" and name.parts[0] != MEMORY:
                continue
            for words, damage in DAMAGES.items():
                results[state, str(name), words] = trial(
                    whole, folder / "damaged", name, damage, run, expected
                )
    counts = Counter(result.split(":")[0] for result in results.values())
    with capsys.disabled():
        print(f"\n{run}: {len(results)} damages: {dict(counts)}")
    bad = {key: each for key, each in results.items() if each not in ("refused", "survived")}
    assert bad == {}


@pytest.mark.parametrize(("killed", "run"), [("ram-fed", "ram-fed")], indirect=["killed"])
def test_damaged_run_goes_on_after_its_repair(run: str, killed: Path, folder: Path) -> None:
    results = {
        (str(name), words): repaired(killed, folder / "damaged", name, DAMAGES[words], run)
        for name in files_of(killed)
        for words in ("flip inside", "delete")
        if name.parts[0] != MODEL and name.name != ABOUT
    }
    assert set(results.values()) == {"repaired", "whole"}, results
