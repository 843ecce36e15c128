"""A run on disk: everything needed to resume after any stop.

    lock                          held by the process that has the run open
    run.json                      task, run id, the source of the run, checksums of `model/`
    model/                        plan, weights, buffers, manifest, graphs (`saved_model.py`)
    counters.json                 the newest round ever opened, and the one in `round.json`;
                                  number of coordinator starts; the epoch of the last one, and the
                                  inode it was at
    checkpoints/<n>.safetensors   the model after round n, and the record of the fleet: of the last
                                  few rounds, every n-th and the one with the best accuracy
    checkpoints/<n>.moments       the server optimiser's moments after round n (`moments.py`)
    memory/                       the rule's memory (`memory/disk/`)
    round.json                    the open round, and its assignments (`journal.py`)
    movements/, uploads/          movements for open rounds (`receiving.py`)
    movements.jsonl               names of the movements that were kept, so that none can be lost
                                  unnoticed
    chunks/, published.bin        chunks that devices fetch, and those that brokers may hold
    teachers.jsonl                blocks that each device ever trained, a line per round with news
    history.jsonl                 one line per closed round, and one for other news (`history.py`)
    steering.json, audit.jsonl    what operators asked of the run, and who asked it (`steering/`)
    start.json                    settings and versions of the last start (`operate/serve/start.py`)
    delivery.json                 the model that devices have for inference, and the one they try
    evaluation/                   test data that memory does not hold, converted and mapped

Rules:
- A round's number is used once: it is on disk before any device hears of it. An interrupted run
  resumes the round that was open, whether its devices were bidding or had their assignments.
- A round's teachers are written before its checkpoint, which knows their checksum. Lines of rounds
  without one are removed.
- A round's line of history is part of its checkpoint and is appended after it.
- A round's checkpoint is written before its memory. If a crash leaves memory behind, the round
  closes again from the previous checkpoint, to the same bits.
- Files appear whole or not at all: they are written under another name, synced and renamed.
- Every file has a checksum (`checksums.py`), which is checked when it is read. Damage is refused
  and named; nothing damaged is replaced by nothing. `inspection.py` looks at everything.
- Only the run's owner may read its files.
- A rollback removes the open round and the memory, whose entries came from later models, and then
  the later checkpoints, newest first; round numbers still increase.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Expected
from coordinator.aggregate.rules.pending import Pending, pack_pending, unpack_pending
from coordinator.aggregate.screening import block_squares, pack_usual, unpack_usual
from coordinator.checksums import (
    PIECE,
    Bytes,
    DamagedBytes,
    RunningChecksum,
    check_arrays,
    checksum,
    mapped,
    open_json,
    save_arrays,
    seal_json,
)
from coordinator.errors import ConfigError
from coordinator.rounds.config import UNMEASURED, Best
from coordinator.rounds.fleet import FleetRecord, Teachers, new_fleet
from coordinator.rounds.persistent import PersistentMap
from coordinator.rounds.reputation import Agreed, DeviceStanding, quarantined
from coordinator.rounds.synchronous import PastRound
from coordinator.run.errors import RunError as RunError  # its name for everybody else
from coordinator.run.errors import repair_advice
from coordinator.run.history import RunHistory
from coordinator.run.lines import PRIVATE, Lines, read_lines
from coordinator.task.levels import LevelScores, pack_levels, unpack_levels
from coordinator.task.saved_model import (
    Origin,
    SavedModel,
    check_folder_free,
    read_model,
    save_model,
)
from edge_sdk.program.files import (
    lock_file,
    make_folder,
    mark,
    remove,
    remove_folder,
    remove_leftovers,
    sync_folder,
    whole_folder,
    write_whole,
)
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.epoch import Epoch, next_epoch
from edge_sdk.protocol.messages.round import Outcome
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest

log = logging.getLogger(__name__)

FORMAT = 2
LOCK, ABOUT, MODEL, COUNTERS = "lock", "run.json", "model", "counters.json"
STARTING = b"starting\n"
"""Content of the lock while the process that has it is about to serve the run."""
GLANCE_S = 0.2
"""Seconds to wait for a lock that another process perhaps only glances at (`is_starting`)."""
CHECKPOINTS, MEMORY, MOVEMENTS, UPLOADS = "checkpoints", "memory", "movements", "uploads"
CHUNKS, PUBLISHED, HISTORY = "chunks", "published.bin", "history.jsonl"
ROUND, TEACHERS, KEPT = "round.json", "teachers.jsonl", "movements.jsonl"
START, DELIVERY = "start.json", "delivery.json"

READ_TRIES = 5
"""Attempts to read a checkpoint of a run that goes on and may remove it."""

_BUFFER = "buffer/"
STATE = "state"
"""Array of a checkpoint with all that is no array."""


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


@dataclass(frozen=True, slots=True)
class Journals:
    """Contents of the run's journals when a checkpoint was written."""

    teachers: int = 0
    """Bytes of the teachers' file, with the checkpoint's own line."""
    check: str = checksum().hex()
    """Checksum of those bytes."""
    history: int = 0
    """Bytes of the history, without the checkpoint's own line."""


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
    """Server optimiser, or rule, whose vectors lie beside the checkpoint unless it is `none`."""
    memory: bool = False
    """True if the rule's memory was written with it, and must be there to go on from it."""
    pending: Pending | None = None
    """Asynchronous: movements that are accepted and have not moved the model yet."""
    line: Mapping[str, Any] | None = None
    """The round's line of history; None: it has none."""
    orders: int = 0
    """Number of the newest order of an operator about a device that the fleet's record has."""
    journals: Journals | None = None
    """Places in the run's journals; set when the checkpoint is written."""

    @classmethod
    def first(cls, plan: ModelPlan, theta: Float32, buffers: Mapping[str, Array]) -> Checkpoint:
        """Return the model before any round."""
        fleet = new_fleet(plan)
        return cls(round=0, committed=0, version=0, theta=theta, buffers=buffers, fleet=fleet)

    def apart(self) -> Checkpoint:
        """Return a copy for another thread, while the record of the fleet goes on changing."""
        return replace(
            self,
            fleet=self.fleet.apart(),
            devices=frozenset(self.devices),
            counted=dict(self.counted),
        )


