"""A table of a paper as data: its cells, the paper's values, and the claims made with them.

    PaperTable   one table or figure: cells, words about it, a way to run a cell and to print it
    PaperCell    one number of it: where it stands, the settings of its run, the printed value
    PaperClaim        one cell is better than another, as the paper says
    CellOutcome  one finished run of a cell, with one seed; its numbers are a `Ran`

A new table is a module in `tables/` and one line in its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

Measure = Literal["last", "best", "time_s"]
"""A run's number: the mean accuracy of its last tenth, the best accuracy, both in percent, or
simulated seconds."""
SEEDS = 3
"""Seeds of every cell, counted from 0."""


class CellPlace(NamedTuple):
    """A place in a table: its part, the row and the column."""

    part: str
    row: str
    column: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """A cell: one number of a table, and the settings of the runs it comes from."""

    place: CellPlace
    settings: Mapping[str, Any]
    """Plain values; the table's way to run a cell knows their meaning."""
    paper: float | None = None
    """Value that the paper prints; None: it has none."""
    spread: float | None = None
    """Value behind the paper's `±`, or in its brackets."""
    quick: Mapping[str, Any] | None = None
    """Settings that replace others with `--quick`; None: the cell is not part of it."""
    missing: str = ""
    """Reason why the cell cannot be run yet; empty: it can."""

    def shortened(self) -> PaperCell:
        """Return the cell as `--quick` runs it."""
        return replace(self, settings={**self.settings, **(self.quick or {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The numbers of a run."""

    values: Mapping[str, float]
    """Numbers by name, such as `last`, `best` (percent) and `time_s`."""
    curve: Sequence[Sequence[float]] = ()
    """Points in time: round, simulated seconds, accuracy in percent."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the table prints or draws, as plain data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome(Ran):
    """A finished run of a cell."""

    table: str
    place: CellPlace
    seed: int
    settings: Mapping[str, Any]
    """Every setting of the run but the seed."""
    seconds: float = 0.0
    """Processor time of the run."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    """The paper says that one cell is better than another."""

    name: str
    """Short name, for figures."""
    words: str
    """Words for both: `RAM-Fed over RA-Fed at L`."""
    better: CellPlace
    worse: CellPlace
    measure: Measure = "last"
    within: float | None = None
    """With a number, the claim is that the first is at most this much worse than the second."""
    paper: float | None = None
    """Difference that the paper prints, where its cells do not give it."""
    ratio: bool = False
    """True: the numbers are divided, first by second; the claim is a ratio below 1."""


RunCell = Callable[[PaperCell, int, Path | None], Ran]
"""Runs a cell with a seed, on the data sets below a folder."""
Outcomes = Mapping[CellPlace, Sequence[CellOutcome]]
"""Finished runs of a table, by cell, in order of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper, or a study of our own that is printed beside them."""

    name: str
    """Name on the command line, such as `ram2`."""
    title: str
    paper: str
    """Paper that it belongs to; tables of a paper stand together."""
    about: str
    """Readings and settings of its runs, and what differs from the paper; Markdown."""
    cells: tuple[PaperCell, ...]
    claims: tuple[PaperClaim, ...] = ()
    remarks: str = ""
    """Remarks on the numbers, written by hand; Markdown."""
    run: RunCell
    show: Callable[[PaperTable, Outcomes], str] | None = None
    """Prints the numbers as Markdown; None: a sheet for each part, with the paper's values."""
    draw: Callable[[PaperTable, Outcomes, Path], None] | None = None
    """Draws a plot to a file; None: the table has none."""
    seeds: int = SEEDS
    expected_s: float = 60.0
    """Processor seconds of a run, until there are measured ones."""
    folders: tuple[str, ...] = ()
    """Data sets that it needs, below `--data`."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Anything that its own functions want to know."""

    def cell(self, place: CellPlace) -> PaperCell | None:
        """Return the cell of a place; None: there is none."""
        return next((each for each in self.cells if each.place == place), None)

    def quick_cells(self) -> tuple[PaperCell, ...]:
        """Return the cells that `--quick` runs, with its settings."""
        return tuple(each.shortened() for each in self.cells if each.quick is not None)
