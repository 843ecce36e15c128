"""The index of a memory folder: one row for every movement, a round array for every device.

SQLite, changed in one transaction from one commit to the next. Which blocks a movement's file part
holds is a packed bit set; which of them are live follows from the device's round array. There is
never a row for a block.

Every row has a checksum of its own; a movement's row also has that of its values in the segment.
`about` has a checksum of itself and of the sum, modulo 2⁶⁴, of all rows' checksums, which a commit
adjusts by what it changed. So a changed, lost or surplus row is found when the index is opened.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregate.memory.contract import Made, Rounds
from coordinator.aggregate.memory.errors import ADVICE, MemoryDamaged, MemoryStoreError
from coordinator.checksums import checksum, checksum_number
from edge_sdk.program.files import DiskFull, free_bytes
from edge_sdk.protocol.plan.layout import Indices

SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE devices (name TEXT PRIMARY KEY, rounds BLOB NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE movements (
    key INTEGER PRIMARY KEY,
    device TEXT NOT NULL,
    made INTEGER NOT NULL,
    learning_rate REAL NOT NULL,
    level REAL NOT NULL,
    weight REAL NOT NULL,
    segment INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    blocks BLOB NOT NULL,
    content INTEGER,
    sum INTEGER NOT NULL
);
CREATE INDEX movements_device ON movements (device, made, key);
CREATE INDEX movements_made ON movements (made, device);
CREATE INDEX movements_segment ON movements (segment);
CREATE TABLE segments (
    number INTEGER PRIMARY KEY,
    size INTEGER NOT NULL,
    total INTEGER NOT NULL,
    live INTEGER NOT NULL,
    sum INTEGER NOT NULL
);
"""
"""`movements`: `content` is the checksum of the scales and values; NULL before the commit.
`segments`: bytes of the file; values ever put in it; values that are some device's newest.
`sum`: checksum of the row's other columns."""

