"""Rows of tables: CSV with the standard library, Parquet with pyarrow (extra `parquet`).

The first row of a CSV file names the columns, unless all of it is numbers: then columns are called
1, 2 … and the last one is the label. A first row that counts 0, 1, 2 … names columns, as pandas
writes them. Commas, semicolons and tabs are recognised. Rows are counted
as spreadsheets do: the first row of the file is row 1.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.readers.files import FoundFiles
from edge_sdk.program.settings import nearest
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec

LABELS = ("label", "class", "target", "y")
"""Names that a label column is found by, if the settings name none."""
ROWS = 4096
"""Rows that are read at once."""


class Columns(NamedTuple):
    """The columns of a table that matter, by their place in a row."""

    features: tuple[int, ...]
    labels: tuple[int, ...]
    series: int | None
    names: tuple[str, ...]
    """Names of all columns of the table."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self.names[place] for place in self.features)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the columns that are the targets."""
        return tuple(self.names[place] for place in self.labels)


class Rows(NamedTuple):
    """Some rows of one file."""

    file: str
    numbers: Sequence[int]
    """Number of each row in its file."""
    values: Array
    """The features, float64: rows × features."""
    labels: Array | None
    """The targets: rows × label columns of text or numbers; None: there is no such column."""
    series: Sequence[str] | None
    columns: Columns

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        return f"{self.file}, row {self.numbers[row]}"


def read_rows(
    found: FoundFiles, spec: DataSpec, format: DataFormat, *, labelled: bool
) -> Iterator[Rows]:
    """Yield the rows of all files, file after file. Raises `DataError`."""
    first: tuple[str, Columns] | None = None
    for each in found.files:
        name = found.name_of(each.path)
        read = _read_parquet if found.kind == "parquet" else _read_csv
        empty = True
        for rows in read(each.path, name, spec, format, labelled):
            if first is not None and rows.columns.feature_names != first[1].feature_names:
                raise DataError(
                    f"{name} has the columns {_listed(rows.columns.feature_names)}, {first[0]} has "
                    f"{_listed(first[1].feature_names)}: tables of one folder need the same"
                )
            first = first or (name, rows.columns)
            empty = False
            yield rows
        if empty:
            raise DataError(f"{name} is empty: it has no rows")


def choose_columns(
    names: Sequence[str],
    spec: DataSpec,
    format: DataFormat,
    file: str,
    *,
    labelled: bool,
    last_is_label: bool = False,
) -> Columns:
    """Find features and labels among the columns of a table. Raises `DataError`."""
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise DataError(f"{file}: two columns are called {twice[0]!r}")
    places = {name: place for place, name in enumerate(names)}

    def find(name: str, what: str) -> int:
        if name not in places:
            raise DataError(f"{file} has no column {name!r} ({what}){nearest(name, names)}")
        return places[name]

    labels: tuple[int, ...] = ()
    if format.label:
        if labelled or all(name in places for name in format.label):
            labels = tuple(find(name, "[format] label") for name in format.label)
    elif last_is_label and (labelled or _one_too_many(names, spec, format)):
        labels = (len(names) - 1,)
    else:
        usual = [name for name in names if name.strip().lower() in LABELS]
        if len(usual) > 1:
            raise DataError(
                f"{file} has the columns {_listed(usual)}: say which is the label in [format] label"
            )
        if not usual and labelled:
            raise DataError(
                f"{file} has no column called {', '.join(LABELS[:-1])} or {LABELS[-1]}: say which "
                f"is the label in [format] label; it has {_listed(names)}"
            )
        labels = tuple(places[name] for name in usual)
    series = None if format.series is None else find(format.series, "[format] series")
    wanted = format.features or spec.first.features
    source = "[format] features" if format.features else "a feature that the task names"
    if wanted:
        features = tuple(find(name, source) for name in wanted)
    else:
        features = tuple(n for n in range(len(names)) if n not in labels and n != series)
    values = _values(spec)
    if len(features) != values:
        raise DataError(
            f"{file} has {len(features)} feature columns ({_listed([names[n] for n in features])}),"
            f" but a sample of the task has {values} values: choose them in [format] features"
        )
    return Columns(features, labels, series, tuple(names))


def _one_too_many(names: Sequence[str], spec: DataSpec, format: DataFormat) -> bool:
    """True if the columns are those of a sample, and one more, the last."""
    used = {*format.features, *spec.first.features, format.series}
    return names[-1] not in used and len(names) - (format.series is not None) == 1 + _values(spec)


def _values(spec: DataSpec) -> int:
    """Return how many values of a sample are in a row."""
    return int(np.prod(spec.inputs[0].shape)) // (spec.first.window or 1)


# -- CSV ------------------------------------------------------------------------------------------


def _read_csv(
    path: Path, name: str, spec: DataSpec, format: DataFormat, labelled: bool
) -> Iterator[Rows]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            lines = csv.reader(file, delimiter=_delimiter(first), strict=True)
            file.seek(0)
            yield from _csv_rows(enumerate(lines, 1), name, spec, format, labelled)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(f"{name} is not a CSV table: {error}") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


