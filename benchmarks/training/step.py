"""CPU seconds of one training step at each level, against the multiply-accumulates.

The claim measured is the project's first decision: a submodel is a really smaller model. For each
family and level, on the torch backend unless it says otherwise:

- *slice*: the submodel of that level, at `rescale` 0;
- *onnx*: the same job on the onnx backend, from the graphs that a device would be sent, in the ways
  that a device's calibration finds to be the fastest here;
- *zero-mask*: the full model, its weights and gradients multiplied by 0 or 1 in every step. It
  computes the same numbers as the slice, the way most other frameworks do it;
- *rescaled*: the slice at half the width with the default `rescale`, to show its cost.

A step is timed inside the backend's own loop, from one request for a batch to the next: it
includes everything a device pays for it (batch to tensor, forward, backward, `LocalSteps`) but
neither the graph, which is built once, nor the data, which are made before.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median

import numpy as np
import torch

from benchmarks.models import FAMILIES, Family
from benchmarks.report.figures import Figure
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.costs.calibration import tune
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.messages.local_rule import LocalRule, Precision
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.plan import Groups, ModelPlan, Regions
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import Forward, TorchBackend, TorchTask

GROUPS = 4
RESCALED_LEVEL = 0.5
RULE = LocalRule(learning_rate=0.01, momentum=0.9, rescale=0)
RESCALED_RULE = LocalRule(learning_rate=0.01, momentum=0.9)
TARGETS = {
    ("mlp-2048", 0.75): 1.2,
    ("mlp-2048", 0.5): 1.2,
    ("mlp-2048", 0.25): 1.2,
    ("cnn", 0.5): 1.5,
    ("cnn", 0.25): 2.5,
}
"""Largest acceptable (step's share of the full model's) ÷ (its share of the MACs)."""
MACS_FAMILIES = frozenset(family for family, _ in TARGETS)
"""Families large enough that arithmetic dominates; the target applies on both backends."""
ONNX_TARGET = 1.0
"""Largest acceptable step of the onnx backend, in steps of torch."""
LEAST_TURNS = 3
LONG_STEP_S = 0.3
"""A step that takes longer is not tried out more than once before it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Parameters: `reps` turns, in each of which every variant runs for `burst_s`."""

    batch: int = 64
    threads: int = 1
    reps: int = 15
    burst_s: float = 0.25
    family_s: float = 90.0
    """Time after which a family of long steps takes no further turns, if it had a few."""
    tuning_s: float = 20.0
    """Time to find the fastest ways to compute, for all levels of a family."""
    regions: Regions = "width"
    precision: Precision = "fp32"
    """That of the onnx backend's products."""

    def __post_init__(self) -> None:
        for name in ("batch", "threads", "reps"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One level of one family. Ratios are to the full model's step of the same run."""

    family: str
    level: float
    parameter_share: float
    macs_ratio: float
    steps: int
    """Number of steps of which `step_ms` is the median."""
    step_ms: float
    quartiles_ms: tuple[float, float]
    ratio: float
    over_macs: float
    """`ratio / macs_ratio`: 1 when time follows the arithmetic."""
    zero_mask_ratio: float | None
    """None at full width, where there is nothing to mask."""
    rescaled_ratio: float | None
    """None except at one level."""
    onnx_steps: int
    onnx_ms: float
    onnx_quartiles_ms: tuple[float, float]
    onnx_over_torch: float
    """`onnx_ms / step_ms`, at the same level."""
    onnx_over_macs: float
    """As `over_macs`, with the onnx backend's full model as the base."""
    ways: str | None
    """The ways in which the onnx backend computes; None: the graph leaves no choice."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One timed way to train: a backend and its job."""

    backend: Backend
    job: Job


Key = tuple[str, float]
"""A variant's name: ("slice" | "onnx" | "zero-mask" | "rescaled", level)."""


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, for the rest of the process; False unless it is glibc's.

    By default glibc returns large freed blocks, or not, depending on the history of the heap. Then
    every step faults its activations in again: wide ones, which are larger, get up to half as slow
    again. That is chance, differs between processes, and flatters the slices.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4  # names of malloc.h
    return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))


