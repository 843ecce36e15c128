"""The demo's run: rounds with accuracy, and their savings."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.pairings import fitting_masks, fitting_rescale, fitting_widths
from coordinator.aggregate.published import find_recipe
from coordinator.aggregate.robust import Robust
from coordinator.aggregate.rules import AsyncRule, Rule, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.service.courses.parts import Evaluator
from coordinator.simulate.demo.config import DemoConfig
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
from coordinator.simulate.presets import preset_levels, study_policies
from coordinator.task.saved_model import SavedModel, load_weights, save_model
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import Emulation, Moment
from edge_sdk.decide.emulation.fleet import Fleet, load_fleet
from edge_sdk.program.settings import read_table
from edge_sdk.protocol.messages.local_rule import CLIP_NORM, LocalRule
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.backend import Backend

if TYPE_CHECKING:
    from coordinator.task.task import Task

GROUPS = 4
STEPS = 10
BATCH_SIZE = 32
LOCAL_RULE = LocalRule(learning_rate=0.1, momentum=0.5)
SAM_RADIUS = 0.05
"""Radius for `subdismo`, whose devices train with SAM."""


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


@dataclass(slots=True)
class Demo:
    """The run in this process alone, over the in-memory link: iterate over `run()`."""

    config: DemoConfig
    initial: SavedModel
    """The model before the first round, with its graphs."""
    federation: Federation
    test: ArrayData
    fleet: Fleet
    ledger: Ledger
    rounds: list[DemoRound] = field(default_factory=list)

    @property
    def plan(self) -> ModelPlan:
        """Plan of the trained model."""
        return self.initial.plan

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
        saved = replace(
            self.initial,
            weights=model.weights,
            buffers=model.buffers,
            levels=self.federation.levels,
        )
        save_model(saved.with_statistics(), path)


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


def choose_masks(config: DemoConfig) -> tuple[Rule | AsyncRule, DemoConfig]:
    """Return the rule, and the settings with suitable masks and widths. Raises `ConfigError`."""
    if config.recipe is not None and find_recipe(config.recipe).decoupled:
        raise ConfigError(
            f"recipe {config.recipe} decouples the norms of a model, and the demo's has none: use "
            "it in a run with a model of your own"
        )
    rule = make_rule(config.rule, **config.rule_options)
    if isinstance(rule, AsyncRule) and choose_robust(config).active:
        raise ConfigError(
            f"robust = {config.robust!r} compares the movements of a round, and {config.rule} has "
            "none: use a synchronous rule"
        )
    config = replace(config, widths=config.widths or fitting_widths(rule, config.mask))
    return rule, replace(config, mask=config.mask or fitting_masks(rule, local_rule(config).widths))


def choose_robust(config: DemoConfig) -> Robust:
    """Return the defence against bad devices. Raises `ConfigError`."""
    options = {"name": config.robust, **config.robust_options}
    return read_table(Robust, options, label="robust: ")


def choose_policies(config: DemoConfig, devices: Iterable[str]) -> dict[str, Policy]:
    """Return every device's limits: those of the preset, or what is usual. Raises `ConfigError`."""
    names = list(devices)
    if config.preset is None:
        return dict.fromkeys(names, Policy())
    levels = preset_levels(config.preset, len(names))
    return dict(zip(names, study_policies(Policy(), levels), strict=True))


def demo_task(seed: int, init: Path | None) -> Task:
    """Make the task, with the weights in `init` if given. Raises `TesseraError`."""
    import torch

    from coordinator.task.task import make_task

    task = make_task(make_model(seed), torch.zeros(2, 1, 8, 8), groups=GROUPS)
    if init is None:
        return task
    weights, buffers = load_weights(init, task.plan, buffers=task.buffers)
    return replace(task, weights=weights, buffers=buffers)


def local_rule(config: DemoConfig) -> LocalRule:
    """Return the devices' local training rule of a configuration from `choose_masks`."""
    widths = config.widths or "own"
    chosen = {
        "momentum": 0.0 if config.rule == "scaffold" else LOCAL_RULE.momentum,
        "sam_radius": SAM_RADIUS if config.rule == "subdismo" else 0.0,
        "rescale": fitting_rescale(widths),
        "widths": widths,
        "classes": config.classes,
        "clip_norm": None if config.recipe else CLIP_NORM,
    }
    return replace(LOCAL_RULE, **{**chosen, **config.local})


