"""An operator steers a served run: pauses, stops, more rounds, settings, quarantine, the audit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.rules import RULES
from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.masks import make_masks
from coordinator.operate.control.steering import change_report
from coordinator.operate.upkeep.inspection import Inspection
from coordinator.operate.upkeep.repair import find_steps
from coordinator.rounds.synchronous import RoundPhase
from coordinator.run.errors import RunError
from coordinator.run.folder import Run
from coordinator.run.steering import stopped
from coordinator.run.steering.audit import AUDIT, read_audit
from coordinator.run.steering.orders import STEERING, read_steered
from edge_sdk.protocol.messages.round import Bid, Receipt, RoundClosed, RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from tests.unit.coordinator.service.service_world import (
    TOPICS,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)
from tests.unit.coordinator.service.test_resuming import surveyed

__all__ = ["surveyed"]  # a fixture

ANNA = "anna"


def in_round(worlds: Worlds, **changes: Any) -> World:
    """Two devices that train in round 1 and send when they are told to."""
    world = worlds.make(rounds_config(**{"rounds": 6, **changes}))
    for name, value in (("a", 0.01), ("b", -0.02)):
        world.add(name, value=value, sends=False)
    world.settle()
    return world


def send(world: World, round: int, *names: str) -> None:
    for device in world.devices:
        if not names or device.name in names:
            device.send(round)


def phase(world: World) -> RoundPhase:
    return world.state.phase


def idle(world: World) -> bool:
    return world.service.course.idle


def stops(world: World) -> bool:
    return world.service.helm.stops


def rates(world: World) -> dict[int, float]:
    """Learning rates of the rounds, as devices heard them."""
    return {
        number: opened.local_rule.learning_rate
        for number, opened in sorted(world.devices[0].opened.items())
    }


def audited(world: World) -> list[tuple[str, str]]:
    return [(line["what"], line["by"]) for line in read_audit(world.folder)]


# -- pause and resume ----------------------------------------------------------------------------


def test_paused_run_finishes_the_open_round_and_opens_no_other(worlds: Worlds) -> None:
    world = in_round(worlds)
    answer = world.service.helm.pause(ANNA)
    assert answer["changed"]
    assert "movements of a, b" in answer["waits_for"]
    assert phase(world) is RoundPhase.TRAINING
    send(world, 1)
    assert [line["round"] for line in world.history if "round" in line] == [1]
    assert phase(world) is RoundPhase.WAITING
    wait = world.service.waits_for
    assert wait is not None
    assert wait.words.startswith("paused by anna since ")
    world.wait(1e6)  # no deadline runs, and nobody is late
    world.add("c")
    world.settle()
    assert phase(world) is RoundPhase.WAITING
    assert not world.state.fleet.standings
    assert world.service.overview.status()["state"] == "paused"
    world.service.helm.resume(ANNA)
    world.settle()
    assert world.state.round == 2
    assert audited(world) == [("pause", ANNA), ("resume", ANNA)]
    assert world.service.overview.status()["paused"] is None


@pytest.mark.parametrize("crash", [True, False])
def test_pause_outlives_the_process_with_its_author_and_time(worlds: Worlds, crash: bool) -> None:
    world = in_round(worlds)
    world.service.helm.pause(ANNA)
    send(world, 1)
    before = world.service.helm.paused
    if crash:
        world.crash()
    else:
        world.stop()
    assert read_steered(world.folder).paused == before
    world.start()
    world.settle()
    assert world.service.helm.paused == before
    assert phase(world) is RoundPhase.WAITING
    (line,) = change_report(world.folder, read_steered(world.folder))
    assert line.startswith("paused     by anna")
    assert "tessera-coordinator resume" in line


def test_orders_that_change_nothing_leave_no_trace(worlds: Worlds) -> None:
    world = in_round(worlds)
    helm = world.service.helm
    assert not helm.resume(ANNA)["changed"]
    assert helm.pause(ANNA)["changed"]
    again = helm.pause("bert")
    assert not again["changed"]
    assert again["paused"]["by"] == ANNA
    assert not helm.change("learning_rate", 0.1, ANNA)["changed"]
    assert audited(world) == [("pause", ANNA)]


@pytest.mark.parametrize("error", [OSError(5, "no disk"), RunError("damaged")])
def test_order_that_cannot_be_carried_out_ends_the_process_and_the_next_carries_it_out(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Else the round would be open for this process alone: no device heard of it."""
    world = worlds.make(rounds_config())
    world.service.helm.pause(ANNA)
    world.add("a", sends=False), world.add("b", sends=False)
    world.settle()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(world.service._parts.store, "open_round", fail)
    with pytest.raises(type(error)):
        world.service.helm.resume(ANNA)
    with pytest.raises(RunError):
        world.service.pump()
    world.restart()
    assert world.service.helm.paused is None
    assert phase(world) is RoundPhase.TRAINING
    assert set(world.devices[0].opened) == {1}


