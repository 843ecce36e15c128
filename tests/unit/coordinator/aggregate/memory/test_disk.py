"""The folder of a memory: who may open it, what damage says, how much it holds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.memory import (
    DiskMemory,
    MemoryBusy,
    MemoryConfig,
    MemoryDamaged,
    MemoryStoreError,
    MemoryType,
    RamMemory,
    estimate_bytes,
)
from coordinator.aggregate.memory.disk.index import SCHEMA
from coordinator.errors import ConfigError
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim, Tensor
from tests.contract.memory.oracle import PLAN, movement

CONFIG = MemoryConfig(memory_type="fp32", damping=0.8)
ALL = list(range(PLAN.block_count))


def open_disk(folder: Path, config: MemoryConfig = CONFIG, plan: ModelPlan = PLAN) -> DiskMemory:
    return DiskMemory(folder, plan, config, reserve_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one committed round."""
    memory = open_disk(tmp_path)
    memory.advance(1)
    memory.write([movement("ada", 1, ALL, 1), movement("bob", 1, [0, 5], 2)])
    memory.commit()
    memory.close()
    return tmp_path


# -- opening -----------------------------------------------------------------------------------


def test_uncommitted_changes_are_lost_and_their_files_deleted(folder: Path) -> None:
    memory = open_disk(folder)
    before = memory.total.copy()
    memory.advance(2)
    memory.write([movement("ada", 2, ALL, 3)])
    memory.close()
    (folder / "segment-9.bin").write_bytes(b"left over")
    memory = open_disk(folder)
    assert memory.now == 1
    assert memory.total.tolist() == before.tolist()
    assert sorted(path.name for path in folder.glob("segment-*")) == ["segment-1.bin"]
    memory.close()


def test_prepared_changes_are_lost_and_committed_ones_are_not(folder: Path) -> None:
    memory = open_disk(folder)
    before = memory.total.copy()
    memory.advance(2)
    memory.write([movement("ada", 2, ALL, 3), movement("bob", 2, [0, 5], 4)])
    memory.prepare()
    after = memory.total.copy()
    memory.close()
    memory = open_disk(folder)
    assert (memory.now, memory.total.tolist()) == (1, before.tolist())
    memory.advance(2)
    memory.write([movement("ada", 2, ALL, 3), movement("bob", 2, [0, 5], 4)])
    memory.prepare()
    memory.commit(tidy=False)
    segments = sorted(path.name for path in folder.glob("segment-*"))
    assert segments == ["segment-1.bin", "segment-2.bin"]
    memory.close()
    memory = open_disk(folder)  # as after a kill before it was tidied
    assert (memory.now, memory.total.tolist()) == (2, after.tolist())
    assert [path.name for path in folder.glob("segment-*")] == ["segment-2.bin"]
    memory.close()


def test_change_after_preparing_is_prepared_too(folder: Path) -> None:
    memory = open_disk(folder)
    memory.advance(2)
    memory.write([movement("ada", 2, ALL, 3)])
    memory.prepare()
    memory.write([movement("bob", 2, [1, 5], 4)])
    memory.commit()
    total = memory.total.copy()
    memory.close()
    memory = open_disk(folder)
    assert memory.total.tolist() == total.tolist()
    assert memory.rounds("bob")[[0, 1, 5]].tolist() == [1, 2, 2]
    memory.close()


def test_folder_open_in_another_process_is_refused(folder: Path) -> None:
    memory = open_disk(folder)
    code = (
        "from tests.unit.coordinator.aggregate.memory.test_disk import open_disk\n"
        "from pathlib import Path\n"
        "from coordinator.aggregate.memory import MemoryBusy\n"
        f"try: open_disk(Path({str(folder)!r}))\n"
        "except MemoryBusy as error: print(error)"
    )
    root = Path(__file__).resolve().parents[5]
    run = [sys.executable, "-c", code]
    said = subprocess.run(run, capture_output=True, text=True, check=True, cwd=root).stdout
    assert f"{folder} is open in another process" in said
    memory.close()
    open_disk(folder).close()


