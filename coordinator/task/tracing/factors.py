"""Dimensions as products of factors: the algebra behind finding a model's width axes.

Every dimension of every value in a traced graph is a list of *factors* whose sizes multiply to the
dimension's size; a dimension of size one is an empty list. Operators relate factors:

- `tie(a, b)`   two dimensions are the same (an addition, a layer's weights and its input);
- `reshape`     the same factors in the same order, partitioned anew; a boundary that falls inside
                a factor splits that factor, everywhere it occurs;
- `freeze`      a factor cannot be narrowed, and why (it is normalised over, indexed, an input).

Once the whole graph has been walked, each factor that is still free and occurs in a weight is a
width axis. Flattening an image, fused q/k/v, attention heads, GroupNorm groups and tied residual
widths need no special case: they are all splits and ties.

A concatenation is a *sum*: one factor that consists of segments, each a dimension of its own. It
passes through layers like any factor, so a weight that meets it gets its segments; a sum that is
split or tied to other segments freezes them all.

The batch is one more, special factor: an ordinary factor whose size is chosen for each run.
Freezing it means that the batch size is fixed inside the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from coordinator.errors import TraceError


class Factor:
    """One factor of one or many dimensions. Compare by `leaf` identity, not by this object."""

    __slots__ = ("batch", "frozen", "parts", "root", "segments", "size")

    def __init__(self, size: int, *, frozen: str | None = None, batch: bool = False) -> None:
        self.size = size
        self.frozen = frozen
        self.batch = batch
        self.root: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None
        self.segments: tuple[Factors, ...] = ()
        """Dimensions that add up to this one, if it is a sum."""

    def leaves(self) -> list[Factor]:
        """Return the factors this one has become through ties and splits, in order."""
        root = self
        while root.root is not None:
            root = root.root
        step = self
        while step.root is not None:  # many ties make a long chain: shorten it for next time
            step.root, step = root, step.root
        if root.parts is not None:
            return root.parts[0].leaves() + root.parts[1].leaves()
        return [root]


Factors = list[Factor]
"""One dimension: factors from the slowest to the fastest varying."""


def fresh(size: int, *, frozen: str | None = None) -> Factors:
    """Make a dimension about which nothing is known yet, or one frozen from the start."""
    return [] if size == 1 else [Factor(size, frozen=frozen)]


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    """Return the dimension's current factors, in order."""
    return [leaf for factor in dim for leaf in factor.leaves()]


def size_of(dim: Iterable[Factor]) -> int:
    """Return the dimension's size."""
    return prod(leaf.size for leaf in leaves(dim))


def concatenation(dims: Sequence[Factors], size: int) -> Factors:
    """Make a dimension that consists of these, one after the other."""
    sum_ = Factor(size)
    sum_.segments = tuple(dims)
    return [sum_]


def segments_of(factor: Factor) -> list[Factors]:
    """Return the segments of a sum, none of which is a sum itself; none for other factors."""
    found: list[Factors] = []
    for segment in factor.segments:
        parts = leaves(segment)
        if len(parts) == 1 and parts[0].segments:
            found += segments_of(parts[0])
        else:
            freeze([part for part in parts if part.segments], "is concatenated and flattened")
            found.append(leaves(parts))
    return found


def widths(dim: Iterable[Factor]) -> list[Factor]:
    """Return the dimension's current factors, those of the segments in place of a sum."""
    return [
        part
        for leaf in leaves(dim)
        for part in ([f for s in segments_of(leaf) for f in s] if leaf.segments else [leaf])
    ]


def freeze(dim: Iterable[Factor], why: str) -> None:
    """Keep the dimension whole, and remember the first reason given."""
    for leaf in leaves(dim):
        segments, leaf.segments = leaf.segments, ()
        for segment in segments:
            freeze(segment, why)
        if leaf.batch:
            raise TraceError(f"the batch size is fixed inside the model: {why}")
        if leaf.frozen is None:
            leaf.frozen = why


def tie(one: Factors, other: Factors, why: str) -> None:
    """Make two dimensions of equal size the same, splitting factors where necessary.

    Where no common factors exist (6 as 2·3 against 3·2) both are frozen.
    """
    left, right = leaves(one), leaves(other)
    while left and right:
        a, b = left[0], right[0]
        if a.size == b.size:
            if a is not b:
                _unite(a, b, why)
            left, right = leaves(left[1:]), leaves(right[1:])
        elif a.size < b.size and b.size % a.size == 0 and not b.batch:
            _split(b, a.size)
            right = leaves(right)
        elif b.size < a.size and a.size % b.size == 0 and not a.batch:
            _split(a, b.size)
            left = leaves(left)
        else:
            break
    freeze([*left, *right], why)


def reshape(dims: Sequence[Factors], shape: Sequence[int], why: str) -> list[Factors]:
    """Return the same elements in another shape; factors that cannot be followed are frozen."""
    todo = leaves([factor for dim in dims for factor in dim])
    out: list[Factors] = []
    for size in shape:
        dim: Factors = []
        while size > 1:
            if not todo:
                break
            factor = todo[0]
            if size % factor.size == 0:
                dim.append(factor)
                size //= factor.size
                todo = todo[1:]
            elif factor.size % size == 0 and not factor.batch:
                _split(factor, size)
                todo = leaves(todo)
            else:
                freeze([*dim, *todo], why)
                return _refrozen(out, shape, why)
        out.append(dim)
    return out


def split_front(dim: Factors, count: int, why: str) -> tuple[Factors, Factors]:
    """Split a dimension into (count, rest), the way groups lie in channels."""
    front, rest = reshape([dim], [count, size_of(dim) // count], why)
    return front, rest


def _refrozen(done: list[Factors], shape: Sequence[int], why: str) -> list[Factors]:
    for dim in done:
        freeze([factor for factor in leaves(dim) if not factor.batch], why)
    return done + [fresh(size, frozen=why) for size in shape[len(done) :]]


def _unite(a: Factor, b: Factor, why: str) -> None:
    if b.segments and not a.segments:
        a, b = b, a
    if a.segments and b.segments:
        pairs = list(zip(segments_of(a), segments_of(b), strict=False))
        alike = len(segments_of(a)) == len(segments_of(b))
        if alike and all(size_of(one) == size_of(other) for one, other in pairs):
            for one, other in pairs:
                tie(one, other, why)
        else:
            freeze([a, b], why)
    elif a.segments and (b.frozen is not None or b.batch):
        freeze([a], b.frozen or why)
    if a.batch or b.batch:
        frozen = a.frozen or b.frozen
        if frozen is not None:
            raise TraceError(f"the batch size is fixed inside the model: {frozen}")
        a.batch = b.batch = True
    a.frozen = a.frozen or b.frozen
    b.root = a


def _split(factor: Factor, front: int) -> None:
    if factor.segments:
        freeze([factor], "is concatenated, then split otherwise")
    factor.parts = (
        Factor(front, frozen=factor.frozen),
        Factor(factor.size // front, frozen=factor.frozen),
    )
