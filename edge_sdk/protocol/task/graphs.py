"""The graphs of a task, their inputs and outputs, and the choice of one for a submodel and batch.

A `Manifest` describes the ONNX files the coordinator compiled; the device reads nothing else about
them. It names files by the SHA-256 of their bytes, so it cannot be paired with other files.

    inputs    x0, x1 …         the model's inputs        targets          one per sample
              sample_weights   float32, one per sample   w:<tensor>       weights
              b:<buffer>       buffers                   s:<axis>         scale, float32 scalar
              m0, m1 …         dropout masks: 0 or 1 / (1 − p)
              teacher          a wider model's outputs   kappa            share of them, scalar
              classes          float32, one per class: 1, or 0 to leave out its score
    outputs   loss, g:<tensor>, n:<statistic>            of a gradient graph
              the same, and outputs                      of a distillation graph
              outputs                                    of an evaluate graph
              n:<statistic>                              of a statistics graph, in pairs

`loss` is Σ wᵢ lᵢ / Σ wᵢ, `g:` its gradients and `n:` the statistics after the pass. A statistics
graph runs the model forward in training mode: its outputs are, for each BatchNorm, the mean and
then the variance (divided by n) of the batch. A distillation graph is a gradient graph whose lᵢ is
`(1 − kappa) · lᵢ + kappa · cross-entropy(softmax(teacher), outputs)ᵢ`. With
`classes`, the outputs in all of this are the model's times these. A graph of kind `gradient-fp16`
has the inputs and outputs of a gradient graph, in float32, and multiplies in float16. An input that
a graph does not use is not listed; the device feeds exactly the listed ones.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from edge_sdk.protocol.errors import GraphError, GroupError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim, Tensor
from edge_sdk.protocol.task.data_spec import DTYPE, MAX_RANK, MAX_SIZE, DataSpec

Kind = Literal["gradient", "evaluate", "statistics", "distillation", "gradient-fp16"]
KINDS: tuple[str, ...] = get_args(Kind)
_NEEDED = {
    "gradient": "loss",
    "gradient-fp16": "loss",
    "evaluate": "outputs",
    "distillation": "outputs",
}
"""An output that a graph of this kind must have."""

SLOT_BYTES = 4
"""Length of a number that is written into a graph's file: up to 2²⁸ − 1."""

CONTRIBUTED = {"com.microsoft.nchwc": 1}
"""Operator sets, with their versions, that a way besides the default may use."""
PLACE = "place"
"""Nodes of the ways of place 7 are named `place7.0`, `place7.1` …."""

MAX_GRAPHS = 4_096
MAX_PORTS = 65_536

_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_DATA = re.compile(r"x[0-9]{1,4}|targets|sample_weights|teacher|kappa|classes")
_SPECIFIED = re.compile(r"x[0-9]{1,4}|targets")
"""Inputs that the task's data describes."""