def _csv_rows(
    lines: Iterator[tuple[int, list[str]]],
    name: str,
    spec: DataSpec,
    format: DataFormat,
    labelled: bool,
) -> Iterator[Rows]:
    first = next(((number, row) for number, row in lines if any(row)), None)
    if first is None:
        raise DataError(f"{name} is empty")
    number, row = first
    counts = len(row) > 2 and [cell.strip() for cell in row] == [*map(str, range(len(row)))]
    headless = not counts and all(_is_number(cell) for cell in row)
    names = [str(place) for place in range(1, len(row) + 1)] if headless else row
    names = [each.strip() for each in names]
    columns = choose_columns(names, spec, format, name, labelled=labelled, last_is_label=headless)
    waiting = [(number, row)] if headless else []
    while True:
        taken = [*waiting, *islice(((n, r) for n, r in lines if any(r)), ROWS - len(waiting))]
        waiting = []
        if not taken:
            return
        yield _parsed(taken, name, columns, labelled)


def _parsed(
    taken: Sequence[tuple[int, list[str]]], name: str, columns: Columns, labelled: bool
) -> Rows:
    width = len(columns.names)
    for number, row in taken:
        if len(row) != width:
            raise DataError(f"{name}, row {number} has {len(row)} values, not {width}")
    picked = [[row[place] for place in columns.features] for _, row in taken]
    try:
        if any("_" in cell for row in picked for cell in row):
            raise ValueError  # Python takes 1_000 for a number, people do not
        values = np.array(picked, np.float64).reshape(len(picked), len(columns.features))
    except ValueError:
        values = None
    if values is None:
        raise _not_a_number(taken, name, columns)
    labels = series = None
    if columns.labels:
        labels = np.array([[row[place] for place in columns.labels] for _, row in taken])
        for at, (number, row) in enumerate(taken):
            if labelled and not all(row[place].strip() for place in columns.labels):
                label = next(each for each in columns.labels if not taken[at][1][each].strip())
                raise DataError(
                    f"{name}, row {number}, column {columns.names[label]!r}: empty: must be a label"
                )
    if columns.series is not None:
        series = [row[columns.series] for _, row in taken]
    return Rows(name, [number for number, _ in taken], values, labels, series, columns)


def _not_a_number(taken: Sequence[tuple[int, list[str]]], name: str, columns: Columns) -> DataError:
    for number, row in taken:
        for place in columns.features:
            if not _is_number(row[place]):
                found = f"{row[place]!r:.80}" if row[place].strip() else "empty"
                return DataError(
                    f"{name}, row {number}, column {columns.names[place]!r}: {found}: must be a "
                    "number"
                )
    return DataError(f"{name}: a value is not a number")


def _delimiter(line: str) -> str:
    bare = re.sub(r'"[^"]*"', "", line)
    return max((",", ";", "\t"), key=bare.count)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


# -- Parquet --------------------------------------------------------------------------------------


def _read_parquet(
    path: Path, name: str, spec: DataSpec, format: DataFormat, labelled: bool
) -> Iterator[Rows]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{name}: Parquet needs pyarrow: pip install 'tessera-fl[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = choose_columns(names, spec, format, name, labelled=labelled)
            start = 1
            for batch in file.iter_batches(batch_size=ROWS):
                rows = [batch.column(place) for place in range(len(names))]
                numbers = range(start, start + len(batch))
                start += len(batch)
                yield _of_arrow(rows, numbers, name, columns, labelled)
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(f"{name} cannot be read as Parquet: {said}") from error


def _of_arrow(
    arrays: list[object], numbers: Sequence[int], name: str, columns: Columns, labelled: bool
) -> Rows:
    values = np.empty((len(numbers), len(columns.features)), np.float64)
    for at, place in enumerate(columns.features):
        values[:, at] = _numbers(arrays[place], numbers, f"{columns.names[place]!r}", name)
    labels = series = None
    if columns.labels:
        each = [_cells(arrays[place]) for place in columns.labels]
        for place, cells in zip(columns.labels, each, strict=True):
            if labelled and None in cells:
                row = numbers[cells.index(None)]
                raise DataError(
                    f"{name}, row {row}, column {columns.names[place]!r}: empty: must be a label"
                )
        labels = np.array(
            [["" if cell is None else str(cell) for cell in row] for row in zip(*each, strict=True)]
        )
    if columns.series is not None:
        series = [str(cell) for cell in _cells(arrays[columns.series])]
    return Rows(name, numbers, values, labels, series, columns)


def _numbers(array: object, numbers: Sequence[int], column: str, name: str) -> Array:
    cells = _cells(array)
    for row, cell in zip(numbers, cells, strict=True):
        if isinstance(cell, str) or not isinstance(cell, int | float):
            found = "empty" if cell is None else f"{cell!r:.80}"
            raise DataError(f"{name}, row {row}, column {column}: {found}: must be a number")
    return np.array(cells, np.float64)


def _cells(array: object) -> list[object]:
    cells: list[object] = array.to_pylist()  # type: ignore[attr-defined]
    return cells


def _listed(names: Sequence[str]) -> str:
    shown = [str(name) for name in names[:8]]
    return ", ".join(shown) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
