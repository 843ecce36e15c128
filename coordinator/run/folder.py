"""A run on disk: everything needed to resume after any stop.

    lock                          held by the process that has the run open
    run.json                      task, run id, and the source of the run
    model/                        plan, weights, buffers, manifest, graphs (`saved_model.py`)
    counters.json                 the newest round ever opened; number of coordinator starts
    checkpoints/<n>.safetensors   the model after round n, and the record of the fleet: of the last
                                  few rounds, every n-th and the one with the best accuracy
    checkpoints/<n>.moments       the server optimiser's moments after round n (`moments.py`)
    memory/                       the rule's memory (`memory/disk/`)
    round.json                    assignments of the open round (`journal.py`)
    movements/, uploads/          movements for open rounds (`receiving.py`)
    chunks/, published.bin        chunks that devices fetch, and those that brokers may hold
    teachers.jsonl                blocks that each device ever trained, a line per round with news
    history.jsonl                 one line per closed round, and one per rollback
    evaluation/                   test data that memory does not hold, converted and mapped

Rules:
- A round's number is used once: it is on disk before any device hears of it. An interrupted run
  resumes its round if there were assignments, and otherwise opens the next one.
- A round's teachers are written before its checkpoint. Lines of rounds without one are removed.
- A round's checkpoint is written before its memory. If a crash leaves memory behind, the round
  closes again from the previous checkpoint, to the same bits.
- Files appear whole or not at all: they are written under another name, synced and renamed.
- A rollback removes the open round and the memory, whose entries came from later models, and then
  the later checkpoints, newest first; round numbers still increase.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Expected
from coordinator.aggregate.screening import block_squares, pack_usual, unpack_usual
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.rounds.fleet import FleetRecord, Teachers, new_fleet
from coordinator.rounds.persistent import PersistentMap
from coordinator.rounds.reputation import Agreed, DeviceStanding
from coordinator.rounds.state import UNMEASURED, Best
from coordinator.rounds.synchronous import PastRound
from coordinator.task.levels import LevelScores, pack_levels, unpack_levels
from coordinator.task.saved_model import (
    Origin,
    SavedModel,
    check_folder_free,
    read_model,
    save_model,
)
from edge_sdk.program.files import (
    append_line,
    lock_file,
    make_folder,
    remove,
    remove_folder,
    remove_leftovers,
    sync_folder,
    whole_folder,
    write_whole,
)
from edge_sdk.protocol.messages.round import Outcome
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest

FORMAT = 1
LOCK, ABOUT, MODEL, COUNTERS = "lock", "run.json", "model", "counters.json"
CHECKPOINTS, MEMORY, MOVEMENTS, UPLOADS = "checkpoints", "memory", "movements", "uploads"
CHUNKS, PUBLISHED, HISTORY = "chunks", "published.bin", "history.jsonl"
ROUND, TEACHERS = "round.json", "teachers.jsonl"

READ_TRIES = 5
"""Attempts to read a checkpoint of a run that goes on and may remove it."""

_BUFFER = "buffer/"
_STATE = "state"


class RunError(CoordinatorError):
    """A run's folder cannot be used: it is open elsewhere, damaged, or belongs to another task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Identity of a run. `run` is 16 hex digits; `source` names the task's code."""

    task: str
    run: str
    source: str
    batch_size: int


@dataclass(frozen=True, slots=True, eq=False)
class TaskFiles:
    """Parts of a task that devices need besides weights. `files` holds the graphs by SHA-256."""

    plan: ModelPlan
    manifest: Manifest
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Checkpoint:
    """The model after a round, and the facts the state machine needs to resume from it."""

    round: int
    """The round; in an asynchronous run, the number of updates."""
    committed: int
    """Number of rounds so far, without void or interrupted ones."""
    version: int
    """Number of changes of the model."""
    theta: Float32
    """Weights in block order."""
    buffers: Mapping[str, Array]
    fleet: FleetRecord
    """Record of the fleet, without norms (they follow from θ)."""
    best: Best = UNMEASURED
    devices: Set[str] = frozenset()
    past: Mapping[int, PastRound] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    """Asynchronous: per device, the newest round whose movement was applied."""
    levels: LevelScores = field(default_factory=LevelScores)
    """The run's levels, as far as this model was evaluated."""
    optimizer: str = "none"
    """Server optimiser, whose moments lie beside the checkpoint unless it is `none`."""

    @classmethod
    def first(cls, plan: ModelPlan, theta: Float32, buffers: Mapping[str, Array]) -> Checkpoint:
        """Return the model before any round."""
        fleet = new_fleet(plan)
        return cls(round=0, committed=0, version=0, theta=theta, buffers=buffers, fleet=fleet)