@dataclass(frozen=True, slots=True)
class SizeTerm:
    """A size: `coefficient` × the kept atoms of `axes` × the batch size if `batch`, plus `more`.

    `axes` are axis numbers of the plan, ascending; a number may occur twice. A concatenation has
    several summands, each of other axes or batch, in ascending order.
    """

    coefficient: int
    axes: tuple[int, ...] = ()
    batch: bool = False
    more: tuple[SizeTerm, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient <= MAX_SIZE:
            raise GraphError(f"a size's coefficient is 0 to {MAX_SIZE}, not {self.coefficient}")
        if len(self.axes) > MAX_RANK:
            raise GraphError(f"a size has up to {MAX_RANK} axes, not {len(self.axes)}")
        if any(axis < 0 for axis in self.axes) or tuple(sorted(self.axes)) != self.axes:
            raise GraphError(f"a size's axes are ascending numbers, not {self.axes}")
        if self.more:
            kinds = [(term.axes, term.batch) for term in self.summands]
            nested = any(term.more or not term.coefficient for term in self.summands[1:])
            if nested or not self.coefficient or kinds != sorted(set(kinds)):
                raise GraphError("a size's summands are not in order, or one occurs twice")

    @property
    def summands(self) -> tuple[SizeTerm, ...]:
        """Terms without `more` that add up to this one."""
        if not self.more:
            return (self,)
        return (SizeTerm(self.coefficient, self.axes, self.batch), *self.more)

    @property
    def all_axes(self) -> frozenset[int]:
        """Axes of all summands."""
        return frozenset(axis for term in self.summands for axis in term.axes)

    @property
    def any_batch(self) -> bool:
        """True if a summand follows the batch."""
        return any(term.batch for term in self.summands)

    def value(self, kept: Sequence[int], batch: int) -> int:
        """Return the size with these atoms kept on each axis."""
        size = self.coefficient * (batch if self.batch else 1)
        size *= math.prod(kept[axis] for axis in self.axes)
        return size + sum(term.value(kept, batch) for term in self.more)


@dataclass(frozen=True, slots=True)
class CostTerm:
    """A part of a cost: `coefficient` × the kept atoms of `axes` × the batch size to `batch`.

    `batch` is 2 where every sample is paired with every other.
    """

    coefficient: int
    axes: tuple[int, ...] = ()
    batch: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.coefficient <= MAX_SIZE:
            raise GraphError(f"a cost's coefficient is 1 to {MAX_SIZE}, not {self.coefficient}")
        if any(axis < 0 for axis in self.axes) or tuple(sorted(self.axes)) != self.axes:
            raise GraphError(f"a cost's axes are ascending numbers, not {self.axes}")
        if not (len(self.axes) <= MAX_RANK and 0 <= self.batch <= MAX_RANK):
            raise GraphError(f"a cost has up to {MAX_RANK} axes and powers of the batch")

    def value(self, kept: Sequence[int], batch: int) -> int:
        """Return the cost with these atoms kept on each axis."""
        cost = self.coefficient * math.prod(kept[axis] for axis in self.axes)
        return cost * math.prod([batch] * self.batch)


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph: its name, numpy's name of its type, its sizes."""

    name: str
    dtype: str
    dims: tuple[SizeTerm, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise GraphError("a graph's input or output has no name")
        if not DTYPE.fullmatch(self.dtype):
            raise GraphError(f"{self.name!r} has the unknown type {self.dtype!r}")
        if len(self.dims) > MAX_RANK:
            raise GraphError(f"{self.name!r} has {len(self.dims)} dimensions, over {MAX_RANK}")

    def shape(self, kept: Sequence[int], batch: int) -> tuple[int, ...]:
        """Return the array's shape with these atoms kept on each axis."""
        return tuple(dim.value(kept, batch) for dim in self.dims)


@dataclass(frozen=True, slots=True)
class SizeSlot:
    """A size that is written into the file, at byte `offset`, before the graph is loaded.

    ONNX has no input for the number of groups of a convolution, so it follows the widths this way.
    The file holds a number of `SLOT_BYTES` bytes there; `edge_sdk.protocol.task.codec.fitted`
    replaces it by another of the same length.
    """

    offset: int
    size: SizeTerm

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise GraphError(f"a slot's offset is at least 0, not {self.offset}")


@dataclass(frozen=True, slots=True)
class GraphWay:
    """One way to compute a value: the bytes of the file from `start` to before `end`.

    `multiples` are sizes and numbers of which they must be multiples, or this way does not work.
    """

    name: str
    start: int
    end: int
    multiples: tuple[tuple[SizeTerm, int], ...] = ()

    def __post_init__(self) -> None:
        if not (self.name and 0 <= self.start < self.end):
            raise GraphError(f"a way to compute a value has a name and some bytes, not {self}")
        if len(self.multiples) > MAX_RANK:
            raise GraphError(f"a way depends on up to {MAX_RANK} sizes, not {len(self.multiples)}")
        if not all(1 <= number <= MAX_SIZE for _, number in self.multiples):
            raise GraphError(f"a size is a multiple of 1 to {MAX_SIZE}, not as {self} says")

    def works(self, kept: Sequence[int], batch: int) -> bool:
        """True if these sizes allow it."""
        return not any(size.value(kept, batch) % number for size, number in self.multiples)


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """A value that can be computed in several ways; the first is the default, and always works.

    The file holds all of them, one behind the other; all but one are cut out before it is loaded.
    """

    name: str
    options: tuple[GraphWay, ...]

    def __post_init__(self) -> None:
        if not self.name or len(self.options) < 2 or self.options[0].multiples:
            raise GraphError(f"place {self.name!r} has no default, or nothing to choose")
        _check_unique(f"place {self.name!r}: way", (option.name for option in self.options))

    def option(self, name: str | None, kept: Sequence[int], batch: int) -> GraphWay:
        """Return the way of this name; the default where it is unknown or does not work."""
        for option in self.options:
            if option.name == name and option.works(kept, batch):
                return option
        return self.options[0]


Ways = Mapping[str, str]
"""Names of the ways that were chosen, by place; a place that is not in it takes its default."""


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A dropout: the input that takes its mask, and the probability of a zero."""

    port: str
    probability: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise GraphError(
                f"mask {self.port!r}: a probability is in [0, 1), not {self.probability}"
            )


@dataclass(frozen=True)
class GraphEntry:
    """One ONNX file.

    `kept` are the atoms per axis the graph was made for, 0 for an axis of which it takes any; None:
    any on all axes (sizes are symbolic). A chain of blocks has a graph for each number of blocks
    kept. `batch` is the batch size it was made for; None: any. Masks are drawn in the order of
    `masks`.
    `activations` add up to `activation_bytes` and `products` to `macs`; both are ordered by axes
    and batch, each pair once. `slots` are the sizes to write into the file, by ascending offset;
    only those inside a way that is no default may follow the batch. `places` are the values that
    the file computes in several ways, in the order of its bytes.
    """

    kind: Kind
    sha256: str
    size_bytes: int
    kept: tuple[int, ...] | None
    batch: int | None
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    masks: tuple[MaskSpec, ...] = ()
    activations: tuple[CostTerm, ...] = ()
    products: tuple[CostTerm, ...] = ()
    slots: tuple[SizeSlot, ...] = ()
    places: tuple[GraphPlace, ...] = ()

    def __post_init__(self) -> None:
        _check_entry(self)

    def fits(self, kept: Sequence[int]) -> bool:
        """True if the graph takes these atoms per axis."""
        return self.kept is None or (
            len(self.kept) == len(kept)
            and all(made in (0, atoms) for made, atoms in zip(self.kept, kept, strict=True))
        )

    def fixes(self, axes: Iterable[int]) -> bool:
        """True if the graph was made for one size of any of these axes."""
        return self.kept is not None and any(
            axis < len(self.kept) and self.kept[axis] for axis in axes
        )

    def without(self, taken: Sequence[GraphWay]) -> tuple[list[GraphWay], list[SizeSlot]]:
        """Return the ways that are left out when these are taken, and the slots that remain."""
        left = [
            option
            for place, way in zip(self.places, taken, strict=True)
            for option in place.options
            if option is not way
        ]
        starts = [option.start for option in left]
        slots = []
        for slot in self.slots:
            before = bisect_right(starts, slot.offset) - 1
            if before < 0 or slot.offset >= left[before].end:
                slots.append(slot)
        return left, slots

    def options(self, ways: Ways, kept: Sequence[int], batch: int) -> tuple[GraphWay, ...]:
        """Return the way that each place takes at these sizes."""
        return tuple(place.option(ways.get(place.name), kept, batch) for place in self.places)

    @cached_property
    def default_slots(self) -> tuple[SizeSlot, ...]:
        """Return the slots that remain when every value is computed in its default way."""
        return tuple(self.without([place.options[0] for place in self.places])[1])

    @cached_property
    def input_names(self) -> frozenset[str]:
        """Names of the inputs."""
        return frozenset(port.name for port in self.inputs)

    def activation_bytes(self, kept: Sequence[int], batch: int) -> int:
        """Bytes of all float tensors between inputs and outputs, as if none were ever freed.

        A runtime frees what it no longer needs, so this is far above the peak; the runtime's own
        scratch memory is not included. A graph made for one size costs the same at every other.
        """
        return sum(term.value(kept, batch) for term in self.activations)

    def macs(self, kept: Sequence[int], batch: int) -> int:
        """Multiply-accumulates of one run: all matrix products and convolutions of the graph.

        Those of a gradient graph are the forward and the backward pass, counted one by one: an
        unused gradient, such as the batch's, is neither computed nor counted.
        """
        return sum(term.value(kept, batch) for term in self.products)

    def weight_bytes(self, kept: Sequence[int]) -> int:
        """Bytes of the input weights; a gradient graph outputs as many bytes of gradients."""
        return sum(
            math.prod(port.shape(kept, 1)) * np.dtype(port.dtype).itemsize
            for port in self.inputs
            if port.name.startswith("w:")
        )

    @cached_property
    def pads(self) -> bool:
        """True if samples may be added to a short batch without changing the result.

        A gradient graph must weight its samples, and must not mix them in batch statistics.
        """
        if self.kind == "evaluate":
            return True
        mixes = any(port.name.startswith("n:") for port in self.outputs)
        return "sample_weights" in self.input_names and not mixes

    def __str__(self) -> str:
        sizes = [str(atoms or "any") for atoms in self.kept or ()]
        kept = "any widths" if self.kept is None else f"widths [{', '.join(sizes)}]"
        batch = "any batch" if self.batch is None else f"batch {self.batch}"
        return f"{self.kind} graph {self.sha256[:12]}… ({kept}, {batch})"


@dataclass(frozen=True, slots=True)
class RunCost:
    """Cost of a submodel with a batch; None where the task has no such graph.

    `forward_macs` are those of an evaluation, `step_macs` of a loss with its gradients (SAM needs
    two of them per step). `activation_bytes` are the gradient graph's, an upper bound.
    """

    forward_macs: int | None
    step_macs: int
    activation_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class Manifest:
    """All graphs of one task, and the format of its data.

    `tolerance` is the largest relative difference from torch's gradients that the build saw;
    `min_onnxruntime` is the oldest version of onnxruntime that runs the graphs.
    """

    plan_hash: str
    opset: int
    ir_version: int
    min_onnxruntime: str
    loss: str
    tolerance: float
    data: DataSpec
    graphs: tuple[GraphEntry, ...]

    def __post_init__(self) -> None:
        _check_manifest(self)

    @cached_property
    def encoded(self) -> bytes:
        """Canonical encoding, with its hash in front."""
        from edge_sdk.protocol.task.codec import encode_manifest

        return encode_manifest(self)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical encoding's body, as 64 hex digits."""
        from edge_sdk.protocol.task.codec import manifest_hash

        return manifest_hash(self)

    def check(self, plan: ModelPlan) -> None:
        """Raise `GraphError` unless these graphs belong to this plan, with its names and shapes."""
        if self.plan_hash != plan.hash:
            raise GraphError(
                f"the graphs were made for plan {self.plan_hash[:12]}…, not {plan.hash[:12]}…"
            )
        for entry in self.graphs:
            _check_fit(entry, plan)

    def pick(self, kind: Kind, kept: Sequence[int], batch: int) -> GraphEntry:
        """Choose the graph for these atoms per axis and this batch size.

        Prefers a graph made for exactly this; then for these widths or any, and this batch or any;
        then for the smallest larger batch, if it `pads`. Raises `GraphError`, which names both
        sides.
        """
        if batch < 1:
            raise GraphError(f"a batch has at least one sample, not {batch}")
        fits = [
            entry
            for entry in self._of(kind, kept)
            if entry.batch in (None, batch)
            or (entry.batch is not None and entry.batch > batch and entry.pads)
        ]
        if not fits:
            has = ", ".join(str(entry) for entry in self.graphs if entry.kind == kind) or "none"
            raise GraphError(
                f"no {kind} graph fits widths {list(kept)} with batch {batch}; the task has: {has}"
            )
        return min(
            fits,
            key=lambda entry: (
                entry.batch is not None and entry.batch != batch,
                entry.batch if entry.batch is not None else math.inf,
                entry.kept is None,
                0 if entry.kept is None else entry.kept.count(0),
            ),
        )

    def level_within(self, plan: ModelPlan, level: float) -> float:
        """Return the largest level up to this one that has a gradient graph; this one if none has.

        It differs where graphs are made for some sizes alone, such as numbers of blocks.
        """
        shares = {n / len(axis.groups) for axis in plan.axes for n in range(1, len(axis.groups))}
        smaller = sorted((share for share in shares if share < level), reverse=True)
        for each in (level, *smaller):
            if self._of("gradient", tuple(axis.atoms_at(each) for axis in plan.axes)):
                return each
        return level

    def cost_at(self, plan: ModelPlan, level: float, batch: int) -> RunCost:
        """Return the most a level costs with this batch size; exact if groups are equal.

        Where a graph is made for a larger batch, the cost is that of the larger one. Raises
        `GroupError` unless 0 < level ≤ 1, `GraphError` when no gradient graph fits.
        """
        if not 0 < level <= 1:
            raise GroupError(f"a level is a share in (0, 1], not {level!r}")
        kept = tuple(axis.atoms_at(level) for axis in plan.axes)
        gradient = self.pick("gradient", kept, batch)
        evaluates = bool(self._of("evaluate", kept))
        return RunCost(
            self.pick("evaluate", kept, batch).macs(kept, batch) if evaluates else None,
            gradient.macs(kept, batch),
            gradient.activation_bytes(kept, batch),
            gradient.weight_bytes(kept),
        )

    def largest_batch(self, kind: Kind, kept: Sequence[int]) -> int | None:
        """Largest batch that some graph takes at these widths; None: any. 0: there is no graph."""
        sizes = [entry.batch for entry in self._of(kind, kept)]
        return None if None in sizes else max((size for size in sizes if size), default=0)

    def _of(self, kind: Kind, kept: Sequence[int]) -> list[GraphEntry]:
        return [entry for entry in self.graphs if entry.kind == kind and entry.fits(kept)]


def _check_entry(entry: GraphEntry) -> None:
    if entry.kind not in KINDS:
        raise GraphError(f"a graph's kind is one of {list(KINDS)}, not {entry.kind!r}")
    if not _SHA256.fullmatch(entry.sha256):
        raise GraphError(f"{entry.sha256!r} is not a SHA-256 in hex digits")
    if entry.size_bytes < 1:
        raise GraphError(f"{entry}: a file has at least one byte, not {entry.size_bytes}")
    if entry.kept is not None and (min(entry.kept, default=1) < 0 or not any(entry.kept)):
        raise GraphError(f"{entry}: an axis keeps one atom or more, 0 means any, and one is fixed")
    if entry.batch is not None and entry.batch < 1:
        raise GraphError(f"{entry}: a batch has at least one sample")
    ports = (*entry.inputs, *entry.outputs)
    if len(ports) > MAX_PORTS:
        raise GraphError(f"{entry} has {len(ports)} inputs and outputs, over {MAX_PORTS}")
    _check_unique(f"{entry}: name", (port.name for port in ports))
    for port in ports:
        for dim in port.dims:
            if entry.fixes(dim.all_axes) or (dim.any_batch and entry.batch is not None):
                raise GraphError(f"{entry}: {port.name!r} varies with a size the graph has fixed")
    for terms in (entry.activations, entry.products):
        _check_costs(entry, terms)
    _check_slots(entry)


def _check_slots(entry: GraphEntry) -> None:
    if len(entry.slots) > MAX_PORTS:
        raise GraphError(f"{entry} has {len(entry.slots)} slots, over {MAX_PORTS}")
    edges = [*(slot.offset for slot in entry.slots), entry.size_bytes]
    if any(end - offset < SLOT_BYTES for offset, end in pairwise(edges)):
        raise GraphError(f"{entry}: slots are not in order, or one is outside the file")
    _check_places(entry)
    _check_unique(f"{entry}: mask", (mask.port for mask in entry.masks))
    for mask in entry.masks:
        if mask.port not in entry.input_names:
            raise GraphError(f"{entry}: mask {mask.port!r} is not an input")
    needed = _NEEDED.get(entry.kind)
    if needed is not None and needed not in {port.name for port in entry.outputs}:
        raise GraphError(f"{entry} has no output {needed!r}")
    if entry.kind == "statistics" and (not entry.outputs or len(entry.outputs) % 2):
        raise GraphError(f"{entry} has {len(entry.outputs)} outputs, which are not pairs")


def _check_places(entry: GraphEntry) -> None:
    _check_unique(f"{entry}: place", (place.name for place in entry.places))
    options = [option for place in entry.places for option in place.options]
    if len(options) > MAX_PORTS:
        raise GraphError(f"{entry} has {len(options)} ways to compute its values, over {MAX_PORTS}")
    edges = [0, *(edge for option in options for edge in (option.start, option.end))]
    if any(end < start for start, end in pairwise([*edges, entry.size_bytes])):
        raise GraphError(f"{entry}: its ways are not in order, or one is outside the file")
    sizes = [size for option in options for size, _ in option.multiples]
    sizes += [slot.size for slot in entry.slots]
    if any(entry.fixes(size.all_axes) for size in sizes) or (
        entry.batch is not None and any(size.any_batch for size in sizes)
    ):
        raise GraphError(f"{entry}: a slot or a way varies with a size the graph has fixed")
    defaults = {place.options[0].start for place in entry.places}
    starts = [option.start for option in options]
    for slot in entry.slots:
        before = bisect_right(starts, slot.offset) - 1
        inside = before >= 0 and slot.offset < options[before].end
        end = options[before].end if inside else [*starts, entry.size_bytes][before + 1]
        if slot.offset + SLOT_BYTES > end:
            raise GraphError(f"{entry}: a slot is at the edge of a way")
        if slot.size.any_batch and (not inside or starts[before] in defaults):
            raise GraphError(f"{entry}: a slot that is always there follows the batch")


def _check_costs(entry: GraphEntry, terms: Sequence[CostTerm]) -> None:
    if len(terms) > MAX_PORTS:
        raise GraphError(f"{entry} has {len(terms)} cost terms, over {MAX_PORTS}")
    kinds = [(term.axes, term.batch) for term in terms]
    if kinds != sorted(set(kinds)):
        raise GraphError(f"{entry}: cost terms are not in order, or one occurs twice")
    for axes, power in kinds:
        if entry.fixes(axes) or (power and entry.batch is not None):
            raise GraphError(f"{entry}: a cost varies with a size the graph has fixed")


def _check_manifest(manifest: Manifest) -> None:
    if not _SHA256.fullmatch(manifest.plan_hash):
        raise GraphError(f"{manifest.plan_hash!r} is not a plan's hash in hex digits")
    if manifest.opset < 1 or manifest.ir_version < 1:
        raise GraphError(f"opset {manifest.opset}, IR {manifest.ir_version}: both start at 1")
    if not _VERSION.fullmatch(manifest.min_onnxruntime):
        raise GraphError(f"{manifest.min_onnxruntime!r} is not a version such as '1.23.0'")
    if not (math.isfinite(manifest.tolerance) and manifest.tolerance >= 0):
        raise GraphError(f"tolerance must be finite and at least 0, not {manifest.tolerance}")
    if len(manifest.graphs) > MAX_GRAPHS:
        raise GraphError(f"{len(manifest.graphs)} graphs are too many, over {MAX_GRAPHS}")
    _check_unique("file", (entry.sha256 for entry in manifest.graphs))
    _check_unique("graph for", ((e.kind, e.kept, e.batch) for e in manifest.graphs))
    for entry in manifest.graphs:
        _check_data(entry, manifest.data)


def _check_data(entry: GraphEntry, data: DataSpec) -> None:
    """Raise `GraphError` unless the graph's inputs match the task's data."""
    specs = {f"x{number}": spec for number, spec in enumerate(data.inputs)}
    specs["targets"] = data.targets
    for port in entry.inputs:
        if not _SPECIFIED.fullmatch(port.name):
            continue
        spec = specs.get(port.name)
        if spec is None:
            raise GraphError(
                f"{entry} takes {port.name!r}; the task's data has {len(data.inputs)} inputs"
            )
        samples = SizeTerm(1, (), True) if entry.batch is None else SizeTerm(entry.batch)
        wanted = (samples, *(SizeTerm(size) for size in spec.shape))
        if (port.dtype, port.dims) != (spec.dtype, wanted):
            raise GraphError(f"{entry}: {port.name!r} is not {spec}, as the task's data is")


def _check_fit(entry: GraphEntry, plan: ModelPlan) -> None:
    """Raise `GraphError` unless widths, names, types and shapes match the plan."""
    whole = tuple(axis.atoms for axis in plan.axes)
    made = (0,) * len(whole) if entry.kept is None else entry.kept
    if len(made) != len(whole) or any(a > b for a, b in zip(made, whole, strict=True)):
        raise GraphError(f"{entry} does not fit the plan's widths {list(whole)}")
    kept = tuple(a or b for a, b in zip(made, whole, strict=True))
    ports = (*entry.inputs, *entry.outputs)
    named = [axis for port in ports for dim in port.dims for axis in dim.all_axes]
    named += [axis for term in (*entry.activations, *entry.products) for axis in term.axes]
    sizes = [slot.size for slot in entry.slots]
    sizes += [s for place in entry.places for way in place.options for s, _ in way.multiples]
    named += [axis for size in sizes for axis in size.all_axes]
    if any(axis >= len(whole) for axis in named):
        raise GraphError(f"{entry} names an axis that is not among the plan's {len(whole)}")
    weights = {f"w:{t.name}": _port(f"w:{t.name}", t) for t in plan.tensors}
    buffers = {f"b:{b.name}": _port(f"b:{b.name}", b) for b in plan.buffers}
    scales = {f"s:{axis.name}": Port(f"s:{axis.name}", "float32") for axis in plan.axes}
    _check_ports(entry, entry.inputs, weights | buffers | scales, kept)
    statistics = {f"n:{b.name}": _port(f"n:{b.name}", b) for b in plan.buffers if b.statistic}
    if entry.kind == "statistics":
        if unknown := sorted({port.name for port in entry.outputs} - set(statistics)):
            raise GraphError(f"{entry}: {unknown[0]!r} is not a statistic of the plan")
        _check_ports(entry, entry.outputs, statistics, kept)
    if entry.kind in ("gradient", "distillation", "gradient-fp16"):
        gradients = {f"g:{t.name}": _port(f"g:{t.name}", t) for t in plan.tensors}
        results = {"loss": Port("loss", "float32")} | gradients | statistics
        shown = "outputs" if entry.kind == "distillation" else None
        given = [port for port in entry.outputs if port.name != shown]
        _check_ports(entry, given, results, kept)
        if missing := sorted(set(results) - {port.name for port in entry.outputs}):
            raise GraphError(f"{entry} has no output {missing[0]!r}, which the plan needs")


def _check_ports(
    entry: GraphEntry, ports: Iterable[Port], known: dict[str, Port], kept: Sequence[int]
) -> None:
    batch = entry.batch or 1
    free = {mask.port for mask in entry.masks}
    for port in ports:
        expected = known.get(port.name)
        if expected is None:
            if port.name not in free and not _DATA.fullmatch(port.name):
                raise GraphError(f"{entry}: {port.name!r} is neither in the plan nor data")
            continue
        is_ = (port.dtype, port.shape(kept, batch))
        wanted = (expected.dtype, expected.shape(kept, batch))
        if is_ != wanted:
            raise GraphError(
                f"{entry}: {port.name!r} is {is_[0]} of shape {is_[1]}; "
                f"the plan says {wanted[0]} of shape {wanted[1]}"
            )


def _port(name: str, tensor: Tensor) -> Port:
    return Port(name, tensor.dtype, tuple(size_of(dim) for dim in tensor.dims))


def size_of(dim: Dim) -> SizeTerm:
    """Return the size of a tensor's dimension."""
    if dim.segments:
        return sum_of(
            SizeTerm(each.size) if each.axis is None else SizeTerm(each.inner, (each.axis,))
            for each in dim.segments
        )
    if dim.axis is None:
        return SizeTerm(dim.size)
    return SizeTerm(dim.outer * dim.inner, (dim.axis,))


def sum_of(terms: Iterable[SizeTerm]) -> SizeTerm:
    """Return the sum of sizes, in the one form it has."""
    total: Counter[tuple[tuple[int, ...], bool]] = Counter()
    for term in terms:
        for each in term.summands:
            total[each.axes, each.batch] += each.coefficient
    kinds = sorted(kind for kind in total if total[kind])
    if not kinds:
        return SizeTerm(0)
    first, *rest = (SizeTerm(total[kind], *kind) for kind in kinds)
    return SizeTerm(first.coefficient, first.axes, first.batch, tuple(rest))


def _check_unique(what: str, values: Iterable[object]) -> None:
    if twice := [value for value, uses in Counter(values).items() if uses > 1]:
        raise GraphError(f"{what} {twice[0]!r} occurs twice")
