"""The table of operators, and functions that every handler needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.task.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.symbols import Operation, Shape, Size, Spec

Handler = Callable[[Builder, Operation], OnnxValue | Sequence[OnnxValue | None]]

HANDLERS: dict[str, Handler] = {}


def handles(*targets: str) -> Callable[[Handler], Handler]:
    """Register a handler for operators by their torch names, without "aten"."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def spec_of(step: Operation, index: int = 0) -> Spec:
    """Return shape and type of a step's result."""
    spec = step.results[index]
    if spec is None:
        raise GraphCompileError("a result is not a tensor")
    return spec


def result(step: Operation, name: str, index: int = 0) -> OnnxValue:
    """Return a value held in full."""
    spec = spec_of(step, index)
    return OnnxValue(name, spec.shape, spec.dtype, spec.shape)


def axis_of(axis: int, rank: int) -> int:
    """Return the dimension's number, counted from the front."""
    return axis % rank if rank else 0


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape that these shapes stretch to together."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*padded, strict=True))


def fixed(sizes: Sequence[Size], what: str) -> list[int]:
    """Return the sizes if all are fixed, else raise `NotSymbolicError`."""
    found = [size for size in sizes if isinstance(size, int)]
    if len(found) != len(sizes):
        raise NotSymbolicError(f"{what} must not depend on a width or the batch: {list(sizes)}")
    return found


def reduced(
    builder: Builder, operator: str, name: str, axes: Sequence[int], *, keep: bool = False
) -> str:
    """Reduce over these axes; with no axes, return the value unchanged."""
    if not axes:
        return name
    return builder.emit(operator, name, builder.ints(axes), keepdims=int(keep))
