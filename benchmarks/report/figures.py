"""Figures: the numbers of a benchmark, each with its unit and, if it has one, its target.

Every `tessera-bench` command writes one JSON file of the same form, so that runs can be compared
by the names of their figures:

    { "schema": 1,
      "figures": [ { "name", "value", "unit", "target", "better" }, … ],
      "command": "step", "host", "environment": {…}, …the command's own data }

`host` stands for the machine; `regress` compares seconds only of files with the same one.

A missed target is news, not an error: it is printed, and the exit code stays 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from edge_sdk import TesseraError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
"""Version of the JSON files' common part."""

Better = Literal["lower", "higher"]

MOST_NAMED = 6
"""Most targets of a run whose met ones are printed, too."""

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_COMMON = frozenset({"schema", "figures"})


class FigureError(TesseraError):
    """A figure, or a set of them, contradicts itself."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `target` is the value it should reach, in its own unit; None: no target.

    `name` is dotted, from the command inwards: `step.cnn.50.over_macs`.
    """

    name: str
    value: float
    unit: str
    target: float | None = field(default=None, kw_only=True)
    better: Better = field(default="lower", kw_only=True)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FigureError(
                f"{self.name!r} is not a figure's name: use dotted lower-case words, as in "
                "'step.cnn.50.over_macs'"
            )
        if not self.unit:
            raise FigureError(f"figure {self.name} has no unit; a bare ratio has the unit '×'")
        if self.better not in get_args(Better):
            raise FigureError(f"figure {self.name}: better is lower or higher, not {self.better!r}")
        for what, number in (("value", self.value), ("target", self.target)):
            if number is not None and not math.isfinite(number):
                raise FigureError(f"figure {self.name}: its {what} is {number}, not a number")

    @property
    def met(self) -> bool | None:
        """True if the target is reached; None if there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def environment(*packages: str) -> dict[str, Any]:
    """Describe what numbers depend on besides the code: interpreter, machine, package versions."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in packages},
    }


def host() -> str:
    """Return a name for this machine that tells nobody which it is."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_json(path: Path, figures: Sequence[Figure], data: Mapping[str, Any]) -> None:
    """Write one run, see `render_json`. Raises `FigureError`, and then writes nothing."""
    path.write_text(render_json(figures, data), encoding="utf-8")


def render_json(figures: Sequence[Figure], data: Mapping[str, Any]) -> str:
    """Render one run: its figures and, beside them at the top level, the command's own `data`.

    Raises `FigureError` when two figures share a name or `data` uses a name of the common part.
    """
    names = [figure.name for figure in figures]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FigureError(f"two figures are called {twice[0]!r}")
    if clash := sorted(_COMMON & data.keys()):
        raise FigureError(f"{clash[0]!r} belongs to every file's common part; rename the data")
    document = {"schema": SCHEMA, "figures": [asdict(figure) for figure in figures], **data}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_figures(figures: Sequence[Figure], console: Console) -> None:
    """Print which targets are met and which are not; the met ones only if targets are few."""
    aimed = [figure for figure in figures if figure.met is not None]
    missed = [figure for figure in aimed if not figure.met]
    if aimed:
        console.print(f"{len(aimed) - len(missed)} of {len(aimed)} targets met")
    for figure in aimed if len(aimed) <= MOST_NAMED else missed:
        sign = "≥ " if figure.better == "higher" else "≤ " if figure.target else ""
        console.print(
            f"  {'met' if figure.met else 'not met'}: {figure.name} is "
            f"{figure.value:.4g} {figure.unit}, target {sign}{figure.target:.4g} {figure.unit}",
            highlight=False,
            soft_wrap=True,
        )
