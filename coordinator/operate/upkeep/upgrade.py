"""Adds checksums to a run of the version before, whose files had none.

Every file is written anew as this version would have; `run.json` last, so that an upgrade that was
cut short is taken up again. What was damaged before cannot be told from what was not.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from coordinator.aggregate.memory.contract import Made, MemoryType
from coordinator.aggregate.memory.disk.index import VERSION, MemoryIndex, SegmentRow
from coordinator.aggregate.memory.disk.memory import INDEX, sums_header, sums_path
from coordinator.aggregate.memory.disk.segments import SegmentMaps
from coordinator.aggregate.memory.sums import Sums
from coordinator.aggregate.memory.values import VALUE_TYPES
from coordinator.checksums import (
    DamagedBytes,
    RunningChecksum,
    check_arrays,
    checksum,
    mapped,
    open_json,
    open_sealed,
    seal_json,
)
from coordinator.operate.upkeep.inspection import read_plan
from coordinator.run.errors import RunError
from coordinator.run.folder import (
    ABOUT,
    CHECKPOINTS,
    COUNTERS,
    FORMAT,
    HISTORY,
    MEMORY,
    MODEL,
    MOVEMENTS,
    PUBLISHED,
    ROUND,
    STATE,
    TEACHERS,
    About,
    Journals,
    build_checkpoint,
    checkpoint_path,
    checkpoint_rounds,
    make_private,
    moments_path,
    write_about,
    write_checkpoint,
    write_json,
)
from coordinator.run.lines import PRIVATE
from coordinator.run.moments import HEADER, MAGIC
from coordinator.task.saved_model import PLAN
from edge_sdk.program.files import PlacedFile, move, remove, remove_leftovers, write_whole
from edge_sdk.protocol.plan.plan import ModelPlan

OLD_HEADER = struct.Struct("<24s16sq16x")
OLD_SUMS_HEADER = struct.Struct("<24sq32x")


def needs_checksums(folder: Path) -> bool:
    """True if a run was made by the version before."""
    try:
        data = (folder / ABOUT).read_bytes()
        return bool(json.loads(data)["format"] == FORMAT - 1)
    except (ValueError, KeyError, TypeError, OSError):
        return False


def add_checksums(folder: Path) -> None:
    """Write every file anew with its checksum. Raises `RunError` if one cannot be read."""
    for each in (folder, folder / CHECKPOINTS):
        remove_leftovers(each)
    plan = read_plan(folder / MODEL / PLAN)
    if plan is None:
        raise RunError(f"{folder / MODEL / PLAN} cannot be read: restore it from a backup")
    about = json.loads((folder / ABOUT).read_bytes())
    history, teachers = folder / HISTORY, folder / TEACHERS
    for path in (history, teachers):
        if path.is_file():
            write_whole(path, b"".join(map(seal_json, _lines(path))), mode=PRIVATE)
    _seal_checkpoints(folder)
    journal = folder / ROUND
    opened = _content(journal) if journal.is_file() else None
    if opened is not None:
        write_json(journal, opened)
    counters = _content(folder / COUNTERS)
    assigned = 0 if opened is None else opened["round"]
    write_json(folder / COUNTERS, {"assigned": assigned, **counters})
    for path in (folder / MOVEMENTS).glob("*-*"):
        _seal_bytes(path)
    if (folder / MEMORY / INDEX).is_file():
        _seal_memory(folder / MEMORY, plan)
    remove(folder / PUBLISHED)
    make_private(folder)
    write_about(folder, About(**{each.name: about[each.name] for each in fields(About)}))


def _content(path: Path) -> dict[str, Any]:
    """Read a JSON file, sealed or not."""
    return _opened(path.read_bytes())


def _opened(data: bytes) -> dict[str, Any]:
    try:
        return open_json(data)
    except DamagedBytes:
        content: dict[str, Any] = json.loads(data)
        return content


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Read lines, sealed or not; those that crashes cut short are left out."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = _opened(line)
        except ValueError:
            continue
        found.append(entry)
    return found


def _seal_bytes(path: Path) -> None:
    data = path.read_bytes()
    try:
        open_sealed(data)
    except DamagedBytes:
        write_whole(path, data + checksum(data), mode=PRIVATE)


def _seal_checkpoints(folder: Path) -> None:
    """Write checkpoints anew, with their places in journals that have been sealed."""
    from safetensors import safe_open

    history = (folder / HISTORY).stat().st_size if (folder / HISTORY).is_file() else 0
    lines = list(_lines(folder / TEACHERS)) if (folder / TEACHERS).is_file() else []
    rounds = checkpoint_rounds(folder)
    for round in rounds:
        _seal_moments(moments_path(folder, round))
        path = checkpoint_path(folder, round)
        try:
            check_arrays(mapped(path))
            continue
        except DamagedBytes:
            pass
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        taught = RunningChecksum()
        for line in lines:
            if line["round"] <= round:
                taught.add(seal_json(line))
        journals = Journals(taught.size, taught.hex, history)
        memory = round == rounds[-1] > 0 and (folder / MEMORY / INDEX).is_file()
        state = json.loads(arrays[STATE].tobytes()) | {"memory": memory, "line": None}
        state["journals"] = {each.name: getattr(journals, each.name) for each in fields(Journals)}
        write_checkpoint(folder, build_checkpoint(state, arrays))


def _seal_moments(path: Path) -> None:
    data = mapped(path) if path.is_file() else memoryview(b"")
    if len(data) < HEADER.size or bytes(data[: len(MAGIC)]) == MAGIC:
        return
    _, optimizer, parameters = OLD_HEADER.unpack(data[: HEADER.size])
    moments = bytes(data[HEADER.size :])
    start = HEADER.pack(MAGIC, optimizer, parameters, bytes(8))
    sealed = HEADER.pack(MAGIC, optimizer, parameters, checksum(start, moments))
    write_whole(path, sealed + moments, mode=PRIVATE)


def _seal_memory(folder: Path, plan: ModelPlan) -> None:
    """Make the index anew, with the checksums of the values as they are now."""
    old = sqlite3.connect(folder / INDEX)
    about = dict(old.execute("SELECT name, value FROM about"))
    if about.get("version") == str(VERSION):
        old.close()
        return
    draft = folder / "index.new"
    remove(draft)
    index = MemoryIndex(draft, plan.block_count)
    kind = VALUE_TYPES[about["dtype"]]
    maps = SegmentMaps(folder, kind)
    index.set_about({**about, "version": VERSION})
    for name, rounds in old.execute("SELECT name, rounds FROM devices"):
        index.set_rounds(name, np.frombuffer(rounds, dtype="<i4").astype(np.int32))
    for row in old.execute("SELECT number, size, total, live FROM segments"):
        index.set_segment(SegmentRow(*row))
    for name, made, rate, level, weight, segment, offset, blocks in old.execute(
        "SELECT device, made, learning_rate, level, weight, segment, offset, blocks FROM movements"
        " ORDER BY key"
    ):
        held = np.unpackbits(np.frombuffer(blocks, dtype=np.uint8), count=plan.block_count)
        ids = np.flatnonzero(held)
        key = index.add(name, Made(made, rate, level, weight), segment, offset, ids)
        found = index.of_key(key)
        values, scales = int(plan.block_sizes[ids].sum()), len(ids) if kind.scaled else 0
        if found is not None:
            index.seal(found, maps.content(segment, offset, scales, values))
    index.commit()
    index.close()
    old.close()
    _seal_sums(folder, plan, int(about["commits"]), about)
    for ending in ("-wal", "-shm"):
        remove(folder / f"{INDEX}{ending}")
    move(draft, folder / INDEX)


def _seal_sums(folder: Path, plan: ModelPlan, commit: int, about: dict[str, str]) -> None:
    path = sums_path(folder, commit)
    if not commit or not path.is_file():
        return
    kind = VALUE_TYPES[cast(MemoryType, about["dtype"])]
    sums = Sums(plan, kind, totals=about["sums"] == "True", threads=1)
    with path.open("rb") as file:
        file.seek(OLD_SUMS_HEADER.size)
        for array in sums.arrays:
            if array.size:
                file.readinto(array.data.cast("B"))
    placed = PlacedFile(path, new=False)
    try:
        placed.write_at(sums_header(commit, sums.arrays), 0)
        placed.sync()
    finally:
        placed.close()