COLUMNS = "key, device, made, learning_rate, level, weight, segment, offset, blocks, content"
KEYS = {"devices": "name", "movements": "key", "segments": "number"}
"""The tables whose rows have checksums, and their keys."""
CHECK = "check"
VERSION = 2


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One stored movement as the index has it."""

    key: int
    device: str
    made: Made
    segment: int
    offset: int
    ids: Indices
    content: int | None
    """Checksum of its scales and values; None before the commit."""


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
        self._about = dict(self._all("SELECT name, value FROM about"))
        self._next_key = 1 + (self._all("SELECT max(key) FROM movements")[0][0] or 0)
        self._sum = 0
        """Of all rows' checksums, modulo 2⁶⁴."""
        if self._about.get("version", str(VERSION)) != str(VERSION):
            raise MemoryStoreError(
                f"{self._path} has version {self._about['version']}, and this program reads "
                f"{VERSION}; {ADVICE}"
            )
        if self._about or self._next_key > 1:
            self._check_rows()

    def _check_rows(self) -> None:
        """Compare all rows with their checksums. Raises `MemoryDamaged`."""
        if bad := self.bad_rows():
            raise MemoryDamaged(
                f"{self._path}: the row of {bad[0]} is damaged, {len(bad)} in all; {ADVICE}"
            )
        if self._about.get(CHECK) != self._about_check():
            raise MemoryDamaged(f"{self._path}: rows are missing or were changed; {ADVICE}")

    def bad_rows(self) -> list[str]:
        """Return the names of the rows that do not match their checksums, and add up the others."""
        self._sum, bad = 0, []
        for table, key in KEYS.items():
            for *row, found in self._db.execute(f"SELECT * FROM {table}"):  # noqa: S608
                if _row_sum(table, row) != found:
                    bad.append(f"{key} {row[0]!r} in {table}")
                self._sum += found if isinstance(found, int) else 0
        return bad

    def _about_check(self) -> str:
        facts = [self._sum % 2**64, sorted((n, v) for n, v in self._about.items() if n != CHECK)]
        return checksum(json.dumps(facts).encode()).hex()

    # -- what it is about -------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """Return the memory's settings and state; empty in a new index."""
        return dict(self._about)

    def set_about(self, values: Mapping[str, object]) -> None:
        """Change some settings or state."""
        for name, value in values.items():
            self._about[name] = str(value)
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
            self._put("devices", device, rounds.astype("<i4").tobytes())
        else:
            self._drop("devices", device)

    def of_device(self, device: str) -> list[Row]:
        """Return a device's movements, by round made."""
        return self._rows("WHERE device = ? ORDER BY made, key", device)

    def of_segment(self, number: int) -> list[Row]:
        """Return the movements in a segment."""
        return self._rows("WHERE segment = ? ORDER BY key", number)

    def of_key(self, key: int) -> Row | None:
        """Return one movement; None if it is unknown."""
        return next(iter(self._rows("WHERE key = ?", key)), None)

    def device_names(self) -> list[str]:
        """Return the devices that anything is kept of, in order."""
        return [str(name) for (name,) in self._all("SELECT name FROM devices ORDER BY name")]

    def add(self, device: str, made: Made, segment: int, offset: int, ids: Indices) -> int:
        """Add a movement, whose values are not in the segment yet. Returns its key."""
        key, self._next_key = self._next_key, self._next_key + 1
        self._put_movement(Row(key, device, made, segment, offset, ids, None))
        return key

    def move(self, row: Row, segment: int, offset: int, ids: Indices) -> None:
        """Set a new place for a movement, or for what is left of it."""
        self._put_movement(replace(row, segment=segment, offset=offset, ids=ids, content=None))

    def seal(self, row: Row, content: int) -> None:
        """Set the checksum of a movement's scales and values."""
        self._put_movement(replace(row, content=content))

    def drop(self, key: int) -> None:
        """Forget a movement."""
        self._drop("movements", key)

    def _put_movement(self, row: Row) -> None:
        made = row.made
        self._put(
            "movements",
            *(row.key, row.device, made.round, made.learning_rate, made.level, made.weight),
            *(row.segment, row.offset, self._pack(row.ids), row.content),
        )

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
        self._put("segments", row.number, row.size, row.total, row.live)

    def drop_segment(self, number: int) -> None:
        """Forget a segment."""
        self._drop("segments", number)

    # -- transactions -----------------------------------------------------------------------

    def commit(self) -> None:
        """Make all changes since the last commit durable at once."""
        with self._naming():
            if self._db.in_transaction:
                self.set_about({CHECK: self._about_check()})
                self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file; changes that were not committed are undone."""
        self._db.close()

    def _put(self, table: str, key: str | int, *values: object) -> None:
        """Insert or replace a row, with its checksum."""
        row = (key, *values)
        self._sum += _row_sum(table, row) - self._sum_of(table, key)
        places = ", ".join("?" * (len(row) + 1))
        statement = f"INSERT OR REPLACE INTO {table} VALUES ({places})"  # noqa: S608
        self._run(statement, *row, _row_sum(table, row))

    def _drop(self, table: str, key: str | int) -> None:
        self._sum -= self._sum_of(table, key)
        self._run(f"DELETE FROM {table} WHERE {KEYS[table]} = ?", key)  # noqa: S608

    def _sum_of(self, table: str, key: str | int) -> int:
        """Return the checksum of a row; 0 if there is none."""
        found = self._all(f"SELECT sum FROM {table} WHERE {KEYS[table]} = ?", key)  # noqa: S608
        return int(found[0][0]) if found else 0

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
            Row(
                key, name, Made(made, rate, level, weight), segment, at, self._unpack(held), content
            )
            for key, name, made, rate, level, weight, segment, at, held, content in self._all(
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
            if "disk is full" in str(error):  # the transaction is gone, the file is whole
                raise DiskFull(self._path, 0, free_bytes(self._path)) from error
            raise MemoryDamaged(
                f"{self._path}: the memory's index failed ({error}); {ADVICE}"
            ) from error


def _row_sum(table: str, row: Iterable[object]) -> int:
    """Return the checksum of a row's columns."""
    facts: list[object] = [table]
    data = b""
    for value in row:
        if isinstance(value, bytes):
            facts.append(len(value))
            data += value
        else:
            facts.append(value)
    return checksum_number(json.dumps(facts).encode(), data)
