"""One graph for every size, found from traces in which every size is a prime number.

`decoded` needs a single trace. Every axis and the batch have their own large prime, so a number
that one of them divides depends on that size, and what remains is its coefficient. Numbers that
are no such product (a sum of sizes) go unnoticed here, so the graph must be checked at other sizes.

`symbolic` compares traces at three points, with other primes at each. A number that differs
between two points must have changed by a product of those primes' ratios, and unique factorisation
tells which sizes it is a product of; the third point checks the result. If operators differ between
points, or a number is no such product, `NotSymbolicError` is raised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import islice
from math import copysign, isclose, isfinite
from typing import Any

import torch
from torch import fx

from coordinator.task.graphs.errors import NotSymbolicError
from coordinator.task.graphs.gradient import KeptSizes, Traced
from edge_sdk.protocol.task.data_spec import MAX_SIZE
from edge_sdk.protocol.task.graphs import SizeTerm, sum_of

Size = int | SizeTerm
"""A constant, or a term that depends on an axis or the batch."""

Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class TracePoint:
    """Sizes at which a graph is traced."""

    kept: KeptSizes
    batch: int


@dataclass(frozen=True, slots=True)
class Quotient:
    """A float that depends on sizes: coefficient × over / under."""

    coefficient: float
    over: SizeTerm
    under: SizeTerm


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of a step's result or of an input."""

    name: str


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and type of a tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator: its name, its arguments by name (with defaults), its results."""

    name: str
    target: str
    arguments: dict[str, Any]
    results: tuple[Spec | None, ...]
    single: bool
    module: str


@dataclass(frozen=True, slots=True)
class Symbolic:
    """A graph whose sizes may depend on axes and batch."""

    inputs: dict[str, Spec]
    """Inputs by name, in order; `Ref` uses the same names."""
    steps: tuple[Operation, ...]
    outputs: dict[str, Ref]
    masks: tuple[float, ...]
    constants: dict[str, torch.Tensor]
    moments: dict[str, Ref] = field(default_factory=dict)
    """Further outputs, those of a statistics graph."""

    def only(self, outputs: dict[str, Ref]) -> Symbolic:
        """Return the graph with these outputs, and the steps they need."""
        needed = {ref.name for ref in outputs.values()}
        steps = []
        for step in reversed(self.steps):
            if step.name in needed:
                steps.append(step)
                needed.update(_refs(list(step.arguments.values())))
        return Symbolic(self.inputs, tuple(steps[::-1]), outputs, self.masks, self.constants)


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _refs(part)


LARGE = 1009
"""Primes from here on are large: no size of a usual model is a multiple of one."""


def large_point(
    made: KeptSizes, others: Iterable[int], sums: Sequence[SizeTerm] = ()
) -> TracePoint:
    """Return a point of large primes for the batch and the axes that are 0 in `made`.

    None of them divides a number in `others`. Of several such points, it is the one at which the
    fewest `sums` look like products.
    """
    known, count = set(others), made.count(0) + 1
    usable = (prime for prime in _primes(LARGE) if all(number % prime for number in known))
    primes = list(islice(usable, count + (TRIES if sums else 0)))
    points = []
    for start in range(0, len(primes) - count + 1, 4):
        batch, *left = primes[start : start + count]
        rest = iter(left)
        points.append(TracePoint(tuple(atoms or next(rest) for atoms in made), batch))
    return min(points, key=lambda point: sum(_like_a_product(each, point) for each in sums))


TRIES = 200
"""Further primes to choose from where sizes are sums."""


def _like_a_product(size: SizeTerm, point: TracePoint) -> bool:
    """Tell whether a sum's value at a point is a usual number times widths of the point."""
    value = size.value(point.kept, point.batch)
    for prime in (*point.kept, point.batch):
        while prime >= LARGE and value % prime == 0:
            value //= prime
    return value < LARGE


def decoded(
    traced: Traced,
    point: TracePoint,
    sums: Iterable[SizeTerm] = (),
    fixed: Collection[int] = (),
) -> Symbolic:
    """Return the graph for every size, from one trace at a `large_point`; it is to be checked.

    `sums` are the sums of sizes that may occur: no factorisation shows them. `fixed` are axes whose
    size is no prime but the graph's own.
    """
    return _Decoding(point, traced, sums, fixed).run()