def create_run(folder: Path, about: About, model: SavedModel) -> None:
    """Create the folder of a new run, completely or not at all; raises as `check_run_free`."""
    check_run_free(folder)
    with whole_folder(folder) as draft:
        save_model(model, draft / MODEL)
        make_folder(draft / CHECKPOINTS)
        first = Checkpoint.first(model.plan, model.plan.flatten(model.weights), model.buffers)
        write_checkpoint(draft, replace(first, journals=Journals()))
        write_json(draft / COUNTERS, {"opened": 0, "assigned": 0, "session": 0})
        write_about(draft, about)
        make_private(draft)


def check_run_free(folder: Path) -> None:
    """Raise `ConfigError` unless a new run can be made there, `RunError` if it holds an old one."""
    if (folder / CHECKPOINTS).is_dir():
        raise RunError(
            f"{folder} holds checkpoints, but {folder / ABOUT} is missing: restore it from a "
            "backup, or name another folder for a new run"
        )
    check_folder_free(folder)


def write_about(folder: Path, about: About) -> None:
    """Write the identity of a run, with the checksums of its model."""
    content = {"format": FORMAT, **asdict(about), "model": model_checksums(folder)}
    write_json(folder / ABOUT, content)


def model_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a run's model, by path."""
    model = folder / MODEL
    files = sorted(path for path in model.rglob("*") if path.is_file())
    return {path.relative_to(model).as_posix(): checksum_of(path) for path in files}


def checksum_of(path: Path) -> str:
    """Return the checksum of a file's bytes, in hex digits."""
    return checksum(mapped(path)).hex()


def make_private(folder: Path) -> int:
    """Let only the owner read a folder and all in it; returns how many others could read.

    Nobody else could read anything in a folder that was the owner's alone: programs of other
    projects, such as the broker, may write as they like there.
    """
    was_open, changed = bool(folder.stat().st_mode & 0o077), 0
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if mode & 0o077 and not path.is_symlink():
            path.chmod(mode & 0o700)
            changed += 1
    return changed if was_open else 0


