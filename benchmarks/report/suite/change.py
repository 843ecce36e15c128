"""Changes of figures between two measurements, and whether they are more than noise.

A figure is *worse* (or *better*) if

- its median moved by more than the repeats of both sides lie apart together,
- and by more than `FLOOR`, or `ALONE` where a side has one repeat, which says nothing of its noise,
- and every repeat of the new side lies beyond every repeat of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.report.suite.repeats import Repeated

FLOOR = 0.05
ALONE = 0.25


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure on both sides."""

    old: Repeated
    new: Repeated

    @property
    def name(self) -> str:
        """Name of the figure."""
        return self.new.name

    @property
    def ratio(self) -> float:
        """New median over old one; infinite if the old one is 0 and the new one is not."""
        old, new = self.old.figure.value, self.new.figure.value
        return new / old if old else 1.0 if new == old else float("inf")

    @property
    def noise(self) -> float:
        """Share of the median by which a figure may move without being news."""
        alone = min(len(self.old.values), len(self.new.values)) < 2
        return max(ALONE if alone else FLOOR, self.old.spread + self.new.spread)

    @property
    def verdict(self) -> Literal["worse", "better", "same"]:
        """Whether the figure became worse or better, or neither beyond its noise."""
        old, new = self.old, self.new
        if abs(self.ratio - 1) <= self.noise:
            return "same"
        above, below = min(new.values) > max(old.values), max(new.values) < min(old.values)
        if not (above or below):
            return "same"
        return "worse" if above == (new.figure.better == "lower") else "better"


def changes(old: Sequence[Repeated], new: Sequence[Repeated]) -> Iterator[FigureChange]:
    """Yield the figures that both sides have, in the new side's order."""
    known: Mapping[str, Repeated] = {each.name: each for each in old}
    for each in new:
        if each.name in known:
            yield FigureChange(known[each.name], each)
