"""Looks at every file of a run's folder and compares it with its checksum.

A start checks what it reads: this checks everything, also what no start would read. Changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from coordinator.aggregate.memory.disk.index import MemoryIndex
from coordinator.aggregate.memory.disk.memory import INDEX
from coordinator.aggregate.memory.disk.upkeep import check_memory
from coordinator.checksums import DamagedBytes, open_json, open_sealed
from coordinator.errors import CoordinatorError
from coordinator.operate.joining.codes import BOOK, read_book
from coordinator.operate.joining.codes import FOLDER as JOIN
from coordinator.run.errors import RunError
from coordinator.run.folder import (
    ABOUT,
    CHECKPOINTS,
    COUNTERS,
    DELIVERY,
    HISTORY,
    KEPT,
    MEMORY,
    MODEL,
    MOVEMENTS,
    PUBLISHED,
    ROUND,
    START,
    TEACHERS,
    Checkpoint,
    Journals,
    checkpoint_path,
    checkpoint_rounds,
    checksum_of,
    moments_path,
    read_about,
    read_checkpoint,
    read_counters,
)
from coordinator.run.forgetting import FORGET, read_request
from coordinator.run.history import RunHistory
from coordinator.run.journal import Journal
from coordinator.run.lines import read_lines
from coordinator.run.moments import read_moments
from coordinator.run.steering.audit import AUDIT
from coordinator.run.steering.orders import STEERING, read_steered
from coordinator.service.receiving import kept_names, read_kept
from coordinator.task.saved_model import PLAN
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.plan import ModelPlan

NEWEST = "newest"
"""Name for a checkpoint that the history knows and that is missing."""

FileCondition = Literal["good", "damaged", "missing"]


@dataclass(frozen=True, slots=True)
class FileFinding:
    """The state of one file of a run."""

    path: Path
    """Within the run's folder."""
    condition: FileCondition
    problem: str = ""
    size: int = 0
    """Bytes."""