# -- stop ----------------------------------------------------------------------------------------


def served(world: World, meanwhile: Callable[[], object]) -> threading.Event:
    """Serve until an order stops it; `meanwhile` is done in the loop's thread, before each step."""
    stop = threading.Event()
    step = world.service._step

    def work(wait_s: float) -> None:
        meanwhile()
        world.broker.run()
        for device in world.devices:
            device.pump()
        step(min(wait_s, 0.01))

    world.service._step = work  # type: ignore[method-assign]
    world.service.serve(stop)
    return stop


def test_stop_after_the_round_ends_the_loop_once_it_is_committed(worlds: Worlds) -> None:
    world = in_round(worlds)
    world.service.helm.stop("round", ANNA)
    assert not stops(world)
    assert world.service.overview.status()["state"] == "stopping"
    served(world, lambda: [each.offer(each.movements[1]) for each in world.devices])
    assert [line["round"] for line in world.history if "round" in line] == [1]
    world.stop()
    world.start()  # the stop is done with
    assert world.service.helm.stopping is None
    world.settle()
    assert world.state.round == 2


def test_stop_now_keeps_the_open_round_for_the_next_start(worlds: Worlds) -> None:
    world = in_round(worlds)
    send(world, 1, "a")
    world.service.helm.stop("now", ANNA)
    assert stops(world)
    served(world, lambda: pytest.fail("it goes on"))
    world.stop()
    world.start()
    world.settle()
    assert (world.state.round, world.state.phase) == (1, RoundPhase.TRAINING)
    send(world, 1, "b")
    assert next(line for line in world.history if "round" in line)["movements"]["counted"] == 2


def test_stop_that_a_crash_came_before_is_carried_out_by_the_next_process(worlds: Worlds) -> None:
    world = in_round(worlds)
    world.service.helm.stop("round", ANNA)
    world.restart()
    assert world.service.helm.stopping is not None
    assert not stops(world)  # the round is open again
    send(world, 1)
    assert stops(world)


def test_stop_can_be_hastened_and_called_off(worlds: Worlds) -> None:
    world = in_round(worlds)
    helm = world.service.helm
    assert helm.stop("round", ANNA)["changed"]
    assert not helm.stop("round", ANNA)["changed"]
    assert helm.resume(ANNA)["stopping"] is None
    send(world, 1)
    assert world.state.round == 2
    helm.stop("round", ANNA)
    assert helm.stop("now", ANNA)["stopping"] == "now"
    assert not helm.stop("round", ANNA)["changed"]
    with pytest.raises(ConfigError, match='must be "round" or "now"'):
        helm.stop("later", ANNA)


def test_request_that_waits_when_the_process_ends_is_refused(worlds: Worlds) -> None:
    world = in_round(worlds)
    requests = world.service._requests
    world.stop()
    with pytest.raises(CoordinatorError, match="is ending: start it again"):
        requests.ask(lambda service: service.helm.pause(ANNA))


# -- settings and rounds -------------------------------------------------------------------------


