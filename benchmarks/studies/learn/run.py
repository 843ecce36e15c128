"""One rule and one seed: accuracy after every round, and the amounts spent so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from benchmarks.studies.learn.setting import Setting
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.pairings import fitting_masks
from coordinator.aggregate.rules import RULES
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.service.courses.parts import Evaluator
from coordinator.simulate.demo.emulated import observe
from coordinator.simulate.demo.run import BATCH_SIZE, SAM_RADIUS, STEPS, DemoRound, Ledger
from coordinator.simulate.federation import Federation, Member
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.train.onnx import OnnxBackend

LOCAL_RULE = LocalRule(learning_rate=0.05, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
    """State of a run after a round, all phones together. Seconds and joules are modelled.

    `levels` and `skips` are of this round alone; the fields after them count from the start.
    """

    round: int
    """0: before the first."""
    accuracy: float
    """Share of test samples that the whole model classifies correctly."""
    levels: dict[str, int]
    """Number of phones that trained at each level, in percent."""
    skips: int
    """Number of phones that trained nothing."""
    joules: float
    """Joules drawn while training and calibrating, idle included."""
    bytes: int
    """Bytes of the model's and of movements' blocks, down and up."""
    train_s: float
    """Seconds of training and calibrating."""
    waited_s: float
    """Seconds of the slowest phone of each round, transfers included."""
    accuracies: dict[str, float] = field(default_factory=dict)
    """Accuracy of every level, by its percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """A finished run."""

    rule: str
    mask: str
    seed: int
    points: tuple[RunPoint, ...]
    """Points from round 0 on."""
    model_sha256: str
    """The same for the same seed, data and versions."""

    @property
    def last(self) -> RunPoint:
        """Its last point."""
        return self.points[-1]

    @property
    def best(self) -> float:
        """Best accuracy reached."""
        return max(point.accuracy for point in self.points)


def run_rule(
    setting: Setting, rule: str, seed: int, rounds: int, tick: Callable[[], None]
) -> StudyRun:
    """Train; `tick` is called after every round. Equal arguments give equal runs."""
    task = setting.task(seed)
    phones = setting.phones()
    shares = setting.shares(tuple(phones), seed)
    local = replace(
        LOCAL_RULE,
        momentum=0.0 if rule == "scaffold" else LOCAL_RULE.momentum,
        sam_radius=SAM_RADIUS if rule == "subdismo" else 0.0,
    )
    server = RULES[rule]()
    mask = fitting_masks(server)
    config = RoundsConfig(
        plan=task.plan,
        rule=server,
        rounds=rounds,
        masks=make_masks(mask),
        local_rule=local,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        min_devices=len(phones),
        seed=seed,
        train_deadline_s=setting.fleet.deadline_s,
        min_participants=0,  # a round in which all skip counts
    )
    # Before devices are made: calibration is part of the first round.
    ledger = Ledger(task.plan, local, phones, {name: len(each) for name, each in shares.items()})
    graphs = setting.graphs
    policy = Policy()
    members = [
        Member(
            name,
            policy,
            shares[name],
            phone,
            partial(observe, phone, manifest=graphs.manifest, policy=policy, data=shares[name]),
        )
        for name, phone in phones.items()
    ]
    model = GlobalModel(task.plan, task.weights, task.buffers, seed=seed)
    evaluate = Evaluator(task.traced, setting.data.test)
    federation = Federation(
        config,
        model,
        lambda: OnnxBackend(task.plan, graphs.manifest, graphs.files),
        members,
        evaluate=evaluate,
    )
    start, done = evaluate(model, config.unscored()).accuracies, []
    for report in federation.run():
        moments = {name: phone.moment for name, phone in phones.items()}
        done.append(ledger.close(report, moments))
        tick()
    return StudyRun(
        rule=rule,
        mask=mask,
        seed=seed,
        points=tuple(_points(start, done)),
        model_sha256=model.digest,
    )


def _points(start: dict[float, float], rounds: list[DemoRound]) -> list[RunPoint]:
    nothing = RunPoint(
        round=0,
        accuracy=start[1.0],
        levels={},
        skips=0,
        joules=0.0,
        bytes=0,
        train_s=0.0,
        waited_s=0.0,
        accuracies=_by_percent(start),
    )
    return list(accumulate(rounds, _after, initial=nothing))


def _after(before: RunPoint, done: DemoRound) -> RunPoint:
    levels = [device.level for device in done.report.devices]
    trained = Counter(f"{level:.0%}".rstrip("%") for level in levels if level is not None)
    return RunPoint(
        round=done.report.round,
        accuracy=done.accuracy,
        levels=dict(sorted(trained.items(), key=lambda item: -int(item[0]))),
        skips=levels.count(None),
        joules=before.joules + done.joules,
        bytes=before.bytes + done.bytes_moved,
        train_s=before.train_s + done.train_s,
        waited_s=before.waited_s + done.slowest_s,
        accuracies=_by_percent({each.level: each.accuracy or 0.0 for each in done.report.levels}),
    )


def _by_percent(accuracies: dict[float, float]) -> dict[str, float]:
    return {f"{level:.0%}".rstrip("%"): share for level, share in accuracies.items()}