def create_run(folder: Path, about: About, model: SavedModel) -> None:
    """Create the folder of a new run, completely or not at all. Raises `ConfigError`."""
    check_folder_free(folder)
    with whole_folder(folder) as draft:
        save_model(model, draft / MODEL)
        make_folder(draft / CHECKPOINTS)
        first = Checkpoint.first(model.plan, model.plan.flatten(model.weights), model.buffers)
        write_whole(_checkpoint_path(draft, 0), _encode(first))
        write_whole(draft / COUNTERS, _json({"opened": 0, "session": 0}))
        write_whole(draft / ABOUT, _json({"format": FORMAT, **asdict(about)}))


def is_run(folder: Path) -> bool:
    """True if this folder holds a run."""
    return (folder / ABOUT).is_file()


class Run:
    """The folder of a run, open in this process only. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` if there is no run, `RunError` if it is in use or damaged."""
        if not is_run(folder):
            raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
        self.folder = folder
        self._accuracies: dict[int, float | None] = {}
        """Accuracy of the level to deploy, by round, of checkpoints that were looked at."""
        self._lock: int | None = None
        lock = _lock(folder)
        try:
            for each in (folder, folder / CHECKPOINTS):
                remove_leftovers(each)
            self._remove_unused_moments()
            self.about = _read_about(folder)
            model = read_model(folder / MODEL)
            self.task = TaskFiles(model.plan, model.manifest, model.files)
            counters = json.loads((folder / COUNTERS).read_text())
            self.opened, self._session = int(counters["opened"]), int(counters["session"])
            self._lock = lock
        except (ValueError, KeyError, OSError) as error:
            raise RunError(f"{folder} is damaged: {error!r}") from error
        finally:
            if self._lock is None:
                os.close(lock)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes open the run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def plan(self) -> ModelPlan:
        """Plan of the task."""
        return self.task.plan

    def first_norms(self) -> NDArray[np.float64]:
        """Squared norm, per block, of the weights that the run started with."""
        weights = self.plan.flatten(read_model(self.folder / MODEL).weights)
        return block_squares(weights, self.plan.block_sizes)

    def note_opened(self, round: int) -> None:
        """Mark a round's number as used, on disk, before any device hears of it."""
        if round > self.opened:
            self.opened = round
            self._write_counters()

    def next_session(self, wall_s: float) -> int:
        """Return the number of this start, above all earlier ones in any folder of the task."""
        self._session = max(self._session + 1, int(wall_s))
        self._write_counters()
        return self._session

    # -- checkpoints ------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and before it the news of its teachers."""
        if news := checkpoint.fleet.teachers.news:
            line = {"round": checkpoint.round, "blocks": {n: b.hex() for n, b in news.items()}}
            append_line(self.folder / TEACHERS, _json(line))
        write_whole(_checkpoint_path(self.folder, checkpoint.round), _encode(checkpoint))
        self._accuracies[checkpoint.round] = checkpoint.levels.best

    def drop_latest(self) -> None:
        """Remove the newest checkpoint, unless it is the only one."""
        if len(rounds := self.rounds()) > 1:
            self._remove_checkpoint(rounds[-1])

    def prune(self, *, keep_last: int, keep_every: int) -> None:
        """Keep the last few checkpoints, every n-th one and the best; remove the others."""
        numbers, best = self.rounds(), self.best_round()
        for number in numbers[:-keep_last]:
            if number % keep_every and number != best:
                self._remove_checkpoint(number)

    def best_round(self) -> int | None:
        """Return the round with the best accuracy of those kept, the earliest of several.

        None: no accuracy is known.
        """
        numbers = self.rounds()
        known = {each: self._accuracies[each] for each in numbers if each in self._accuracies}
        for number in numbers:
            if number not in known:
                known[number] = _accuracy_of(_checkpoint_path(self.folder, number))
        self._accuracies = known
        return _best(known)

    def read(self, round: int) -> Checkpoint:
        """Read the checkpoint of a round. Raises `RunError` if it is damaged or missing."""
        return _decode(_checkpoint_path(self.folder, round), self.plan)

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, in ascending order."""
        return _rounds(self.folder)

    def latest(self) -> Checkpoint:
        """Read the newest checkpoint. Raises `RunError` if it is damaged or missing."""
        rounds = self.rounds()
        if not rounds:
            raise RunError(f"{self.folder / CHECKPOINTS} contains no checkpoint")
        checkpoint = _decode(_checkpoint_path(self.folder, rounds[-1]), self.plan)
        fleet = checkpoint.fleet
        teachers = fleet.teachers.joined(self._read_teachers(checkpoint.round), fleet.samples)
        return replace(checkpoint, fleet=replace(fleet, teachers=teachers).settled())

    def _read_teachers(self, round: int) -> dict[str, bytes]:
        """Read the blocks that devices had trained by a round; remove the lines of later rounds."""
        path = self.folder / TEACHERS
        entries = list(_read_lines(path))
        if len(kept := [entry for entry in entries if entry["round"] <= round]) < len(entries):
            write_whole(path, b"".join(map(_json, kept)))
        # A later line of a device has all that an earlier one has.
        return {n: bytes.fromhex(b) for entry in kept for n, b in entry["blocks"].items()}

    def rollback(self, to_round: int) -> None:
        """Return to a checkpoint and continue from it. Raises `ConfigError`, `RunError`."""
        rounds = self.rounds()
        if to_round not in rounds:
            known = ", ".join(map(str, rounds))
            raise ConfigError(f"round {to_round} has no checkpoint; there are {known}")
        _decode(_checkpoint_path(self.folder, to_round), self.plan)
        # First remove what belongs to the newest model: it would damage an older one.
        for name in (ROUND, MOVEMENTS, MEMORY):
            remove_folder(self.folder / name)
        sync_folder(self.folder)
        for number in reversed([each for each in rounds if each > to_round]):
            self._remove_checkpoint(number)
        sync_folder(self.folder / CHECKPOINTS)
        self.record({"rolled_back": {"from": rounds[-1], "to": to_round}})

    def _remove_checkpoint(self, round: int) -> None:
        remove(_checkpoint_path(self.folder, round))
        remove(moments_path(self.folder, round))

    def _remove_unused_moments(self) -> None:
        """Remove moments whose round a crash kept from getting its checkpoint."""
        kept = {moments_path(self.folder, round) for round in self.rounds()}
        for path in (self.folder / CHECKPOINTS).glob("*.moments"):
            if path not in kept:
                remove(path)

    # -- history ----------------------------------------------------------------------------

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the history."""
        append_line(self.folder / HISTORY, _json(entry))

    def _write_counters(self) -> None:
        content = _json({"opened": self.opened, "session": self._session})
        write_whole(self.folder / COUNTERS, content)