def test_setting_holds_from_the_next_round_on(worlds: Worlds) -> None:
    world = in_round(worlds)
    answer = world.service.helm.change("learning_rate", "0.025", ANNA)
    assert answer == {
        "changed": True,
        "name": "learning_rate",
        "value": 0.025,
        "was": 0.1,
        "file": 0.1,
    }
    world.service.helm.change("steps", 3, ANNA)
    send(world, 1)
    send(world, 2)
    assert rates(world) == {1: 0.1, 2: 0.025, 3: 0.025}
    assert [world.devices[0].opened[n].steps for n in (1, 2)] == [1, 3]
    (first, *_) = (line["steered"] for line in world.history if "steered" in line)
    assert (first["what"], first["by"], first["round"]) == ("set", ANNA, 1)
    assert first["details"] == {"name": "learning_rate", "value": 0.025, "was": 0.1}
    words = [row["event"] for row in world.service.overview.rounds() if row["event"]]
    assert words == ["learning_rate 0.1 → 0.025 (anna)", "steps 1 → 3 (anna)"]
    assert world.service.overview.status()["settings"]["learning_rate"] == 0.025
    assert all(outcome == "counted" for _, outcome in world.devices[0].verdicts)


def test_setting_while_no_round_is_open_holds_for_the_next(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.service.helm.change("learning_rate", 0.5, ANNA)
    world.service.helm.change("min_devices", 1, ANNA)
    world.add("a")
    world.settle()
    assert rates(world)[1] == 0.5


@pytest.mark.parametrize("machine", [rounds_config, fragments_config])
def test_waiting_run_begins_once_a_change_makes_its_devices_enough(
    worlds: Worlds, machine: Callable[..., Any]
) -> None:
    world = worlds.make(machine(min_devices=3))
    for name in ("a", "b"):
        world.add(name, sends=False)
    world.settle()
    assert not world.devices[0].opened
    world.service.helm.change("min_devices", 2, ANNA)
    world.settle()
    assert world.devices[0].opened


def test_paused_run_does_not_begin_by_a_change(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=2))
    world.service.helm.pause(ANNA)
    world.add("a", sends=False)
    world.settle()
    world.service.helm.change("min_devices", 1, ANNA)
    world.settle()
    assert not world.devices[0].opened
    world.service.helm.resume(ANNA)
    world.settle()
    assert world.devices[0].opened


@pytest.mark.parametrize("sent", [(), ("a",)])
def test_crash_after_a_change_resumes_the_round_by_its_own_terms(
    worlds: Worlds, sent: tuple[str, ...]
) -> None:
    world = in_round(worlds)
    send(world, 1, *sent) if sent else None
    world.service.helm.change("learning_rate", 0.025, ANNA)
    world.restart()
    assert (world.state.round, world.state.phase) == (1, RoundPhase.TRAINING)
    send(world, 1, *({"a", "b"} - set(sent)))
    world.restart()
    send(world, 2)
    assert rates(world) == {1: 0.1, 2: 0.025, 3: 0.025}
    assert world.devices[1].verdicts == [(1, "counted"), (2, "counted")]


def test_newest_word_counts_between_a_change_and_an_edit_of_the_file(worlds: Worlds) -> None:
    world = in_round(worlds)
    world.service.helm.change("learning_rate", 0.025, ANNA)
    world.service.helm.change("bid_s", 20, ANNA)
    send(world, 1)
    send(world, 2)
    world.stop()
    # Another setting was edited: the change stays.
    world.machine = replace(rounds_config(rounds=6), train_deadline_s=77.0)
    world.start()
    world.settle()
    assert rates(world)[3] == 0.025
    (line, bids) = change_report(world.folder, read_steered(world.folder))
    assert "learning_rate = 0.025 by anna" in line
    assert f"tessera-coordinator set {world.folder} learning_rate 0.1" in line
    assert "run.toml says 10.0" in bids
    send(world, 3)
    world.service.helm.stop("round", ANNA)
    send(world, 4)
    world.stop()
    # The same setting was edited: the file counts, and the audit says so.
    rule = replace(world.machine.local_rule, learning_rate=0.4)
    world.machine = replace(world.machine, local_rule=rule)
    world.start()
    world.settle()
    assert rates(world)[5] == 0.4
    assert audited(world)[-1] == ("set", "run.toml")
    assert [*read_steered(world.folder).changes] == ["bid_s"]


