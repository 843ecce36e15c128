"""One model from its builder to a checked training step, in this process."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.zoo.build import build
from benchmarks.zoo.names import TOKENS, ZooModel
from benchmarks.zoo.outcome import ZooOutcome
from benchmarks.zoo.own import VOCABULARY
from benchmarks.zoo.pruning import pruned_share
from coordinator.errors import TraceError
from coordinator.task.graphs.cache import translator_version
from coordinator.task.graphs.check import (
    difference,
    make_case,
    open_session,
    run_graph,
    torch_gradient,
)
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from coordinator.task.tracing.capture.calls import ExampleInput
from edge_sdk import TesseraError
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.task.codec import fitted

GROUPS = 4
BATCH = 6
"""Samples of the checked step."""
BATCHES = 4
"""Batches tried at every level, until one is right. Rounding can flip a ReLU at one; a wrong graph
is always wrong."""
SLACK = 2.0
"""Our error may be this many times torch's own in float32 …"""
SPARE = 1e-6
"""… and this much more, relative to the largest gradient."""

LANGUAGE = ("gpt2", "llama")
"""Models that predict every next word."""


def run_trial(model: ZooModel, before: ZooOutcome | None = None) -> Iterator[ZooOutcome]:
    """Trace, prune, compile and train; yields the outcome so far after every step.

    torch-pruning's share is taken from an earlier outcome: other code of ours does not change it.
    """
    warnings.simplefilter("ignore")  # of the packages
    torch.set_num_threads(1)
    outcome = ZooOutcome(model.key, translator_version())
    try:
        for outcome in _steps(model, outcome, before):  # noqa: B020  # the newest one counts below
            yield outcome
    except TesseraError as error:
        yield outcome.failed(str(error))
    except Exception as error:  # a raw traceback is what the zoo is there to find
        yield outcome.failed(f"{type(error).__name__}: {error}", raw=True)


def _steps(model: ZooModel, outcome: ZooOutcome, before: ZooOutcome | None) -> Iterator[ZooOutcome]:
    made, example = build(model)
    outcome = replace(outcome, parameters=sum(each.numel() for each in made.parameters()))
    began = time.process_time()
    task, outcome = _traced(model, made, example, outcome)
    share = task.plan.cost_at(0.5).parameter_share
    outcome = replace(outcome, traced=True, share=share, trace_s=time.process_time() - began)
    yield outcome
    if outcome.layer_norm == "whole" and any(map(NORMED.search, task.traced.reasons)):
        narrow = make_task(made, example, groups=GROUPS, layer_norm="submodel", **_objective(model))
        outcome = replace(outcome, submodel_share=narrow.plan.cost_at(0.5).parameter_share)
        yield outcome
    if before and (before.pruned_share or before.pruning_failed):
        other, why = before.pruned_share, before.pruning_failed
    else:
        other, why = pruned_share(made, example)
    outcome = replace(outcome, pruned_share=other, pruning_failed=why)
    yield outcome
    began = time.process_time()
    compiled = compile_graphs(task, batch_sizes=(BATCH,))
    outcome = replace(
        outcome,
        compiled=True,
        compile_s=time.process_time() - began,
        graph_bytes=sum(map(len, compiled.files.values())),
        graphs=len(compiled.files),
    )
    yield outcome
    error, own, level = _step_error(task, compiled)
    outcome = replace(outcome, error=error, torch_error=own, right=error <= SLACK * own + SPARE)
    if not outcome.right:
        outcome = outcome.failed(
            f"a step at level {level:g} is off by {error:.1e} of the largest gradient, torch in "
            f"float32 by {own:.1e}"
        )
    yield outcome


NORMED = re.compile(r"normalised over as a whole|inside a GroupNorm group")
"""Reasons that `layer_norm="submodel"` may lift."""


def _traced(
    model: ZooModel, made: torch.nn.Module, example: ExampleInput, outcome: ZooOutcome
) -> tuple[Task, ZooOutcome]:
    """Trace a model; where norms leave nothing to narrow, with the statistics of what is kept."""
    given = _objective(model)
    try:
        return make_task(made, example, groups=GROUPS, **given), outcome
    except TraceError as error:
        if not NORMED.search(str(error)):
            raise
        task = make_task(made, example, groups=GROUPS, layer_norm="submodel", **given)
        return task, replace(outcome, layer_norm="submodel")


def _objective(model: ZooModel) -> dict[str, Any]:
    if model.name not in LANGUAGE:
        return {}
    return {"loss": _next_words, "example_targets": torch.randint(VOCABULARY, (2, TOKENS))}


def _next_words(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def _step_error(task: Task, compiled: CompiledGraphs) -> tuple[float, float, float]:
    """Return our error and torch's own, of the level that is worst by the aim, and the level."""
    found = []
    for level in LEVELS:
        tried: list[tuple[float, float]] = []
        while len(tried) < BATCHES and not any(_excess(each) <= SPARE for each in tried):
            tried.append(_errors(task, compiled, level, len(tried)))
        found.append((*min(tried, key=_excess), level))
    return max(found, key=_excess)


def _excess(errors: tuple[float, ...]) -> float:
    return errors[0] - SLACK * errors[1]


def _errors(task: Task, compiled: CompiledGraphs, level: float, seed: int) -> tuple[float, float]:
    """Return the errors of onnx and of torch, both in float32, against torch in float64."""
    case = make_case(task, level=level, batch=BATCH, seed=100 + seed)
    entry = next(
        entry
        for entry in compiled.manifest.graphs
        if entry.kind == "gradient" and entry.fits(case.kept)
    )
    file = fitted(entry, compiled.files[entry.sha256], case.kept)
    got = run_graph(entry, open_session(file), case)
    exact = torch_gradient(task, replace(case, double=True))
    return difference(got, exact), difference(torch_gradient(task, case), exact)
