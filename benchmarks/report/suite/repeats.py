"""Figures that were measured several times: their medians, and how far the repeats lie apart.

A file of them is that of any command (`figures.py`) with the repeats beside the figures:

    { "schema": 1, "figures": [ … the medians … ], "repeats": { NAME: [VALUE, …], … }, … }

A file without repeats has one of each figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report.figures import SCHEMA, Figure, FigureError
from benchmarks.report.options import UsageError

RATIOS = frozenset({"×", "%"})
"""Units that mean the same on every machine."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A figure and its repeats, at least one. The figure's value is their median."""

    figure: Figure
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        """Name of the figure."""
        return self.figure.name

    @property
    def is_ratio(self) -> bool:
        """True if the figure can be compared with that of another machine."""
        return self.figure.unit in RATIOS

    @property
    def spread(self) -> float:
        """Half of the distance between the extremes, as a share of the median; 0 of one value."""
        middle = abs(self.figure.value)
        return (max(self.values) - min(self.values)) / 2 / middle if middle else 0.0


def merge(passes: Sequence[Sequence[Figure]]) -> list[Repeated]:
    """Merge the figures of several passes, in the order in which they first appear.

    A figure that some pass does not have keeps the repeats of the others.
    """
    found: dict[str, list[Figure]] = {}
    for each in passes:
        for figure in each:
            found.setdefault(figure.name, []).append(figure)
    merged = []
    for figures in found.values():
        values = tuple(figure.value for figure in figures)
        merged.append(Repeated(replace(figures[0], value=median(values)), values))
    return merged


def ratios_of(found: Sequence[Repeated]) -> list[Repeated]:
    """Return the figures that mean the same on every machine."""
    return [each for each in found if each.is_ratio]


def repeats_of(found: Sequence[Repeated]) -> dict[str, list[float]]:
    """Return the repeats as they are written beside the figures."""
    return {each.name: list(each.values) for each in found}


def parse_figures(document: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a command's document. Raises `FigureError`."""
    try:
        if document["schema"] != SCHEMA:
            raise FigureError(
                f"schema {document['schema']!r} is unknown; this version has {SCHEMA}"
            )
        return [Figure(**each) for each in document["figures"]]
    except (KeyError, TypeError) as error:
        raise FigureError(f"these are not the figures of a benchmark: {error}") from error


def read_repeats(path: Path) -> tuple[list[Repeated], str | None]:
    """Read a file's figures with their repeats, and the host they are of; None: it is not said.

    Raises `UsageError`, which names the file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise FigureError("no table of figures")
        figures = parse_figures(document)
        values: Mapping[str, Sequence[float]] = document.get("repeats", {})
        found = [
            Repeated(each, tuple(map(float, values.get(each.name, ()))) or (each.value,))
            for each in figures
        ]
        return found, document.get("host")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, FigureError) as error:
        raise UsageError(
            f"{path} has no figures ({error}): give a file that --json of a tessera-bench command "
            "wrote"
        ) from error