def read_history(folder: Path) -> Iterator[dict[str, Any]]:
    """Read a run's history, even if the run is open elsewhere. Raises `ConfigError`."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    return _read_lines(folder / HISTORY)


WhichRound = int | Literal["best", "last"]
"""A round's number, the newest round, or the one with the best accuracy."""


def read_result(folder: Path, round: WhichRound = "last") -> SavedModel:
    """Read the model that a round of a run made, even if the run is open elsewhere.

    Its buffers are the statistics that were computed for the whole model, where there are any.
    Raises `ConfigError` and `RunError`.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    about, model = _read_about(folder), read_model(folder / MODEL)
    for _ in range(READ_TRIES):
        path = _checkpoint_path(folder, _pick_round(folder, round))
        if path.is_file():
            break  # else a running coordinator removed it just now
    found = _decode(path, model.plan)
    weights = model.plan.unflatten(found.theta)
    origin = Origin(about.task, about.run, found.round, found.fleet.last_covered > 0)
    return replace(
        model, weights=weights, buffers=found.buffers, levels=found.levels, origin=origin
    ).with_statistics()


def _pick_round(folder: Path, round: WhichRound) -> int:
    """Return the number of a round that has a checkpoint. Raises `ConfigError`, `RunError`."""
    rounds = _rounds(folder)
    if not rounds:
        raise RunError(f"{folder / CHECKPOINTS} contains no checkpoint")
    if round == "last":
        return rounds[-1]
    if round == "best":
        paths = {each: _checkpoint_path(folder, each) for each in rounds}
        best = _best({each: _accuracy_of(path) for each, path in paths.items() if path.is_file()})
        if best is None:
            raise ConfigError(
                f"{folder} has no best round, because no accuracy was measured: give the run test "
                "data (task.evaluation), or take the newest model (--round last)"
            )
        return best
    if round not in rounds:
        known = ", ".join(map(str, rounds))
        raise ConfigError(
            f"round {round} has no checkpoint; there are {known}. A run keeps the last few, every "
            "n-th and the best (run.keep_last, run.keep_every)"
        )
    return round


def _best(accuracies: Mapping[int, float | None]) -> int | None:
    found = {round: each for round, each in accuracies.items() if each is not None}
    return min(found, key=lambda each: (-found[each], each), default=None)


def _accuracy_of(path: Path) -> float | None:
    """Read the accuracy of a checkpoint's level to deploy, and nothing else of it; None: unknown,
    or it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            state = json.loads(file.get_tensor(_STATE).tobytes())
        return unpack_levels(state["levels"], {}).best if "levels" in state else None
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError):
        return None


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short by a crash
        if isinstance(entry, dict):
            yield entry


