"""Looks at a whole memory folder, and saves what can be saved of a damaged one.

Opening a folder checks its index and sums, and a round checks the movements it reads. This looks at
all the rest, too. The folder must not be open elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.aggregate.memory.disk.index import MemoryIndex, Row, SegmentRow
from coordinator.aggregate.memory.disk.memory import (
    INDEX,
    DiskMemory,
    memory_config,
    read_sums,
    sums_path,
    write_sums,
)
from coordinator.aggregate.memory.disk.segments import SegmentMaps, map_segment, segment_name
from coordinator.aggregate.memory.errors import ADVICE, MemoryDamaged, MemoryStoreError
from coordinator.aggregate.memory.sums import Sums
from coordinator.aggregate.memory.values import VALUE_TYPES
from edge_sdk.program.files import sync_folder
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True)
class MemoryFinding:
    """The state of one file of a memory folder."""

    path: Path
    problem: str = ""
    """Empty: it is as it should be."""
    devices: frozenset[str] = frozenset()
    """Devices whose movements are damaged."""


def check_memory(folder: Path, plan: ModelPlan) -> Iterator[MemoryFinding]:
    """Look at every file that a memory needs; files of no use to it are left out."""
    path = folder / INDEX
    if not (path.is_file() and path.stat().st_size):
        yield MemoryFinding(path, "it is missing or empty")
        return
    try:
        index = MemoryIndex(path, plan.block_count)
    except MemoryStoreError as error:
        yield MemoryFinding(path, _without_advice(error))
        return
    try:
        if "commits" not in index.about():
            yield MemoryFinding(path, "it holds nothing")
            return
        yield MemoryFinding(path)
        yield _check_sums(folder, plan, index)
        maps = SegmentMaps(folder, VALUE_TYPES[memory_config(index).memory_type])
        for row in index.segments():
            yield _check_segment(folder, plan, index, maps, row)
    finally:
        index.close()


def repair_memory(folder: Path, plan: ModelPlan) -> None:
    """Drop the devices of which anything is damaged, and compute the sums anew.

    Raises `MemoryStoreError` if the index is damaged: then nothing can be saved.
    """
    damaged = {name for each in check_memory(folder, plan) for name in each.devices}
    index = MemoryIndex(folder / INDEX, plan.block_count)
    try:
        config = memory_config(index)
        for device in sorted(damaged):
            for row in index.of_device(device):
                index.drop(row.key)
            index.set_rounds(device, np.zeros(plan.block_count, dtype=np.int32))
        for segment in index.segments():
            live = sum(_live_values(plan, index, row) for row in index.of_segment(segment.number))
            if live:
                index.set_segment(SegmentRow(segment.number, segment.size, segment.total, live))
            else:
                index.drop_segment(segment.number)
        # Sums of nothing, so that the folder opens; then those of what is left.
        sums = Sums(plan, VALUE_TYPES[config.memory_type], totals=config.sums, threads=1)
        commit = int(index.about()["commits"]) + 1
        write_sums(folder, commit, sums.arrays)
        sync_folder(folder)
        index.set_about({"commits": commit})
        index.commit()
        names = index.device_names()
    finally:
        index.close()
    memory = DiskMemory(folder, plan, config, reserve_bytes=0)
    try:
        memory.recount(names)
        memory.commit()
    finally:
        memory.close()


def _check_sums(folder: Path, plan: ModelPlan, index: MemoryIndex) -> MemoryFinding:
    commit = int(index.about()["commits"])
    path = sums_path(folder, commit)
    if not commit:
        return MemoryFinding(path)
    config = memory_config(index)
    sums = Sums(plan, VALUE_TYPES[config.memory_type], totals=config.sums, threads=1)
    try:
        read_sums(folder, commit, sums.arrays)
    except MemoryDamaged as error:
        return MemoryFinding(path, _without_advice(error))
    return MemoryFinding(path)


def _check_segment(
    folder: Path, plan: ModelPlan, index: MemoryIndex, maps: SegmentMaps, segment: SegmentRow
) -> MemoryFinding:
    """Compare the movements in a segment with their checksums."""
    path, rows = folder / segment_name(segment.number), index.of_segment(segment.number)
    try:
        map_segment(path, segment.number, segment.size)
    except MemoryDamaged as error:
        return MemoryFinding(path, _without_advice(error), frozenset(row.device for row in rows))
    kind = VALUE_TYPES[memory_config(index).memory_type]
    bad = set()
    for row in rows:
        values = int(plan.block_sizes[row.ids].sum())
        scales = len(row.ids) if kind.scaled else 0
        if maps.content(row.segment, row.offset, scales, values) != row.content:
            bad.add(row.device)
    problem = f"movements of {', '.join(sorted(bad))} do not match their checksums" if bad else ""
    return MemoryFinding(path, problem, frozenset(bad))


def _without_advice(error: MemoryStoreError) -> str:
    return str(error).removesuffix(f"; {ADVICE}")


def _live_values(plan: ModelPlan, index: MemoryIndex, row: Row) -> int:
    live = index.rounds(row.device)[row.ids] == row.made.round
    return int(plan.block_sizes[row.ids[live]].sum())