def test_going_back_to_the_file_is_no_change_any_more(worlds: Worlds) -> None:
    world = in_round(worlds)
    world.service.helm.change("quorum", 0.5, ANNA)
    answer = world.service.helm.change("quorum", "none", ANNA)
    assert answer["value"] is None
    assert change_report(world.folder, read_steered(world.folder)) == []
    send(world, 1)
    assert world.service.course.config == world.service.course.wanted


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("learning_rat", 1, "did you mean 'learning_rate'"),
        ("learning_rate", 0, "above 0"),
        ("learning_rate", "fast", "must be a number"),
        ("momentum", 1.0, "below 1"),
        ("steps", 1.5, "a whole number"),
        ("steps", None, "must have a value, at least 1"),
        ("quorum", 2, "above 0 and at most 1"),
        ("batch_size", 8, "graphs are made for it"),
        ("rest_s", 8, "a setting of asynchronous runs"),
        ("rounds", 8, r"tessera-coordinator rounds RUN \+20"),
        ("target_accuracy", 0.9, "needs the accuracy, which is not measured"),
        ("over_selection", 2, "over_selection needs participants"),
        ("min_devices", 10**9, "max_devices is"),
        ("participants", True, "a whole number"),
    ],
)
def test_setting_that_does_not_fit_is_refused_and_nothing_changes(
    worlds: Worlds, name: str, value: object, words: str
) -> None:
    world = in_round(worlds)
    before = read_steered(world.folder)
    with pytest.raises(ConfigError, match=words):
        world.service.helm.change(name, value, ANNA)
    assert read_steered(world.folder) == before
    assert not audited(world)


def test_run_is_made_longer_while_its_last_round_is_open(worlds: Worlds) -> None:
    world = in_round(worlds, rounds=1)
    assert world.service.helm.lengthen(2, ANNA)["value"] == 3
    send(world, 1)
    send(world, 2)
    assert world.state.round == 3
    world.restart()
    send(world, 3)
    assert world.service.finished
    assert world.service.overview.status()["rounds"] == 3


def test_added_rounds_do_not_stretch_the_growth_of_the_model(worlds: Worlds) -> None:
    world = in_round(
        worlds, rounds=4, masks=make_masks("nested"), levels=(1.0, 0.5), grow=0.5, min_devices=2
    )
    world.service.helm.lengthen(5000, ANNA)
    send(world, 1)
    world.restart()
    send(world, 2)
    send(world, 3)
    opened = [each for each in world.devices[0].heard if isinstance(each, RoundOpen)]
    largest = {each.round: each.largest for each in opened}
    assert largest == {1: 0.5, 2: 0.5, 3: 1.0, 4: 1.0}


def test_finished_run_goes_on_after_the_next_start(worlds: Worlds) -> None:
    world = in_round(worlds, rounds=1)
    send(world, 1)
    assert world.service.finished
    with pytest.raises(ConfigError, match="the run has ended"):
        world.service.helm.pause(ANNA)
    assert "start serve again" in world.service.helm.lengthen(1, ANNA)["note"]
    assert world.service.finished
    world.stop()
    world.start()
    world.settle()
    assert (world.state.round, world.state.phase) == (2, RoundPhase.TRAINING)


@pytest.mark.parametrize("more", [0, -3, True, 1.5, "20"])
def test_rounds_are_only_added(worlds: Worlds, more: Any) -> None:
    with pytest.raises(ConfigError, match="whole number above 0"):
        in_round(worlds).service.helm.lengthen(more, ANNA)


# -- memory and the learning rate ----------------------------------------------------------------


