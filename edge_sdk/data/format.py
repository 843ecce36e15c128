"""The format of a device's files, as far as they do not say it themselves: the table `[format]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from edge_sdk.program.settings import Count, Example, Spelling, check_fields
from edge_sdk.protocol.errors import ConfigError

WindowLabel = Literal["majority", "last", "same"]


def _read_names(value: Any, _: Path) -> tuple[str, ...]:
    """One name, or a list of names; variables separate them with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise TypeError
    found = tuple(each.strip() for each in names)
    if not all(found):
        raise ValueError
    return found


ColumnNames = Annotated[
    tuple[str, ...], Spelling(_read_names, "the name of a column, or a list of names")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """Format of the data's files, where they do not say it themselves (docs/data.md)."""

    features: Annotated[ColumnNames, Example(["temperature", "humidity"])] = ()
    """Columns of a table that are the input, in order; without it, those the task names, or else
    all but the label."""
    label: Annotated[ColumnNames, Example("class")] = ()
    """Column of a table that is the target, or a list of columns; without it, the column label,
    class, target or y."""
    series: Annotated[str | None, Example("recording")] = None
    """Column that tells time series in one table apart; a window never spans two of them."""
    stride: Annotated[Count | None, Example(64)] = None
    """Rows, or samples of sound, from the start of one window to the start of the next; without it,
    windows do not overlap."""
    window_label: WindowLabel = "majority"
    """Label of a window: the most frequent one of its rows, the last one, or `same`, which leaves
    out windows with more than one."""
    range: Annotated[tuple[float, ...], Example([0.0, 255.0])] = ()
    """Lowest and highest value in the files, which are scaled to the task's range; without it, 0 to
    255 for pixels, and other values are not scaled."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.range and (
            len(self.range) != 2
            or not all(math.isfinite(bound) for bound in self.range)
            or self.range[0] >= self.range[1]
        ):
            raise ConfigError(
                f"range = {list(self.range)}: give the lowest and highest value, such as [0, 255]"
            )
