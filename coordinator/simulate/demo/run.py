"""The demo's run: rounds with accuracy, their savings, and everything as JSON."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from coordinator.aggregate.memory import MemoryType
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.pairings import fitting_masks
from coordinator.aggregate.rules import FedRaa, Rule, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.service.courses import Evaluator
from coordinator.simulate.demo.digits import deal, load_digits, make_model
from coordinator.simulate.demo.emulated import (
    Chronicle,
    Lived,
    choose_members,
    emulate_all,
    full_round_s,
    observe,
)
from coordinator.simulate.federation import Federation, Member, RoundReport
from coordinator.task.saved_model import SavedModel, load_weights, save_model
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import Emulation, Moment
from edge_sdk.decide.emulation.fleet import Fleet, load_fleet, shipped_fleet
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.backend import Backend
from edge_sdk.train.torch import TorchBackend

if TYPE_CHECKING:
    from coordinator.task.graphs import CompiledGraphs

GROUPS = 4
STEPS = 10
BATCH_SIZE = 32
LOCAL_RULE = LocalRule(learning_rate=0.1, momentum=0.5)
SAM_RADIUS = 0.05
"""Radius for `subdismo`, whose devices train with SAM."""
SCHEMA = 4

BackendName = Literal["onnx", "torch"]
"""Training backend of the demo's devices: the compiled graph without torch, or the torch module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Options of the command line."""

    rounds: int = 30
    fleet: Path = field(default_factory=lambda: shipped_fleet("mixed"))
    """File of the fleet to emulate."""
    devices: int = 8
    """Number of devices (`choose_members`)."""
    weigh: bool = True
    """Devices decide for themselves; False: all train the whole model in every round."""
    seed: int = 0
    backend: BackendName = "onnx"
    init: Path | None = None
    """A file with the weights to start from; None: random ones."""
    rule: str = "ram-fed"
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None
    """`mask` and `rule` are names for `make_masks` and `make_rule`. None: the best for the rule."""
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the devices' local rule that differ from the demo's."""
    up: Encoding = field(default_factory=Encoding)
    """Encoding of movements; `down` is that of the model."""
    down: Encoding = field(default_factory=Encoding)
    memory_dir: Path | None = None
    """Folder of the rule's memory; None: in RAM."""
    memory_type: MemoryType = "fp32"
    threads: int = 1
    """Devices that train at the same time."""

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
    """A round's report, with accuracies, and the cost if all devices had trained fully.

    Seconds and joules are those of the emulated devices.
    """

    report: RoundReport
    lived: tuple[Lived, ...]
    """Each device's round, in the report's order."""
    full_bytes: int
    full_train_s: float
    full_joules: float

    @property
    def accuracy(self) -> float:
        """Share of test samples that the whole model gets right."""
        return self.report.accuracy or 0.0

    @property
    def bytes_moved(self) -> int:
        """Model and movement payload of all devices, both directions."""
        return sum(device.bytes_down + device.bytes_up for device in self.report.devices)

    @property
    def train_s(self) -> float:
        """Seconds of training on all devices together."""
        return sum(each.train_s for each in self.lived)

    @property
    def joules(self) -> float:
        """Energy all devices together drew while training, as far as their profiles tell."""
        return sum(each.joules or 0.0 for each in self.lived)

    @property
    def slowest_s(self) -> float:
        """Seconds of the device that took longest to train and transfer."""
        return max((each.train_s + (each.transfer_s or 0.0) for each in self.lived), default=0.0)


class AnyDemo(Protocol):
    """A run in progress, in one process or several: iterate over `run()`, and close it.

    Everything except `config` and `rounds` is available once a round is done.
    """

    @property
    def config(self) -> DemoConfig:
        """Options of the run, with a mask policy filled in."""

    @property
    def rounds(self) -> Sequence[DemoRound]:
        """Rounds done so far."""

    @property
    def plan(self) -> ModelPlan:
        """Plan of the trained model."""

    @property
    def fleet(self) -> Fleet:
        """Fleet that the devices emulate."""

    @property
    def test_samples(self) -> int:
        """Number of digits on which accuracy is measured."""

    @property
    def digest(self) -> str:
        """SHA-256 of the global model (`GlobalModel.digest`)."""

    @property
    def repeatable(self) -> bool:
        """True if the same seed gives the same bits."""

    def run(self) -> Generator[DemoRound]:
        """Train, yielding every round as it closes."""

    def save(self, path: Path) -> None:
        """Save the global model in a new folder (`coordinator.task.saved_model`)."""