def prime_points(axes: Sequence[bool], *, batch: bool, base: TracePoint) -> tuple[TracePoint, ...]:
    """Return three points; an axis or batch that is False stays as in `base`."""
    free = sum(axes) + batch
    primes = list(islice(_primes(11), 3 * free))
    points = []
    for index in range(3):
        own = iter(primes[index::3])
        kept = tuple(
            next(own) if varies else size for varies, size in zip(axes, base.kept, strict=True)
        )
        points.append(TracePoint(kept, next(own) if batch else base.batch))
    return tuple(points)


def static(traced: Traced, point: TracePoint) -> Symbolic:
    """Return the graph at one size."""
    return _Comparison([point], [traced]).run()


def symbolic(trace: Callable[[KeptSizes, int], Traced], points: Sequence[TracePoint]) -> Symbolic:
    """Return the graph for every size, from its traces at these points (`prime_points`)."""
    return _Comparison(points, [trace(point.kept, point.batch) for point in points]).run()


def as_term(size: Size) -> SizeTerm:
    """Return the size as the manifest states it."""
    return SizeTerm(size, (), False) if isinstance(size, int) else size


def multiply(*sizes: Size) -> Size:
    """Return the product of sizes; sums are multiplied out."""
    found = [SizeTerm(1)]
    for size in sizes:
        found = [_times(one, other) for one in found for other in as_term(size).summands]
    return plain(sum_of(found))


def _times(one: SizeTerm, other: SizeTerm) -> SizeTerm:
    if one.batch and other.batch:
        raise NotSymbolicError("a size depends on the batch twice")
    axes = tuple(sorted((*one.axes, *other.axes)))
    return SizeTerm(one.coefficient * other.coefficient, axes, one.batch or other.batch)


def plain(term: SizeTerm) -> Size:
    """Return a constant as a number."""
    return term if term.all_axes or term.any_batch else term.coefficient


def subtract(left: Size, right: Size) -> Size:
    """Return the difference, which must be a size or zero."""
    rest = {(term.axes, term.batch): term for term in as_term(left).summands}
    for term in as_term(right).summands:
        if not term.coefficient:
            continue
        before = rest.get((term.axes, term.batch), SizeTerm(0)).coefficient
        if before < term.coefficient:
            raise NotSymbolicError(f"{left} − {right} is not a size")
        rest[term.axes, term.batch] = replace(term, coefficient=before - term.coefficient)
    return plain(sum_of(rest.values()))


