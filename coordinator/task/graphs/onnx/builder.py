"""Collects the nodes of an ONNX graph whose sizes may follow widths and the batch.

A value may be held narrower than its shape (`Value.held`): a value that only feeds pointwise
operators need not be expanded, since those broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from coordinator.task.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.task.graphs.symbols import Quotient, Shape, Size, as_term
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Tensor
from edge_sdk.protocol.task.graphs import SLOT_BYTES, SizeTerm, sum_of

PLACEHOLDER = 2 ** (7 * (SLOT_BYTES - 1))
"""The smallest number that takes `SLOT_BYTES` bytes; no layer is so wide."""
LATER = ("channels", "group", "hidden_size")
"""Attributes that may be written into the file later: of convolutions, and of recurrent layers."""


@dataclass(frozen=True, slots=True)
class OnnxValue:
    """A tensor of the ONNX graph; `held` is its actual shape there and broadcasts to `shape`."""

    name: str
    shape: Shape
    dtype: torch.dtype
    held: Shape


@dataclass(frozen=True, slots=True)
class WayMaker:
    """One way to compute a value; see `edge_sdk.protocol.task.graphs.GraphWay`."""

    name: str
    make: Callable[[], str]
    """Adds the nodes and returns the value's name; may raise `NotSymbolicError`."""
    multiples: tuple[tuple[Size, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MadePlace:
    """A value with several ways to compute it, behind the first `at` nodes."""

    name: str
    at: int
    output: str
    ways: tuple[tuple[WayMaker, tuple[onnx.NodeProto, ...]], ...]


class Builder:
    """Collects ONNX nodes; the same operation requested twice gives the same result.

    Values that can be computed in several ways keep those that work at full width with a batch of
    `ways_batch` (`either`); 0: only their first.
    """

    def __init__(self, plan: ModelPlan, batch_source: str, ways_batch: int = 0) -> None:
        self.plan = plan
        self.choices: list[MadePlace] = []
        self._ways_batch = ways_batch
        self.trains = bool(ways_batch)
        """The graph is one for training alone; others also go to other runtimes."""
        self._inside = False
        self._count = 0
        self._batch_source = batch_source
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.placeholders: dict[SizeTerm, int] = {}
        self._made: dict[Any, tuple[str, ...]] = {}
        self._constants: dict[Any, str] = {}

    def emit(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        return self.emit_many(1, operator, *inputs, **attributes)[0]

    def emit_many(
        self, outputs: int, operator: str, *inputs: str, **attributes: Any
    ) -> tuple[str, ...]:
        """Add a node and return the names of its outputs."""
        for name in LATER:
            if isinstance(size := attributes.get(name), SizeTerm):
                attributes[name] = self._placeholder(size)
        for name, value in attributes.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(part, SizeTerm) for part in values):
                raise NotSymbolicError(f"ONNX needs a fixed number for {name!r} of {operator}")
        key = (operator, inputs, outputs, repr(sorted(attributes.items())))
        if key not in self._made:
            stem, self._count = f"v{self._count}", self._count + 1
            names = (stem,) if outputs == 1 else tuple(f"{stem}_{i}" for i in range(outputs))
            self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
            self._made[key] = names
        return self._made[key]

    def either(self, place: str, *ways: WayMaker) -> str:
        """Add a value that can be computed in several ways, the first by default.

        `place` names it for people; a number is added where the name is taken. A further way that
        needs a fixed number where a size follows the widths is left out, and one that does not
        even work at full width.
        """
        first, *others = ways
        atoms, batch = [axis.atoms for axis in self.plan.axes], self._ways_batch
        others = [
            way
            for way in others
            if batch and not any(as_term(size).value(atoms, batch) % n for size, n in way.multiples)
        ]
        if not others:
            return first.make()
        nodes, made = self.nodes, self._made
        output, self._count = f"v{self._count}", self._count + 1
        found = []
        try:
            for number, way in enumerate((first, *others)):
                # What another way makes is not there if that one is not chosen.
                self.nodes, self._made, self._inside = [], dict(made), number > 0
                try:
                    name = way.make()
                except NotSymbolicError:
                    if way is first:
                        raise
                    continue
                self.nodes.append(helper.make_node("Identity", [name], [output]))
                found.append((way, tuple(self.nodes)))
        finally:
            self.nodes, self._made, self._inside = nodes, made, False
        if len(found) == 1:
            self.nodes += found[0][1]
            return output
        taken = {choice.name for choice in self.choices}
        named, more = place, 2
        while named in taken:
            named, more = f"{place} {more}", more + 1
        self.choices.append(MadePlace(named, len(self.nodes), output, tuple(found)))
        return output

    def _placeholder(self, size: SizeTerm) -> int:
        """Return the number that stands for a size which is written into the file later."""
        if size.any_batch and not self._inside:
            raise NotSymbolicError("the width of a layer depends on the batch")
        self.placeholders.setdefault(size, PLACEHOLDER + len(self.placeholders))
        return self.placeholders[size]

    def constant(self, array: Array) -> str:
        """Return the name of an initializer with this value."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"k{len(self._constants)}"
            self._constants[key] = name
            self.initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def ints(self, values: Sequence[int]) -> str:
        """Add a vector of int64."""
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: float | Size | Quotient, dtype: torch.dtype) -> str:
        """Add a number of this type, computed from sizes if it depends on them."""
        if isinstance(value, SizeTerm):
            return self.cast(self.emit("Squeeze", self.size(value)), dtype)
        if isinstance(value, Quotient):
            over = self.scalar(value.over, dtype)
            under = self.scalar(value.under, dtype)
            factor = self.scalar(value.coefficient, dtype)
            return self.emit("Div", self.emit("Mul", factor, over), under)
        return self.constant(np.array(value, dtype=numpy_type(dtype)))

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """Convert the value to another type."""
        return self.emit("Cast", name, to=onnx_type(dtype))

    def size(self, size: Size) -> str:
        """Return a size as a vector of one int64."""
        first, *rest = as_term(size).summands
        result = self._product(first)
        for term in rest:
            result = self.emit("Add", result, self._product(term))
        return result

    def _product(self, term: SizeTerm) -> str:
        factors = [self._kept(axis) for axis in term.axes]
        if term.batch:
            factors.append(self.emit("Shape", self._batch_source, start=0, end=1))
        if term.coefficient != 1 or not factors:
            factors.append(self.ints([term.coefficient]))
        result, *rest = factors
        for factor in rest:
            result = self.emit("Mul", result, factor)
        return result

    def sizes(self, shape: Shape) -> str:
        """Return a shape as a vector of int64."""
        if all(isinstance(size, int) for size in shape):
            return self.ints([size for size in shape if isinstance(size, int)])
        return self.emit("Concat", *(self.size(size) for size in shape), axis=0)

    def _kept(self, axis: int) -> str:
        """Return the kept atoms of an axis, from a weight that has the axis alone or in a sum."""
        for tensor in self.plan.tensors:
            for position, dim in enumerate(tensor.dims):
                if dim.axis == axis:
                    return self._quotient(tensor, position, dim.outer * dim.inner)
        for tensor, position, found in self._sums:
            if found == axis:
                return self._rest_of_sum(tensor, position, axis)
        raise GraphCompileError(f"no weight has axis {self.plan.axes[axis].name!r}")

    def _quotient(self, tensor: Tensor, position: int, divisor: int, less: str = "") -> str:
        size = self.emit("Shape", f"w:{tensor.name}", start=position, end=position + 1)
        size = self.emit("Sub", size, less) if less else size
        return size if divisor == 1 else self.emit("Div", size, self.ints([divisor]))

    def _rest_of_sum(self, tensor: Tensor, position: int, axis: int) -> str:
        """Subtract all other segments of a dimension; the rest is this axis."""
        segments = tensor.dims[position].segments
        others = [
            SizeTerm(each.inner, (each.axis,)) if each.axis is not None else SizeTerm(each.size)
            for each in segments
            if each.axis != axis
        ]
        own = sum(each.inner for each in segments if each.axis == axis)
        return self._quotient(tensor, position, own, self.size(sum_of(others)))

    @cached_property
    def _sums(self) -> list[tuple[Tensor, int, int]]:
        """Dimensions made of segments (tensor, position), and the one axis each makes known."""
        dims = [(t, at, dim) for t in self.plan.tensors for at, dim in enumerate(t.dims)]
        known = {dim.axis for _, _, dim in dims} - {None}
        found: list[tuple[Tensor, int, int]] = []
        while True:
            before = len(found)
            for tensor, at, dim in dims:
                missing = {each.axis for each in dim.segments} - known - {None}
                if len(missing) == 1:
                    known |= missing
                    found += [(tensor, at, axis) for axis in missing if axis is not None]
            if len(found) == before:
                return found

    # -- values -----------------------------------------------------------------------------

    def full(self, value: OnnxValue) -> str:
        """Expand the value to its shape and return its name."""
        if value.held == value.shape:
            return value.name
        return self.emit("Expand", value.name, self.sizes(value.shape))

    def reshape(self, name: str, before: Shape, after: Shape) -> str:
        """Reshape with as few computed sizes as ONNX's 0 (keep) and −1 (the rest) allow."""
        if before == after:
            return name
        wanted: list[Size] = [
            0 if i < len(before) and isinstance(size, SizeTerm) and before[i] == size else size
            for i, size in enumerate(after)
        ]
        open_ = [i for i, size in enumerate(wanted) if isinstance(size, SizeTerm)]
        if open_:
            wanted[open_[0]] = -1
        if all(isinstance(size, int) for size in wanted):
            return self.emit("Reshape", name, self.sizes(tuple(wanted)))
        parts = [self.ints([size]) if isinstance(size, int) else self.size(size) for size in wanted]
        return self.emit("Reshape", name, self.emit("Concat", *parts, axis=0))


def numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """numpy's type for a torch type."""
    return np.dtype(str(dtype).removeprefix("torch."))


def onnx_type(dtype: torch.dtype) -> int:
    """ONNX's number for a torch type."""
    return int(helper.np_dtype_to_tensor_dtype(numpy_type(dtype)))