def is_run(folder: Path) -> bool:
    """True if this folder holds a run."""
    return (folder / ABOUT).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Numbers of a run that only grow, and the place of its folder."""

    opened: int
    """Newest round ever opened."""
    assigned: int
    """Newest round in the journal; 0: none is open."""
    session: int
    """Number of the last start of a coordinator; 0: none was started."""
    epoch: Epoch | None = None
    """Epoch of the last start."""
    place: int | None = None
    """Inode of the lock at the last start: a copy of the folder has another."""
    moved: float | None = None
    """Unix seconds when the run was packed to go on elsewhere; None: it was not."""


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
        self._teachers = Lines(folder / TEACHERS)
        self._taught: RunningChecksum | None = None
        """Of the teachers' file; None: not read yet."""
        self.history = RunHistory(folder / HISTORY)
        lock = _lock(folder)
        try:
            self._tidy()
            self.about, checks = read_about(folder)
            check_model(folder, checks)
            model = read_model(folder / MODEL)
            self.task = TaskFiles(model.plan, model.manifest, model.files)
            counters = read_counters(folder)
            self.opened, self._session = counters.opened, counters.session
            self._assigned = counters.assigned
            self.epoch, self._place = counters.epoch, counters.place
            self.moved = counters.moved
            self._lock = lock
        finally:
            if self._lock is None:
                os.close(lock)

    def _tidy(self) -> None:
        """Remove what killed processes left, and close the folder to other accounts."""
        folder = self.folder
        for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            if each.name not in (CHUNKS, UPLOADS):  # emptied by their users
                remove_leftovers(each)
        self._remove_unused_moments()
        if changed := make_private(folder):
            log.warning(
                "%s: %d files and folders could be read by other accounts; now only this account "
                "can",
                folder,
                changed,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note_starting(self, starting: bool) -> None:
        """Note for commands that this process is about to serve the run, or that it answers."""
        if self._lock is not None:
            mark(self._lock, STARTING if starting else b"")

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

    def note_journal(self, round: int) -> None:
        """Note that a round is open and in the journal, which must not be lost from now on."""
        if round > self._assigned:
            self._assigned = round
            self.opened = max(self.opened, round)
            self._write_counters()

    def note_unassigned(self) -> None:
        """Note that the journal may go: its round is committed, or will never be."""
        if self._assigned > self.rounds()[-1]:
            self._assigned = 0
            self._write_counters()

    def is_over(self, round: int) -> bool:
        """True if a round in the journal was noted to be over; a power cut may bring its file back.

        One that was never noted to be open is not: nobody has heard of it yet.
        """
        return self._assigned < round <= self.opened

    def check_journal(self, newest: int) -> None:
        """Raise `RunError` if a round behind the newest checkpoint has lost its journal."""
        if self._assigned > newest and not (self.folder / ROUND).is_file():
            raise RunError(
                f"{self.folder / ROUND} is missing, and round {self._assigned} is open: "
                f"{repair_advice(self.folder)}"
            )

    def next_session(self, wall_s: float) -> int:
        """Return the number of this start, above all earlier ones in any folder of the task."""
        self._session = max(self._session + 1, int(wall_s))
        self._write_counters()
        return self._session

    @property
    def session(self) -> int:
        """Number of the last start of a coordinator; 0: none was started."""
        return self._session

    @property
    def copied(self) -> bool:
        """True if the last coordinator was started in another folder, of which this is a copy."""
        return self._place not in (None, self._inode)

    @property
    def _inode(self) -> int:
        return (self.folder / LOCK).stat().st_ino

    def take_epoch(self, instance: str, *known: Epoch | None) -> Epoch:
        """Return the epoch of this start, above all earlier ones here and the known ones.

        It is on disk before anybody hears of it. From now on this folder is the original.
        """
        self.epoch = next_epoch(instance, self.epoch, *known)
        self._place, self.moved = self._inode, None
        self._write_counters()
        return self.epoch

    # -- checkpoints ------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, at: int | None = None) -> Checkpoint:
        """Write a checkpoint, and before it the news of its teachers. Returns it as written.

        Its line of history is appended by `record_line`, once the round is complete, `at` bytes
        from the start or behind; None: the history ends there now.
        """
        taught = self._taught = self._taught or self._read_taught(self._teachers.trim())
        if news := checkpoint.fleet.teachers.news:
            blocks = {name: held.hex() for name, held in news.items()}
            taught.add(self._teachers.append({"round": checkpoint.round, "blocks": blocks}))
        at = self.history.trim() if at is None else at
        journals = Journals(taught.size, taught.hex, at)
        written = replace(checkpoint, journals=journals)
        write_checkpoint(self.folder, written)
        self._accuracies[checkpoint.round] = checkpoint.levels.best
        return written

    def drop_latest(self) -> None:
        """Remove the newest checkpoint, unless it is the only one."""
        if len(rounds := self.rounds()) > 1:
            self._remove_checkpoint(rounds[-1])

    def prune(self, *, keep_last: int, keep_every: int, needed: Collection[int] = ()) -> None:
        """Keep the last few checkpoints, every n-th one, the best and those needed."""
        numbers, kept = self.rounds(), {self.best_round(), *needed}
        for number in numbers[:-keep_last]:
            if number % keep_every and number not in kept:
                self._remove_checkpoint(number)

    def best_round(self) -> int | None:
        """Return the round with the best accuracy of those kept, the earliest of several.

        None: no accuracy is known.
        """
        numbers = self.rounds()
        known = {each: self._accuracies[each] for each in numbers if each in self._accuracies}
        for number in numbers:
            if number not in known:
                known[number] = _accuracy_of(checkpoint_path(self.folder, number))
        self._accuracies = known
        return _best(known)

    def warn_of_best(self, newest: Checkpoint) -> None:
        """Log it if the checkpoint with the best accuracy is gone: another counts as the best."""
        found = self.best_round()
        kept = None if found is None else self._accuracies[found]
        if newest.best[0] > (-math.inf if kept is None else kept):
            log.warning(
                "the checkpoint with the best accuracy, %.2f%%, is missing: restore it from a "
                "backup, or the best of those that are kept is taken for it",
                100 * newest.best[0],
            )

    def read(self, round: int) -> Checkpoint:
        """Read the checkpoint of a round. Raises `RunError` if it is damaged or missing."""
        return read_checkpoint(checkpoint_path(self.folder, round), self.plan)

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, in ascending order."""
        return checkpoint_rounds(self.folder)

    def latest(self) -> Checkpoint:
        """Read the newest checkpoint. Raises `RunError` if it is damaged or missing."""
        rounds = self.rounds()
        if not rounds:
            raise RunError(
                f"{self.folder / CHECKPOINTS} contains no checkpoint: restore it from a backup"
            )
        checkpoint = self.read(rounds[-1])
        journals = checkpoint.journals or Journals()
        self.history.check_newest(journals.history, checkpoint.line, checkpoint.round)
        fleet = checkpoint.fleet
        teachers = fleet.teachers.joined(self._read_teachers(journals), fleet.samples)
        return replace(checkpoint, fleet=replace(fleet, teachers=teachers).settled())

    def _read_teachers(self, journals: Journals) -> dict[str, bytes]:
        """Read the blocks that devices had trained by a checkpoint; remove the lines behind."""
        path, taught = self._teachers.path, self._read_taught(journals.teachers)
        if (taught.size, taught.hex) != (journals.teachers, journals.check):
            raise RunError(
                f"{path} is damaged: its first {journals.teachers} bytes are not those of the "
                f"newest checkpoint; {repair_advice(self.folder)}"
            )
        self._teachers.cut(taught.size)
        self._taught = taught
        # A later line of a device has all that an earlier one has.
        entries = self._teachers.entries()
        return {n: bytes.fromhex(b) for entry in entries for n, b in entry["blocks"].items()}

    def _read_taught(self, size: int) -> RunningChecksum:
        taught = RunningChecksum()
        while piece := self._teachers.read(taught.size, min(size - taught.size, PIECE)):
            taught.add(piece)
        return taught

    def _quarantined(self, round: int) -> dict[str, DeviceStanding]:
        """Return the devices that were quarantined by a round; none if it cannot be read."""
        try:
            return quarantined(self.read(round).fleet.standings)
        except RunError:
            return {}

    def rollback(self, to_round: int) -> None:
        """Return to a checkpoint and continue from it; devices in quarantine stay there.

        Raises `ConfigError`, `RunError`.
        """
        rounds = self.rounds()
        if to_round not in rounds:
            known = ", ".join(map(str, rounds))
            raise ConfigError(f"round {to_round} has no checkpoint; there are {known}")
        checkpoint = self.read(to_round)
        back = {"from": rounds[-1], "to": to_round}
        if self.history.last().get("rolled_back", {}).get("to") != to_round:  # else cut short
            self.record({"rolled_back": back})
        fleet = checkpoint.fleet
        fleet = replace(fleet, standings=fleet.standings.merging(self._quarantined(rounds[-1])))
        write_checkpoint(self.folder, replace(checkpoint, memory=False, fleet=fleet))
        # First remove what belongs to the newest model: it would damage an older one.
        self._assigned = 0
        self._write_counters()
        for name in (ROUND, KEPT, MOVEMENTS, MEMORY):
            remove_folder(self.folder / name)
        sync_folder(self.folder)
        for number in reversed([each for each in rounds if each > to_round]):
            self._remove_checkpoint(number)
        sync_folder(self.folder / CHECKPOINTS)

    def _remove_checkpoint(self, round: int) -> None:
        remove(checkpoint_path(self.folder, round))
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
        self.history.append(entry)

    def is_recorded(self, checkpoint: Checkpoint) -> bool:
        """True if the history has the line of a checkpoint."""
        return self.history.has((checkpoint.journals or Journals()).history, checkpoint.line)

    def record_line(self, checkpoint: Checkpoint) -> None:
        """Append the line of a checkpoint to the history, unless it is there.

        Raises `RunError` if the history is damaged.
        """
        journals = checkpoint.journals or Journals()
        self.history.settle(journals.history, checkpoint.line)

    def check_digest(self, checkpoint: Checkpoint, digest: str) -> None:
        """Raise `RunError` if the model of a checkpoint is not that of its line of history."""
        noted = None if checkpoint.line is None else checkpoint.line.get("digest")
        if noted not in (None, digest):
            raise RunError(
                f"the model of round {checkpoint.round} is not the one in {self.history.path}: its "
                f"digest is {digest[:12]}…, not {str(noted)[:12]}…; {repair_advice(self.folder)}"
            )

    def _write_counters(self) -> None:
        counters = Counters(
            opened=self.opened,
            assigned=self._assigned,
            session=self._session,
            epoch=self.epoch,
            place=self._place,
            moved=self.moved,
        )
        write_counters(self.folder, counters)


def read_history(folder: Path) -> Iterator[dict[str, Any]]:
    """Read a run's history, even if the run is open elsewhere. Raises `ConfigError`."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    return read_lines(folder / HISTORY)


WhichRound = int | Literal["best", "last"]
"""A round's number, the newest round, or the one with the best accuracy."""


def read_result(folder: Path, round: WhichRound = "last") -> SavedModel:
    """Read the model that a round of a run made, even if the run is open elsewhere.

    Its buffers are the statistics that were computed for the whole model, where there are any.
    Raises `ConfigError` and `RunError`.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    about, checks = read_about(folder)
    check_model(folder, checks)
    model = read_model(folder / MODEL)
    for _ in range(READ_TRIES):
        path = checkpoint_path(folder, _pick_round(folder, round))
        if path.is_file():
            break  # else a running coordinator removed it just now
    found = read_checkpoint(path, model.plan)
    weights = model.plan.unflatten(found.theta)
    origin = Origin(about.task, about.run, found.round, found.fleet.last_covered > 0)
    return replace(
        model, weights=weights, buffers=found.buffers, levels=found.levels, origin=origin
    ).with_statistics()


def _pick_round(folder: Path, round: WhichRound) -> int:
    """Return the number of a round that has a checkpoint. Raises `ConfigError`, `RunError`."""
    rounds = checkpoint_rounds(folder)
    if not rounds:
        raise RunError(f"{folder / CHECKPOINTS} contains no checkpoint")
    if round == "last":
        return rounds[-1]
    if round == "best":
        paths = {each: checkpoint_path(folder, each) for each in rounds}
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
    or it was removed. Raises `RunError` if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            state = open_json(file.get_tensor(STATE).tobytes())
        return unpack_levels(state["levels"], {}).best if "levels" in state else None
    except FileNotFoundError:
        return None
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise _damaged_checkpoint(path, error) from error


def _damaged_checkpoint(path: Path, error: Exception) -> RunError:
    folder = path.parent.parent
    earlier = [each for each in checkpoint_rounds(folder) if each < int(path.stem)]
    back = f"tessera-coordinator rollback {folder} --to-round {earlier[-1]}" if earlier else ""
    return RunError(
        f"checkpoint {path} is damaged ({error}): {back}{', or ' if back else ''}"
        f"{repair_advice(folder)}"
    )


def checkpoint_rounds(folder: Path) -> list[int]:
    """Return the rounds that have a checkpoint, in ascending order."""
    found = (folder / CHECKPOINTS).glob("*.safetensors")
    return sorted(int(path.stem) for path in found if path.stem.isdecimal())


# -- formats -------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to its file, with its places in the journals."""
    parts = _encode(checkpoint)

    def write(file: BinaryIO) -> None:
        for part in parts:
            file.write(part)

    write_whole(checkpoint_path(folder, checkpoint.round), write, mode=PRIVATE)


def _encode(checkpoint: Checkpoint) -> Iterable[Bytes]:
    fleet = checkpoint.fleet
    levels, statistics = pack_levels(checkpoint.levels)
    sums, collected = pack_pending(checkpoint.pending)
    arrays = {
        **statistics,
        **sums,
        "theta": checkpoint.theta,
        "last_covered": fleet.last_covered,
        "times_covered": fleet.times_covered,
        **{f"{_BUFFER}{name}": array for name, array in checkpoint.buffers.items()},
        **pack_usual(fleet.usual),
        **({} if fleet.importance is None else {"importance": fleet.importance}),
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
                "learning_rate": past.learning_rate,
            }
            for round, past in checkpoint.past.items()
        },
    }
    if checkpoint.optimizer != "none":
        state["optimizer"] = checkpoint.optimizer
    if checkpoint.journals is not None:
        state["journals"] = asdict(checkpoint.journals)
    if checkpoint.orders:
        state["orders"] = checkpoint.orders
    state |= {"memory": checkpoint.memory, "line": checkpoint.line, **collected}
    # An array, not the file's metadata, which is limited to 100 MB. Its own checksum lets it be
    # read alone.
    arrays[STATE] = np.frombuffer(seal_json(state), np.uint8)
    return save_arrays({name: np.asarray(each, order="C") for name, each in arrays.items()})