@dataclass(slots=True)
class Demo:
    """The run in this process alone, over the in-memory link."""

    config: DemoConfig
    task: Task
    federation: Federation
    test: ArrayData
    graphs: CompiledGraphs | None
    """Graphs for the onnx backend; None on torch."""
    fleet: Fleet
    ledger: Ledger
    rounds: list[DemoRound] = field(default_factory=list)

    @property
    def plan(self) -> ModelPlan:
        """Plan of the trained model."""
        return self.task.plan

    @property
    def test_samples(self) -> int:
        """Number of digits on which accuracy is measured."""
        return len(self.test)

    @property
    def digest(self) -> str:
        """SHA-256 of the current global model."""
        return self.federation.model.digest

    @property
    def repeatable(self) -> bool:
        """Always: devices take turns in the same order."""
        return True

    def run(self) -> Generator[DemoRound]:
        """Train, yielding every round as it closes."""
        for report in self.federation.run():
            moments = {name: each.moment for name, each in self.ledger.emulations.items()}
            done = self.ledger.close(report, moments)
            self.rounds.append(done)
            yield done

    def save(self, path: Path) -> None:
        """Save the current global model in a new folder (`coordinator.task.saved_model`)."""
        model = self.federation.model
        graphs = self.graphs or _compile(self.task)
        saved = SavedModel(
            self.task.plan,
            model.weights,
            model.buffers,
            graphs.manifest,
            graphs.files,
            self.federation.levels,
        )
        save_model(saved.with_statistics(), path)


def as_json(demo: AnyDemo) -> dict[str, Any]:
    """Return the whole run as plain data. `rounds` depends only on config and versions."""
    config, plan, rounds = demo.config, demo.plan, demo.rounds
    return {
        "schema": SCHEMA,
        "seed": config.seed,
        "rule": config.rule,
        "rule_options": dict(config.rule_options),
        "mask": config.mask,
        "mask_options": dict(config.mask_options),
        "local": dict(config.local),
        "encoding_up": str(config.up),
        "encoding_down": str(config.down),
        "backend": config.backend,
        "fleet": config.fleet.stem,
        "work": demo.fleet.work,
        "weigh": config.weigh,
        "plan_hash": plan.hash,
        "parameters": plan.parameters,
        "rounds": [_round_json(done) for done in rounds],
        "model_sha256": demo.digest,
        "bytes": sum(done.bytes_moved for done in rounds),
        "bytes_full_training": sum(done.full_bytes for done in rounds),
        "joules": sum(done.joules for done in rounds),
        "train_s": sum(done.train_s for done in rounds),
        "slowest_s": sum(done.slowest_s for done in rounds),
        "timings": {
            "torch": torch.__version__,
            "wall_s": [round(done.report.seconds, 6) for done in rounds],
        },
    }


class Ledger:
    """Turns reports into rounds: what devices spent, beside the cost of full training."""

    def __init__(
        self,
        plan: ModelPlan,
        rule: LocalRule,
        emulations: Mapping[str, Emulation],
        samples: Mapping[str, int],
    ) -> None:
        """Takes `emulations` in their initial state; `samples`: rows that each device has."""
        self.emulations = emulations
        self._chronicle = Chronicle(emulations)
        self._full_bytes = 2 * 4 * plan.parameters * len(emulations)
        self._full_s = {
            name: full_round_s(each, plan, rule, STEPS, min(BATCH_SIZE, samples[name]))
            for name, each in emulations.items()
        }

    def close(self, report: RoundReport, moments: Mapping[str, Moment]) -> DemoRound:
        """Finish a round; `moments`: the devices at its end."""
        watts = {name: each.member.board.power.train_w for name, each in self.emulations.items()}
        return DemoRound(
            report,
            self._chronicle.close(report, moments),
            full_bytes=self._full_bytes,
            full_train_s=sum(self._full_s.values()),
            full_joules=sum(
                self._full_s[name] * drawn.value for name, drawn in watts.items() if drawn
            ),
        )


def choose_masks(config: DemoConfig) -> tuple[Rule | FedRaa, DemoConfig]:
    """Return the rule, and the configuration with a suitable mask policy. Raises `ConfigError`."""
    rule = make_rule(config.rule, **config.rule_options)
    return rule, replace(config, mask=config.mask or fitting_masks(rule, local_rule(config).widths))