def test_folder_open_twice_in_one_process_is_refused(folder: Path) -> None:
    memory = open_disk(folder)
    with pytest.raises(MemoryBusy):
        open_disk(folder)
    memory.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (replace(CONFIG, memory_type="int8"), "dtype fp32, not int8"),
        (replace(CONFIG, damping=1.0), "damping 0.8, not 1.0"),
        (replace(CONFIG, weighting="samples"), "weighting uniform, not samples"),
        (replace(CONFIG, sums=False), "sums True, not False"),
    ],
)
def test_memory_made_otherwise_is_refused(folder: Path, config: MemoryConfig, says: str) -> None:
    with pytest.raises(MemoryStoreError, match=says):
        open_disk(folder, config)
    open_disk(folder).close()


def test_memory_of_another_plan_is_refused(folder: Path) -> None:
    other = ModelPlan(axes=(), tensors=(Tensor("w", "float32", (Dim(3),)),))
    with pytest.raises(MemoryStoreError, match=f"plan {PLAN.hash}, not {other.hash}"):
        open_disk(folder, plan=other)


def test_shorter_staleness_may_be_asked_of_an_old_folder(folder: Path) -> None:
    memory = open_disk(folder, replace(CONFIG, max_staleness=0))
    memory.advance(2)
    assert memory.oldest() is None
    memory.close()


# -- damage ------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


@pytest.mark.parametrize("name", ["index.sqlite", "segment-1.bin", "sums-1.bin"])
@pytest.mark.parametrize("damage", [cut, overwrite, Path.unlink])
def test_damaged_file_is_named(folder: Path, name: str, damage: object) -> None:
    assert callable(damage)
    damage(folder / name)
    with pytest.raises(MemoryDamaged, match=name):
        open_disk(folder).recall("ada")
    assert (folder / "segment-1.bin").exists() or (name, damage) == ("segment-1.bin", Path.unlink)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE devices SET rounds = x'00' WHERE name = 'ada'", "name 'ada' in devices"),
        ("UPDATE movements SET weight = weight * 2 WHERE key = 1", "key 1 in movements"),
        ("UPDATE segments SET live = live + 1", "in segments"),
        ("DELETE FROM movements WHERE key = 1", "rows are missing"),
        ("UPDATE about SET value = value + 1 WHERE name = 'now'", "rows are missing"),
        ("DELETE FROM about", "rows are missing"),
    ],
)
def test_row_that_was_changed_or_lost_is_noticed(folder: Path, change: str, says: str) -> None:
    with sqlite3.connect(folder / "index.sqlite") as index:
        index.execute(change)
    index.close()
    with pytest.raises(MemoryDamaged, match=rf"index\.sqlite.*{says}.*repair"):
        open_disk(folder)


def test_segment_cut_short_while_open_is_named(folder: Path) -> None:
    memory = open_disk(folder)
    cut(folder / "segment-1.bin")
    with pytest.raises(MemoryDamaged, match=r"segment-1\.bin was cut short"):
        memory.recall("ada")
    memory.close()


def test_failed_write_makes_the_memory_unusable_until_reopened(folder: Path) -> None:
    memory = open_disk(folder)
    cut(folder / "segment-1.bin")
    memory.advance(2)
    with pytest.raises(MemoryDamaged):
        memory.write([movement("ada", 2, ALL, 3)])
    with pytest.raises(StateError, match="open it again"):
        memory.commit()
    memory.close()