def read_checkpoint(path: Path, plan: ModelPlan) -> Checkpoint:
    """Read a checkpoint. Raises `RunError` if it is damaged, missing or of another plan."""
    from safetensors import SafetensorError, safe_open

    try:
        check_arrays(mapped(path))
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = open_json(arrays[STATE].tobytes())
        checkpoint = build_checkpoint(state, arrays)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise _damaged_checkpoint(path, error) from error
    plan.check_buffers(checkpoint.buffers)
    blocks = checkpoint.fleet.last_covered.shape
    vectors: list[Array] = [checkpoint.theta]
    if checkpoint.pending is not None:
        vectors.append(checkpoint.pending.total)
    fits = all(each.shape == (plan.parameters,) for each in vectors)
    if not fits or blocks != (plan.block_count,):
        raise RunError(f"checkpoint {path} belongs to another plan")
    return checkpoint


def build_checkpoint(state: Mapping[str, Any], arrays: Mapping[str, Array]) -> Checkpoint:
    """Make a checkpoint of its state and arrays. Raises as they do that lack something."""
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
            importance=arrays.get("importance"),
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
                learning_rate=past.get("learning_rate"),
            )
            for round, past in state["past"].items()
        },
        counted=state["counted"],
        levels=unpack_levels(state["levels"], arrays) if "levels" in state else LevelScores(),
        optimizer=state.get("optimizer", "none"),
        memory=state["memory"],
        pending=unpack_pending(state, arrays),
        line=state["line"],
        orders=state.get("orders", 0),
        journals=Journals(**state["journals"]) if "journals" in state else None,
    )


