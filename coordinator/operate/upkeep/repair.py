"""Repairs a damaged run: finds the steps that let it go on, says what each loses, and takes them.

    an end that was cut short       is removed
    counters                        are made anew from what the other files say
    a kept movement                 is dropped: its device counts as silent
    the open round's journal        is dropped: the round is void, and its movements with it
    an older checkpoint             is dropped: nothing goes back to it any more
    the newest, or its moments      the run goes back to the newest that is whole
    a device's entries in memory    are dropped, and the sums computed anew
    memory's index                  all of memory is dropped: it begins empty
    lines of the history            are dropped; so are those of the teachers and of the audit
    orders of operators             are dropped: run.toml holds again
    published chunks, join codes    are forgotten

The run's identity and its first model cannot be made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.aggregate.memory.disk.memory import INDEX
from coordinator.aggregate.memory.disk.upkeep import repair_memory
from coordinator.checksums import DamagedBytes, RunningChecksum, open_json
from coordinator.operate.joining.codes import FOLDER as JOIN
from coordinator.operate.upkeep.inspection import NEWEST, FileFinding, Inspection
from coordinator.operate.upkeep.upgrade import add_checksums, needs_checksums
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
    Counters,
    Journals,
    Run,
    checkpoint_path,
    checkpoint_rounds,
    moments_path,
    read_counters,
    write_checkpoint,
    write_counters,
)
from coordinator.run.forgetting import FORGET
from coordinator.run.journal import Journal
from coordinator.run.lines import PRIVATE
from coordinator.run.steering.audit import AUDIT
from coordinator.run.steering.orders import STEERING
from edge_sdk.program.files import remove, remove_folder, sync_folder, write_whole


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One step of a repair."""

    words: str
    """What is done, and what is lost."""
    take: Callable[[], None]


def find_steps(folder: Path) -> list[RepairStep]:
    """Return the steps that repair a run, in order; none if it is whole.

    Nobody may have the run open. Raises `RunError` if it cannot be repaired.
    """
    if needs_checksums(folder):
        words = f"{folder}: checksums are added to the files of an earlier version; nothing is lost"
        return [RepairStep(words, partial(add_checksums, folder))]
    look = Inspection(folder)
    bad = [found for found in look.all() if found.condition != "good"]
    beyond = [found for found in bad if found.path.parts[0] in (ABOUT, MODEL)]
    if beyond:
        raise RunError(
            f"{folder / beyond[0].path} cannot be repaired ({beyond[0].problem}): restore it from "
            "a backup"
        )
    return list(_Steps(folder, look, bad).all())


