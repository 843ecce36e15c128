"""The results of a sweep: one row for each evaluated round, with every setting of its case.

    rows.jsonl      a line of JSON for each row, added as it comes
    rows.parquet    the same as a table, written when the sweep ends or is stopped

Settings have their keys with a dot, such as `run.rounds`; measurements have none. `state` is
`going`, `finished` in the last row of a case, or `failed`, with the reason in `error`. Before a
sweep goes on, rows of cases that did not come to an end are removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from benchmarks.report.options import UsageError
from benchmarks.report.record import append_line, read_lines
from edge_sdk.program.files import write_whole

if TYPE_CHECKING:
    import pyarrow

LINES = "rows.jsonl"
TABLE = "rows.parquet"
GOING, FINISHED, FAILED = "going", "finished", "failed"

SweepRow = dict[str, Any]


class SweepRows:
    """The rows in a folder."""

    def __init__(self, folder: Path) -> None:
        """Reads what is there. Raises `UsageError` for a file of anything else."""
        self.folder = folder
        self.rows: list[SweepRow] = read_rows(folder / LINES)

    def ended(self, *, failed: bool = True) -> set[str]:
        """Return the ids of the cases that came to an end; `failed`: also by an error."""
        ends = (FINISHED, FAILED) if failed else (FINISHED,)
        return {row["id"] for row in self.rows if row["state"] in ends}

    def keep(self, cases: set[str]) -> None:
        """Remove the rows of all other cases."""
        path = self.folder / LINES
        self.rows = [row for row in self.rows if row["id"] in cases]
        if path.exists():
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_whole(path, text.encode())

    def add(self, row: SweepRow) -> None:
        """Add a row."""
        self.rows.append(row)
        append_line(self.folder / LINES, row)

    def write_table(self) -> Path:
        """Write all rows as a Parquet file and return its place. Raises `UsageError`."""
        path = self.folder / TABLE
        parquet = _parquet()
        table = _table(self.rows)

        def write(stream: BinaryIO) -> None:
            parquet.write_table(table, stream)

        write_whole(path, write)
        return path


def read_rows(path: Path) -> list[SweepRow]:
    """Read the rows of a sweep's file, `.jsonl` or `.parquet`. Raises `UsageError`."""
    if path.suffix == ".parquet":
        return [_without_gaps(row) for row in _parquet().read_table(path).to_pylist()]
    return read_lines(path, _parse)


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of everything that some row has, in the order of their first use."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _parse(fields: dict[str, Any]) -> SweepRow:
    if not {"id", "state"} <= fields.keys():
        raise ValueError("it has no id and state")
    return fields


def _without_gaps(row: SweepRow) -> SweepRow:
    return {name: value for name, value in row.items() if value is not None}


def _table(rows: Sequence[SweepRow]) -> pyarrow.Table:
    import pyarrow

    found = {}
    for name in columns(rows):
        values = [row.get(name) for row in rows]
        try:
            found[name] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # numbers beside words
            texts = [None if each is None else json.dumps(each) for each in values]
            found[name] = pyarrow.array(texts)
    return pyarrow.table(found)


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UsageError(
            "Parquet needs pyarrow: pip install 'tessera-fl[parquet]'; rows.jsonl has the same"
        ) from error
    return parquet