class Naive:
    """ram-fed for whole models whose movements are one number everywhere, in plain Python."""

    def __init__(self, damping: float | None) -> None:
        self.damping = damping
        self.memory: dict[str, tuple[float, float, int]] = {}
        self.moved = 0.0

    def close(self, round: int, rate: float, fresh: dict[str, float]) -> None:
        fading = 1.0 if self.damping is None else self.damping

        def used(name: str) -> float:
            movement, made, at = self.memory[name]
            return fading ** (round - at) * movement * rate / made

        held = [used(name) for name in self.memory]
        mean = sum(held) / len(held) if held else 0.0
        known = [name for name in fresh if name in self.memory]
        own = 1.0
        if self.damping is None:
            length = sum(used(name) ** 2 for name in known)
            along = sum(fresh[name] * used(name) for name in known)
            own = min(1.0, max(0.0, along / length)) if length else 0.0
        average = sum(fresh.values()) / len(fresh)
        corrected = [
            movement - (used(name) if name in self.memory else mean)
            for name, movement in fresh.items()
        ]
        new = mean + sum(corrected) / len(corrected)
        self.moved += (1 - own) * average + own * new
        self.memory |= {name: (movement, rate, round) for name, movement in fresh.items()}


@pytest.mark.parametrize("damping", [0.8, None])
def test_memory_is_used_at_todays_rate(worlds: Worlds, damping: float | None) -> None:
    rule = RamFed(damping="adaptive" if damping is None else damping)
    config = rounds_config(
        rule=rule,
        masks=make_masks("nested"),
        rounds=6,
        min_devices=3,
        rms_limit=None,
        cohort_limit=None,
    )
    world = worlds.make(config)
    attends = {"a": {1, 2, 4, 6}, "b": {1, 3, 4, 5}, "c": {2, 3, 5}}
    values = {"a": 0.03, "b": -0.01, "c": 0.02}
    for name, there in attends.items():
        world.add(
            name,
            value=values[name],
            sends=False,
            level=lambda number, there=there: 1.0 if number in there else None,
        )
    world.settle()
    theta = world.service.model.theta.copy()
    naive = Naive(damping)
    planned = {1: 0.1, 2: 0.1, 3: 0.02, 4: 0.02, 5: 0.3, 6: 0.3}
    for round, rate in planned.items():
        if round in (2, 4):
            world.service.helm.change("learning_rate", planned[round + 1], ANNA)
        fresh = {}
        for device in world.devices:
            assert device.opened[round].local_rule.learning_rate == rate
            if round in attends[device.name]:
                # Its size differs from round to round, as with gradients that change.
                device.value = values[device.name] * rate / 0.1 * (1 + 0.1 * round)
                made = device.make_movement(round, world.state.assigned[device.name])
                device.movements[round] = made
                fresh[device.name] = float(np.float32(device.value))
        for name in fresh:
            next(each for each in world.devices if each.name == name).send(round)
        naive.close(round, rate, fresh)
    assert world.service.finished
    moved = world.service.model.theta - theta
    np.testing.assert_allclose(moved, naive.moved, rtol=2e-5)


@pytest.mark.parametrize("rule", ["ram-fed", "ccfl-1"])
def test_movement_of_a_round_with_another_rate_is_judged_by_that_rate(
    worlds: Worlds, rule: str
) -> None:
    world = worlds.make(
        rounds_config(rule=RULES[rule](), masks=make_masks("nested"), rounds=4, min_devices=2)
    )
    late = world.add(
        "late",
        sends=rule == "ccfl-1",
        keeps_copy=rule == "ccfl-1",
        level=lambda number: 1.0 if number == 1 else None,
    )
    other = world.add("other", sends=False, value=0.02)
    world.settle()
    world.service.helm.change("learning_rate", 0.025, ANNA)
    other.send(1)
    if rule == "ram-fed":
        world.wait(101)
        late.send(1)
        assert late.receipts == [(1, "memory")]
        world.restart()
    assert world.state.round == 2
    other.send(2)
    assert "rejected" not in [outcome for _, outcome in late.verdicts]
    assert world.history[-1]["movements"]["rejected"] == 0
    if rule == "ccfl-1":
        assert late.copy is not None
        assert late.copy.learning_rate == 0.1
        assert "counted" in [each.outcome.value for each in late.all(Receipt) if each.round == 2]