class _Comparison:
    def __init__(self, points: Sequence[TracePoint], traces: Sequence[Traced]) -> None:
        self._points = points
        self._traces = traces
        self._sizes: list[list[int]] = [[*point.kept, point.batch] for point in points]
        self._numbers: list[dict[fx.Node, int]] = [
            {node: number for number, node in enumerate(traced.graph.nodes)} for traced in traces
        ]

    def run(self) -> Symbolic:
        graphs = [list(traced.graph.nodes) for traced in self._traces]
        if len({len(nodes) for nodes in graphs}) != 1:
            raise NotSymbolicError("the graph has more operators at some sizes than at others")
        first = self._traces[0]
        inputs: dict[str, Spec] = {}
        steps: list[Operation] = []
        outputs: dict[str, Ref] = {}
        moments: dict[str, Ref] = {}
        for nodes in zip(*graphs, strict=True):
            node = nodes[0]
            if len({(other.op, str(other.target)) for other in nodes}) != 1 and node.op not in (
                "placeholder",
                "output",
            ):
                raise NotSymbolicError(f"{node.target} is a different operator at other sizes")
            if node.op == "placeholder":
                inputs[node.name] = self._spec([other.meta["val"] for other in nodes])
            elif node.op == "output":
                refs = self._unify([list(other.args[0]) for other in nodes])
                outputs = dict(zip(first.outputs, refs, strict=False))
                moments = dict(zip(first.moments, refs[len(outputs) :], strict=True))
            elif node.op == "get_attr":
                raise NotSymbolicError(f"the graph contains a tensor of its own: {node.target}")
            else:
                steps.append(self._step(nodes))
        names = dict(zip(inputs, first.inputs, strict=True))
        return Symbolic(
            {names[name]: spec for name, spec in inputs.items()},
            tuple(_rename(step, names) for step in steps),
            {name: Ref(names.get(ref.name, ref.name)) for name, ref in outputs.items()},
            first.masks,
            first.constants,
            {name: Ref(names.get(ref.name, ref.name)) for name, ref in moments.items()},
        )

    def _step(self, nodes: Sequence[fx.Node]) -> Operation:
        node = nodes[0]
        value = node.meta["val"]
        single = isinstance(value, torch.Tensor)
        values = [[other.meta["val"]] if single else other.meta["val"] for other in nodes]
        results = tuple(
            self._spec(parts) if isinstance(parts[0], torch.Tensor) else None
            for parts in zip(*values, strict=True)
        )
        arguments = self._unify([_bind(other) for other in nodes])
        target = _target(node)
        if arguments.get("transposed"):  # one torch operator covers two very different ones
            target = target.replace("convolution", "convolution_transposed")
        return Operation(node.name, target, arguments, results, single, _module_of(node))

    def _spec(self, values: Sequence[torch.Tensor]) -> Spec:
        if len({(value.ndim, value.dtype) for value in values}) != 1:
            raise NotSymbolicError("a tensor has a different number of dimensions at other sizes")
        shape = self._unify([tuple(int(size) for size in value.shape) for value in values])
        return Spec(shape, values[0].dtype)

    def _unify(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, fx.Node):
            numbers = {
                number.get(value) for number, value in zip(self._numbers, values, strict=True)
            }
            if len(numbers) != 1:
                raise NotSymbolicError(f"{first} is connected differently at other sizes")
            return Ref(first.name)
        if isinstance(first, (list, tuple)):
            if len({len(value) for value in values}) != 1:
                raise NotSymbolicError(f"{first} has a different length at other sizes")
            parts = [self._unify(part) for part in zip(*values, strict=True)]
            return tuple(parts) if isinstance(first, tuple) else parts
        if isinstance(first, dict):
            return {key: self._unify([value[key] for value in values]) for key in first}
        return self._number(values)

    def _number(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(value == first or (value != value and first != first) for value in values):
            return first  # NaN is the same number too
        if type(first) is int:
            return self._size(values)
        if type(first) is float:
            return self._quotient(values)
        raise NotSymbolicError(f"{first!r} differs between sizes")

    def _size(self, values: Sequence[int]) -> SizeTerm:
        if min(values) > 0:
            over, under = self._powers(Fraction(values[1], values[0]))
            total = over.value(*self._at(0))
            if under == SizeTerm(1, (), False) and values[0] % total == 0:
                term = SizeTerm(values[0] // total, over.axes, over.batch)
                if all(term.value(*self._at(i)) == value for i, value in enumerate(values)):
                    return term
        raise NotSymbolicError(f"the sizes {list(values)} are not products of widths and batch")

    def _quotient(self, values: Sequence[float]) -> Quotient:
        if min(values) > 0:
            over, under = self._powers(Fraction(values[1] / values[0]).limit_denominator(10**7))
            coefficient = values[0] * under.value(*self._at(0)) / over.value(*self._at(0))
            if isclose(coefficient, round(coefficient), rel_tol=1e-12):
                coefficient = float(round(coefficient))
            if all(
                isclose(
                    coefficient * over.value(*self._at(i)) / under.value(*self._at(i)),
                    value,
                    rel_tol=1e-9,
                )
                for i, value in enumerate(values)
            ):
                return Quotient(coefficient, over, under)
        raise NotSymbolicError(f"the numbers {list(values)} depend on neither widths nor batch")

    def _at(self, index: int) -> tuple[KeptSizes, int]:
        return self._points[index].kept, self._points[index].batch

    def _powers(self, ratio: Fraction) -> tuple[SizeTerm, SizeTerm]:
        """Return the sizes that grew and those that shrank between the first two points."""
        batch = len(self._sizes[0]) - 1
        found: list[list[int]] = [[], []]
        for which, number in enumerate((ratio, 1 / ratio)):
            for index, (before, after) in enumerate(
                zip(self._sizes[0], self._sizes[1], strict=True)
            ):
                grown, shrunk = number.numerator, number.denominator
                while before != after and grown % after == 0 and shrunk % before == 0:
                    found[which].append(index)
                    grown, shrunk = grown // after, shrunk // before
        if any(part.count(batch) > 1 for part in found):
            raise NotSymbolicError("a size depends on the batch twice")
        over, under = (
            SizeTerm(1, tuple(i for i in part if i != batch), batch in part) for part in found
        )
        return over, under


class _Decoding(_Comparison):
    """Reads sizes off a single trace at a `large_point`."""

    def _number(self, values: Sequence[Any]) -> Any:
        (value,) = values
        if type(value) is int and abs(value) < _ENDLESS:
            size = self._size_of(abs(value))
            if not isinstance(size, int) and value < 0:
                raise NotSymbolicError(f"the size {value} is negative")
            return value if isinstance(size, int) else size
        if type(value) is float and value != 0 and isfinite(value):
            ratio = _fraction(abs(value))
            over, under = self._term(ratio.numerator), self._term(ratio.denominator)
            if (over.coefficient, under.coefficient) != (ratio.numerator, ratio.denominator):
                coefficient = copysign(over.coefficient / under.coefficient, value)
                return Quotient(
                    coefficient, replace(over, coefficient=1), replace(under, coefficient=1)
                )
        return value

    def __init__(
        self,
        point: TracePoint,
        traced: Traced,
        sums: Iterable[SizeTerm],
        fixed: Collection[int],
    ) -> None:
        super().__init__([point], [traced])
        self._fixed = frozenset(fixed)
        self._term, self._size_of = cache(self._divided), cache(self._decoded)
        self._sums = {term.value(point.kept, point.batch): term for term in sums}

    def _decoded(self, number: int) -> Size:
        for value, term in self._sums.items() if number else ():
            if number % value == 0:
                return multiply(term, plain(self._term(number // value)))
        return plain(self._term(number))

    def _divided(self, number: int) -> SizeTerm:
        """Divide out the primes of the axes and the batch; zero is a constant."""
        found = []
        for index, prime in enumerate(self._sizes[0]):
            while index not in self._fixed and number and number % prime == 0:
                found.append(index)
                number //= prime
        batch = len(self._sizes[0]) - 1
        if found.count(batch) > 1:
            raise NotSymbolicError("a size depends on the batch twice")
        return SizeTerm(number, tuple(i for i in found if i != batch), batch in found)


_ENDLESS = 2**62
"""torch writes "to the end" as the largest integer."""


def _fraction(value: float) -> Fraction:
    """Return the simplest fraction that rounds to the value; sizes make 1 / n and n.

    Numbers too large for a size, such as the largest float, become 1.
    """
    if value > MAX_SIZE:
        return Fraction(1)
    for whole, turned in ((value, False), (1 / value, True)):
        if whole < 2**53 and isclose(whole, round(whole), rel_tol=1e-15) and round(whole):
            return Fraction(1, round(whole)) if turned else Fraction(round(whole))
    found = Fraction(value).limit_denominator(10**7)
    return found if isclose(found, value, rel_tol=1e-13) else Fraction(1)


def _primes(start: int) -> Any:
    number = start
    while True:
        if all(number % factor for factor in range(2, int(number**0.5) + 1)):
            yield number
        number += 1


def _target(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    full = str(node.target).removeprefix("aten.").removeprefix("tessera.")
    name, _, overload = full.partition(".")
    # Results of operators that torch still runs in place are read only through the result.
    return name.removesuffix("_") + ("" if overload == "default" else f".{overload}")


def _bind(node: fx.Node) -> dict[str, Any]:
    if node.target is operator.getitem:
        return {"source": node.args[0], "index": node.args[1]}
    schema: Any = node.target._schema  # type: ignore[union-attr]
    bound = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        else:
            bound[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return bound


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [entry[0] for entry in stack.values()]
    return str(names[-1]) if names else ""


def _rename(step: Operation, names: dict[str, str]) -> Operation:
    def renamed(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names.get(value.name, value.name))
        if isinstance(value, (list, tuple)):
            return type(value)(renamed(part) for part in value)
        return value

    arguments = {key: renamed(value) for key, value in step.arguments.items()}
    return Operation(step.name, step.target, arguments, step.results, step.single, step.module)
