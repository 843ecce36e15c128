"""Tables of numbers for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")


def make_table(title: str, *columns: str) -> Table:
    """Make a table with these columns of numbers and no rows yet."""
    from rich import box
    from rich.table import Table

    # Ten columns of numbers fit a terminal of 80 if no space goes to lines between them.
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def table_of(
    title: str, rows: Iterable[T], *columns: tuple[str, Callable[[T], str]], texts: int = 0
) -> Table:
    """Make a table of rows. A column is its heading and its cell of a row; the first `texts` of
    them are words, the others numbers."""
    table = make_table(title, *(heading for heading, _ in columns))
    for column in table.columns[:texts]:
        column.justify = "left"
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def or_dash(value: float | None) -> str:
    """Format with three decimals; a dash for None."""
    return "–" if value is None else f"{value:.3f}"