# -- quarantine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
def test_quarantined_device_is_out_of_the_open_round_and_of_later_ones(
    worlds: Worlds, crash: bool
) -> None:
    world = in_round(worlds, min_devices=2)
    third = world.add("c", sends=False)
    world.settle()
    assert third.name not in world.state.assigned  # it came too late for this round
    send(world, 1, "a", "b")
    send(world, 2, "a")
    for name, reason in (("a", "wrong labels"), ("b", "")):
        found = world.service.helm.quarantine(name, reason, ANNA)
        assert found["since"] == 2
    if crash:
        world.restart()
    a, b = world.devices[:2]
    b.send(2)
    third.send(2)
    assert "wrong labels (anna)" in a.all(Receipt)[-1].reason
    assert a.verdicts[1] == (2, "rejected")  # what was kept before
    assert b.verdicts[1] == (2, "rejected")  # what came afterwards
    closed = [line for line in world.history if "movements" in line][-1]
    assert closed["round"] == 2
    assert closed["movements"] == {**closed["movements"], "counted": 1}
    assert closed["quarantined"] == ["a", "b"]
    assert [*world.state.selected] == ["c"]
    assert [each["device"] for each in world.service.helm.quarantined()] == ["a", "b"]
    assert world.service.helm.allow("a", ANNA)["since"] is None  # the row as it is from now on
    if crash:
        world.restart()
    assert [each["device"] for each in world.service.helm.quarantined()] == ["b"]
    third.send(3)
    assert sorted(world.state.selected) == ["a", "c"]


def test_bids_for_a_closed_round_are_answered_after_a_restart_in_a_pause(worlds: Worlds) -> None:
    """Also those of a quarantined device: its movement counted."""
    world = in_round(worlds)
    world.service.helm.pause(ANNA)
    send(world, 1)
    world.service.helm.quarantine("a", "noisy", ANNA)
    world.restart()
    assert phase(world) is RoundPhase.WAITING
    run = world.run.about.run
    for device in world.devices:
        device.heard.clear()
        device.tell(Bid(device=device.name, round=1, level=1.0, reason="again", run=run))
    world.settle()
    for device in world.devices:
        assert device.heard == [RoundClosed(round=1, run=run)]


def test_quarantine_refuses_what_it_does_not_know(worlds: Worlds) -> None:
    world = in_round(worlds)
    helm = world.service.helm
    with pytest.raises(ConfigError, match="no device 'aa'; did you mean 'a'"):
        helm.quarantine("aa", "", ANNA)
    with pytest.raises(ConfigError, match="'a' is not quarantined; quarantined devices: none"):
        helm.allow("a", ANNA)
    helm.quarantine("a", "x", ANNA)
    with pytest.raises(ConfigError, match="'a' is quarantined already"):
        helm.quarantine("a", "y", ANNA)
    with pytest.raises(ConfigError, match="at most 200 characters"):
        helm.quarantine("b", "x" * 201, ANNA)


def test_rollback_keeps_an_operators_quarantine(worlds: Worlds) -> None:
    world = in_round(worlds, min_devices=1)
    send(world, 1)
    world.service.helm.quarantine("a", "", ANNA)
    send(world, 2, "b")
    send(world, 3, "b")
    world.stop()
    with Run(world.folder) as run:
        run.rollback(1)
    world.start()
    assert [each["device"] for each in world.service.helm.quarantined()] == ["a"]


# -- asynchronous runs ---------------------------------------------------------------------------


def asynchronous(worlds: Worlds) -> World:
    world = worlds.make(fragments_config(updates=20, train_deadline_s=1000.0))
    for name in "ab":
        world.add(name, sends=False)
    world.settle()
    return world


