"""Tables as texts: the same cells for a terminal and for Markdown.

A number is short enough for a column of seven, a dash is what nobody knows, and `~` stands before
what is modelled.
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
"""Stands before every modelled number."""
WORD = 12
"""So many characters of a word are always printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Rows of cells under headings; a heading's lines are one in Markdown.

    The first `texts` columns are words, and give way on a narrow terminal; the others are numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1

    def print(self, console: Console) -> None:
        """Print it, with less between the columns where it would not fit.

        What still does not fit cuts long words on a terminal. Numbers are never cut: lines are
        then longer than the terminal is wide, as they are in a file.
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
        """A table of Markdown, without its title; ends without a line break."""
        headings = [heading.replace("\n", " ").strip() for heading in self.columns]
        rules = ["---"] * self.texts + ["--:"] * (len(self.columns) - self.texts)
        lines = (headings, rules, *self.rows)
        return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)


def without_unknown(sheets: Sequence[Sheet]) -> list[Sheet]:
    """Sheets of the same columns, without those that are a dash in every row of all of them."""
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
    """Three digits that count and at most four decimals; a dash for None."""
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
    """A level, as `62.5%`."""
    return f"{100 * level:.3g}%"


def yes_or_no(flag: bool | None) -> str:
    """A dash for None."""
    return DASH if flag is None else "yes" if flag else "no"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def printable(text: str) -> str:
    """Files of others decide neither over lines nor over the terminal."""
    return "".join(each if each.isprintable() else " " for each in text)


def escaped(text: str) -> str:
    """The text as Markdown that neither ends a cell nor is a link, a picture or HTML."""
    return re.sub(r"([\\|\[\]])", r"\\\1", printable(text)).replace("<", "&lt;")