# -- space -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_folder_holds_at_most_what_was_estimated(tmp_path: Path, dtype: MemoryType) -> None:
    """Segments within twice of what is live; and compaction does not change what is held."""
    wide = ModelPlan(
        axes=PLAN.axes,
        tensors=(*PLAN.tensors, Tensor("t", "float32", (Dim(6 * 400, 0, inner=400),))),
    )
    config = MemoryConfig(memory_type=dtype, damping=0.8, max_staleness=6)
    memory, twin = open_disk(tmp_path, config, wide), RamMemory(wide, config)
    stream = np.random.default_rng(5)
    devices = [f"device{number}" for number in range(8)]
    for now in range(1, 31):
        given = [
            movement(
                device,
                now,
                np.flatnonzero(stream.random(wide.block_count) < 0.5).tolist(),
                int(stream.integers(2**32)),
                plan=wide,
            )
            for device in devices
            if stream.random() < 0.3
        ]
        for one in (memory, twin):
            one.advance(now)
            one.write(given)
            one.commit()
        live = int(memory.entries @ wide.block_sizes) * {"fp32": 4, "fp16": 2, "int8": 1}[dtype]
        scales = 0 if dtype == "fp32" else 2 * 8 * int(memory.entries.sum())
        segments = list(tmp_path.glob("segment-*"))
        padding = sum(64 + 2 * 64 * len(devices) for _ in segments)
        assert sum(path.stat().st_size for path in segments) <= 2 * live + 2 * scales + padding
    assert memory.total.tobytes() == twin.total.tobytes()
    for device in devices:
        pieces, others = memory.recall(device), twin.recall(device)
        assert [piece.made for piece in pieces] == [other.made for other in others]
        for piece, other in zip(pieces, others, strict=True):
            assert piece.blocks.values.tobytes() == other.blocks.values.tobytes()
    memory.close()
    index = sqlite3.connect(tmp_path / "index.sqlite")
    mixed = "SELECT segment FROM movements GROUP BY segment HAVING count(DISTINCT made) > 1"
    assert index.execute(mixed).fetchall()  # only rewriting puts two rounds in one segment
    index.close()


def test_values_leave_the_disk_at_most_twice_their_age_after_they_were_made(
    tmp_path: Path,
) -> None:
    """Held, replaced or stale: no file is older than the retention and what it was copied at."""
    retention = 3
    memory = open_disk(tmp_path, replace(CONFIG, max_staleness=retention))
    stream = np.random.default_rng(3)
    born: dict[str, int] = {}
    for now in range(1, 40):
        memory.advance(now)
        given = [each for each in "abcdef" if stream.random() < 0.4]
        blocks = np.flatnonzero(stream.random(PLAN.block_count) < 0.6).tolist() or [0]
        memory.write([movement(each, now, blocks, now) for each in given])
        memory.commit()
        names = {path.name for path in tmp_path.glob("segment-*")}
        born = {name: born.get(name, now) for name in names}
        # A value is copied only while it is held, that is until `made + retention`.
        assert all(now - since <= retention for since in born.values())
        oldest = memory.oldest()
        assert oldest is None or now - oldest <= retention
    memory.close()


def test_estimate_counts_values_sums_and_index() -> None:
    one = estimate_bytes(PLAN, 1, "fp32")
    ten = estimate_bytes(PLAN, 10, "fp32")
    assert ten - one >= 9 * 2 * 4 * PLAN.parameters
    assert estimate_bytes(PLAN, 0, "fp32") == 2 * (8 * PLAN.parameters + 16 * PLAN.block_count)
    large = ModelPlan(axes=(), tensors=(Tensor("w", "float32", (Dim(1_000_000),)),))
    sizes = [estimate_bytes(large, 100, dtype) for dtype in ("int8", "fp16", "fp32")]
    assert sizes == sorted(sizes)


def test_disk_too_small_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"may grow to .* GB; there is room for"):
        DiskMemory(tmp_path / "new", PLAN, CONFIG, devices=10**12)
    with pytest.raises(ConfigError, match="in reserve"):
        DiskMemory(tmp_path / "new", PLAN, CONFIG, reserve_bytes=10**18)
    assert not (tmp_path / "new" / "index.sqlite").exists()


# -- cost --------------------------------------------------------------------------------------


def test_no_statement_looks_at_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round asks of the index is found through an index, however many devices there are."""
    statements: set[str] = set()

    class Traced(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.set_trace_callback(statements.add)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Traced))
    memory = open_disk(tmp_path, replace(CONFIG, max_staleness=1))
    monkeypatch.undo()
    statements.clear()
    for now in range(1, 8):
        memory.advance(now)
        memory.write(
            [movement("ada", now, [0, now], now), movement("bob", max(1, now - 1), [1, 2], now)]
        )
        memory.recall("ada")
        memory.oldest()
        memory.commit()
    memory.close()
    plain = sqlite3.connect(":memory:")
    plain.executescript(SCHEMA)
    asked = 0
    for statement in statements:
        if statement.split()[0] not in ("SELECT", "UPDATE", "DELETE"):
            continue
        asked += 1
        for *_, step in plain.execute(f"EXPLAIN QUERY PLAN {statement}"):
            assert "SCAN" not in step, statement
    plain.close()
    assert asked > 10