def _expected(
    groups: Mapping[str, list[int]], level: float, samples: int, limit: float | None = None
) -> Expected:
    return Expected({axis: tuple(ids) for axis, ids in groups.items()}, level, samples, limit)


def read_about(folder: Path) -> tuple[About, Mapping[str, str]]:
    """Read the identity of a run, and the checksums of its model's files."""
    path = folder / ABOUT
    try:
        data = path.read_bytes()
        try:
            content = open_json(data)
        except DamagedBytes:
            content = json.loads(data)
            if content["format"] != FORMAT - 1:
                raise
        if content["format"] != FORMAT:
            raise RunError(
                f"{folder} has format {content['format']}, and this version reads {FORMAT}: "
                + (
                    "its files have no checksums yet; tessera-coordinator repair adds them"
                    if content["format"] == FORMAT - 1
                    else "go on with the version that made it"
                )
            )
        about = About(**{entry.name: content[entry.name] for entry in fields(About)})
        return about, dict(content["model"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RunError(
            f"{path} is damaged ({error}): restore it from a backup; the model of a checkpoint can "
            "still be read with the safetensors library"
        ) from error


def check_model(folder: Path, checks: Mapping[str, str]) -> None:
    """Compare the files of a run's model with their checksums. Raises `RunError`."""
    for name, check in checks.items():
        path = folder / MODEL / name
        found = checksum_of(path) if path.is_file() else None
        if found != check:
            raise RunError(
                f"{path} is {'missing' if found is None else 'damaged'}: restore it from a backup, "
                "or from another run of the same task and seed"
            )


def read_counters(folder: Path) -> Counters:
    """Read the counters of a run. Raises `RunError`."""
    path = folder / COUNTERS
    try:
        content = open_json(path.read_bytes())
        opened, assigned, session = (int(content[key]) for key in ("opened", "assigned", "session"))
        epoch, place = content.get("epoch"), content.get("place")
        return Counters(
            opened=opened,
            assigned=assigned,
            session=session,
            epoch=None if epoch is None else Epoch(*epoch),
            place=None if place is None else int(place),
            moved=None if content.get("moved") is None else float(content["moved"]),
        )
    except (ValueError, KeyError, TypeError, OSError, MessageError) as error:
        raise RunError(f"{path} is damaged ({error}): {repair_advice(folder)}") from error


def write_counters(folder: Path, counters: Counters) -> None:
    """Write the counters of a run."""
    content: dict[str, Any] = {
        "opened": counters.opened,
        "assigned": counters.assigned,
        "session": counters.session,
    }
    if counters.epoch is not None:
        content["epoch"] = [counters.epoch.counter, counters.epoch.instance]
        content["place"] = counters.place
    if counters.moved is not None:
        content["moved"] = counters.moved
    write_json(folder / COUNTERS, content)


def moments_path(folder: Path, round: int) -> Path:
    """Return the path of the optimiser's moments after a round."""
    return folder / CHECKPOINTS / f"{round:08}.moments"


def checkpoint_path(folder: Path, round: int) -> Path:
    """Return the path of a checkpoint."""
    return folder / CHECKPOINTS / f"{round:08}.safetensors"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping with its checksum, readable by its owner only."""
    write_whole(path, seal_json(content), mode=PRIVATE)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from opening a run. Raises `ConfigError`, `RunError`."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    lock = _lock(folder)
    try:
        yield
    finally:
        os.close(lock)


def is_starting(folder: Path) -> bool:
    """True if a process has a run open which it is about to serve, and answers nobody yet."""
    if not _says_starting(folder):
        return False
    try:
        os.close(lock_file(folder / LOCK, mode=PRIVATE))
    except BlockingIOError:
        return _says_starting(folder)
    except OSError:
        pass
    return False  # that process was killed


def starting_words(folder: Path) -> str:
    """Say that a run is starting, and what to do."""
    return f"{folder}: the run is starting; try again in a moment"


def _says_starting(folder: Path) -> bool:
    try:
        return (folder / LOCK).read_bytes() == STARTING
    except OSError:
        return False


def _lock(folder: Path) -> int:
    until = time.monotonic() + GLANCE_S
    while True:
        try:
            lock = lock_file(folder / LOCK, mode=PRIVATE)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(GLANCE_S / 10)
                continue
            if _says_starting(folder):
                raise RunError(starting_words(folder)) from None
            raise RunError(f"{folder} is open in another process: stop that process") from None
        mark(lock, b"")  # what a process that was killed left there
        return lock
