"""`compile_graphs`: a gradient graph and an evaluation graph for a task, checked against torch.

Sizes stay open where the operators allow it. In order of preference: one graph for every submodel
and batch; one graph a level, for every batch; one graph for each level and batch size.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import prod

import onnx
import torch

from coordinator.graphs.builder import numpy_type
from coordinator.graphs.check import check_graph
from coordinator.graphs.compiled import BATCH_SIZES, LEVELS, CompiledGraphs, check_wanted
from coordinator.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.graphs.gradient import (
    Kept,
    Traced,
    loss_name,
    target_example,
    trace_evaluation,
    trace_gradient,
)
from coordinator.graphs.symbols import (
    Point,
    Spec,
    Symbolic,
    as_term,
    prime_points,
    static,
    symbolic,
)
from coordinator.graphs.translate import IR_VERSION, OPSET, translate
from coordinator.tasks import Task
from edge_sdk.protocol.graphs import CostTerm, GraphEntry, Kind, Manifest, MaskSpec, Port

MIN_ONNXRUNTIME = "1.23.0"

_SCATTERS = re.compile(r".*embedding.*_backward|max_pool.*_backward")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Built:
    """A graph; None: any widths, any batch."""

    graph: Symbolic
    model: onnx.ModelProto
    kept: Kept | None
    batch: int | None


def compile_graphs(
    task: Task,
    *,
    levels: Sequence[float] = LEVELS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    example_targets: torch.Tensor | None = None,
) -> CompiledGraphs:
    """Compile and check a task's graphs.

    `levels` and `batch_sizes` matter only where sizes cannot stay open: there is then one graph for
    each, and an axis' groups must be of equal size. `example_targets`, a batch of targets, is
    needed for a loss that is not in `LOSSES`.

    Raises `GraphCompileError`, which names the operator and its module when one has no translation,
    and the differences when a graph does not compute what torch does.
    """
    check_wanted(levels, batch_sizes)
    targets = target_example(task, example_targets)
    tolerance = 0.0
    entries: list[GraphEntry] = []
    files: dict[str, bytes] = {}
    for kind in ("gradient", "evaluate"):
        trace = (
            partial(trace_gradient, task, targets)
            if kind == "gradient"
            else partial(trace_evaluation, task)
        )
        source = "sample_weights" if kind == "gradient" else "x0"
        for built in _build(task, trace, source, levels, batch_sizes):
            data = built.model.SerializeToString(deterministic=True)
            entry = _entry(kind, built, data)
            vocabulary = _vocabulary(built.graph)
            error = check_graph(task, targets, entry, data, vocabulary=vocabulary)
            tolerance = max(tolerance, error)
            entries.append(entry)
            files[entry.sha256] = data
    manifest = Manifest(
        plan_hash=task.plan.hash,
        opset=OPSET,
        ir_version=IR_VERSION,
        min_onnxruntime=MIN_ONNXRUNTIME,
        loss=loss_name(task),
        tolerance=tolerance,
        graphs=tuple(entries),
    )
    manifest.check(task.plan)
    return CompiledGraphs(manifest, files)


def _build(
    task: Task,
    trace: Callable[[Kept, int], Traced],
    source: str,
    levels: Sequence[float],
    batch_sizes: Sequence[int],
) -> Iterator[_Built]:
    plan = task.plan
    whole = Point(tuple(axis.atoms for axis in plan.axes), batch_sizes[0])
    try:
        points = prime_points([True] * len(plan.axes), batch=True, base=whole)
        graph = symbolic(trace, points)
        yield _Built(graph, translate(graph, plan, source), None, None)
        return
    except NotSymbolicError as error:
        logger.info("one graph a level, because %s", error)
    for kept in _kept_at(task, levels):
        base = Point(kept, batch_sizes[0])
        try:
            graph = symbolic(trace, prime_points([False] * len(kept), batch=True, base=base))
            yield _Built(graph, translate(graph, plan, source), kept, None)
        except NotSymbolicError as error:
            logger.info("one graph a batch size, because %s", error)
            for batch in dict.fromkeys(batch_sizes):
                graph = static(trace(kept, batch), Point(kept, batch))
                yield _Built(graph, translate(graph, plan, source), kept, batch)


def _kept_at(task: Task, levels: Sequence[float]) -> list[Kept]:
    for axis in task.plan.axes:
        if len(set(axis.groups)) > 1:
            raise GraphCompileError(
                f"this model needs one graph a level, so groups must be of equal size; axis "
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
        activations=_activations(built.graph),
    )


def _activations(graph: Symbolic) -> tuple[CostTerm, ...]:
    """Bytes of every float result of a step that is not an output.

    Where a step scatters into zeros, ONNX holds those as a tensor of their own.
    """
    given = {ref.name for ref in graph.outputs.values()}
    total: Counter[tuple[tuple[int, ...], int]] = Counter()
    for step in graph.steps:
        if step.target == "getitem":
            continue  # a part of what another step made
        times = (step.name not in given) + bool(_SCATTERS.fullmatch(step.target))
        for spec in step.results:
            if spec is not None and spec.dtype.is_floating_point:
                terms = [as_term(size) for size in spec.shape]
                axes = tuple(sorted(axis for term in terms for axis in term.axes))
                size = times * spec.dtype.itemsize * prod(term.coefficient for term in terms)
                total[axes, sum(term.batch for term in terms)] += size
    return tuple(CostTerm(total[kind], *kind) for kind in sorted(total) if total[kind])


def _output_specs(built: _Built) -> dict[str, Spec]:
    specs = dict(built.graph.inputs)
    for step in built.graph.steps:
        if step.results[0] is not None:
            specs[step.name] = step.results[0]
    return {name: specs[ref.name] for name, ref in built.graph.outputs.items()}


def _port(name: str, spec: Spec) -> Port:
    return Port(name, numpy_type(spec.dtype).name, tuple(as_term(size) for size in spec.shape))


def _vocabulary(graph: Symbolic) -> int:
    """Integers below this are valid inputs: the smallest table that is looked up."""
    specs = dict(graph.inputs)
    sizes = []
    for step in graph.steps:
        table = step.arguments.get("weight")
        if "embedding" in step.target and table is not None and table.name in specs:
            sizes.append(specs[table.name].shape[0])
    return min((size for size in sizes if isinstance(size, int)), default=2)
