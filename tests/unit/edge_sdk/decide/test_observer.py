"""What a device sees of itself, and what it does about a gate that closes while it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.budget import History
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import Decision, Policy
from edge_sdk.decide.gates import Limits
from edge_sdk.decide.observer import Observer, load_history, save_history
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.stores.movements import MemoryMovements
from edge_sdk.machine.snapshot import Battery, MemoryState, Snapshot
from edge_sdk.protocol.errors import GraphError, TrainingStopped
from edge_sdk.protocol.messages.round import Assignment, Bid, Movement, Replay, RoundOpen
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.train.backend import Job, Trained
from tests.messages import make_opening
from tests.unit.edge_sdk.decide.prices import share_of
from tests.unit.edge_sdk.device.test_app import PLAN, Doubling, Source

PHONE = Snapshot(
    battery=Battery(present=True, percent=80, charging=False, capacity_wh=10),
    memory=MemoryState(available_bytes=1e9),
)


def opening(round: int = 1, **more: Any) -> RoundOpen:
    usual = {"plan_hash": PLAN.hash, "steps": 4, "batch_size": 2, "train_deadline_s": 60}
    return make_opening(round, **{**usual, **more})


@dataclass
class Shown:
    """A probe that shows what it is told to; counts who looks."""

    now: Snapshot = PHONE
    looks: int = 0

    def snapshot(self) -> Snapshot:
        self.looks += 1
        return self.now

    def drain(self, percent: float) -> None:
        self.now = replace(self.now, battery=replace(self.now.battery, percent=percent))


@dataclass
class Meter:
    joules: float | None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        return None


@dataclass
class Priced:
    """Every level costs its share of these."""

    joules: float | None = 100.0
    asked: list[tuple[float, ...]] = field(default_factory=list)

    def predict(self, levels: tuple[float, ...], opened: RoundOpen) -> tuple[Cost, ...]:
        self.asked.append(levels)
        return tuple(share_of(self._whole, level) for level in levels)

    @property
    def _whole(self) -> Cost:
        return Cost(
            level=1, seconds=10, joules=self.joules, peak_bytes=1e8, bytes_down=1, bytes_up=1
        )

    is_off: bool = False

    def renew(self, should_stop: Callable[[], bool]) -> None:
        self.is_off = self.is_off and should_stop()

    def forward(self, survey: Survey, number: int, samples: int) -> Cost:
        return share_of(self._whole, survey.levels[number])

    def metered(self, opened: RoundOpen | None, level: float, job: Job | None = None) -> Meter:
        return Meter(None if self.joules is None else self.joules * level)


def test_look_has_all_that_a_decision_needs() -> None:
    costs = Priced()
    observer = Observer(Policy(level=0.5), Shown(), costs, wall=lambda: 1000.0)
    sight = observer.look(opening(rounds_left=9, whole=True, warmup=True))
    assert sight.snapshot == PHONE
    assert costs.asked == [(1.0, 0.5, 0.25)]  # the full model too: a round may ask for it
    assert [cost.level for cost in sight.costs] == [1.0, 0.5, 0.25]
    assert (sight.deadline_s, sight.rounds_left) == (60, 9)
    assert (sight.whole, sight.warmup) == (True, True)
    assert not observer.look(opening(whole=True)).warmup
    assert sight.now_s == 1000.0
    assert 0 <= sight.minute < 24 * 60


def test_energy_of_training_is_booked_on_battery_alone() -> None:
    probe = Shown()
    observer = Observer(Policy(), probe, Priced())
    with observer.training(opening(), 0.5):
        pass
    assert observer.history.spent_j == 50
    probe.now = Snapshot(battery=Battery(present=True, percent=50, charging=True))
    with observer.training(opening(), 0.5):
        pass
    assert observer.history.spent_j == 50


def test_energy_of_training_that_fails_is_booked() -> None:
    observer = Observer(Policy(), Shown(), Priced())
    with pytest.raises(OSError, match="disk"), observer.training(opening(), 1.0):
        raise OSError("disk")
    assert observer.history.spent_j == 100


def test_gates_are_looked_at_once_a_second() -> None:
    probe, now = Shown(), [0.0]
    observer = Observer(Policy(), probe, clock=lambda: now[0])
    with observer.training(opening(), 1.0):
        before = probe.looks
        for tick in range(41):  # four seconds, ten questions each
            now[0] = tick / 10
            assert observer.closed_gate() is None
        assert probe.looks - before == 5  # at once, and after each
        probe.drain(20)
        now[0] += 0.5
        assert observer.closed_gate() is None
        now[0] += 0.5
        gate = observer.closed_gate()
        assert gate is not None
        assert gate.reason == "battery 20 % < 30 % and not charging"
        probe.drain(90)
        now[0] += 5
        assert observer.closed_gate() == gate  # what was stopped stays stopped


def test_history_is_written_when_it_changes_and_once_with_training(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    observer = Observer(Policy(), Shown(), Priced(), history=path)
    heard = History(turn=0.25, opened_s=5.0)
    observer.decided(opening(), Decision(1.0, "full", history=heard))
    assert not path.exists()  # it is going to train
    with observer.training(opening(), 1.0):
        pass
    assert load_history(path) == replace(heard, spent_j=100)
    written = path.stat().st_mtime_ns
    later = replace(observer.history, opened_s=9.0, interval_s=4.0)
    observer.decided(opening(2), Decision(None, "skip", history=later))
    assert path.stat().st_mtime_ns == written  # times alone are no reason
    observer.decided(opening(3), Decision(None, "skip", history=replace(later, skipped=1)))
    assert load_history(path) == replace(later, skipped=1)


def test_costs_are_measured_again_when_there_is_time() -> None:
    costs = Priced(is_off=True)
    observer = Observer(Policy(), Shown(), costs)
    seen = [observer.is_off]
    for busy in (True, False):
        observer.renew(lambda busy=busy: busy)  # type: ignore[misc]
        seen.append(observer.is_off)
    assert seen == [True, True, False]
    assert not Observer(Policy()).is_off


def test_costs_with_a_file_are_kept_and_others_need_not_be() -> None:
    class Learning(Priced):
        is_kept = False

        def keep(self, *, always: bool = False) -> None:
            self.is_kept = self.is_kept or always

    observer = Observer(Policy(), Shown(), Learning())
    seen = []
    for always in (False, True):
        observer.keep(always=always)
        seen.append(observer.is_kept)
    assert seen == [False, True]
    for costs in (None, Priced()):
        Observer(Policy(), Shown(), costs).keep(always=True)
        assert Observer(Policy(), Shown(), costs).is_kept


def test_history_outlives_the_program(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    observer = Observer(Policy(), Shown(), Priced(), history=path)
    remembered = History(turn=0.25, skipped=3, opened_s=5.0)
    observer.decided(opening(), Decision(1.0, "full", history=remembered))
    with observer.training(opening(), 1.0):
        pass
    again = Observer(Policy(), history=path).history
    assert again == observer.history == History(turn=0.25, skipped=3, opened_s=5.0, spent_j=100)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'{"turn": "x"}',
        b'{"turns": 1}',
        b'{"skipped": null}',
        b"\xff\xfe",
        b"[" * 9999,
    ],
)
def test_history_that_is_damaged_is_told_and_begun_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_history(path) == History()
    assert "cannot be used" in caplog.text
    save_history(path, History(skipped=2))
    assert load_history(path) == History(skipped=2)


class Slow(Doubling):
    """A backend that looks around between its steps."""

    def __init__(self, between: Callable[[int], None]) -> None:
        self.between = between
        self.steps = 0

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        for _ in batches:
            if should_stop():
                raise TrainingStopped(self.steps)
            self.steps += 1
            self.between(self.steps)
        return super().train(job, ())


App = DeviceApp[Movement | Replay]


def make_app(
    policy: Policy, observer: Observer, backend: Doubling | None = None, **options: Any
) -> App:
    return DeviceApp(
        "pi",
        backend=backend or Doubling(),
        data=ArrayData((np.zeros((4, 3), dtype=np.float32),), np.zeros(4)),
        policy=policy,
        source=Source(),
        seed=1,
        movements=MemoryMovements(),
        observer=observer,
        **options,
    )


def test_gate_that_closes_stops_training_within_a_step_and_is_a_skip() -> None:
    probe, now = Shown(), [0.0]

    def between(step: int) -> None:
        now[0] += 2
        if step == 2:
            probe.drain(12)

    backend = Slow(between)
    policy = Policy(level=0.5, limits=Limits(battery_floor=20))
    app = make_app(policy, Observer(policy, probe, clock=lambda: now[0]), backend)
    app.receive(opening())
    sent = app.receive(Assignment(device="pi", round=1, groups={"a": (1,)}))
    assert backend.steps == 2
    why = "skip: battery 12 % < 20 % and not charging; training was stopped after 2 steps"
    assert sent == [Bid(device="pi", round=1, level=None, reason=why, code="battery")]


def test_round_that_is_heard_of_again_is_answered_alike() -> None:
    sent: list[Bid | SurveyFinding | Movement | Replay] = []
    policy = Policy(participation=0.5)
    observer = Observer(policy, history=None)

    def hear(round: int) -> list[Bid | SurveyFinding | Movement | Replay]:
        return make_app(policy, observer).receive(opening(round))

    for round in (1, 1, 1, 2, 2, 3):
        sent += hear(round)
    levels = [bid.level for bid in sent if isinstance(bid, Bid)]
    assert levels[0] == levels[1] == levels[2] != levels[3] == levels[4] != levels[5]


def test_round_that_is_passed_over_again_is_noted_once() -> None:
    clock = [1000.0]
    observer = Observer(Policy(), wall=lambda: clock[0])
    for now, round in ((1000.0, 1), (1001.0, 1), (1100.0, 2), (1101.0, 2)):
        clock[0] = now
        observer.passed_over(opening(round))
    assert (observer.history.skipped, observer.history.interval_s) == (2, 100.0)


@pytest.mark.parametrize("tells", [True, False])
def test_energy_of_a_training_is_told_unless_the_owner_keeps_it(tells: bool) -> None:
    app = make_app(Policy(), Observer(Policy(), Shown(), Priced()), tells_energy=tells)
    app.receive(opening())
    (made,) = app.receive(Assignment(device="pi", round=1, groups={"a": (0, 1)}))
    assert isinstance(made, Movement)
    assert made.energy_j == (100 if tells else None)


class Unpriced(Priced):
    """Costs that cannot be had."""

    def predict(self, levels: tuple[float, ...], opened: RoundOpen) -> tuple[Cost, ...]:
        raise GraphError("no gradient graph fits")


def test_decision_that_fails_is_a_skip_and_not_silence() -> None:
    app = make_app(Policy(), Observer(Policy(), Shown(), Unpriced()))
    (bid,) = app.receive(opening())
    assert isinstance(bid, Bid)
    assert (bid.level, bid.code, bid.reason) == (None, "failed", "skip: no gradient graph fits")


def test_device_bids_what_it_can_afford() -> None:
    probe = Shown(replace(PHONE, memory=MemoryState(available_bytes=100e6)))
    policy = Policy()
    app = make_app(policy, Observer(policy, probe, Priced(joules=1.0)))
    (bid,) = app.receive(opening())
    assert isinstance(bid, Bid)
    assert (bid.level, bid.code) == (0.75, "memory")
    assert bid.reason == "level 75 %: full needs 100 MB, 80 MB free"
