"""The demo's run: rounds with accuracy, what they saved, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from coordinator.rules import FedRaa, make_rule
from coordinator.saved import SavedModel, load_weights, save_model
from coordinator.tasks import Task, make_task
from edge_sdk.protocol.encoding import Encoding
from edge_sdk.protocol.local_rule import LocalRule
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


@dataclass(slots=True)
class Demo:
    """A run in progress. Iterate over `run()`; `rounds` holds what is done."""

    config: DemoConfig
    task: Task
    federation: Federation
    test: ArrayData
    graphs: CompiledGraphs | None
    """What the onnx backend trains with; None on torch."""
    rounds: list[DemoRound] = field(default_factory=list)

    def run(self) -> Iterator[DemoRound]:
        """Train, yielding every round as it closes."""
        full_bytes = 2 * 4 * self.task.plan.parameters * self.config.devices
        for report in self.federation.run():
            full_train_s = self._full_train_s(report) * self.config.devices
            done = DemoRound(report, self.accuracy(), full_bytes, full_train_s)
            self.rounds.append(done)
            yield done

    def _full_train_s(self, report: RoundReport) -> float:
        """What the full model took in this very round, so that noise hits both sides alike."""
        taken = [device.train_s for device in report.devices if device.level == 1]
        if not taken:
            return self.rounds[-1].full_train_s / self.config.devices if self.rounds else 0.0
        return float(np.mean(taken))

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

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain data. `rounds` depends on nothing but config and versions."""
        plan = self.task.plan
        return {
            "schema": SCHEMA,
            "seed": self.config.seed,
            "rule": self.config.rule,
            "rule_options": dict(self.config.rule_options),
            "mask": self.config.mask,
            "mask_options": dict(self.config.mask_options),
            "encoding_up": str(self.config.up),
            "encoding_down": str(self.config.down),
            "backend": self.config.backend,
            "plan_hash": plan.hash,
            "parameters": plan.parameters,
            "rounds": [_round_json(done) for done in self.rounds],
            "model_sha256": self.federation.model.digest,
            "bytes": sum(done.bytes_moved for done in self.rounds),
            "bytes_full_training": sum(done.full_bytes for done in self.rounds),
            "timings": {
                "torch": torch.__version__,
                "train_s": [round(done.train_s, 6) for done in self.rounds],
                "train_s_full_training": [round(done.full_train_s, 6) for done in self.rounds],
                "wall_s": [round(done.report.seconds, 6) for done in self.rounds],
            },
        }


def make_demo(config: DemoConfig) -> Demo:
    """Load the data, trace the model, deal both out."""
    rule = make_rule(config.rule, **config.rule_options)
    config = replace(config, mask=config.mask or fitting_masks(rule))
    masks = make_masks(str(config.mask), **config.mask_options)
    digits = load_digits(config.seed)
    task = make_task(
        make_model(config.seed), torch.from_numpy(digits.train.inputs[0][:2]), groups=GROUPS
    )
    sam = SAM_RADIUS if config.rule == "subdismo" else 0.0
    common: dict[str, Any] = {
        "plan": task.plan,
        "masks": masks,
        "local_rule": replace(LOCAL_RULE, sam_radius=sam),
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
    weights, buffers = task.weights, task.buffers
    if config.init is not None:
        weights, buffers = load_weights(config.init, task.plan, buffers=buffers)
    graphs = _compile(task) if config.backend == "onnx" else None
    model = GlobalModel(task.plan, weights, buffers, encoding=config.down, seed=config.seed)
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