class _Steps:
    """The steps for what an inspection found."""

    def __init__(self, folder: Path, look: Inspection, bad: list[FileFinding]) -> None:
        self._folder = folder
        self._look = look
        self._bad = {each.path: each for each in bad}
        """By path within the folder."""

    def all(self) -> Iterator[RepairStep]:
        """Give the steps in the order to take them."""
        yield from self._counters()
        back = self._fall_back()
        if back is not None:
            yield back
            yield from self._lines()
            yield from self._small()
            return
        yield from self._older_checkpoints()
        yield from self._open_round()
        yield from self._lines()
        yield from self._memory()
        yield from self._small()

    def _is_bad(self, *parts: str) -> bool:
        return Path(*parts) in self._bad

    def _counters(self) -> Iterator[RepairStep]:
        if self._is_bad(COUNTERS):
            yield RepairStep(
                f"{COUNTERS}: is made anew from the other files; some round numbers are left out, "
                "and the folder no longer knows which coordinator served it last: make sure that "
                "no other copy of it is in use",
                self._make_counters,
            )

    def _make_counters(self) -> None:
        folder = self._folder
        journal = folder / ROUND
        try:
            opened = Journal(journal).read()
        except RunError:
            opened = None
        assigned = 0 if opened is None else opened.round
        known = [*checkpoint_rounds(folder), assigned]
        known += [int(path.name.partition("-")[0]) for path in (folder / MOVEMENTS).glob("*-*")]
        known += [int(line.get("round", 0)) for line in _whole_lines(folder / HISTORY)]
        # A round may have been opened, and forgotten with the file: its number is left out.
        last = max(known) + (0 if opened is not None and assigned == max(known) else 1)
        write_counters(folder, Counters(opened=last, assigned=assigned, session=0))

    def _fall_back(self) -> RepairStep | None:
        """Return the step to the newest whole checkpoint; None if that is the newest."""
        rounds = checkpoint_rounds(self._folder)
        whole = [round for round in rounds if not self._is_bad_round(round)]
        if not whole:
            raise RunError(
                f"{self._folder / CHECKPOINTS} has no whole checkpoint: restore it from a backup"
            )
        back = partial(self._go_back, whole[-1])
        if self._is_bad(CHECKPOINTS, NEWEST):
            words = f"{CHECKPOINTS}: the newest is missing; the run goes back to round {whole[-1]}"
            return RepairStep(f"{words}, without the open round and the rule's memory", back)
        if whole[-1] == rounds[-1]:
            return None
        first = self._bad.get(Path(CHECKPOINTS, checkpoint_path(self._folder, rounds[-1]).name))
        name = f"{rounds[-1]:08}.safetensors" if first else f"{rounds[-1]:08}.moments"
        words = (
            f"{CHECKPOINTS}/{name}: the run goes back from round {rounds[-1]} to round "
            f"{whole[-1]}; the rounds between are lost, and so are the open round and the rule's "
            "memory"
        )
        return RepairStep(words, back)

    def _go_back(self, to_round: int) -> None:
        with Run(self._folder) as run:
            run.rollback(to_round)

    def _is_bad_round(self, round: int) -> bool:
        folder = self._folder
        paths = checkpoint_path(folder, round), moments_path(folder, round)
        return any(path.relative_to(folder) in self._bad for path in paths)

    def _older_checkpoints(self) -> Iterator[RepairStep]:
        for round in checkpoint_rounds(self._folder)[:-1]:
            if self._is_bad_round(round):
                paths = checkpoint_path(self._folder, round), moments_path(self._folder, round)
                yield RepairStep(
                    f"{CHECKPOINTS}/{round:08}: is dropped; the run cannot go back to round "
                    f"{round}, and goes on as before",
                    partial(_remove_all, paths),
                )

    def _open_round(self) -> Iterator[RepairStep]:
        if self._is_bad(ROUND):
            kept = len(list((self._folder / MOVEMENTS).glob("*")))
            yield RepairStep(
                f"{ROUND}: the open round is void, and the next one opens; {kept} movements that "
                "were kept for it are lost",
                self._drop_round,
            )
            return
        for path in self._bad:
            if path.parts[0] == MOVEMENTS:
                number, _, device = path.name.partition("-")
                yield RepairStep(
                    f"{path}: the movement of {device!r} for round {int(number)} is lost here; "
                    "the device sends it again, or counts as silent",
                    partial(self._drop_movement, path),
                )

    def _drop_round(self) -> None:
        write_counters(self._folder, replace(read_counters(self._folder), assigned=0))
        for name in (KEPT, ROUND, MOVEMENTS):
            remove_folder(self._folder / name)
        sync_folder(self._folder)

    def _drop_movement(self, path: Path) -> None:
        remove(self._folder / KEPT)  # it names the lost one; the others speak for themselves
        remove(self._folder / path)
        sync_folder(self._folder)

    def _lines(self) -> Iterator[RepairStep]:
        for name, lost in (
            (HISTORY, "their rounds are missing from the history"),
            (TEACHERS, "who trained which block is counted anew for their devices"),
            (AUDIT, "their orders still hold"),
        ):
            if self._is_bad(name):
                path = self._folder / name
                there = path.read_bytes().count(b"\n") if path.is_file() else 0
                whole = len(list(_whole_lines(path)))
                yield RepairStep(
                    f"{name}: {whole} lines are kept, {max(0, there - whole)} damaged ones and any "
                    f"that were cut off are lost: {lost}",
                    partial(self._keep_whole_lines, name),
                )

    def _keep_whole_lines(self, name: str) -> None:
        path = self._folder / name
        if name == AUDIT:
            write_whole(path, b"".join(line for line, _ in _read_whole(path)), mode=PRIVATE)
            return
        newest = _newest(self._folder, self._look)
        lines = [
            line
            for line, entry in _read_whole(path)
            if name == HISTORY or entry["round"] <= newest.round
        ]
        write_whole(path, b"".join(lines), mode=PRIVATE)
        at = newest.journals or Journals()
        if name == TEACHERS:
            taught = RunningChecksum()
            for line in lines:
                taught.add(line)
            at = replace(at, teachers=taught.size, check=taught.hex)
        else:
            own = [entry for _, entry in _read_whole(path)]
            has = newest.line is not None and dict(newest.line) in own
            newest = replace(newest, line=None if has else newest.line)
            at = replace(at, history=sum(map(len, lines)))
        write_checkpoint(self._folder, replace(newest, journals=at))

    def _memory(self) -> Iterator[RepairStep]:
        bad = [each for path, each in self._bad.items() if path.parts[0] == MEMORY]
        plan = self._look.plan
        if not bad or plan is None:
            return
        if self._is_bad(MEMORY, INDEX):
            yield RepairStep(
                f"{MEMORY}/{INDEX}: all of memory is dropped; the rule begins with an empty one, "
                "and hears of a device again when it trains",
                self._drop_memory,
            )
            return
        words = "; ".join(f"{each.path}: {each.problem}" for each in bad)
        yield RepairStep(
            f"{words}. Entries of devices that are named here are dropped, as if they had never "
            "trained; the sums are computed anew, so that their last bits may differ",
            partial(repair_memory, self._folder / MEMORY, plan),
        )

    def _drop_memory(self) -> None:
        newest = _newest(self._folder, self._look)
        write_checkpoint(self._folder, replace(newest, memory=False))
        remove_folder(self._folder / MEMORY)
        sync_folder(self._folder)

    def _small(self) -> Iterator[RepairStep]:
        if self._is_bad(PUBLISHED):
            yield RepairStep(
                f"{PUBLISHED}: is dropped; a broker may keep chunks that nobody needs",
                partial(remove, self._folder / PUBLISHED),
            )
        for name, lost in (
            (START, "the next start writes it again"),
            (DELIVERY, "the next model is tried by some devices first, as if it were the first"),
        ):
            if self._is_bad(name):
                yield RepairStep(
                    f"{name}: is dropped; {lost}", partial(remove, self._folder / name)
                )
        if self._is_bad(STEERING):
            yield RepairStep(
                f"{STEERING}: is dropped; a pause, settings that were changed while the run was "
                "served and quarantine since the newest round are lost, and run.toml holds again: "
                "tessera-coordinator audit shows what was asked",
                partial(remove, self._folder / STEERING),
            )
        if self._is_bad(FORGET):
            yield RepairStep(
                f"{FORGET}: is dropped; ask again to forget the device",
                partial(remove, self._folder / FORGET),
            )
        for path in self._bad:
            if path.parts[0] == JOIN:
                yield RepairStep(
                    f"{path}: is dropped; open join codes are void, devices that have joined stay",
                    partial(remove, self._folder / path),
                )


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        remove(path)


def _newest(folder: Path, look: Inspection) -> Checkpoint:
    """Read the newest checkpoint as the steps before have left it."""
    for _ in look.checkpoints():
        pass
    if look.newest is None:
        raise RunError(f"{folder / CHECKPOINTS} has no whole checkpoint")
    return look.newest


def _read_whole(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Read the lines that match their checksums."""
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        entry = _entry(line)
        if entry is not None:
            yield line, entry


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for _, entry in _read_whole(path):
        yield entry


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        return open_json(line)
    except DamagedBytes:
        return None
