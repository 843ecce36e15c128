"""The demo's run: rounds with accuracy, what they saved, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from coordinator.demo.digits import load_digits, make_members, make_model
from coordinator.errors import ConfigError
from coordinator.federation import Federation, RoundReport
from coordinator.fragments import FragmentsConfig
from coordinator.masks import make_masks
from coordinator.memory import Dtype
from coordinator.model import GlobalModel
from coordinator.pairings import fitting_masks
from coordinator.rounds import RoundsConfig
from coordinator.rules import FedRaa, Rule, make_rule
from coordinator.saved import SavedModel, load_weights, save_model
from coordinator.tasks import Task, make_task
from edge_sdk.protocol.encoding import Encoding
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.train.backend import Backend
from edge_sdk.train.data import ArrayData
from edge_sdk.train.torch import TorchBackend

if TYPE_CHECKING:
    from coordinator.graphs import CompiledGraphs

GROUPS = 4
STEPS = 10
BATCH_SIZE = 32
LOCAL_RULE = LocalRule(learning_rate=0.1, momentum=0.5)
SAM_RADIUS = 0.05
"""For `subdismo`, whose devices train with SAM."""
SCHEMA = 2

BackendName = Literal["onnx", "torch"]
"""How the demo's devices train: the shipped graph without torch, or the traced torch module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the command line asks for."""

    rounds: int = 30
    devices: int = 8
    seed: int = 0
    backend: BackendName = "onnx"
    init: Path | None = None
    """A file with the weights to start from; None: random ones."""
    rule: str = "ram-fed"
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None
    """`mask` and `rule` are names, as `make_masks` and `make_rule` know them. None: what fits."""
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    up: Encoding = field(default_factory=Encoding)
    """How movements travel; `down` likewise for the model."""
    down: Encoding = field(default_factory=Encoding)
    memory_dir: Path | None = None
    """Where the rule's memory is kept; None: in RAM."""
    memory_dtype: Dtype = "fp32"
    threads: int = 1
    """How many devices train at the same time."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, not {self.rounds}")
        if not 1 <= self.devices <= 200:
            raise ConfigError(f"--devices must be from 1 to 200, not {self.devices}")
        if not 1 <= self.threads <= 64:
            raise ConfigError(f"--threads must be from 1 to 64, not {self.threads}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must be from 0 to 2^63 − 1, not {self.seed}")


@dataclass(frozen=True, slots=True)
class DemoRound:
    """A round's report, the accuracy after it, and what full training by all would have cost."""

    report: RoundReport
    accuracy: float
    full_bytes: int
    full_train_s: float

    @property
    def bytes_moved(self) -> int:
        """Model and movement payload of all devices, both directions."""
        return sum(device.bytes_down + device.bytes_up for device in self.report.devices)

    @property
    def train_s(self) -> float:
        """Seconds of training on all devices together."""
        return sum(device.train_s for device in self.report.devices)


class AnyDemo(Protocol):
    """A run in progress, in one process or several: iterate over `run()`, and close it.

    All but `config` and `rounds` is known once a round is done.
    """

    @property
    def config(self) -> DemoConfig:
        """What was asked for, with a mask policy."""

    @property
    def rounds(self) -> Sequence[DemoRound]:
        """What is done."""

    @property
    def plan(self) -> ModelPlan:
        """Of the model that is trained."""

    @property
    def test_samples(self) -> int:
        """How many digits the accuracy is of."""

    @property
    def digest(self) -> str:
        """SHA-256 of the global model (`GlobalModel.digest`)."""

    @property
    def repeatable(self) -> bool:
        """Whether the same seed gives the same bits."""

    def run(self) -> Generator[DemoRound]:
        """Train, yielding every round as it closes."""

    def save(self, path: Path) -> None:
        """Save the global model in a new folder, as `coordinator.saved` describes it."""


@dataclass(slots=True)
class Demo:
    """The run in this process alone, over the in-memory link."""

    config: DemoConfig
    task: Task
    federation: Federation
    test: ArrayData
    graphs: CompiledGraphs | None
    """What the onnx backend trains with; None on torch."""
    rounds: list[DemoRound] = field(default_factory=list)

    @property
    def plan(self) -> ModelPlan:
        """Of the model that is trained."""
        return self.task.plan

    @property
    def test_samples(self) -> int:
        """How many digits the accuracy is of."""
        return len(self.test)

    @property
    def digest(self) -> str:
        """SHA-256 of the present global model."""
        return self.federation.model.digest

    @property
    def repeatable(self) -> bool:
        """Always: devices take turns in the same order."""
        return True

    def run(self) -> Generator[DemoRound]:
        """Train, yielding every round as it closes."""
        for report in self.federation.run():
            done = compared(report, self.accuracy(), self.plan, self.config.devices, self.rounds)
            self.rounds.append(done)
            yield done

    def accuracy(self) -> float:
        """Share of test digits that the present global model gets right."""
        model = self.federation.model
        scores = self.task.traced.predict(model.weights, model.buffers, self.test.inputs)
        return float(np.mean(scores.argmax(axis=1) == self.test.targets))

    def save(self, path: Path) -> None:
        """Save the present global model in a new folder, as `coordinator.saved` describes it."""
        model = self.federation.model
        graphs = self.graphs or _compile(self.task)
        saved = SavedModel(
            self.task.plan, model.weights, model.buffers, graphs.manifest, graphs.files
        )
        save_model(saved, path)