def test_asynchronous_run_pauses_and_devices_finish_their_work(worlds: Worlds) -> None:
    world = asynchronous(worlds)
    a, b = world.devices
    world.service.helm.pause(ANNA)
    a.send(max(a.movements))
    assert len(a.opened) == 1  # it is not asked again
    assert not idle(world)
    b.send(max(b.movements))
    assert idle(world)
    assert world.service.waits_for is not None
    assert world.service.waits_for.kind == "paused"
    world.wait(1e5)
    world.restart()
    assert len(a.opened) == 1
    world.service.helm.resume(ANNA)
    world.settle()
    assert len(a.opened) == len(b.opened) == 2
    assert a.verdicts == [(1, "counted")]


def test_asynchronous_run_judges_a_movement_by_the_rate_it_was_asked_for(worlds: Worlds) -> None:
    world = asynchronous(worlds)
    a, b = world.devices
    world.service.helm.change("learning_rate", 0.025, ANNA)
    world.service.helm.change("rest_s", 5, ANNA)
    a.send(max(a.movements))
    assert [a.learning_rate(round) for round in sorted(a.opened)] == [0.1, 0.025]
    a.send(max(a.movements))
    b.send(max(b.movements))
    verdicts = [outcome for each in (a, b) for _, outcome in each.verdicts]
    world.wait(10)  # the checkpoint has them
    verdicts = [outcome for each in (a, b) for _, outcome in each.verdicts]
    assert verdicts == ["counted"] * 3
    assert world.service.helm.lengthen(5, ANNA)["name"] == "updates"
    with pytest.raises(ConfigError, match="a setting of synchronous runs"):
        world.service.helm.change("quorum", 0.5, ANNA)
    world.restart()
    assert world.service.course.config.local_rule.learning_rate == 0.025


def test_asynchronous_run_stops_when_nobody_works(worlds: Worlds) -> None:
    world = asynchronous(worlds)
    a, b = world.devices
    world.service.helm.stop("round", ANNA)
    a.send(max(a.movements))
    assert not stops(world)
    b.send(max(b.movements))
    assert stops(world)


def test_asynchronous_run_lets_go_of_a_quarantined_device(worlds: Worlds) -> None:
    world = asynchronous(worlds)
    a, b = world.devices
    world.service.helm.quarantine("a", "noisy", ANNA)
    a.send(max(a.movements))
    assert a.verdicts == [(1, "late")]
    world.wait(40)  # it is asked again, and declined
    assert "noisy (anna)" in a.all(Receipt)[-1].reason
    b.send(max(b.movements))
    world.wait(10)
    world.restart()
    assert [each["device"] for each in world.service.helm.quarantined()] == ["a"]
    world.service.helm.allow("a", ANNA)
    world.wait(40)
    assert world.service.helm.quarantined() == []


# -- the folder of a stopped run -----------------------------------------------------------------


def test_stopped_run_is_steered_in_its_folder(worlds: Worlds) -> None:
    world = in_round(worlds)
    send(world, 1)
    world.stop()
    folder = world.folder
    assert stopped.change(folder, "learning_rate", "0.025", ANNA)["was"] == 0.1
    assert stopped.lengthen(folder, 2, ANNA)["value"] == 8
    assert stopped.quarantine(folder, "a", "why", ANNA)["since"] == 2
    assert stopped.pause(folder, ANNA)["changed"]
    assert [each["device"] for each in stopped.list_quarantined(folder)] == ["a"]
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        stopped.change(folder, "learning_rat", 1, ANNA)
    with pytest.raises(ConfigError, match="no device 'x'"):
        stopped.quarantine(folder, "x", "", ANNA)
    world.start()
    world.settle()
    assert world.service.helm.paused is not None
    world.stop()
    allowed = stopped.allow(folder, "a", ANNA)
    assert (allowed["device"], allowed["since"]) == ("a", None)
    assert stopped.resume(folder, ANNA)["changed"]
    world.start()
    world.settle()
    assert [*world.state.assigned] == ["b"]  # it was out when the round went on
    send(world, 2, "b")
    opened = world.devices[0].all(RoundOpen)[-1]
    assert (opened.round, opened.local_rule.learning_rate) == (3, 0.025)
    assert opened.rounds_left == 8 - 2
    assert [what for what, _ in audited(world)] == [
        *("set", "rounds", "quarantine", "pause", "allow", "resume")
    ]