def make_demo(config: DemoConfig, initial: SavedModel | None = None) -> Demo:
    """Load the data, compile the model, and set up the devices.

    `initial`: the model of an earlier run with this seed and `init`, which is not compiled again.
    """
    from edge_sdk.train.inference import Predictor

    rule, config = choose_masks(config)
    masks = make_masks(str(config.mask), **config.mask_options)
    digits = load_digits(config.seed)
    if initial is None or config.backend == "torch":
        task = demo_task(config.seed, config.init)
    if initial is None:
        initial = _compile(task, local_rule(config))
    plan, manifest, files = initial.plan, initial.manifest, initial.files
    fleet = load_fleet(config.fleet)
    emulations = emulate_all(fleet, choose_members(fleet, config.devices))
    common: dict[str, Any] = {
        "plan": plan,
        "masks": masks,
        "local_rule": local_rule(config),
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "min_devices": config.devices,
        "seed": config.seed,
        "up": config.up,
        "train_deadline_s": fleet.deadline_s,
        "target_accuracy": config.target_accuracy,
        "patience": config.patience,
    }
    run: RoundsConfig | FragmentsConfig
    if isinstance(rule, AsyncRule):
        run = FragmentsConfig(rule=rule, updates=config.rounds * config.devices, **common)
    else:
        run = RoundsConfig(
            rule=rule,
            rounds=config.rounds,
            min_participants=0,  # a round in which all skip counts
            grow=config.grow,
            max_staleness=config.max_staleness,
            robust=choose_robust(config),
            **common,
        )
    model = GlobalModel(
        plan, initial.weights, initial.buffers, encoding=config.down, seed=config.seed
    )
    shares = deal(digits.train, tuple(emulations), config.seed)
    policies = choose_policies(config, emulations)
    members = [
        Member(
            name,
            policies[name],
            shares[name],
            emulation,
            # Costs of a step are counted from the graphs, even if torch takes the steps.
            partial(
                observe,
                emulation,
                manifest=manifest,
                policy=policies[name],
                data=shares[name],
            )
            if config.weigh
            else None,
        )
        for name, emulation in emulations.items()
    ]
    samples = {name: len(share) for name, share in shares.items()}
    ledger = Ledger(plan, local_rule(config), emulations, samples)
    federation = Federation(
        run,
        model,
        lambda: _onnx(initial) if config.backend == "onnx" else _torch(task),
        members,
        threads=config.threads,
        memory_dir=config.memory,
        memory_type=config.memory_type,
        evaluate=Evaluator(Predictor(plan, manifest, files), digits.test),
    )
    return Demo(config, initial, federation, digits.test, fleet, ledger)


def run_full(config: DemoConfig, initial: SavedModel | None = None) -> Demo | None:
    """Repeat the run in this process with every device training the whole model, and only that.

    None for asynchronous rules: they end after a number of movements, whoever made them, and a
    device that offers everything still gets one fragment.
    """
    if isinstance(make_rule(config.rule, **config.rule_options), AsyncRule):
        return None
    alone = replace(config, weigh=False, memory=None, widths="own", grow=0.0, local={}, preset=None)
    if config.mask == "gre-raa":  # which gives nobody the whole model
        alone = replace(alone, mask="random", mask_options={})
    demo = make_demo(alone, initial)
    for _ in demo.run():
        pass
    return demo


def _compile(task: Task, rule: LocalRule) -> SavedModel:
    from coordinator.task.graphs.compilation import compile_graphs

    graphs = compile_graphs(
        task,
        batch_sizes=(BATCH_SIZE,),
        distillation=rule.distillation > 0,
        class_masks=rule.classes != "all",
    )
    return SavedModel(task.plan, task.weights, task.buffers, graphs.manifest, graphs.files)


def _onnx(model: SavedModel) -> Backend:
    from edge_sdk.train.onnx import OnnxBackend

    return OnnxBackend(model.plan, model.manifest, model.files)


def _torch(task: Task) -> Backend:
    from edge_sdk.train.torch import TorchBackend

    return TorchBackend(task)