def _rounds(folder: Path) -> list[int]:
    found = (folder / CHECKPOINTS).glob("*.safetensors")
    return sorted(int(path.stem) for path in found if path.stem.isdecimal())


# -- formats -------------------------------------------------------------------------------------


def _encode(checkpoint: Checkpoint) -> bytes:
    from safetensors.numpy import save

    fleet = checkpoint.fleet
    levels, statistics = pack_levels(checkpoint.levels)
    arrays = {
        **statistics,
        "theta": checkpoint.theta,
        "last_covered": fleet.last_covered,
        "times_covered": fleet.times_covered,
        **{f"{_BUFFER}{name}": array for name, array in checkpoint.buffers.items()},
        **pack_usual(fleet.usual),
    }
    accuracy, best_round = checkpoint.best
    state = {
        "round": checkpoint.round,
        "committed": checkpoint.committed,
        "version": checkpoint.version,
        "best": [accuracy if math.isfinite(accuracy) else None, best_round],
        "devices": sorted(checkpoint.devices),
        "trained": dict(fleet.trained),
        "samples": dict(fleet.samples),
        "counted": dict(checkpoint.counted),
        "levels": levels,
        "agreements": {
            device: [each.total, each.weight] for device, each in fleet.agreements.items()
        },
        "standings": {device: asdict(each) for device, each in fleet.standings.items()},
        "past": {
            str(round): {
                "expected": {
                    device: [dict(each.groups), each.level, each.samples, each.limit]
                    for device, each in past.expected.items()
                },
                "outcomes": {device: outcome.value for device, outcome in past.outcomes.items()},
                "reasons": dict(past.reasons),
            }
            for round, past in checkpoint.past.items()
        },
    }
    if checkpoint.optimizer != "none":
        state["optimizer"] = checkpoint.optimizer
    # An array, not the file's metadata, which is limited to 100 MB.
    arrays[_STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    encoded: bytes = save({name: np.asarray(each, order="C") for name, each in arrays.items()})
    return encoded


def _decode(path: Path, plan: ModelPlan) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = json.loads(arrays[_STATE].tobytes())
        checkpoint = _build(state, arrays)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise RunError(
            f"checkpoint {path} cannot be read ({error}); remove it to resume from the previous one"
        ) from error
    plan.check_buffers(checkpoint.buffers)
    blocks = checkpoint.fleet.last_covered.shape
    if checkpoint.theta.shape != (plan.parameters,) or blocks != (plan.block_count,):
        raise RunError(f"checkpoint {path} belongs to another plan")
    return checkpoint


def _build(state: Mapping[str, Any], arrays: Mapping[str, Array]) -> Checkpoint:
    accuracy, best_round = state["best"]
    nobody = np.zeros_like(arrays["last_covered"])
    return Checkpoint(
        round=state["round"],
        committed=state["committed"],
        version=state["version"],
        theta=arrays["theta"],
        buffers={
            name.removeprefix(_BUFFER): array
            for name, array in arrays.items()
            if name.startswith(_BUFFER)
        },
        fleet=FleetRecord(
            arrays["last_covered"],
            arrays["times_covered"],
            Teachers(nobody, nobody),
            trained=PersistentMap(state["trained"]),
            samples=PersistentMap(state["samples"]),
            total_samples=sum(state["samples"].values()),
            usual=unpack_usual(arrays),
            agreements=PersistentMap(
                {name: Agreed(*each) for name, each in state.get("agreements", {}).items()}
            ),
            standings=PersistentMap(
                {name: DeviceStanding(**each) for name, each in state.get("standings", {}).items()}
            ),
        ),
        best=(-math.inf if accuracy is None else accuracy, best_round),
        devices=frozenset(state["devices"]),
        past={
            int(round): PastRound(
                {device: _expected(*each) for device, each in past["expected"].items()},
                {device: Outcome(value) for device, value in past["outcomes"].items()},
                past.get("reasons", {}),
            )
            for round, past in state["past"].items()
        },
        counted=state["counted"],
        levels=unpack_levels(state["levels"], arrays) if "levels" in state else LevelScores(),
        optimizer=state.get("optimizer", "none"),
    )


def _expected(
    groups: Mapping[str, list[int]], level: float, samples: int, limit: float | None = None
) -> Expected:
    return Expected({axis: tuple(ids) for axis, ids in groups.items()}, level, samples, limit)


def _read_about(folder: Path) -> About:
    content = json.loads((folder / ABOUT).read_text())
    if content["format"] != FORMAT:
        raise RunError(
            f"{folder} has format {content['format']}; this version reads format {FORMAT}"
        )
    return About(**{entry.name: content[entry.name] for entry in fields(About)})


def moments_path(folder: Path, round: int) -> Path:
    """Return the path of the optimiser's moments after a round."""
    return folder / CHECKPOINTS / f"{round:08}.moments"


def _checkpoint_path(folder: Path, round: int) -> Path:
    return folder / CHECKPOINTS / f"{round:08}.safetensors"


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False) + "\n").encode()


def _lock(folder: Path) -> int:
    try:
        return lock_file(folder / LOCK)
    except BlockingIOError as error:
        raise RunError(f"{folder} is open in another process: stop that process") from error
