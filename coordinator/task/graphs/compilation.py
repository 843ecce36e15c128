"""`compile_graphs`: gradient, evaluation and statistics graphs of a task, checked against torch.

Sizes stay open where the operators allow it. In order of preference: one graph for every submodel
and batch; one graph per level, for every batch; one graph for each level and batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import cast

import onnx

from coordinator.task.graphs.check import check_graph
from coordinator.task.graphs.compiled import BATCH_SIZES, CompiledGraphs, check_wanted
from coordinator.task.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.task.graphs.gradient import (
    KeptSizes,
    Traced,
    trace_evaluation,
    trace_gradient,
    trace_statistics,
)
from coordinator.task.graphs.onnx.builder import numpy_type
from coordinator.task.graphs.onnx.costs import activations, products
from coordinator.task.graphs.onnx.translation import IR_VERSION, OPSET, translate
from coordinator.task.graphs.symbols import (
    Spec,
    Symbolic,
    TracePoint,
    as_term,
    prime_points,
    static,
    symbolic,
)
from coordinator.task.task import Task
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.task.graphs import GraphEntry, Kind, Manifest, MaskSpec, Port

MIN_ONNXRUNTIME = "1.23.0"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Built:
    """A compiled graph; `kept` or `batch` None means any."""

    graph: Symbolic
    model: onnx.ModelProto
    kept: KeptSizes | None
    batch: int | None


def compile_graphs(
    task: Task,
    *,
    levels: Sequence[float] = LEVELS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    distillation: bool = False,
    class_masks: bool = False,
) -> CompiledGraphs:
    """Compile and check a task's graphs.

    `levels` and `batch_sizes` matter only where sizes cannot stay open: then there is one graph for
    each, and all groups of an axis must have the same size. If the loss is cross-entropy,
    `distillation` adds the graphs by which a wide submodel teaches a narrow one, and with
    `class_masks` gradients can leave out the scores of some classes.

    Raises `GraphCompileError`, which names the operator and its module when an operator has no
    translation, and the differences when a graph disagrees with torch. Raises `ConfigError` when
    the task does not describe its targets.
    """
    check_wanted(levels, batch_sizes)
    data_spec = task.data
    tolerance = 0.0
    entries: list[GraphEntry] = []
    files: dict[str, bytes] = {}
    for kind, trace in _traces(task, distillation, class_masks).items():
        source = "sample_weights" if kind in ("gradient", "distillation") else "x0"
        for built in _build(task, trace, source, levels, batch_sizes):
            data = built.model.SerializeToString(deterministic=True)
            entry = _entry(kind, built, data)
            tolerance = max(tolerance, check_graph(task, entry, data))
            entries.append(entry)
            files[entry.sha256] = data
    manifest = Manifest(
        plan_hash=task.plan.hash,
        opset=OPSET,
        ir_version=IR_VERSION,
        min_onnxruntime=MIN_ONNXRUNTIME,
        loss=task.loss_name,
        tolerance=tolerance,
        data=data_spec,
        graphs=tuple(entries),
    )
    manifest.check(task.plan)
    return CompiledGraphs(manifest, files)


def _traces(
    task: Task, distillation: bool, class_masks: bool
) -> dict[Kind, Callable[[KeptSizes, int], Traced]]:
    """Return how each kind of graph is traced; only a model with BatchNorm has statistics."""
    scores = task.loss_name == "cross-entropy"
    gradient = partial(trace_gradient, task, class_masks=class_masks and scores)
    found: dict[Kind, Callable[[KeptSizes, int], Traced]] = {
        "gradient": gradient,
        "evaluate": partial(trace_evaluation, task),
    }
    if any(buffer.statistic for buffer in task.plan.buffers):
        whole = tuple(axis.atoms for axis in task.plan.axes)
        if trace_statistics(task, whole, 2) is not None:
            found["statistics"] = cast(
                Callable[[KeptSizes, int], Traced], partial(trace_statistics, task)
            )
    if distillation and scores:
        found["distillation"] = partial(gradient, distils=True)
    return found


def _build(
    task: Task,
    trace: Callable[[KeptSizes, int], Traced],
    source: str,
    levels: Sequence[float],
    batch_sizes: Sequence[int],
) -> Iterator[_Built]:
    plan = task.plan
    whole = TracePoint(tuple(axis.atoms for axis in plan.axes), batch_sizes[0])
    try:
        points = prime_points([True] * len(plan.axes), batch=True, base=whole)
        graph = symbolic(trace, points)
        yield _Built(graph, translate(graph, plan, source), None, None)
        return
    except NotSymbolicError as error:
        logger.info("compiling one graph per level, because %s", error)
    for kept in _kept_at(task, levels):
        base = TracePoint(kept, batch_sizes[0])
        try:
            graph = symbolic(trace, prime_points([False] * len(kept), batch=True, base=base))
            yield _Built(graph, translate(graph, plan, source), kept, None)
        except NotSymbolicError as error:
            logger.info("compiling one graph per batch size, because %s", error)
            for batch in dict.fromkeys(batch_sizes):
                graph = static(trace(kept, batch), TracePoint(kept, batch))
                yield _Built(graph, translate(graph, plan, source), kept, batch)


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


def _entry(kind: Kind, built: _Built, data: bytes) -> GraphEntry:
    used = {value.name for value in built.model.graph.input}
    outputs = _output_specs(built)
    return GraphEntry(
        kind=kind,
        sha256=sha256(data).hexdigest(),
        size_bytes=len(data),
        kept=built.kept,
        batch=built.batch,
        inputs=tuple(_port(n, s) for n, s in built.graph.inputs.items() if n in used),
        outputs=tuple(_port(name, spec) for name, spec in outputs.items()),
        masks=tuple(
            MaskSpec(f"m{index}", probability)
            for index, probability in enumerate(built.graph.masks)
            if f"m{index}" in used
        ),
        activations=activations(built.graph),
        products=products(built.graph),
    )


def _output_specs(built: _Built) -> dict[str, Spec]:
    specs = dict(built.graph.inputs)
    for step in built.graph.steps:
        if step.results[0] is not None:
            specs[step.name] = step.results[0]
    return {name: specs[ref.name] for name, ref in built.graph.outputs.items()}


def _port(name: str, spec: Spec) -> Port:
    return Port(name, numpy_type(spec.dtype).name, tuple(as_term(size) for size in spec.shape))