def demo_task(seed: int, init: Path | None) -> Task:
    """Make the task, with the weights in `init` if given. Raises `TesseraError`."""
    task = make_task(make_model(seed), torch.zeros(2, 1, 8, 8), groups=GROUPS)
    if init is None:
        return task
    weights, buffers = load_weights(init, task.plan, buffers=task.buffers)
    return replace(task, weights=weights, buffers=buffers)


def local_rule(config: DemoConfig) -> LocalRule:
    """Return the devices' local training rule."""
    radius = SAM_RADIUS if config.rule == "subdismo" else 0.0
    return replace(LOCAL_RULE, sam_radius=radius, **config.local)


def make_demo(config: DemoConfig) -> Demo:
    """Load the data, trace the model, and set up the devices."""
    rule, config = choose_masks(config)
    masks = make_masks(str(config.mask), **config.mask_options)
    digits = load_digits(config.seed)
    task = demo_task(config.seed, config.init)
    fleet = load_fleet(config.fleet)
    emulations = emulate_all(fleet, choose_members(fleet, config.devices))
    common: dict[str, Any] = {
        "plan": task.plan,
        "masks": masks,
        "local_rule": local_rule(config),
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "min_devices": config.devices,
        "seed": config.seed,
        "up": config.up,
        "train_deadline_s": fleet.deadline_s,
    }
    run = (
        FragmentsConfig(rule=rule, updates=config.rounds * config.devices, **common)
        if isinstance(rule, FedRaa)
        # A round in which all skip counts.
        else RoundsConfig(rule=rule, rounds=config.rounds, min_participants=0, **common)
    )
    distils = local_rule(config).distillation > 0
    graphs = _compile(task, distils) if config.backend == "onnx" else None
    model = GlobalModel(
        task.plan, task.weights, task.buffers, encoding=config.down, seed=config.seed
    )
    shares = deal(digits.train, tuple(emulations), config.seed)
    policy = Policy()
    # Costs of a step are counted from the graphs, even if torch takes the steps.
    manifest = (graphs or _compile(task)).manifest
    members = [
        Member(
            name,
            policy,
            shares[name],
            emulation,
            partial(observe, emulation, manifest=manifest, policy=policy, data=shares[name])
            if config.weigh
            else None,
        )
        for name, emulation in emulations.items()
    ]
    ledger = Ledger(
        task.plan,
        local_rule(config),
        emulations,
        {name: len(share) for name, share in shares.items()},
    )
    federation = Federation(
        run,
        model,
        lambda: _make_backend(task, graphs),
        members,
        threads=config.threads,
        memory_dir=config.memory_dir,
        memory_type=config.memory_type,
        evaluate=Evaluator(task.traced, digits.test),
    )
    return Demo(config, task, federation, digits.test, graphs, fleet, ledger)


def run_full(config: DemoConfig) -> Demo | None:
    """Repeat the run in this process with every device training the whole model.

    None for asynchronous rules: they end after a number of movements, whoever made them, and a
    device that offers everything still gets one fragment.
    """
    if isinstance(make_rule(config.rule, **config.rule_options), FedRaa):
        return None
    demo = make_demo(replace(config, weigh=False, memory_dir=None))
    for _ in demo.run():
        pass
    return demo


def _compile(task: Task, distillation: bool = False) -> CompiledGraphs:
    # Imported here, so that the torch backend does not need onnx.
    from coordinator.task.graphs import compile_graphs

    return compile_graphs(task, batch_sizes=(BATCH_SIZE,), distillation=distillation)


def _make_backend(task: Task, graphs: CompiledGraphs | None) -> Backend:
    if graphs is None:
        return TorchBackend(task)
    from edge_sdk.train.onnx import OnnxBackend

    return OnnxBackend(task.plan, graphs.manifest, graphs.files)


def _round_json(done: DemoRound) -> dict[str, Any]:
    return {
        "round": done.report.round,
        "accuracy": done.accuracy,
        "levels": [asdict(level) for level in done.report.levels],
        "deploy": done.report.deploy,
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
                "battery_percent": lived.percent,
                "train_s": lived.train_s,
                "joules": lived.joules,
            }
            for device, lived in zip(done.report.devices, done.lived, strict=True)
        ],
    }