def make_variants(family: Family, config: StepConfig) -> dict[Key, Variant]:
    """Make everything that is timed for one family, the full model first."""
    task = make_task(family.model(), family.inputs(2), groups=GROUPS, regions=config.regions)
    plan = task.plan

    def job(groups: Groups, rule: LocalRule) -> Job:
        return Job(
            groups=groups,
            weights=plan.cut(task.weights, groups),
            buffers=plan.cut_buffers(task.buffers, groups),
            rule=rule,
            mask_stream=stream(0, "step", "dropout"),
        )

    backend = TorchBackend(task, threads=config.threads)
    half = config.precision == "fp16"
    compiled = compile_graphs(task, levels=LEVELS, batch_sizes=(config.batch,), half=half)
    onnx = OnnxBackend(
        plan,
        compiled.manifest,
        compiled.files,
        threads=config.threads,
        precision=config.precision,
    )
    if half and onnx.precision != config.precision:
        raise TrainingError("this family has no graphs in fp16: they would be too coarse")
    if not half:
        onnx.tuned = tune(onnx, compiled.manifest, levels=LEVELS, limit_s=config.tuning_s) or ()
    variants: dict[Key, Variant] = {}
    for level in LEVELS:
        groups = leading_groups(plan, level)
        variants["slice", level] = Variant(backend, job(groups, RULE))
        variants["onnx", level] = Variant(onnx, job(groups, RULE))
        if level < 1:
            masked = TorchBackend(ZeroMaskedTask(task, groups), threads=config.threads)
            variants["zero-mask", level] = Variant(masked, job(plan.all_groups(), RULE))
        if level == RESCALED_LEVEL:
            variants["rescaled", level] = Variant(backend, job(groups, RESCALED_RULE))
    return variants


def leading_groups(plan: ModelPlan, level: float) -> dict[str, tuple[int, ...]]:
    """Return the level's number of leading groups of every axis; which ones does not matter."""
    return {axis.name: tuple(range(axis.wanted(level))) for axis in plan.axes}


class ZeroMaskedTask:
    """A task whose full model is reduced to a submodel by zeros, as a `TorchTask`.

    Weights are multiplied by the mask before the forward pass, and autograd multiplies the
    gradients by it: the backend, its loop and its optimiser are those of the slices.
    """

    def __init__(self, task: TorchTask, groups: Groups) -> None:
        plan = task.plan
        mask = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in plan.tensors}
        ones = {name: np.ones_like(array) for name, array in mask.items()}
        plan.paste(mask, plan.cut(ones, groups), groups)
        self.plan = plan
        self.loss = task.loss
        self.loss_name = task.loss_name
        self.data = task.data
        self.train_program = _ZeroMaskedProgram(
            task, tuple(torch.from_numpy(mask[tensor.name]) for tensor in plan.tensors)
        )


class _ZeroMaskedProgram:
    def __init__(self, task: TorchTask, mask: tuple[torch.Tensor, ...]) -> None:
        def at(kept: tuple[int, ...], batch: int, scaled: bool) -> Forward:
            return _ZeroMaskedForward(task.train_program.at(kept, batch, scaled), mask)

        self.at = lru_cache(at)


class _ZeroMaskedForward:
    def __init__(self, full: Forward, mask: tuple[torch.Tensor, ...]) -> None:
        self._full = full
        self._mask = mask
        self.masks = full.masks

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        scales: Sequence[float | torch.Tensor],
        masks: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        held = [weight * mask for weight, mask in zip(weights, self._mask, strict=True)]
        return self._full(held, buffers, inputs, scales, masks)


def measure_family(
    name: str, config: StepConfig, tick: Callable[[], None] = lambda: None
) -> list[StepRow]:
    """Time all variants of a family in turns; `tick` is called `config.reps + 1` times."""
    family = FAMILIES[name]
    variants = make_variants(family, config)
    plan = variants["slice", 1.0].backend.plan
    labels = stream(0, "step", "labels").integers(family.classes, size=config.batch)
    batch = Batch((family.inputs(config.batch).numpy(),), labels)
    # The first burst builds graphs and fills caches; the second counts the steps of a burst.
    counts = {}
    for key, variant in variants.items():
        step_s = min(time_steps(variant, batch, 1))
        if step_s < LONG_STEP_S:
            step_s = min(time_steps(variant, batch, 3))
        counts[key] = int(
            min(50, max(1 if step_s > LONG_STEP_S else 3, config.burst_s / max(step_s, 1e-6)))
        )
    tick()
    times: dict[Key, list[float]] = {key: [] for key in variants}
    ends = time.perf_counter() + config.family_s
    for turn in range(config.reps):
        # Variants take turns, so that other load on the machine hits all of them alike.
        if turn < LEAST_TURNS or time.perf_counter() < ends:
            for key, variant in variants.items():
                times[key] += time_steps(variant, batch, counts[key])
        tick()
    onnx = variants["onnx", 1.0].backend
    tuned = onnx.tuned if isinstance(onnx, OnnxBackend) else ()
    return _rows(name, plan, times, {each.level: str(each) for each in tuned})