def as_json(demo: AnyDemo) -> dict[str, Any]:
    """Everything, as plain data. `rounds` depends on nothing but config and versions."""
    config, plan, rounds = demo.config, demo.plan, demo.rounds
    return {
        "schema": SCHEMA,
        "seed": config.seed,
        "rule": config.rule,
        "rule_options": dict(config.rule_options),
        "mask": config.mask,
        "mask_options": dict(config.mask_options),
        "encoding_up": str(config.up),
        "encoding_down": str(config.down),
        "backend": config.backend,
        "plan_hash": plan.hash,
        "parameters": plan.parameters,
        "rounds": [_round_json(done) for done in rounds],
        "model_sha256": demo.digest,
        "bytes": sum(done.bytes_moved for done in rounds),
        "bytes_full_training": sum(done.full_bytes for done in rounds),
        "timings": {
            "torch": torch.__version__,
            "train_s": [round(done.train_s, 6) for done in rounds],
            "train_s_full_training": [round(done.full_train_s, 6) for done in rounds],
            "wall_s": [round(done.report.seconds, 6) for done in rounds],
        },
    }


def compared(
    report: RoundReport,
    accuracy: float,
    plan: ModelPlan,
    devices: int,
    earlier: Sequence[DemoRound],
) -> DemoRound:
    """A round beside what it would have cost had all devices trained the full model.

    Its time is that of the full model in this very round, so that noise hits both sides alike; of
    the round before if no device trained it.
    """
    taken = [device.train_s for device in report.devices if device.level == 1]
    if taken:
        full_train_s = float(np.mean(taken)) * devices
    else:
        full_train_s = earlier[-1].full_train_s if earlier else 0.0
    return DemoRound(report, accuracy, 2 * 4 * plan.parameters * devices, full_train_s)


def choose_masks(config: DemoConfig) -> tuple[Rule | FedRaa, DemoConfig]:
    """The rule, and the configuration with the mask policy that fits it. Raises `ConfigError`."""
    rule = make_rule(config.rule, **config.rule_options)
    return rule, replace(config, mask=config.mask or fitting_masks(rule))


def demo_task(seed: int, init: Path | None) -> Task:
    """What is trained, from the weights in `init` if it is given. Raises `TesseraError`."""
    task = make_task(make_model(seed), torch.zeros(2, 1, 8, 8), groups=GROUPS)
    if init is None:
        return task
    weights, buffers = load_weights(init, task.plan, buffers=task.buffers)
    return replace(task, weights=weights, buffers=buffers)


def local_rule(config: DemoConfig) -> LocalRule:
    """How devices train."""
    return replace(LOCAL_RULE, sam_radius=SAM_RADIUS if config.rule == "subdismo" else 0.0)


def make_demo(config: DemoConfig) -> Demo:
    """Load the data, trace the model, deal both out."""
    rule, config = choose_masks(config)
    masks = make_masks(str(config.mask), **config.mask_options)
    digits = load_digits(config.seed)
    task = demo_task(config.seed, config.init)
    common: dict[str, Any] = {
        "plan": task.plan,
        "masks": masks,
        "local_rule": local_rule(config),
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "min_devices": config.devices,
        "seed": config.seed,
        "encoding": config.up,
    }
    run = (
        FragmentsConfig(rule=rule, updates=config.rounds * config.devices, **common)
        if isinstance(rule, FedRaa)
        else RoundsConfig(rule=rule, rounds=config.rounds, **common)
    )
    graphs = _compile(task) if config.backend == "onnx" else None
    model = GlobalModel(
        task.plan, task.weights, task.buffers, encoding=config.down, seed=config.seed
    )
    federation = Federation(
        run,
        model,
        lambda: _make_backend(task, graphs),
        make_members(digits.train, config.devices, config.seed),
        threads=config.threads,
        memory_dir=config.memory_dir,
        memory_dtype=config.memory_dtype,
    )
    return Demo(config, task, federation, digits.test, graphs)


def _compile(task: Task) -> CompiledGraphs:
    # Here, so that the torch backend does without onnx.
    from coordinator.graphs import compile_graphs

    return compile_graphs(task, batch_sizes=(BATCH_SIZE,))


def _make_backend(task: Task, graphs: CompiledGraphs | None) -> Backend:
    if graphs is None:
        return TorchBackend(task)
    from edge_sdk.train.onnx import OnnxBackend

    return OnnxBackend(task.plan, graphs.manifest, graphs.files)


def _round_json(done: DemoRound) -> dict[str, Any]:
    return {
        "round": done.report.round,
        "accuracy": done.accuracy,
        "coverage_min": done.report.coverage_min,
        "coverage_mean": done.report.coverage_mean,
        "trained_coverage_min": done.report.trained_coverage_min,
        "trained_blocks": done.report.trained_blocks,
        "oldest_uncovered": done.report.oldest_uncovered,
        "gap_bound": done.report.gap_bound,
        "oldest_memory": done.report.oldest_memory,
        "compression_noise": done.report.compression_noise,
        "skip_share": done.report.skip_share,
        "longest_skip": done.report.longest_skip,
        "devices": [
            {
                "device": device.device,
                "skip": device.level is None,
                "level": device.level,
                "reason": device.reason,
                "loss": device.loss,
                "parameters": device.parameters,
                "bytes_down": device.bytes_down,
                "bytes_up": device.bytes_up,
                "reduction_noise": device.reduction_noise,
                "replayed": device.replayed,
            }
            for device in done.report.devices
        ],
    }
