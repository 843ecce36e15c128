"""Tables of numbers for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


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


def or_dash(value: float | None) -> str:
    """Format with three decimals; a dash for None."""
    return "–" if value is None else f"{value:.3f}"
