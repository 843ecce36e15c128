"""`compile_graphs`: gradient, evaluation and statistics graphs of a task, checked against torch.

Sizes stay open where the operators allow it. In order of preference: one graph for every submodel
and batch; one graph per level, for every batch; one graph for each level and batch size. A model
with regions by depth has these for each number of blocks that a level keeps, and for one block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import gcd

from coordinator.task.graphs.check import (
    HALF_TOLERANCE,
    TOLERANCE,
    WAYS_BATCH,
    check_graph,
    check_ways,
)
from coordinator.task.graphs.compiled import BATCH_SIZES, CompiledGraphs, check_wanted
from coordinator.task.graphs.errors import (
    CoarseError,
    GraphCompileError,
    NotSymbolicError,
    WrongGraphError,
)
from coordinator.task.graphs.gradient import (
    KeptSizes,
    Traced,
    trace_evaluation,
    trace_gradient,
)
from coordinator.task.graphs.onnx.builder import numpy_type
from coordinator.task.graphs.onnx.costs import activations, products
from coordinator.task.graphs.onnx.half import LOSS_SCALE, in_half
from coordinator.task.graphs.onnx.translation import IR_VERSION, OPSET, Translated, translate
from coordinator.task.graphs.symbols import (
    Spec,
    Symbolic,
    TracePoint,
    as_term,
    decoded,
    large_point,
    prime_points,
    static,
    symbolic,
)
from coordinator.task.task import Task
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim
from edge_sdk.protocol.task.graphs import (
    KINDS,
    GraphEntry,
    Kind,
    Manifest,
    MaskSpec,
    Port,
    SizeTerm,
    size_of,
    sum_of,
)

MIN_ONNXRUNTIME = "1.23.0"
HALF: Kind = "gradient-fp16"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Source:
    """A trace, and the kinds of graph that are made from it."""

    trace: Callable[[KeptSizes, int], Traced]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class _Built:
    """A compiled and checked graph."""

    entry: GraphEntry
    data: bytes
    error: float


def compile_graphs(
    task: Task,
    *,
    levels: Sequence[float] = LEVELS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    distillation: bool = False,
    class_masks: bool = False,
    half: bool = False,
) -> CompiledGraphs:
    """Compile and check a task's graphs.

    `levels` and `batch_sizes` matter only where sizes cannot stay open: then there is one graph for
    each, and all groups of an axis must have the same size. The number of blocks kept of a chain is
    such a size; one block always has a graph. If the loss is cross-entropy,
    `distillation` adds the graphs by which a wide submodel teaches a narrow one, and with
    `class_masks` gradients can leave out the scores of some classes. `half` adds graphs that
    multiply in float16, unless one of them differs from torch by more than that explains.

    Raises `GraphCompileError`, which names the operator and its module when an operator has no
    translation, and the differences when a graph disagrees with torch. Raises `ConfigError` when
    the task does not describe its targets.
    """
    check_wanted(levels, batch_sizes)
    data_spec = task.data
    wanted = [
        built
        for source in _sources(task, distillation, class_masks)
        for built in _build(task, source, levels, batch_sizes)
    ]
    if half:
        wanted += _build_half(task, class_masks, levels, batch_sizes)
    # What comes before a chain is the same for all numbers of its blocks.
    wanted = list({built.entry.sha256: built for built in wanted}.values())
    wanted.sort(key=lambda built: KINDS.index(built.entry.kind))
    manifest = Manifest(
        plan_hash=task.plan.hash,
        opset=OPSET,
        ir_version=IR_VERSION,
        min_onnxruntime=MIN_ONNXRUNTIME,
        loss=task.loss_name,
        tolerance=max(built.error for built in wanted if built.entry.kind != HALF),
        data=data_spec,
        graphs=tuple(built.entry for built in wanted),
    )
    manifest.check(task.plan)
    return CompiledGraphs(manifest, {built.entry.sha256: built.data for built in wanted})


def _sources(task: Task, distillation: bool, class_masks: bool) -> list[_Source]:
    """Return how the graphs are traced; only a model with BatchNorm has statistics."""
    scores = task.loss_name == "cross-entropy"
    gradient = partial(trace_gradient, task, class_masks=class_masks and scores)
    known = any(buffer.statistic for buffer in task.plan.buffers)
    training: tuple[Kind, ...] = ("gradient", "statistics") if known else ("gradient",)
    found = [
        _Source(gradient, training),
        _Source(partial(trace_evaluation, task), ("evaluate",)),
    ]
    if distillation and scores:
        found.append(_Source(partial(gradient, distils=True), ("distillation",)))
    return found


def _build_half(
    task: Task, class_masks: bool, levels: Sequence[float], batch_sizes: Sequence[int]
) -> list[_Built]:
    """Build the gradient graphs in float16; none if one of them is too coarse or cannot be made.

    They only save time, so no failure of them is one of the task.
    """
    scores = class_masks and task.loss_name == "cross-entropy"
    trace = partial(trace_gradient, task, class_masks=scores, loss_scale=LOSS_SCALE)
    try:
        return _build(task, _Source(trace, (HALF,)), levels, batch_sizes)
    except CoarseError as error:
        logger.warning("there are no graphs in float16: %s", error)
    except Exception as error:
        logger.warning("there are no graphs in float16: %s", error, exc_info=True)
    return []


def _build(
    task: Task, source: _Source, levels: Sequence[float], batch_sizes: Sequence[int]
) -> list[_Built]:
    return [
        built
        for made in _blocks_at(task.plan, levels)
        for built in _build_blocks(task, source, made, levels, batch_sizes)
    ]


def _build_blocks(
    task: Task,
    source: _Source,
    made: KeptSizes,
    levels: Sequence[float],
    batch_sizes: Sequence[int],
) -> list[_Built]:
    """Build for the numbers of blocks in `made`; 0 stands for a width, which stays open.

    Trace once where that gives the right graph, else compare several traces.
    """
    axes = task.plan.axes
    sums = _sums(task.plan)
    point = large_point(made, _fixed_sizes(task), sums)
    fixed = [number for number, atoms in enumerate(made) if atoms]
    kept = made if fixed else None
    try:
        graph = decoded(source.trace(point.kept, point.batch), point, sums, fixed)
        return _checked(task, source, graph, kept, None)
    except (NotSymbolicError, WrongGraphError) as error:
        logger.info("comparing several traces, because %s", error)
    sizes = tuple(atoms or axis.atoms for atoms, axis in zip(made, axes, strict=True))
    try:
        points = prime_points(
            [not atoms for atoms in made], batch=True, base=TracePoint(sizes, batch_sizes[0])
        )
        return _checked(task, source, symbolic(source.trace, points), kept, None)
    except NotSymbolicError as error:
        logger.info("compiling one graph per level, because %s", error)
    return [
        built
        for kept in _kept_at(task, levels)
        if all(atoms in (0, own) for atoms, own in zip(made, kept, strict=True))
        for built in _build_level(task, source, kept, batch_sizes)
    ]


def _blocks_at(plan: ModelPlan, levels: Sequence[float]) -> list[KeptSizes]:
    """Return the numbers of blocks that levels keep, with 0 for widths; one without depth.

    One block of each chain is always among them: a device rounds its level down to one that has a
    graph (`Manifest.level_within`), and so even the smallest has one.
    """
    found = [
        tuple(axis.atoms_at(level) if axis.depth else 0 for axis in plan.axes)
        for level in (*levels, 0.0)
    ]
    return list(dict.fromkeys(found))


def _build_level(
    task: Task, source: _Source, kept: KeptSizes, batch_sizes: Sequence[int]
) -> list[_Built]:
    base = TracePoint(kept, batch_sizes[0])
    try:
        points = prime_points([False] * len(kept), batch=True, base=base)
        return _checked(task, source, symbolic(source.trace, points), kept, None)
    except NotSymbolicError as error:
        logger.info("compiling one graph per batch size, because %s", error)
    found = []
    for batch in dict.fromkeys(batch_sizes):
        graph = static(source.trace(kept, batch), TracePoint(kept, batch))
        found += _checked(task, source, graph, kept, batch)
    return found


def _fixed_sizes(task: Task) -> set[int]:
    """Return numbers that occur in the graphs beside widths and batch."""
    dims = [dim for tensor in (*task.plan.tensors, *task.plan.buffers) for dim in tensor.dims]
    sizes = {size for dim in dims for size in (dim.size, dim.outer, dim.inner)}
    for spec in (*task.data.inputs, task.data.targets):
        sizes.update(spec.shape)
    return {*sizes, *task.train_program.output_shape} - {0}


def _sums(plan: ModelPlan) -> list[SizeTerm]:
    """Return the sizes of all runs of neighbouring segments, divided by their common factor."""
    dims = {dim.segments for tensor in plan.tensors for dim in tensor.dims}
    runs = {
        segments[start:end]
        for segments in dims
        for start in range(len(segments))
        for end in range(start + 2, len(segments) + 1)
    }
    sizes = {size_of(Dim(sum(each.size for each in run), segments=run)) for run in runs}
    found = set()
    for size in sizes:
        if size.more:
            terms, common = size.summands, gcd(*(term.coefficient for term in size.summands))
            found.add(sum_of(replace(t, coefficient=t.coefficient // common) for t in terms))
    # A longer sum first: a shorter one may divide it.
    return sorted(found, key=lambda size: (-len(size.more), repr(size)))


def _checked(
    task: Task, source: _Source, graph: Symbolic, kept: KeptSizes | None, batch: int | None
) -> list[_Built]:
    """Translate and check each kind of graph; `kept` or `batch` None means any."""
    found = []
    for kind in source.kinds:
        outputs = graph.moments if kind == "statistics" else graph.outputs
        if not outputs:
            continue
        part = graph.only(outputs)
        samples = "x0" if kind in ("evaluate", "statistics") else "sample_weights"
        trains = kind in ("gradient", "distillation")
        translated = translate(part, task.plan, samples, WAYS_BATCH if trains else 0)
        built = _compare(task, kind, part, translated, kept, batch)
        if kind == HALF:  # its sizes are right; from here on, rounding alone differs
            try:
                halved = in_half(translated)
                built = _compare(task, kind, part, halved, kept, batch, HALF_TOLERANCE)
            except WrongGraphError as error:
                raise CoarseError(str(error)) from error
        try:
            built = replace(
                built, error=max(built.error, check_ways(task, built.entry, built.data))
            )
        except WrongGraphError as wrong:
            # Ways only save time; a runtime that lacks their operators cannot check them.
            logger.warning("values are computed in the default ways alone: %s", wrong)
            translated = translate(part, task.plan, samples)
            built = _compare(task, kind, part, translated, kept, batch)
        found.append(built)
    return found


def _compare(
    task: Task,
    kind: Kind,
    graph: Symbolic,
    translated: Translated,
    kept: KeptSizes | None,
    batch: int | None,
    tolerance: float = TOLERANCE,
) -> _Built:
    """Describe a translated graph and check it against torch."""
    made = _needed(task.plan, {*translated.inputs, *graph.outputs}, kept)
    entry = _entry(kind, graph, translated, made, batch)
    logger.info("checking the graph %r against torch (%d bytes)", kind, entry.size_bytes)
    error = check_graph(task, entry, translated.data, tolerance)
    return _Built(entry, translated.data, error)


def _needed(plan: ModelPlan, used: set[str], kept: KeptSizes | None) -> KeptSizes | None:
    """Return the sizes that a graph was made for, without chains of which it has no block.

    `used` are the names of its inputs and outputs.
    """
    names = {name.partition(":")[2] for name in used}
    stacks = [each for each in (*plan.tensors, *plan.buffers) if each.members]
    present = {each.dims[0].axis for each in stacks if each.name in names}
    if kept is None:
        return None
    found = tuple(
        0 if axis.depth and number not in present else atoms
        for number, (axis, atoms) in enumerate(zip(plan.axes, kept, strict=True))
    )
    return found if any(found) else None


def _kept_at(task: Task, levels: Sequence[float]) -> list[KeptSizes]:
    for axis in task.plan.axes:
        if len(set(axis.groups)) > 1:
            raise GraphCompileError(
                f"this model needs one graph per level, so groups must have equal sizes; axis "
                f"{axis.name!r} has groups of {axis.groups} atoms: choose a number of groups that "
                f"divides {axis.atoms}"
            )
    found = [tuple(axis.atoms_at(level) for axis in task.plan.axes) for level in levels]
    return list(dict.fromkeys(found))


def _entry(
    kind: Kind,
    graph: Symbolic,
    translated: Translated,
    kept: KeptSizes | None,
    batch: int | None,
) -> GraphEntry:
    used = translated.inputs
    return GraphEntry(
        kind=kind,
        sha256=sha256(translated.data).hexdigest(),
        size_bytes=len(translated.data),
        kept=kept,
        batch=batch,
        inputs=tuple(_port(n, s) for n, s in graph.inputs.items() if n in used),
        outputs=tuple(_port(name, spec) for name, spec in _output_specs(graph).items()),
        masks=tuple(
            MaskSpec(f"m{index}", probability)
            for index, probability in enumerate(graph.masks)
            if f"m{index}" in used
        ),
        activations=activations(graph),
        products=products(graph),
        slots=translated.slots,
        places=translated.places,
    )


def _output_specs(graph: Symbolic) -> dict[str, Spec]:
    specs = dict(graph.inputs)
    for step in graph.steps:
        if step.results[0] is not None:
            specs[step.name] = step.results[0]
    return {name: specs[ref.name] for name, ref in graph.outputs.items()}


def _port(name: str, spec: Spec) -> Port:
    return Port(name, numpy_type(spec.dtype).name, tuple(as_term(size) for size in spec.shape))
