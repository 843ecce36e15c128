"""Pretended devices: their time and energy by arithmetic, and what the SDK decides upon them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.costs.calibration import calibrate
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.costs.model import CostModel, known_of
from edge_sdk.decide.costs.work import largest_groups
from edge_sdk.decide.decision import Decision, Policy, decide
from edge_sdk.decide.emulation.emulation import (
    CHARGER_W,
    REFERENCE_MACS_PER_S,
    Emulation,
    emulate,
    read_story,
)
from edge_sdk.decide.emulation.fleet import Fleet, FleetMember, find_fleet
from edge_sdk.decide.observer import Observer
from edge_sdk.machine.board import Board, PowerSpec, Quantity, SpeedSpec, find_board
from edge_sdk.machine.snapshot import Battery
from edge_sdk.protocol.errors import ConfigError, TrainingStopped
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job, Trained
from edge_sdk.train.torch import TorchBackend
from tests.messages import make_opening

STEPS, BATCH = 2, 16
MACS = {1.0: 4864, 0.75: 2880, 0.5: 1408, 0.25: 448}
"""Of a forward pass of the perceptron below: 8·h + h·h + h·4 with h of 64 hidden units."""


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
        return make_task(nn.Sequential(*layers), torch.zeros(2, 8), groups=4)


@pytest.fixture(scope="module")
def data() -> ArrayData:
    random = stream(0, "test", "emulation")
    inputs = random.standard_normal((64, 8), dtype=np.float32)
    return ArrayData((inputs,), random.integers(4, size=64))


def phone(**changes: object) -> FleetMember:
    values: dict[str, object] = {"name": "phone", "board": find_board("pixel_4")}
    return FleetMember(**{**values, "battery_percent": 50.0, **changes})  # type: ignore[arg-type]


def quantity(value: float) -> Quantity:
    return Quantity(value, "a test", "assumed")


def value(number: Quantity | None) -> float:
    assert number is not None
    return number.value


def train(
    backend: Backend,
    task: Task,
    data: ArrayData,
    level: float = 1.0,
    *,
    rule: LocalRule | None = None,
    widths: tuple[float, ...] = (),
    passes: int = 2,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trained:
    groups = largest_groups(task.plan, level)
    job = Job(
        groups=groups,
        weights=task.plan.cut(task.weights, groups),
        buffers=task.plan.cut_buffers(task.buffers, groups),
        rule=rule or LocalRule(learning_rate=0.1),
        mask_stream=stream(0, "masks"),
        widths=tuple(largest_groups(task.plan, each) for each in widths),
        width_stream=stream(0, "widths"),
        passes=passes,
    )
    return backend.train(
        job, data.batches(STEPS, BATCH, stream(0, "batches")), should_stop=should_stop
    )


# -- time and energy -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", MACS)
def test_training_takes_its_work_over_the_speed_that_is_left(
    task: Task, data: ArrayData, level: float
) -> None:
    emulation = Emulation(phone(background_load=0.25), work=1e6)
    train(emulation.emulated(TorchBackend(task)), task, data, level)
    speed = value(find_board("pixel_4").speed.speed_ratio) * (1 - 0.25)
    seconds = 1e6 * STEPS * BATCH * 3 * MACS[level] / (5e9 * speed)
    assert emulation.clock() == pytest.approx(seconds)
    assert emulation.moment.train_s == pytest.approx(seconds)
    joules = 5.72 * seconds
    assert emulation.moment.train_j == pytest.approx(joules)
    assert emulation.percent == pytest.approx(50 - 100 * joules / (10.8 * 3600))


def test_training_on_an_emulated_device_moves_the_same_bits(task: Task, data: ArrayData) -> None:
    backend = TorchBackend(task)
    emulated = Emulation(phone()).emulated(backend)
    assert (emulated.plan, emulated.data) == (backend.plan, backend.data)
    real, pretended = (train(each, task, data, 0.5) for each in (backend, emulated))
    assert real.metrics == pretended.metrics
    for name, array in real.movement.items():
        assert np.array_equal(array, pretended.movement[name])


@pytest.mark.parametrize("passes", [1, 2])
def test_training_of_several_widths_takes_the_time_of_those_it_trains(
    task: Task, data: ArrayData, passes: int
) -> None:
    emulation = Emulation(phone(), work=1e6)
    rule = LocalRule(learning_rate=0.1, widths="sandwich")
    backend = emulation.emulated(TorchBackend(task))
    train(backend, task, data, 0.75, rule=rule, widths=(0.5, 0.25), passes=passes)
    random, dealt = stream(0, "widths"), list[float]()
    cards = [0.75, 0.5, 0.25][passes - 1 :]
    while len(dealt) < STEPS:
        dealt += [cards[number] for number in random.permutation(len(cards))]
    macs = sum(MACS[level] for level in dealt[:STEPS]) + (passes - 1) * STEPS * MACS[0.75]
    speed = value(find_board("pixel_4").speed.speed_ratio)
    assert emulation.moment.train_s == pytest.approx(1e6 * BATCH * 3 * macs / (5e9 * speed))


def test_training_with_sam_takes_twice_as_long(task: Task, data: ArrayData) -> None:
    plain, sam = Emulation(phone()), Emulation(phone())
    train(plain.emulated(TorchBackend(task)), task, data)
    rule = LocalRule(learning_rate=0.1, sam_radius=0.05)
    train(sam.emulated(TorchBackend(task)), task, data, rule=rule)
    assert sam.clock() == pytest.approx(2 * plain.clock())


def test_training_that_is_stopped_takes_the_steps_that_were_done(
    task: Task, data: ArrayData
) -> None:
    emulation = Emulation(phone(), work=1e6)
    with pytest.raises(TrainingStopped):
        train(
            emulation.emulated(TorchBackend(task)),
            task,
            data,
            should_stop=lambda: emulation.clock() > 0,
        )
    assert emulation.clock() == pytest.approx(emulation.step_s(3 * BATCH * MACS[1.0]))


def test_waiting_drains_what_idling_and_others_draw() -> None:
    emulation = Emulation(phone(background_load=0.1), interval_s=3600)
    for round in (1, 1, 2, 2, 5):
        emulation.round_opened(round)
    watts = 0.0424 + 0.1 * (5.72 - 0.0424)
    assert emulation.clock() == 2 * 3600  # three rounds were heard of, whatever their numbers
    assert emulation.percent == pytest.approx(50 - 100 * 2 * watts / 10.8)


def test_waiting_counts_from_the_beginning_of_a_round() -> None:
    emulation = Emulation(phone(), interval_s=600)
    emulation.round_opened(1)
    emulation.trained(100 * 5e9 * 2.668)
    assert emulation.clock() == pytest.approx(100)
    emulation.round_opened(2)
    assert emulation.clock() == pytest.approx(600)
    emulation.trained(700 * 5e9 * 2.668)  # too long: the next round begins when it is done
    emulation.round_opened(3)
    assert emulation.clock() == pytest.approx(1300)
    emulation.round_opened(4)
    assert emulation.clock() == pytest.approx(1900)


def test_charger_feeds_while_it_is_plugged_in() -> None:
    hours = (12 * 60 + 30, 13 * 60)
    emulation = Emulation(phone(charging_hours=hours), interval_s=7200, starts=12 * 60)
    assert emulation.snapshot().battery.charging is False
    emulation.round_opened(1)
    emulation.round_opened(2)
    joules = CHARGER_W.value * 1800 - 0.0424 * 7200
    assert emulation.percent == pytest.approx(50 + 100 * joules / (10.8 * 3600))


def test_hours_of_charger_and_wifi_are_those_of_the_device(task: Task) -> None:
    member = phone(charging_hours=(1380, 60), network="mobile", wifi_hours=(0, 120))
    emulation = Emulation(member, interval_s=3600, starts=22 * 60)
    seen = []
    for round in range(1, 7):
        emulation.round_opened(round)
        snapshot, local = emulation.snapshot(), time.localtime(emulation.wall())
        seen.append((local.tm_hour, snapshot.battery.charging, snapshot.network.metered))
    assert seen == [
        (22, False, True),
        (23, True, True),
        (0, True, False),
        (1, False, False),
        (2, False, True),
        (3, False, True),
    ]


def test_transfers_take_as_long_as_the_members_link(task: Task) -> None:
    emulation = Emulation(phone(network="mobile", up_mbit_s=8, down_mbit_s=40))
    assert emulation.transfer_s(5e6, 1e6) == pytest.approx(1 + 1)
    known = known_of(emulation.board, None)
    assert (known.down_bytes_per_s, known.up_bytes_per_s) == (5e6, 1e6)
    unknown = replace(find_board("pixel_4"), network=find_board("pixel_4").network.__class__())
    assert Emulation(phone(board=unknown)).transfer_s(1, 1) is None


def test_constants_say_what_they_are_computed_from() -> None:
    assert REFERENCE_MACS_PER_S.value == pytest.approx(0.32 * 11.8e9 / 0.76, rel=0.01)
    assert REFERENCE_MACS_PER_S.provenance == CHARGER_W.provenance == "assumed"


def board(speed: float, idle_w: float = 0.1, train_w: float = 4.0) -> Board:
    return replace(
        find_board("pixel_4"),
        speed=SpeedSpec(speed_ratio=quantity(speed)),
        power=PowerSpec(idle_w=quantity(idle_w), train_w=quantity(train_w)),
    )


@given(
    st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
    st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    st.floats(1, 1e12),
)
def test_slower_or_busier_device_is_never_faster(
    speeds: tuple[float, float], loads: tuple[float, float], macs: float
) -> None:
    slow = Emulation(phone(board=board(min(speeds)), background_load=max(loads)))
    fast = Emulation(phone(board=board(max(speeds)), background_load=min(loads)))
    assert slow.step_s(macs) >= fast.step_s(macs)
    for each in (slow, fast):
        each.trained(macs)
    assert slow.clock() >= fast.clock()
    assert (slow.percent or 0) <= (fast.percent or 0)


@given(
    st.floats(0, 100),
    st.sampled_from([{}, {"charging": True}, {"charging_hours": (700, 740)}]),
    st.floats(0, 0.99),
    st.lists(st.one_of(st.none(), st.floats(0, 1e15)), max_size=12),
)
def test_battery_stays_within_its_bounds_and_the_story_repeats(
    percent: float, charger: dict[str, object], load: float, days: list[float | None]
) -> None:
    member = phone(battery_percent=percent, background_load=load, **charger)

    def lived() -> list[object]:
        emulation, seen = Emulation(member), list[object]()
        for number, macs in enumerate(days, start=1):
            before = emulation.clock()
            if macs is None:
                emulation.round_opened(number)
            else:
                emulation.trained(macs)
            assert emulation.clock() >= before
            assert emulation.percent is not None
            assert 0 <= emulation.percent <= 100
            _, wrong = emulation.snapshot().credible()
            assert not wrong
            seen.append((emulation.moment, emulation.snapshot()))
        return seen

    assert lived() == lived()


# -- what the probe shows ------------------------------------------------------------------------


def test_probe_shows_the_board(task: Task) -> None:
    seen = Emulation(phone(background_load=0.25)).probe.snapshot()
    assert (seen.cpu.cores, seen.cpu.busy, seen.cpu.max_mhz) == (8, 0.25, 2840)
    assert [each.cores for each in seen.cpu.classes or ()] == [1, 3, 4]
    assert seen.memory.total_bytes == 6144 * 2**20
    assert seen.memory.available_bytes == 0.75 * 1536 * 2**20
    assert seen.battery == Battery(present=True, percent=50, charging=False, capacity_wh=10.8)
    assert seen.network.metered is False


def test_board_on_mains_is_never_drained_and_what_is_not_known_stays_so() -> None:
    nano = find_board("jetson_nano")
    nano = replace(nano, memory=replace(nano.memory, app_mb=None), power=PowerSpec())
    emulation = Emulation(FleetMember(name="roof", board=nano))
    emulation.trained(1e12)
    emulation.round_opened(1)
    seen = emulation.snapshot()
    assert seen.battery == Battery(present=False)
    assert seen.memory.available_bytes is None
    assert emulation.percent is emulation.moment.train_j is None
    assert emulation.moment.train_s > 0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"speed": SpeedSpec()}, "speed.speed_ratio"),
        ({"power": PowerSpec(idle_w=quantity(1))}, "power.train_w"),
        ({"power": PowerSpec(train_w=quantity(1))}, "power.idle_w"),
    ],
)
def test_profile_that_lacks_a_number_is_named(change: dict[str, object], key: str) -> None:
    lacking = replace(find_board("pixel_4"), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"pixel_4 cannot be emulated: its profile has no {key}"):
        Emulation(phone(board=lacking))


# -- the story -----------------------------------------------------------------------------------


def test_story_is_told_and_taken_up_again(tmp_path: Path, task: Task, data: ArrayData) -> None:
    story = tmp_path / "story.jsonl"
    whole, first = (Emulation(phone(), work=1e6, story=path) for path in (None, story))
    for each in (whole, first):
        each.round_opened(1)
        train(each.emulated(TorchBackend(task)), task, data)
        each.round_opened(2)
    assert [moment.round for moment in read_story(story)] == [1, 1, 2]
    second = Emulation(phone(), work=1e6, story=story)
    for each in (whole, second):
        each.round_opened(2)
        each.round_opened(3)
    assert second.moment == whole.moment == read_story(story)[-1]


def test_story_that_is_half_written_ends_before(tmp_path: Path) -> None:
    story = tmp_path / "story.jsonl"
    Emulation(phone(), story=story).round_opened(1)
    whole = read_story(story)
    with story.open("a") as file:
        file.write('{"round": 2, "no')
    assert read_story(story) == whole


@pytest.mark.parametrize("text", ["{}\n", "no\n", "3\n", '{"round": 1}\n'])
def test_story_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    story = tmp_path / "story.jsonl"
    story.write_text(text)
    with pytest.raises(ConfigError, match=r"story.jsonl is not the story of an emulated device"):
        Emulation(phone(), story=story)


def test_story_is_plain_json(tmp_path: Path) -> None:
    story = tmp_path / "story.jsonl"
    emulation = Emulation(phone(), story=story)
    emulation.round_opened(1)
    assert json.loads(story.read_text())["battery_j"] == pytest.approx(0.5 * 10.8 * 3600)


# -- with what decides ---------------------------------------------------------------------------


class CalibratedCosts:
    """What rounds cost, from a calibration in the device's own time and its profile's watts."""

    def __init__(self, emulation: Emulation, backend: Backend, levels: tuple[float, ...]) -> None:
        self._emulation = emulation
        calibration = calibrate(
            backend, None, levels=levels, batch=BATCH, clock=emulation.clock, limit_s=60
        )
        self._known = known_of(emulation.board, None)
        self._model = CostModel(backend.plan, None, calibration, known=self._known)

    def predict(self, levels: tuple[float, ...], opened: RoundOpen) -> tuple[Cost, ...]:
        return self._model.predict(levels, opened)

    is_off = False

    def renew(self, should_stop: Callable[[], bool]) -> None:
        return

    def forward(self, survey: Survey, number: int, samples: int) -> Cost:
        level, groups = survey.levels[number], survey.groups[number]
        return self._model.forward(level, groups, samples, survey.batch_size)

    def metered(
        self, opened: RoundOpen | None, level: float, job: Job | None = None
    ) -> _VirtualMeter:
        return _VirtualMeter(self._emulation.clock, self._known.net_w)


class _VirtualMeter:
    def __init__(self, clock: Callable[[], float], net_w: float | None) -> None:
        self._clock, self._net_w = clock, net_w
        self._start = 0.0
        self.seconds = 0.0

    def __enter__(self) -> _VirtualMeter:
        self._start = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = self._clock() - self._start

    @property
    def joules(self) -> float | None:
        return None if self._net_w is None else self._net_w * self.seconds


def opening(task: Task, round: int, rounds: int, deadline_s: float) -> RoundOpen:
    size = make_opening(plan_hash=task.plan.hash, steps=STEPS, batch_size=BATCH, bid_s=60)
    left = rounds - round + 1
    return replace(size, round=round, train_deadline_s=deadline_s, rounds_left=left)


def live(
    fleet: Fleet, member: FleetMember, task: Task, data: ArrayData, rounds: int
) -> tuple[list[Decision], Emulation]:
    """What a device decides in the first rounds of 30; it trains as it decided."""
    emulation = emulate(fleet, member.name)
    backend = emulation.emulated(TorchBackend(task))
    policy = Policy()
    costs = CalibratedCosts(emulation, backend, policy.offered_levels())
    observer = Observer(policy, emulation.probe, costs, clock=emulation.clock, wall=emulation.wall)
    decisions = []
    for number in range(1, rounds + 1):
        opened = opening(task, number, 30, fleet.deadline_s)
        emulation.round_opened(number)
        sight = observer.look(opened)
        decision = decide(policy, sight, observer.history, device=member.name, round=number, seed=0)
        observer.decided(opened, decision)
        decisions.append(decision)
        if decision.level is not None:
            with observer.training(opened, decision.level):
                train(backend, task, data, decision.level)
    return decisions, emulation


def test_costs_calibrated_in_virtual_time_are_what_training_takes(
    task: Task, data: ArrayData
) -> None:
    emulation = Emulation(phone(background_load=0.2), work=1e4)
    backend = emulation.emulated(TorchBackend(task))
    levels = tuple(MACS)
    costs = CalibratedCosts(emulation, backend, levels)
    predicted = costs.predict(levels, opening(task, 1, 1, 600))
    for cost in predicted:
        before = emulation.clock()
        train(backend, task, data, cost.level)
        took = (
            emulation.clock() - before + (emulation.transfer_s(cost.bytes_down, cost.bytes_up) or 0)
        )
        assert cost.seconds == pytest.approx(took, rel=0.02)
        assert cost.joules == pytest.approx(
            (5.72 - 0.0424) * (emulation.clock() - before), rel=0.02
        )


def test_mixed_fleet_decides_for_reasons_a_person_can_follow(task: Task, data: ArrayData) -> None:
    fleet = find_fleet("mixed")
    # As much work as the demo's model is: 10 steps of 32 samples, 1.3 million MACs for the whole
    # model, and 0.6 of that where widths take turns.
    work = 0.6 * 320 * 1_330_432 / (STEPS * BATCH * MACS[1.0])
    fleet = replace(fleet, work=fleet.work * work)
    told = {member.name: live(fleet, member, task, data, 12) for member in fleet}
    decisions = {name: decided for name, (decided, _) in told.items()}
    levels = {name: [each.level for each in decided] for name, decided in decisions.items()}
    first = {name: decided[0].reason for name, decided in decisions.items()}

    # Too little energy for more; the level rises when it turns out how much is left per round.
    assert decisions["redmi-7a"][0].code == "energy"
    assert len({level for level in levels["redmi-7a"] if level is not None}) > 1

    assert first["redmi-note-8"] == "skip: battery 24 % < 30 % and not charging"
    assert levels["redmi-note-8"][:6] == [None] * 6
    assert levels["redmi-note-8"][6:] == [1.0] * 6  # on its charger since 20:00

    assert levels["pixel-4"][0] is not None
    below = next(each for each in decisions["pixel-4"] if each.level is None)
    assert below.code == "battery"

    assert first["pixel-8"] == "skip: the network is metered"
    assert levels["pixel-8"][3] is not None  # it is at home since 18:30

    assert find_board("galaxy_s23").battery is not None
    assert levels["galaxy-s23"] == [1.0] * 12
    assert told["galaxy-s23"][1].member.battery_percent == 18

    for name in ("raspberry-pi-4", "jetson-nano"):
        assert {each.code for each in decisions[name]} == {"deadline"}
        assert all(level is not None and level < 1 for level in levels[name])
    assert "the round has 300 s" in first["raspberry-pi-4"]
    assert {each.reason for each in decisions["jetson-agx-orin"]} == {"full model: all of it fits"}


def test_device_lives_the_same_story_again(task: Task, data: ArrayData) -> None:
    fleet = replace(find_fleet("mixed"), work=2e6)
    one, two = (live(fleet, fleet.find("pixel-4"), task, data, 6) for _ in range(2))
    assert one[0] == two[0]
    assert one[1].moment == two[1].moment