def time_steps(variant: Variant, batch: Batch, count: int) -> list[float]:
    """Return CPU seconds of each of `count` steps, after one more that is not counted.

    That first step makes the momentum and finds the caches full of another variant's weights.
    """
    stamps: list[float] = []

    def batches() -> Iterator[Batch]:
        for _ in range(count + 1):
            stamps.append(time.process_time())
            yield batch
        stamps.append(time.process_time())

    variant.backend.train(variant.job, batches())
    return [after - before for before, after in pairwise(stamps[1:])]


def _rows(
    name: str, plan: ModelPlan, times: dict[Key, list[float]], ways: dict[float, str]
) -> list[StepRow]:
    # The median of all steps. Disturbances on a shared machine only add time, and rarely to more
    # than half of the steps; the minimum would favour variants with many short steps, and varies
    # more between runs. Even so, seconds of two runs are not comparable: only ratios within one
    # run are.
    step_s = {key: median(values) for key, values in times.items()}
    full_s, onnx_full_s = step_s["slice", 1.0], step_s["onnx", 1.0]
    full_macs = plan.cost_at(1.0).macs
    rows = []
    for level in LEVELS:
        cost = plan.cost_at(level)
        slice_s, onnx_s = step_s["slice", level], step_s["onnx", level]
        ratio, macs_ratio = slice_s / full_s, cost.macs / full_macs
        masked, rescaled = (step_s.get((way, level)) for way in ("zero-mask", "rescaled"))
        rows.append(
            StepRow(
                family=name,
                level=level,
                parameter_share=cost.parameter_share,
                macs_ratio=macs_ratio,
                steps=len(times["slice", level]),
                step_ms=slice_s * 1e3,
                quartiles_ms=_quartiles_ms(times["slice", level]),
                ratio=ratio,
                over_macs=ratio / macs_ratio,
                zero_mask_ratio=None if masked is None else masked / full_s,
                rescaled_ratio=None if rescaled is None else rescaled / full_s,
                onnx_steps=len(times["onnx", level]),
                onnx_ms=onnx_s * 1e3,
                onnx_quartiles_ms=_quartiles_ms(times["onnx", level]),
                onnx_over_torch=onnx_s / slice_s,
                onnx_over_macs=onnx_s / onnx_full_s / macs_ratio,
                ways=ways.get(level),
            )
        )
    return rows


def _quartiles_ms(times: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(times, (0.25, 0.75)) * 1e3
    return float(low), float(high)


def step_figures(rows: Sequence[StepRow]) -> list[Figure]:
    """Return the figures of `measure_family`."""
    figures = []
    for row in rows:
        stem = f"step.{row.family}.{row.level * 100:.0f}"
        figures += [
            Figure(f"{stem}.cpu", row.step_ms, "ms"),
            Figure(f"{stem}.onnx_cpu", row.onnx_ms, "ms"),
            Figure(f"{stem}.onnx_over_torch", row.onnx_over_torch, "×", target=ONNX_TARGET),
        ]
        if row.level < 1:
            target = TARGETS.get((row.family, row.level))
            if row.family in MACS_FAMILIES:
                figures.append(
                    Figure(f"{stem}.onnx_over_macs", row.onnx_over_macs, "×", target=target)
                )
            figures += [
                Figure(f"{stem}.over_full", row.ratio, "×"),
                Figure(f"{stem}.over_macs", row.over_macs, "×", target=target),
            ]
        if row.zero_mask_ratio is not None:
            figures.append(Figure(f"{stem}.zero_mask_over_full", row.zero_mask_ratio, "×"))
        if row.rescaled_ratio is not None:
            figures.append(Figure(f"{stem}.rescaled_over_full", row.rescaled_ratio, "×"))
    return figures
