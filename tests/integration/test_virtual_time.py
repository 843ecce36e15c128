"""Devices that take time, in one process: who is fast, who is late, who is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.errors import ConfigError, CoordinatorError
from coordinator.rounds.synchronous import RoundsState
from coordinator.simulate.federation import Federation, Member, MemberTimes, RoundReport
from coordinator.simulate.pace import times_of
from coordinator.task.task import Task, make_task
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation import fleet
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.machine.board import find_board
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Outcome
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import make_federation, random_data

STEPS = 2


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return make_task(model, torch.randn(4, 6), groups=4)


def member(name: str, times: MemberTimes | None = None, **more: Any) -> Member:
    data = random_data(np.random.default_rng(len(name)), 20)
    return Member(name, Policy(), data, times=times, **more)


def paced(name: str, step_s: float, **more: Any) -> Member:
    return member(name, MemberTimes(step_s=step_s), **more)


def federation(
    task: Task,
    members: Sequence[Member],
    *,
    rule: str = "ra-fed",
    length: int = 3,
    threads: int = 1,
    time: Any = "profile",
    made: list[TorchBackend] | None = None,
    **more: Any,
) -> Federation:
    backends = [] if made is None else made

    def make_backend() -> TorchBackend:
        backends.append(TorchBackend(task, threads=1))
        return backends[-1]

    usual = {"local_rule": LocalRule(learning_rate=0.1), "steps": STEPS, "batch_size": 4, "seed": 1}
    config: dict[str, Any] = {"min_devices": len(members), **usual, **more}
    run = {"time": time, "threads": threads}
    return make_federation(task, members, make_backend, rule=rule, length=length, run=run, **config)


def updates(reports: Sequence[RoundReport]) -> Counter[str]:
    """Movements that counted, by device."""
    lines = [line for report in reports for line in report.devices]
    return Counter(line.device for line in lines if line.level is not None)


def rounds_state(run: Federation) -> RoundsState:
    assert isinstance(run.state, RoundsState)
    return run.state


def test_asynchronous_device_that_is_ten_times_slower_makes_a_tenth_of_the_updates(
    task: Task,
) -> None:
    members = [paced("fast", 1.0), paced("also-fast", 1.0), paced("slow", 10.0)]
    run = federation(task, members, rule="fedasync", length=210)
    reports = list(run.run())
    made = updates(reports)
    assert made.total() == 210
    assert made["fast"] == pytest.approx(100, abs=1)
    assert made["also-fast"] == pytest.approx(100, abs=1)
    assert made["slow"] == pytest.approx(10, abs=1)
    assert reports[-1].time_s == pytest.approx(100 * STEPS * 1.0, rel=0.02)


def test_asynchronous_devices_make_equally_many_updates_where_nothing_takes_time(
    task: Task,
) -> None:
    members = [paced("fast", 1.0), paced("slow", 10.0)]
    reports = list(federation(task, members, rule="fedasync", length=40, time="none").run())
    assert updates(reports) == {"fast": 20, "slow": 20}
    assert {report.time_s for report in reports} == {None}


def test_round_takes_what_its_slowest_device_takes(task: Task) -> None:
    size = encoded_size(task.plan, task.plan.all_groups(), Encoding())
    slow = MemberTimes(step_s=3.0, down_bytes_s=size / 5, up_bytes_s=size / 7, latency_s=0.25)
    run = federation(task, [member("slow", slow), paced("fast", 1.0)], length=2)
    first, second = list(run.run())
    # Opening, bid, assignment and movement are each a message; then 5 s down, 7 s up.
    round_s = 4 * 0.25 + 5.0 + STEPS * 3.0 + 7.0
    assert first.time_s == pytest.approx(round_s)
    assert second.time_s == pytest.approx(2 * round_s)
    by_name = {line.device: line for line in first.devices}
    assert by_name["slow"].train_s == pytest.approx(STEPS * 3.0)


def test_submodel_takes_its_share_of_the_time(task: Task) -> None:
    half = Member("half", Policy(level=0.5), member("half").data, times=MemberTimes(step_s=1.0))
    (report,) = federation(task, [half], length=1).run()
    plan = task.plan
    groups = {axis.name: tuple(range(axis.wanted(0.5))) for axis in plan.axes}
    share = plan.submodel_macs(groups) / plan.submodel_macs(plan.all_groups())
    assert 0 < share < 1
    assert report.time_s == pytest.approx(STEPS * share)


def test_deadline_closes_the_round_and_the_late_movement_enters_memory(task: Task) -> None:
    members = [paced("fast", 1.0), paced("slow", 60.0)]
    run = federation(task, members, rule="ram-fed", length=3, train_deadline_s=100.0)
    outcomes = {}
    times = []
    for report in run.run():
        times.append(report.time_s)
        outcomes = {
            (name, round): outcome
            for round, past in rounds_state(run).past.items()
            for name, outcome in past.outcomes.items()
        }
    # The slow one needs 120 s: it is late in the first round, and in the second it still trains
    # what it was to do in the first when it is asked.
    assert times[0] == pytest.approx(100.0)
    assert outcomes["slow", 1] is Outcome.MEMORY
    assert outcomes["fast", 1] is Outcome.COUNTED


def test_quorum_closes_the_round_without_the_slowest(task: Task) -> None:
    members = [paced("one", 1.0), paced("two", 2.0), paced("slow", 30.0)]
    run = federation(task, members, length=1, quorum=0.6)
    (report,) = run.run()
    assert report.time_s == pytest.approx(STEPS * 2.0)
    assert updates([report]) == {"one": 1, "two": 1}


def test_late_movement_is_of_the_model_that_its_round_had(task: Task) -> None:
    """A message under way does not change: the device trains from what it was assigned."""
    crawl = MemberTimes(step_s=0.0, latency_s=40.0)
    members = [paced("fast", 1.0), member("far", crawl)]
    run = federation(task, members, rule="ram-fed", length=4, bid_s=90.0, train_deadline_s=50.0)
    reports = list(run.run())
    assert np.isfinite(run.model.theta).all()
    assert updates(reports)["fast"] >= 3


@pytest.mark.parametrize("rule", ["ram-fed", "fedasync"])
def test_virtual_time_does_not_depend_on_threads(task: Task, rule: str) -> None:
    members = [
        member(f"device-{n}", MemberTimes(step_s=1.0 + n / 7, latency_s=0.1 * n)) for n in range(4)
    ]
    runs = [
        federation(task, members, rule=rule, length=12, threads=threads, min_devices=4)
        for threads in (1, 3)
    ]
    times = [[report.time_s for report in run.run()] for run in runs]
    assert times[0] == times[1]
    assert runs[0].model.digest == runs[1].model.digest


def test_device_that_leaves_and_comes_back_is_counted_when_it_is_there(task: Task) -> None:
    members = [
        paced("always", 1.0),
        paced("sometimes", 1.0, there=((0.0, 3.0), (7.0, 100.0))),
        paced("never", 1.0, there=()),
    ]
    run = federation(task, members, length=5, min_devices=1, away_s=1.0)
    took_part = [sorted(updates([report])) for report in run.run()]
    both = ["always", "sometimes"]
    # Rounds take 2 s; it leaves in the second, is waited for a little, and is back for the last.
    assert took_part[0] == both
    assert took_part[-1] == both
    assert ["always"] in took_part
    assert "never" not in rounds_state(run).devices


@pytest.mark.parametrize("threads", [1, 2])
def test_device_that_comes_late_needs_no_backend_of_its_own(task: Task, threads: int) -> None:
    members = [paced("first", 1.0), paced("late", 1.0, there=((3.0, 100.0),))]
    made: list[TorchBackend] = []
    run = federation(task, members, length=4, min_devices=1, threads=threads, made=made)
    assert updates(list(run.run()))["late"]
    assert len(made) <= threads


def test_movement_that_was_ready_while_its_device_was_gone_comes_when_it_is_back(
    task: Task,
) -> None:
    members = [paced("steady", 1.0), paced("gone", 2.0, there=((0.0, 1.0), (8.0, 1000.0)))]
    run = federation(task, members, rule="ram-fed", length=4, away_s=5.0)
    outcomes: dict[int, Any] = {}
    for _ in run.run():
        past = rounds_state(run).past
        outcomes = {round: each.outcomes.get("gone") for round, each in past.items()}
    assert outcomes[1] is Outcome.MEMORY


def test_emulated_device_takes_the_time_of_its_profile(task: Task) -> None:
    board = fleet.FleetMember(
        name="pi", board=find_board("raspberry_pi_4"), up_mbit_s=8.0, down_mbit_s=80.0
    )
    emulation = Emulation(board)
    data = member("pi").data
    (report,) = federation(task, [Member("pi", Policy(), data, emulation)], length=1).run()
    (line,) = report.devices
    transfers = emulation.transfer_s(line.bytes_down, line.bytes_up)
    assert transfers is not None
    assert line.train_s > 0
    assert report.time_s == pytest.approx(line.train_s + transfers)
    assert times_of(emulation).up_bytes_s == 1e6


def test_device_without_times_is_refused(task: Task) -> None:
    with pytest.raises(ConfigError, match="nobody: time"):
        federation(task, [member("nobody")])


@pytest.mark.parametrize(
    "values",
    [{"step_s": -1.0}, {"latency_s": float("nan")}, {"up_bytes_s": 0.0}, {"down_bytes_s": -1.0}],
)
def test_times_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        MemberTimes(**values)


def test_run_in_which_nothing_can_happen_any_more_ends_with_an_error(task: Task) -> None:
    run = federation(task, [paced("never", 1.0, there=())], length=1, time="none")
    with pytest.raises(CoordinatorError, match="no device has trained"):
        list(run.run())
