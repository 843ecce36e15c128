"""Device-steps per second of a federation in one process, against a bare torch loop.

Both train the same model in the same process on one thread, and take turns round by round. The bare
loop is what one would write without a framework: one `torch.nn.Module` of the level's width, SGD
with momentum, the same batches of the same size. Everything else a federation does (deciding,
assigning, cutting, encoding, checking, summing) is its overhead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.models import mlp
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.federation import Federation, Member
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.train.onnx import OnnxBackend

WIDTHS = (784, 200, 200, 10)
GROUPS = 4
LOCAL_RULE = LocalRule(learning_rate=0.05, momentum=0.9)
TARGETS = {1.0: 0.95, 0.25: 0.8}
"""Lowest acceptable ratio of the federation's steps per second to the bare loop's, by level."""
METHOD = (
    "ra-fed, onnx backend, one thread, everybody at the same level; a turn is one round of the "
    "federation and then as many steps of a bare torch loop on a model of that width; seconds are "
    "CPU time of this process; the ratio is the median over turns, the first left out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedConfig:
    """The job: `devices` train `steps` steps of `batch` samples each in every one of the turns."""

    devices: int = 20
    steps: int = 20
    batch: int = 32
    turns: int = 20
    samples: int = 320
    """Samples of each device."""

    @property
    def ticks(self) -> int:
        """Number of ticks of `measure_speed`."""
        return self.turns * len(TARGETS)


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One level: device-steps per CPU second, and their ratio within turns."""

    level: float
    steps_per_s: float
    bare_steps_per_s: float
    ratio: float


def measure_speed(config: SpeedConfig, begin: Begin) -> list[SpeedRow]:
    """Measure one row per level of `TARGETS`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp(*WIDTHS)
    task = make_task(model, torch.zeros(2, WIDTHS[0]), groups=GROUPS)
    return [_measure_level(task, level, config, begin) for level in TARGETS]


def speed_figures(rows: list[SpeedRow]) -> list[Figure]:
    """Return the ratio of every level."""
    return [
        Figure(
            f"fleet.mlp.{row.level * 100:.0f}.steps_over_bare",
            row.ratio,
            "×",
            target=TARGETS[row.level],
            better="higher",
        )
        for row in rows
    ]


def _measure_level(task: Task, level: float, config: SpeedConfig, begin: Begin) -> SpeedRow:
    tick = begin(f"at {level:.0%}")
    shares = [_share(number, config.samples) for number in range(config.devices)]
    rounds = _federation(task, level, shares, config).run()
    bare = _bare_loop(level, shares, config)
    steps = config.devices * config.steps
    times: list[tuple[float, float]] = []
    for _ in range(config.turns):
        started = time.process_time()
        next(rounds)
        between = time.process_time()
        next(bare)
        times.append((between - started, time.process_time() - between))
        tick()
    kept = times[1:] or times
    return SpeedRow(
        level=level,
        steps_per_s=steps / median(ours for ours, _ in kept),
        bare_steps_per_s=steps / median(theirs for _, theirs in kept),
        ratio=median(theirs / ours for ours, theirs in kept),
    )


def _share(number: int, samples: int) -> ArrayData:
    random = stream(0, "fleet", number)
    x = random.standard_normal((samples, WIDTHS[0]), dtype=np.float32)
    return ArrayData((x,), random.integers(0, WIDTHS[-1], samples))


def _federation(
    task: Task, level: float, shares: list[ArrayData], config: SpeedConfig
) -> Federation:
    graphs = compile_graphs(task)
    members = [
        Member(f"device-{number:03}", Policy(level=level), share)
        for number, share in enumerate(shares)
    ]
    rounds = RoundsConfig(
        plan=task.plan,
        rule=RULES["ra-fed"](),
        masks=make_masks("random"),
        local_rule=LOCAL_RULE,
        rounds=config.turns,
        steps=config.steps,
        batch_size=config.batch,
        min_devices=len(members),
        seed=0,
    )
    model = GlobalModel(task.plan, task.weights, task.buffers)
    return Federation(
        rounds, model, lambda: OnnxBackend(task.plan, graphs.manifest, graphs.files), members
    )


def _bare_loop(level: float, shares: list[ArrayData], config: SpeedConfig) -> Iterator[None]:
    """Take the steps of every device in turn, without end; a turn is one `next`."""
    hidden = (round(width * level) for width in WIDTHS[1:-1])
    model = mlp(WIDTHS[0], *hidden, WIDTHS[-1])
    random = stream(0, "fleet", "bare")
    while True:
        for share in shares:
            optimiser = torch.optim.SGD(
                model.parameters(), LOCAL_RULE.learning_rate, LOCAL_RULE.momentum
            )
            for batch in share.batches(config.steps, config.batch, random):
                x, y = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.targets)
                optimiser.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(x), y))
                optimiser.step()
        yield