def test_run_that_was_never_served_has_no_known_settings(worlds: Worlds) -> None:
    world = in_round(worlds)
    world.stop()
    (world.folder / STEERING).unlink()
    with pytest.raises(ConfigError, match="serve it once"):
        stopped.change(world.folder, "learning_rate", 1, ANNA)


# -- the audit and its file ----------------------------------------------------------------------


def test_forgetting_is_audited_once(worlds: Worlds) -> None:
    world = in_round(worlds, rule=RULES["ram-fed"]())
    send(world, 1)
    world.service.forget("a", ANNA)
    (line,) = read_audit(world.folder)
    assert (line["number"], line["what"], line["by"]) == (1, "forget", ANNA)
    assert line["details"]["device"] == "a"
    world.restart()
    assert audited(world) == [("forget", ANNA)]
    assert list(read_audit(world.folder, since=1)) == []


def test_names_and_reasons_cannot_forge_lines(worlds: Worlds) -> None:
    world = in_round(worlds)
    world.service.helm.quarantine("a", "x\n\x1b[2Jy", "an\nna")
    (line,) = read_audit(world.folder)
    assert line["by"] == "an na"
    assert line["details"]["reason"] == "x  [2Jy"


@pytest.mark.parametrize("name", [STEERING, AUDIT])
def test_verify_and_repair_know_the_files(worlds: Worlds, name: str) -> None:
    world = in_round(worlds)
    world.service.helm.pause(ANNA)
    world.service.helm.change("steps", 2, ANNA)
    world.stop()
    path = world.folder / name
    good = [str(each.path) for each in Inspection(world.folder).all() if each.condition == "good"]
    assert name in good
    path.write_bytes(path.read_bytes().replace(b"anna", b"anne", 1))
    (found,) = (each for each in Inspection(world.folder).all() if each.condition != "good")
    assert str(found.path) == name
    (step,) = find_steps(world.folder)
    assert name in step.words
    step.take()
    assert find_steps(world.folder) == []
    assert len(list(read_audit(world.folder))) == (2 if name == STEERING else 1)
    world.start()
    assert (world.service.helm.paused is None) is (name == STEERING)


# -- while levels are surveyed -------------------------------------------------------------------


@pytest.mark.usefixtures("surveyed")
@pytest.mark.parametrize("crash", [False, True])
def test_orders_in_a_survey_hold_after_its_commit(worlds: Worlds, crash: bool) -> None:
    world = in_round(worlds, min_devices=2, survey_every=1, survey_s=50.0, rounds=9)
    send(world, 1)
    asked = world.retained(TOPICS.round)
    assert isinstance(asked, Survey)
    helm = world.service.helm
    helm.change("learning_rate", 0.025, ANNA)
    helm.quarantine("b", "odd", ANNA)
    helm.pause(ANNA)
    helm.pause(ANNA)
    helm.stop("round", ANNA)
    assert not helm.stops  # the round is closing
    if crash:
        world.restart()
    wait = world.service.waits_for
    assert wait is not None
    assert wait.kind == "survey"
    world.wait(51.0)
    world.wait(51.0)
    assert stops(world)
    closed = next(line for line in world.history if "movements" in line)
    assert closed["movements"]["counted"] == 2  # of before the order
    assert closed["quarantined"] == []
    world.stop()
    world.start()
    world.settle()
    assert [each["device"] for each in world.service.helm.quarantined()] == ["b"]
    world.service.helm.resume(ANNA)
    world.settle()
    assert [*world.state.selected] == ["a"]
    assert rates(world) == {1: 0.1, 2: 0.025}
