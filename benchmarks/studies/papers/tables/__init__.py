"""The tables, a module for each paper.

A table is a `PaperTable`: its cells, a way to run one of them (`run`), a way to print the numbers
(`show`, where the usual sheet does not do) and a way to draw them (`draw`). A new one is a module
here and a place in `TABLES`.
"""

from __future__ import annotations

from functools import cache

from benchmarks.report.options import UsageError
from benchmarks.studies.papers.cell import PaperTable


@cache
def all_tables() -> tuple[PaperTable, ...]:
    """Return all tables, in the order of the page."""
    from benchmarks.studies.papers.tables import (
        ccfl,
        every_parameter,
        fed_raa,
        memory,
        ram_fed,
        subdismo,
        worth,
    )

    return (
        *ram_fed.TABLES,
        *memory.TABLES,
        *ccfl.TABLES,
        *every_parameter.TABLES,
        *fed_raa.TABLES,
        *subdismo.TABLES,
        *worth.TABLES,
    )


def find_table(name: str) -> PaperTable:
    """Return the table of this name. Raises `UsageError`."""
    for table in all_tables():
        if table.name == name:
            return table
    known = ", ".join(table.name for table in all_tables())
    raise UsageError(f"unknown table {name!r}; --table is one of {known}")
