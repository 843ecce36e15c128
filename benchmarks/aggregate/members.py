"""Whether a round costs more when more members are registered that do not take part in it.

All members join. Either all but a few leave at once, and those few take part in every round; or all
stay, and as many are drawn and invited in every round. Nothing is trained, so that what is left is
what a round costs the coordinator: once as the state machine alone, once as a federation in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import process_time

import numpy as np

from benchmarks.aggregate.rounds import (
    device_name,
    movement_of,
    perceptron_plan,
    rounds_config,
)
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules.ra_fed import RaFed
from coordinator.rounds import synchronous
from coordinator.rounds.events import Joined, Kept, Left, Send
from coordinator.rounds.synchronous import Commit, Committed, Effect, RoundsConfig, RoundsState
from coordinator.simulate.federation import Federation, Member
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.round import Assignment, Bid, Movement
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Job, Metrics, Trained

METHOD = (
    "Of all members, which join before the second round, a few stay and take part in every round "
    "of ra-fed; or all stay, and as many are drawn and invited in every round. Training is left "
    "out. CPU time of this process, rounds of all fleets in turn; ratios are medians of ratios "
    "within a turn."
)
TARGET = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersConfig:
    """`fleets` ascending, in members; `turns` are counted after `warm` that are not.

    Raises `FigureError` for a fleet that is smaller than a round.
    """

    fleets: tuple[int, ...] = (100, 1_000, 10_000)
    participants: int = 10
    warm: int = 5
    turns: int = 60

    def __post_init__(self) -> None:
        if min(self.fleets) < self.participants:
            raise FigureError(
                f"{self.participants} members take part, and a fleet has {min(self.fleets)}"
            )

    @property
    def ticks(self) -> int:
        """Turns of all parts."""
        return 4 * (self.warm + self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersRow:
    """One fleet; the ratios are to the smallest. Medians."""

    members: int
    there: bool
    """True if all members are there in every round; False if only those that take part."""
    machine_ms: float
    machine_ratio: float
    process_ms: float
    process_ratio: float


def measure_members(config: MembersConfig, begin: Begin = silent) -> list[MembersRow]:
    """Time rounds: of members that left, then of members that stay.

    `begin`'s results are called `config.ticks` times.
    """
    return [row for there in (False, True) for row in _measure_fleets(config, there, begin)]


def _measure_fleets(config: MembersConfig, there: bool, begin: Begin) -> list[MembersRow]:
    which = ", all there" if there else ""
    machine = _in_turns(config, partial(_machine_rounds, there), begin(f"state machine{which}"))
    process = _in_turns(config, partial(_process_rounds, there), begin(f"one process{which}"))
    return [
        MembersRow(
            members=members,
            there=there,
            machine_ms=1e3 * median(turn[n] for turn in machine),
            machine_ratio=median(turn[n] / turn[0] for turn in machine),
            process_ms=1e3 * median(turn[n] for turn in process),
            process_ratio=median(turn[n] / turn[0] for turn in process),
        )
        for n, members in enumerate(config.fleets)
    ]


def members_figures(rows: Sequence[MembersRow]) -> list[Figure]:
    """The figures of `measure_members`."""
    figures = []
    for row in rows:
        stem = f"aggregate.members{'_there' * row.there}.{row.members}"
        for what, value, ratio in (
            ("machine", row.machine_ms, row.machine_ratio),
            ("process", row.process_ms, row.process_ratio),
        ):
            figures.append(Figure(f"{stem}.{what}", value, "ms"))
            if row.members != rows[0].members:
                name = f"{stem}.{what}_over_{rows[0].members}"
                figures.append(Figure(name, ratio, "×", target=TARGET))
    return figures


def _in_turns(
    config: MembersConfig,
    rounds: Callable[[MembersConfig, int], Iterator[float]],
    tick: Callable[[], None],
) -> list[tuple[float, ...]]:
    """Seconds of rounds, those of all fleets beside each other."""
    fleets = [rounds(config, members) for members in config.fleets]
    turns = []
    for _ in range(config.warm + config.turns):
        turns.append(tuple(next(fleet) for fleet in fleets))
        tick()
    return turns[config.warm :]


def _run_config(config: MembersConfig, *, there: bool) -> RoundsConfig:
    plan, rounds = perceptron_plan(16, (16,), 4), config.warm + config.turns + 1
    drawn = config.participants if there else None
    return rounds_config(plan, RaFed(), rounds, min_devices=config.participants, participants=drawn)


# -- the state machine ---------------------------------------------------------------------------


def _machine_rounds(there: bool, config: MembersConfig, members: int) -> Iterator[float]:
    """Let rounds pass through the state machine; yields the seconds of each."""
    run = _run_config(config, there=there)
    state = synchronous.start(run)
    for number in range(members):
        name = device_name(number)
        state, _ = synchronous.handle(run, state, Joined(name), 0.0)
        if number >= config.participants and not there:
            state, _ = synchronous.handle(run, state, Left(name), 0.0)
    plan, zeros = run.plan, np.zeros(run.plan.parameters, dtype=np.float32)
    draws = stream(0, "members")
    sample = movement_of(plan, plan.all_groups(), zeros, draws, device="", round=1)
    while True:
        round, names = state.round, sorted(state.selected)
        bids = [
            Bid(device=name, round=round, level=1.0, reason="all of it", samples=1)
            for name in names
        ]
        movements = [replace(sample, device=name, round=round) for name in names]
        start = process_time()
        state = _one_round(run, state, bids, movements)
        yield process_time() - start


def _one_round(
    run: RoundsConfig, state: RoundsState, bids: Iterable[Bid], movements: Iterable[Movement]
) -> RoundsState:
    told: list[Effect] = []
    for bid in bids:
        state, told = synchronous.handle(run, state, bid, 0.0)
    if not all(isinstance(each, Send) and isinstance(each.message, Assignment) for each in told):
        raise FigureError(f"bids were answered with {told}")
    for movement in movements:
        state, _ = synchronous.handle(run, state, movement, 0.0)
        kept = Kept(movement.device, movement.round)
        state, told = synchronous.handle(run, state, kept, 0.0)
    if not isinstance(told[-1], Commit):
        raise FigureError(f"the last movement was answered with {told}")
    state, _ = synchronous.handle(run, state, Committed(state.round), 0.0)
    return state


# -- a federation --------------------------------------------------------------------------------


def _process_rounds(there: bool, config: MembersConfig, members: int) -> Iterator[float]:
    """Let rounds pass in one process; yields the seconds of each."""
    run = _run_config(config, there=there)
    data = ArrayData((np.zeros((1, 16), dtype=np.float32),), np.zeros(1, dtype=np.int64))
    fleet = [
        Member(
            device_name(number),
            Policy(),
            data,
            there=None if there or number < config.participants else ((0.0, 0.0),),
        )
        for number in range(members)
    ]
    plan = run.plan
    model = GlobalModel(plan, plan.unflatten(np.zeros(plan.parameters, dtype=np.float32)), {})
    reports = Federation(run, model, lambda: _NoTraining(plan), fleet).run()
    next(reports)  # everybody joins in it
    while True:
        start = process_time()
        report = next(reports)
        yield process_time() - start
        trained = sum(device.level is not None for device in report.devices)
        if trained != config.participants:
            raise FigureError(f"{trained} members trained, not {config.participants}")


class _NoTraining:
    """A backend whose movements are of nothing."""

    data: DataSpec | None = None

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],  # noqa: ARG002  as `Backend` has it
        *,
        should_stop: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> Trained:
        movement = {name: np.zeros_like(array) for name, array in job.weights.items()}
        return Trained(movement, {}, Metrics(1, 1, 0.0, 0.0, 0.0))