class Inspection:
    """Looks at the files of a run, which nobody may have open, one part after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: ModelPlan | None = None
        self.newest: Checkpoint | None = None
        """The newest checkpoint, once the checkpoints were looked at; None: it is damaged."""

    def all(self) -> Iterator[FileFinding]:
        """Look at every file."""
        for part in (
            self.identity,
            self.counters,
            self.checkpoints,
            self.journals,
            self.open_round,
            self.memory,
            self.others,
        ):
            yield from part()

    @property
    def plan(self) -> ModelPlan | None:
        """The plan of the run's model, once `identity` was called; None: it is damaged."""
        return self._plan

    def identity(self) -> Iterator[FileFinding]:
        """Look at the run's identity and at its model."""
        try:
            _, checks = read_about(self._folder)
        except RunError as error:
            yield self._bad(self._folder / ABOUT, error)
            return
        yield self._good(self._folder / ABOUT)
        for name, check in sorted(checks.items()):
            path = self._folder / MODEL / name
            if not path.is_file():
                yield self._bad(path, "it is missing")
            elif checksum_of(path) != check:
                yield self._bad(path, "its checksum does not match")
            else:
                yield self._good(path)
                if name == PLAN:
                    self._plan = read_plan(path)

    def counters(self) -> Iterator[FileFinding]:
        """Look at the counters."""
        yield self._tried(self._folder / COUNTERS, lambda: read_counters(self._folder))

    def checkpoints(self) -> Iterator[FileFinding]:
        """Look at all checkpoints, and at the moments beside them."""
        rounds = checkpoint_rounds(self._folder)
        if not rounds:
            yield self._bad(self._folder / CHECKPOINTS, "there is no checkpoint")
        for round in rounds if self._plan is not None else ():
            path, found = checkpoint_path(self._folder, round), None
            try:
                assert self._plan is not None  # noqa: S101  looked at above
                found = read_checkpoint(path, self._plan)
                yield self._good(path)
            except (RunError, ProtocolError) as error:
                yield self._bad(path, error)
            moments = moments_path(self._folder, round)
            if moments.is_file() or (found is not None and found.optimizer != "none"):
                yield self._tried(moments, partial(read_moments, moments))
            self.newest = found

    def journals(self) -> Iterator[FileFinding]:
        """Look at every line of the history, of the teachers and of the audit."""
        for name in (HISTORY, TEACHERS, AUDIT):
            path = self._folder / name
            if path.is_file() or self._expects(name):
                yield self._tried(path, partial(self._check_lines, path))
        if self.newest is not None and self.newest.journals is not None:
            history, at = RunHistory(self._folder / HISTORY), self.newest.journals.history
            try:
                history.check_newest(at, self.newest.line, self.newest.round)
            except RunError as error:
                if "checkpoint is missing" in str(error):
                    yield self._bad(self._folder / CHECKPOINTS / NEWEST, error)

    def _expects(self, name: str) -> int:
        """Return the bytes that a journal had at the newest checkpoint."""
        at = (self.newest and self.newest.journals) or Journals()
        if name == AUDIT:
            return 0
        return at.history if name == HISTORY else at.teachers

    def _check_lines(self, path: Path) -> None:
        for _ in read_lines(path):
            pass
        there = path.stat().st_size if path.is_file() else 0
        if there < self._expects(path.name):
            raise DamagedBytes(f"it has {there} bytes, not {self._expects(path.name)}")

    def open_round(self) -> Iterator[FileFinding]:
        """Look at the journal of the open round, and at the movements that were kept for it."""
        path = self._folder / ROUND
        if path.is_file():
            yield self._tried(path, Journal(path).read)
        elif self._lacks_journal():
            yield self._bad(path, "it is missing, and its round is open")
        movements = self._folder / MOVEMENTS
        there = {each.name: each for each in movements.glob("*")}
        for name in sorted(kept_names(self._folder / KEPT) - there.keys()):
            yield self._bad(movements / name, "it is missing, and its device has a receipt")
        for name in sorted(there):
            yield self._tried(there[name], partial(read_kept, there[name]))

    def _lacks_journal(self) -> bool:
        try:
            assigned = read_counters(self._folder).assigned
        except RunError:
            return False
        return self.newest is not None and assigned > self.newest.round

    def memory(self) -> Iterator[FileFinding]:
        """Look at every movement in memory; needs the checkpoints."""
        folder, newest = self._folder / MEMORY, self.newest
        needed = newest is not None and newest.memory
        if self._plan is None or not (folder.is_dir() or needed):
            return
        for found in check_memory(folder, self._plan):
            if found.problem:
                yield self._bad(found.path, found.problem)
            elif found.path.is_file():
                yield self._good(found.path)
        if needed and newest is not None and (folder / INDEX).is_file():
            yield from self._memory_round(newest)

    def _memory_round(self, newest: Checkpoint) -> Iterator[FileFinding]:
        assert self._plan is not None  # noqa: S101  looked at by the caller
        try:
            index = MemoryIndex(self._folder / MEMORY / INDEX, self._plan.block_count)
        except CoordinatorError:
            return  # said already
        now = int(index.about().get("now", 0))
        index.close()
        if now > newest.round or (now < newest.round and not self._closes_again(newest)):
            problem = f"it is of round {now}, and the newest checkpoint of round {newest.round}"
            yield self._bad(self._folder / MEMORY / INDEX, problem)

    def _closes_again(self, newest: Checkpoint) -> bool:
        """True if a crash cut the newest commit short: the next start closes its round again."""
        try:
            opened = Journal(self._folder / ROUND).read()
        except RunError:
            return False
        history = RunHistory(self._folder / HISTORY)
        recorded = history.has(self._expects(HISTORY), newest.line)
        return opened is not None and opened.round == newest.round and not recorded

    def others(self) -> Iterator[FileFinding]:
        """Look at what is not the model's: orders, chunks, join codes, a device to forget."""
        steering = self._folder / STEERING
        if steering.is_file():
            yield self._tried(steering, lambda: read_steered(self._folder))
        forget = self._folder / FORGET
        if forget.is_file():
            yield self._tried(forget, lambda: read_request(forget))
        path = self._folder / PUBLISHED
        if path.is_file():
            yield self._tried(path, lambda: open_sealed(path.read_bytes()))
        for name in (START, DELIVERY):
            small = self._folder / name
            if small.is_file():
                yield self._tried(small, partial(_open_file, small))
        book = self._folder / JOIN / BOOK
        if book.is_file():
            yield self._tried(book, lambda: read_book(book))

    def _tried(self, path: Path, look: Callable[[], object]) -> FileFinding:
        try:
            look()
        except (CoordinatorError, ProtocolError, ValueError, OSError) as error:
            return self._bad(path, error)
        return self._good(path)

    def _good(self, path: Path) -> FileFinding:
        size = path.stat().st_size if path.is_file() else 0
        return FileFinding(path.relative_to(self._folder), "good", size=size)

    def _bad(self, path: Path, error: Exception | str) -> FileFinding:
        there = path.exists()
        size = path.stat().st_size if path.is_file() else 0
        condition: FileCondition = "damaged" if there else "missing"
        cause = getattr(error, "__cause__", None) or error  # the error itself repeats the path
        return FileFinding(path.relative_to(self._folder), condition, str(cause), size)


def _open_file(path: Path) -> None:
    open_json(path.read_bytes())


def read_plan(path: Path) -> ModelPlan | None:
    """Read a plan; None if it cannot be read."""
    try:
        return decode_plan(path.read_bytes())
    except (ProtocolError, OSError):
        return None
