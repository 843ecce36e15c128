"""The index of a memory folder: one row for every movement, a round array for every device.

SQLite, changed in one transaction from one commit to the next. Which blocks a movement's file part
holds is a packed bit set; which of them are live follows from the device's round array. There is
never a row for a block.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregate.memory.contract import Made, Rounds
from coordinator.aggregate.memory.errors import MemoryDamaged
from edge_sdk.protocol.plan.layout import Indices

SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE devices (name TEXT PRIMARY KEY, rounds BLOB NOT NULL);
CREATE TABLE movements (
    key INTEGER PRIMARY KEY,
    device TEXT NOT NULL,
    made INTEGER NOT NULL,
    learning_rate REAL NOT NULL,
    level REAL NOT NULL,
    weight REAL NOT NULL,
    segment INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    blocks BLOB NOT NULL
);
CREATE INDEX movements_device ON movements (device, made, key);
CREATE INDEX movements_made ON movements (made, device);
CREATE INDEX movements_segment ON movements (segment);
CREATE TABLE segments (
    number INTEGER PRIMARY KEY,
    size INTEGER NOT NULL,
    total INTEGER NOT NULL,
    live INTEGER NOT NULL
);
"""
"""`segments`: bytes of the file; values ever put in it; values that are some device's newest."""

COLUMNS = "key, device, made, learning_rate, level, weight, segment, offset, blocks"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One stored movement as the index has it."""

    key: int
    device: str
    made: Made
    segment: int
    offset: int
    ids: Indices


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One segment as the index has it."""

    number: int
    size: int
    total: int
    live: int


class MemoryIndex:
    """The SQLite file. Raises `MemoryDamaged`, which names it, if it cannot be read."""

    def __init__(self, path: Path, blocks: int) -> None:
        self._path = path
        self._blocks = blocks
        with self._naming():
            # Used by one thread at a time, but not always by the same.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        problem = str(self._db.execute("PRAGMA quick_check(1)").fetchone()[0])
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            self._db.executescript(f"BEGIN;{SCHEMA}COMMIT;")

    # -- what it is about -------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """Return the memory's settings and state; empty in a new index."""
        return dict(self._all("SELECT name, value FROM about"))

    def set_about(self, values: Mapping[str, object]) -> None:
        """Change some settings or state."""
        for name, value in values.items():
            self._run("INSERT OR REPLACE INTO about VALUES (?, ?)", name, str(value))

    # -- devices and movements --------------------------------------------------------------

    def rounds(self, device: str) -> Rounds:
        """Return a copy of a device's round array; zeros for an unknown device."""
        rows = self._all("SELECT rounds FROM devices WHERE name = ?", device)
        if not rows:
            return np.zeros(self._blocks, dtype=np.int32)
        data = bytes(rows[0][0])
        if len(data) != 4 * self._blocks:
            raise MemoryDamaged(f"{self._path}: the rounds of device {device!r} were cut short")
        return np.frombuffer(data, dtype="<i4").astype(np.int32)

    def set_rounds(self, device: str, rounds: Rounds) -> None:
        """Keep a device's round array; a device with nothing held is dropped."""
        if rounds.any():
            data = rounds.astype("<i4").tobytes()
            self._run("INSERT OR REPLACE INTO devices VALUES (?, ?)", device, data)
        else:
            self._run("DELETE FROM devices WHERE name = ?", device)

    def of_device(self, device: str) -> list[Row]:
        """Return a device's movements, by round made."""
        return self._rows("WHERE device = ? ORDER BY made, key", device)

    def of_segment(self, number: int) -> list[Row]:
        """Return the movements in a segment."""
        return self._rows("WHERE segment = ? ORDER BY key", number)

    def add(self, device: str, made: Made, segment: int, offset: int, ids: Indices) -> None:
        """Add a movement."""
        self._run(
            "INSERT INTO movements (device, made, learning_rate, level, weight, segment, offset,"
            " blocks) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(device, made.round, made.learning_rate, made.level, made.weight),
            *(segment, offset, self._pack(ids)),
        )

    def move(self, key: int, segment: int, offset: int, ids: Indices) -> None:
        """Set a new place for a movement, or for what is left of it."""
        self._run(
            "UPDATE movements SET segment = ?, offset = ?, blocks = ? WHERE key = ?",
            *(segment, offset, self._pack(ids), key),
        )

    def drop(self, key: int) -> None:
        """Forget a movement."""
        self._run("DELETE FROM movements WHERE key = ?", key)

    def made_before(self, round: int, most: int) -> list[str]:
        """See `Store`."""
        rows = self._all(
            "SELECT device FROM movements INDEXED BY movements_made WHERE made < ?"
            " ORDER BY made, device LIMIT ?",
            *(round, most),
        )
        return list(dict.fromkeys(str(device) for (device,) in rows))

    def oldest(self) -> int | None:
        """See `Store`."""
        value = self._all("SELECT min(made) FROM movements")[0][0]
        return None if value is None else int(value)

    # -- segments ---------------------------------------------------------------------------

    def segment(self, number: int) -> SegmentRow | None:
        """Return one segment; None if it is unknown."""
        rows = self._all("SELECT number, size, total, live FROM segments WHERE number = ?", number)
        return SegmentRow(*rows[0]) if rows else None

    def segments(self) -> list[SegmentRow]:
        """Return all segments."""
        return [
            SegmentRow(*row)
            for row in self._all("SELECT number, size, total, live FROM segments ORDER BY number")
        ]

    def set_segment(self, row: SegmentRow) -> None:
        """Set the numbers of a segment."""
        self._run(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)",
            *(row.number, row.size, row.total, row.live),
        )

    def drop_segment(self, number: int) -> None:
        """Forget a segment."""
        self._run("DELETE FROM segments WHERE number = ?", number)

    # -- transactions -----------------------------------------------------------------------

    def commit(self) -> None:
        """Make all changes since the last commit durable at once."""
        with self._naming():
            if self._db.in_transaction:
                self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file; changes that were not committed are undone."""
        self._db.close()

    def _run(self, statement: str, *values: object) -> None:
        with self._naming():
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(statement, values)

    def _all(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with self._naming():
            return self._db.execute(statement, values).fetchall()

    def _rows(self, where: str, *values: object) -> list[Row]:
        return [
            Row(key, device, Made(made, rate, level, weight), segment, offset, self._unpack(blocks))
            for key, device, made, rate, level, weight, segment, offset, blocks in self._all(
                f"SELECT {COLUMNS} FROM movements {where}",  # noqa: S608  (our own constants)
                *values,
            )
        ]

    def _pack(self, ids: Indices) -> bytes:
        held = np.zeros(self._blocks, dtype=bool)
        held[ids] = True
        return np.packbits(held).tobytes()

    def _unpack(self, data: bytes) -> Indices:
        if len(data) != -(-self._blocks // 8):
            raise MemoryDamaged(f"{self._path}: the blocks of a movement were cut short")
        held = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=self._blocks)
        return np.flatnonzero(held)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise MemoryDamaged(f"{self._path}: the memory's index failed: {error}") from error
