"""Samples from rows of a table: a row each, or windows cut out of time series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from edge_sdk.data.block import Block
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.readers.files import FoundFiles
from edge_sdk.data.readers.tables import Rows, read_rows
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec

WINDOWS = 64
"""Windows that are handed on at once."""


def read_table(
    found: FoundFiles, spec: DataSpec, format: DataFormat, *, labelled: bool
) -> Iterator[Block]:
    """Yield a sample for every row, or for every window if the task wants windows.

    Raises `DataError`.
    """
    rows = read_rows(found, spec, format, labelled=labelled)
    if spec.first.window is not None:
        yield from cut_windows(rows, spec, format)
        return
    for each in rows:
        columns = each.columns
        labels = each.labels
        if labels is not None and len(columns.labels) == 1:
            labels = labels[:, 0]
        yield Block(
            (each.values,),
            labels,
            each.place,
            "measured",
            columns.feature_names,
            columns.label_names,
        )


def cut_windows(rows: Iterator[Rows], spec: DataSpec, format: DataFormat) -> Iterator[Block]:
    """Yield windows of consecutive rows of one series, `stride` rows apart, as they are complete.

    Rows of several series of one file may take turns. A window that the end of its series cuts
    short is left out. Raises `DataError` if no series is as long as a window.
    """
    length = spec.first.window or 1
    time_last = _time_last(spec.inputs[0].shape, length)
    longest, made = 0, 0
    for _, parts in groupby(_split(rows), key=lambda pair: pair[0][0]):
        series: dict[str, _Series] = {}
        pending: list[_Window] = []
        for (_, name), part in parts:
            one = series.setdefault(name, _Series(length, format))
            for window in one.add(part):
                pending.append(window)
                if len(pending) == WINDOWS:
                    made += len(pending)
                    yield _block(pending, part, time_last)
                    pending = []
        if pending:
            made += len(pending)
            yield _block(pending, part, time_last)
        longest = max(longest, *(one.seen for one in series.values()))
    if not made:
        raise DataError(
            f"no series is as long as the task's window of {length} rows (the longest has "
            f"{longest}), or [format] window_label leaves out all windows"
        )


def _time_last(shape: Sequence[int], length: int) -> bool:
    """True if a window is channels × time, False if it is time × channels; sizes of 1 aside."""
    sizes = [size for size in shape if size != 1]
    if length == 1 or sizes[-1] == length:
        return True
    if sizes[0] == length:
        return False
    raise DataError(
        f"the task's input is {'×'.join(map(str, shape))}: a table gives windows of {length} rows "
        "only where the time comes first or last"
    )


class _Window(NamedTuple):
    values: Array
    label: Array | None
    first: int
    """Number of its first row."""
    last: int


class _Series:
    """Rows of one series that may still become windows."""

    def __init__(self, length: int, format: DataFormat) -> None:
        self._length, self._format = length, format
        self._parts: list[Rows] = []
        self._held = 0
        self._start = 0
        """Where the next window begins, in the rows that are held; perhaps beyond them."""
        self.seen = 0
        """Rows so far."""

    def add(self, part: Rows) -> Iterator[_Window]:
        """Take more rows; yield the windows that they complete."""
        length, stride = self._length, self._format.stride or self._length
        self._parts.append(part)
        self._held += len(part.values)
        self.seen += len(part.values)
        if self._start + length > self._held:
            return
        whole = _joined(self._parts)
        while self._start + length <= self._held:
            cut = slice(self._start, self._start + length)
            label = None if whole.labels is None else _label(whole.labels[cut], self._format)
            if whole.labels is None or label is not None:
                numbers = whole.numbers[cut]
                yield _Window(whole.values[cut], label, numbers[0], numbers[-1])
            self._start += stride
        done = min(self._start, self._held)
        self._parts = [_rows_in(whole, slice(done, None))]
        self._held -= done
        self._start -= done  # a long stride leaves out rows that have not come yet


def _joined(parts: list[Rows]) -> Rows:
    labels = [part.labels for part in parts if part.labels is not None]
    return parts[0]._replace(
        numbers=[number for part in parts for number in part.numbers],
        values=np.concatenate([part.values for part in parts]),
        labels=np.concatenate(labels) if labels else None,
        series=None,
    )


def _rows_in(rows: Rows, cut: slice) -> Rows:
    return rows._replace(
        numbers=rows.numbers[cut],
        values=rows.values[cut],
        labels=None if rows.labels is None else rows.labels[cut],
        series=None,
    )


def _split(rows: Iterator[Rows]) -> Iterator[tuple[tuple[str, str], Rows]]:
    for each in rows:
        if each.series is None:
            yield (each.file, ""), each
            continue
        start = 0
        for name, group in groupby(each.series):
            end = start + len(list(group))
            yield (each.file, name), _rows_in(each, slice(start, end))
            start = end


def _label(labels: Array, format: DataFormat) -> Array | None:
    """Return the label of a window; None: it has none, and is left out."""
    rows = [tuple(row) for row in labels.tolist()]
    if format.window_label == "last":
        chosen = rows[-1]
    elif format.window_label == "same":
        if len(set(rows)) > 1:
            return None
        chosen = rows[0]
    else:  # of equally frequent labels, the one that comes first
        chosen = Counter(rows).most_common(1)[0][0]
    return np.array(chosen if len(chosen) > 1 else chosen[0], labels.dtype)


def _block(windows: list[_Window], rows: Rows, time_last: bool) -> Block:
    values = np.stack([window.values for window in windows])
    labels = [window.label for window in windows if window.label is not None]
    features, length = rows.columns.feature_names, values.shape[1]
    if time_last:
        values = np.ascontiguousarray(values.transpose(0, 2, 1))
        columns = tuple(name for name in features for _ in range(length))
    else:
        columns = features * length
    return Block(
        (values,),
        np.stack(labels) if labels else None,
        _window_place(rows.file, [(window.first, window.last) for window in windows]),
        "measured",
        columns,
    )


def _window_place(file: str, ends: list[tuple[int, int]]) -> Callable[[int], str]:
    return lambda sample: f"{file}, rows {ends[sample][0]} to {ends[sample][1]}"
