"""Axes that fragments may split so that they cover the model.

A block that two split axes own lies between two fragments, and nobody would train it. So two axes
that meet in a tensor exclude each other, and an axis that meets itself (a recurrent weight) is
never split. Of the choices that are left, the one that splits most parameters is taken: an axis
weighs the parameters it owns, and what is wanted is the heaviest set of axes without two that
exclude each other.

The search is exact for up to `MOST_EXACT` axes that hang together, as far as `BRANCHES` choices go.
Two facts keep it short: parts of the model that share no tensor are independent, and an axis that
weighs as much as all its neighbours together is always worth taking. Beyond that, axes are taken by
their weight for each axis they exclude, themselves included (Sakai, Togasaki and Yamazaki 2003):
every axis's weight divided by that number adds up to at least the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod

from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Tensor

MOST_EXACT = 64
BRANCHES = 20_000

AxisSet = frozenset[int]


@lru_cache(maxsize=16)
def split_axes(plan: ModelPlan) -> tuple[int, ...]:
    """Return the numbers of the axes to split, ascending; all have equally many groups.

    An axis of depth is split only where there are no widths: graphs are made for as many blocks as
    levels have. Of several numbers of groups, that which splits most parameters is taken, the
    larger one of equals.
    """
    weights, meets = _axes_of(plan)
    widths = plan.regions != "depth"
    best: tuple[int, int, tuple[int, ...]] = (0, 0, ())
    for count in {len(axis.groups) for axis in plan.axes if len(axis.groups) > 1}:
        free = [
            number
            for number, axis in enumerate(plan.axes)
            if len(axis.groups) == count
            and not axis.alternatives
            and not (axis.depth and widths)
            and number not in meets[number]
        ]
        taken = heaviest({each: weights[each] for each in free}, meets)
        best = max(best, (sum(weights[each] for each in taken), count, tuple(sorted(taken))))
    return best[2]


def heaviest(weights: Mapping[int, int], meets: Sequence[Collection[int]]) -> AxisSet:
    """Return the heaviest set of numbers of which no two meet, as far as the search goes."""
    search = _Search(weights, {each: AxisSet(meets[each]) & weights.keys() for each in weights})
    found, simple = search.best(AxisSet(weights)), search.by_ratio(AxisSet(weights))
    return max(found, simple, key=search.weight)


class _Search:
    """The heaviest sets of parts of one graph."""

    def __init__(self, weights: Mapping[int, int], near: Mapping[int, AxisSet]) -> None:
        self._weights = weights
        self._near = near
        self._left = BRANCHES
        self._known: dict[AxisSet, AxisSet] = {}

    def weight(self, numbers: Collection[int]) -> int:
        """Weight of all together."""
        return sum(self._weights[each] for each in numbers)

    def best(self, numbers: AxisSet) -> AxisSet:
        """Return the heaviest set among these numbers."""
        taken, rest = self._worth_taking(numbers)
        for part in self._parts(rest):
            taken |= self._branched(part)
        return taken

    def _worth_taking(self, numbers: AxisSet) -> tuple[AxisSet, AxisSet]:
        """Return numbers that some heaviest set holds, and those still open."""
        taken: AxisSet = AxisSet()
        found = True
        while found:
            found = False
            for each in sorted(numbers):
                near = self._near[each] & numbers
                if each in numbers and self._weights[each] >= self.weight(near):
                    taken |= {each}
                    numbers -= near | {each}
                    found = True
        return taken, numbers

    def _parts(self, numbers: AxisSet) -> Iterator[AxisSet]:
        """Split numbers into parts that do not meet."""
        while numbers:
            part, edge = AxisSet(), AxisSet({min(numbers)})
            while edge:
                part |= edge
                edge = AxisSet().union(*(self._near[each] for each in edge)) & numbers - part
            yield part
            numbers -= part

    def _branched(self, part: AxisSet) -> AxisSet:
        if len(part) > MOST_EXACT or self._left <= 0:
            return self.by_ratio(part)
        if part not in self._known:
            self._left -= 1
            pivot = max(part, key=lambda each: (len(self._near[each] & part), -each))
            within = self.best(part - self._near[pivot] - {pivot}) | {pivot}
            self._known[part] = max(within, self.best(part - {pivot}), key=self.weight)
        return self._known[part]

    def by_ratio(self, numbers: AxisSet) -> AxisSet:
        """Take numbers by their weight for each one they exclude, the first of equals."""
        taken: AxisSet = AxisSet()
        while numbers:
            each = min(
                numbers,
                key=lambda n: (-self._weights[n] / (1 + len(self._near[n] & numbers)), n),
            )
            taken |= {each}
            numbers -= self._near[each] | {each}
        return taken


def _axes_of(plan: ModelPlan) -> tuple[list[int], list[set[int]]]:
    """Return the parameters that every axis owns, and the axes it meets, perhaps itself."""
    weights = [0 for _ in plan.axes]
    meets: list[set[int]] = [set() for _ in plan.axes]
    for tensor in plan.tensors:
        along = _owners(tensor)
        for number, owners in enumerate(along):
            others = {each for other in (*along[:number], *along[number + 1 :]) for each in other}
            rest = prod(tensor.shape) // tensor.shape[number]
            for axis, size in owners.items():
                weights[axis] += size * rest
                meets[axis] |= others
    return weights, meets


def _owners(tensor: Tensor) -> list[dict[int, int]]:
    """Return, for every dimension, the places along it that each axis owns."""
    found: list[dict[int, int]] = []
    for dim in tensor.dims:
        owners: dict[int, int] = {} if dim.axis is None else {dim.axis: dim.size}
        for segment in dim.segments:
            if segment.axis is not None:
                owners[segment.axis] = owners.get(segment.axis, 0) + segment.size
        found.append(owners)
    return found
