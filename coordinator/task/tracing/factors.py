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
passes through layers like any factor, so a weight that meets it gets its segments. `cut` makes a
sum of a factor that is taken apart into unequal pieces. Two sums that are tied get each other's
boundaries. A sum that is split into equal parts becomes a product: its parts are tied.

The batch is one more, special factor: an ordinary factor whose size is chosen for each run.
Freezing it means that the batch size is fixed inside the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
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
        first, rest = leaves(segment)[:1], leaves(segment)[1:]
        freeze([part for part in rest if part.segments], "is concatenated and flattened")
        rest = leaves(rest)
        if first and first[0].segments:
            found += [[*inner, *rest] for inner in segments_of(first[0])]
        else:
            found.append([*first, *rest])
    return found


def cut(dim: Factors, sizes: Sequence[int], why: str) -> list[Factors]:
    """Cut a dimension into runs of these sizes, each with a width of its own.

    Where that cannot be followed, the dimension is frozen.
    """
    first, rest = leaves(dim)[0], leaves(dim)[1:]
    inner = size_of(rest)
    if first.batch or any(size % inner for size in sizes):
        freeze(dim, why)
        return [fresh(size, frozen=why) for size in sizes]
    counts = [size // inner for size in sizes]
    if first.frozen is not None:
        return [[*fresh(count, frozen=first.frozen), *rest] for count in counts]
    return [[*run, *rest] for run in _refined(first, counts, why)]


def _refined(leaf: Factor, sizes: Sequence[int], why: str) -> list[Factors]:
    """Make a factor a sum, if it is none, with boundaries between runs of these sizes."""
    if not leaf.segments:
        leaf.segments = tuple(fresh(size) for size in sizes)
        return list(leaf.segments)
    found: list[Factors] = []
    segments = segments_of(leaf)
    for size in sizes:
        run: list[Factors] = []
        missing = size
        while missing:
            segment = segments.pop(0)
            if size_of(segment) > missing:
                segment, rest = cut(segment, [missing, size_of(segment) - missing], why)
                segments.insert(0, rest)
            run.append(segment)
            missing -= size_of(segment)
        found.append(run[0] if len(run) == 1 else concatenation(run, size))
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
        ends = {end for each in (a, b) for end in accumulate(map(size_of, segments_of(each)))}
        sizes = [end - start for start, end in pairwise(sorted({0, *ends}))]
        for one, other in zip(_refined(a, sizes, why), _refined(b, sizes, why), strict=True):
            tie(one, other, why)
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
    """Split a factor in two, the first of this size; for a sum, it may be a divisor of it."""
    if not factor.segments:
        factor.parts = (
            Factor(front, frozen=factor.frozen),
            Factor(factor.size // front, frozen=factor.frozen),
        )
        return
    why = "counts the parts of a concatenation"
    sizes = {size_of(segment) for segment in segments_of(factor)}
    count = len(segments_of(factor))
    if len(sizes) > 1 or count == 1 or front % count:
        count = front
    each = factor.size // count
    runs = _refined(factor, [each] * count, why)
    factor.segments = ()
    part = Factor(each)
    factor.parts = (Factor(count, frozen=why), part)
    for run in runs:
        tie([part], run, why)
