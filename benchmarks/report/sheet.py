"""Tables as text: the same cells for a terminal and for Markdown.

Numbers are short enough for a column of seven, a dash means unknown, and `~` marks modelled
numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.report.tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

DASH = "–"
MODELLED = "~"
"""Prefix of every modelled number."""
WORD = 12
"""Fewest characters of a word that are always printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Rows of cells under headings; a heading's lines are joined in Markdown.

    The first `texts` columns are words, and shrink on a narrow terminal; the others are numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1

    def print(self, console: Console) -> None:
        """Print it, with narrower gaps between the columns if it would not fit.

        If it still does not fit, long words are cut on a terminal. Numbers are never cut: lines
        are then longer than the terminal is wide, as in a file.
        """
        from rich.text import Text

        table = make_table("", *self.columns)
        table.title = Text(printable(self.title), style="table.title")
        for row in self.rows:
            table.add_row(
                *(Text(printable(cell), no_wrap=True, overflow="ellipsis") for cell in row)
            )
        spare = 0
        for index, column in enumerate(table.columns):
            if index < self.texts:
                longest = max((len(row[index]) for row in self.rows), default=0)
                column.justify, column.min_width = "left", min(WORD, longest)
                spare += longest - column.min_width
            else:
                column.no_wrap = True
        unbounded = console.options.update(width=10_000)
        if console.measure(table, options=unbounded).maximum > console.width:
            table.padding = (0, 0, 0, 0)
        width = console.measure(table, options=unbounded).maximum
        if console.is_terminal:
            width = max(min(width, console.width), width - spare)
        table.width = width
        console.print(table, crop=False)

    def markdown(self) -> str:
        """Return a Markdown table, without title and final line break."""
        headings = [heading.replace("\n", " ").strip() for heading in self.columns]
        rules = ["---"] * self.texts + ["--:"] * (len(self.columns) - self.texts)
        lines = (headings, rules, *self.rows)
        return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)


def without_unknown(sheets: Sequence[Sheet]) -> list[Sheet]:
    """Return sheets of the same columns, without columns that are a dash in all rows of all."""
    rows = [row for sheet in sheets for row in sheet.rows]
    told = [
        index
        for index in range(len(sheets[0].columns) if sheets else 0)
        if not rows or any(row[index] != DASH for row in rows)
    ]
    return [
        replace(
            sheet,
            columns=tuple(sheet.columns[index] for index in told),
            rows=tuple(tuple(row[index] for index in told) for row in sheet.rows),
            texts=sum(index < sheet.texts for index in told),
        )
        for sheet in sheets
    ]


def number(value: float | None, *, modelled: bool = False) -> str:
    """Format with three significant digits and at most four decimals; a dash for None."""
    if value is None:
        return DASH
    size = abs(value)
    if size >= 1e6 or 0 < size < 5e-5:
        text = f"{value:.1e}"
    elif size >= 100 or not size:
        text = f"{value:.0f}"
    else:
        text = f"{value:.{min(4, 2 - math.floor(math.log10(size)))}f}"
    return MODELLED + text if modelled else text


def percent(level: float) -> str:
    """Format a level, as `62.5%`."""
    return f"{100 * level:.3g}%"


def yes_or_no(flag: bool | None) -> str:
    """Format a flag; a dash for None."""
    return DASH if flag is None else "yes" if flag else "no"


def listed(words: Sequence[str]) -> str:
    """Join words: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def printable(text: str) -> str:
    """Remove control characters: foreign files must not control lines or the terminal."""
    return "".join(each if each.isprintable() else " " for each in text)


def escaped(text: str) -> str:
    """Escape text for Markdown: it cannot end a cell or be a link, an image or HTML."""
    return re.sub(r"([\\|\[\]])", r"\\\1", printable(text)).replace("<", "&lt;")
