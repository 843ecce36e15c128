"""Verdicts at the close, what is held against devices, and rounds that wait for nobody silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.rules import RULES
from coordinator.rounds.events import Kept, Released, Send, Tick
from coordinator.rounds.fleet import new_fleet
from coordinator.rounds.persistent import PersistentMap
from coordinator.rounds.reputation import (
    DeviceStanding,
    closed,
    declines,
    delivered,
    quarantined,
    released,
)
from coordinator.rounds.synchronous import (
    Commit,
    Committed,
    OpenRound,
    RoundPhase,
    RoundsConfig,
    recount,
    resume,
)
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Bid, Outcome, Receipt
from tests.unit.coordinator.rounds.driven import offer, outcome, refusal, said
from tests.unit.coordinator.rounds.test_rounds import (
    CONFIG,
    PLAN,
    Coordinator,
    bid,
    next_round,
    training,
)

NAMES = ("a", "b", "c", "d")
LONG = replace(CONFIG, rounds=99)


def verdicts(effects: list[Any]) -> dict[str, Outcome]:
    """The verdicts among what a commit says."""
    receipts = [each.message for each in effects if isinstance(each, Send)]
    return {each.device: each.outcome for each in receipts if isinstance(each, Receipt)}


def close_with(coordinator: Coordinator, **values: float) -> Commit:
    """Movements of these sizes come and are stored; the round closes."""
    effects: list[Any] = []
    for name, value in values.items():
        made = coordinator.movement(name, value)
        effects = coordinator.tell(made, Kept(name, coordinator.state.round))
    commit = effects[-1]
    assert isinstance(commit, Commit)
    return commit


# -- the cohort ----------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("a", "b", "c"), ("a", "b", "c", "d")])
def test_movement_that_stands_out_is_refused_at_the_close(names: tuple[str, ...]) -> None:
    coordinator = training(*names, config=LONG)
    commit = close_with(coordinator, **dict.fromkeys(names, 1.0) | {"b": 50.0})
    assert commit.fresh == tuple(name for name in names if name != "b")
    assert commit.silent == ("b",)
    assert "50 times the median RMS" in commit.refused["b"]
    assert coordinator.state.bids["b"].reason.startswith("skip: rejected: block")
    said_at_commit = verdicts(coordinator.tell(Committed(1)))
    expected = dict.fromkeys(names, Outcome.COUNTED) | {"b": Outcome.REJECTED}
    assert said_at_commit == expected
    assert coordinator.state.fleet.trained.keys() == set(names) - {"b"}


def test_verdict_that_was_missed_is_said_again_with_its_reason() -> None:
    coordinator = training("a", "b", "c", config=LONG)
    close_with(coordinator, a=1.0, b=50.0, c=1.0)
    assert outcome(coordinator.tell(offer("b", 1))) is Outcome.KEPT  # not committed yet
    next_round(coordinator)
    assert "median RMS" in refusal(coordinator.tell(offer("b", 1)))
    assert outcome(coordinator.tell(offer("a", 1))) is Outcome.COUNTED


def test_two_devices_are_no_cohort() -> None:
    coordinator = training("a", "b", config=LONG)
    assert close_with(coordinator, a=1.0, b=50.0).refused == {}


def test_refused_movement_teaches_nothing_about_the_usual_size() -> None:
    one, other = (training(*NAMES, config=LONG) for _ in range(2))
    close_with(one, a=1.0, b=50.0, c=1.0, d=1.0)
    close_with(other, d=1.0, c=1.0, b=49.0, a=1.0)
    (seen,) = one.state.fleet.usual.levels.values()
    (same,) = other.state.fleet.usual.levels.values()
    assert np.array_equal(seen.square, same.square)
    assert seen.times.max() == 3


def test_bound_holds_in_the_first_round_and_of_late_movements() -> None:
    rule = LocalRule(learning_rate=0.1, clip_norm=20.0)
    config = replace(LONG, rule=RULES["ram-fed"](), local_rule=rule)
    coordinator = Coordinator("a", "b", config=config)
    norms = np.full(PLAN.block_count, 0.25)
    coordinator.state = replace(
        coordinator.state, fleet=replace(coordinator.state.fleet, norms=norms)
    )
    coordinator.tell(bid("a"), bid("b"))
    late = coordinator.movement("b", 9.9e8)
    assert "moves weights by at most" in refusal(coordinator.tell(coordinator.movement("a", 9.9e8)))
    coordinator.run_out()
    next_round(coordinator)
    assert "moves weights by at most" in refusal(coordinator.tell(late))
    assert coordinator.state.refused.keys() == {"b"}


# -- after a restart -----------------------------------------------------------------------------


def test_restarted_round_refuses_and_holds_against_as_if_nothing_had_been() -> None:
    coordinator = training(*NAMES, config=LONG)
    opened = coordinator.state
    sent = {name: coordinator.movement(name, 50.0 if name == "b" else 1.0) for name in "abc"}
    for name, movement in sent.items():
        coordinator.tell(movement, Kept(name, 1))
    before = coordinator.state
    wrong = replace(coordinator.movement("d"), learning_rate=9.0)
    coordinator.tell(wrong)  # refused, and not waited for any more

    known = replace(opened, fleet=new_fleet(PLAN))
    journal = OpenRound(
        1, before.selected, before.bids, before.assigned.dropping("d"), {"d": "it says it was made"}
    )
    state = resume(LONG, known, journal, 0)
    for movement in reversed(sent.values()):
        state, keep = recount(LONG, state, movement)
        assert keep is not None
    again = Coordinator("a", config=LONG)
    again.state = state
    (commit,) = again.tell(Tick())
    assert isinstance(commit, Commit)
    assert commit.fresh == ("a", "c")
    assert commit.refused.keys() == {"b"}
    standings = coordinator.state.fleet.standings
    assert {name: each.refusals for name, each in standings.items()} == {"b": 1, "d": 1}
    assert again.state.fleet.standings.keys() == standings.keys()
    assert not any(each.silent for each in again.state.fleet.standings.values())


# -- reputation ----------------------------------------------------------------------------------


def judged(standings: PersistentMap[str, DeviceStanding], round: int, **what: Any) -> Any:
    values: dict[str, Any] = {"counted": (), "refused": {}, "silent": (), **what}
    return closed(standings, round, quarantine_after=3, **values)


def test_third_refusal_in_a_row_means_quarantine() -> None:
    standings: PersistentMap[str, DeviceStanding] = PersistentMap()
    for round in (1, 2):
        standings = judged(standings, round, refused={"b": f"why {round}"}, counted=["a"])
    assert quarantined(standings) == {}
    cleared = judged(standings, 3, counted=["a", "b"])
    assert cleared == {}
    standings = judged(standings, 3, refused={"b": "why 3"})
    assert declines(standings, "b") == (
        "quarantined since round 3, after 3 refusals in a row; the last: why 3"
    )
    assert declines(judged(standings, 4, counted=["b"]), "b")
    assert declines(standings, "a") == ""
    assert released(standings, "b") == {}


def test_zero_never_quarantines() -> None:
    standings: PersistentMap[str, DeviceStanding] = PersistentMap()
    for round in range(1, 9):
        standings = closed(
            standings, round, counted=(), refused={"b": "x"}, silent=(), quarantine_after=0
        )
    assert quarantined(standings) == {}
    assert standings["b"].refusals == 8


def test_delivery_ends_silence_and_nothing_else() -> None:
    standings = judged(PersistentMap(), 1, silent=["b"], refused={"c": "x"})
    assert standings["b"].silent
    assert delivered(standings, "b").keys() == {"c"}
    assert delivered(standings, "c") == standings


def test_quarantined_device_is_told_why_and_not_waited_for() -> None:
    coordinator = training(*NAMES, config=LONG)
    for round in (1, 2, 3):
        close_with(coordinator, a=1.0, b=50.0, c=1.0, d=1.0)
        if round < 3:
            next_round(coordinator)
    coordinator.tell(Committed(3))
    assert coordinator.state.selected == {"a", "c", "d"}
    reason = refusal(coordinator.tell(bid("b", round=4)))
    assert reason.startswith("quarantined since round 3, after 3 refusals in a row")
    assert coordinator.tell(bid("b", None, 4)) == []
    coordinator.tell(*(bid(name, round=4) for name in "acd"))
    assert coordinator.state.phase is RoundPhase.TRAINING
    assert "quarantined" in refusal(coordinator.tell(bid("b", round=4)))
    coordinator.tell(Released("b"))
    close_with(coordinator, a=1.0, c=1.0, d=1.0)
    coordinator.tell(Committed(4))
    assert coordinator.state.selected == set(NAMES)


def test_run_does_not_stop_because_a_device_is_quarantined() -> None:
    config = replace(LONG, min_devices=3, quarantine_after=1)
    coordinator = training("a", "b", "c", config=config)
    close_with(coordinator, a=1.0, b=50.0, c=1.0)
    coordinator.tell(Committed(1))
    assert coordinator.state.phase is RoundPhase.BIDDING
    assert coordinator.state.selected == {"a", "c"}


# -- silence -------------------------------------------------------------------------------------


def test_silent_device_holds_one_round_and_no_more() -> None:
    coordinator = training("a", "b", config=LONG)
    coordinator.count("a")
    (commit,) = coordinator.run_out()
    assert isinstance(commit, Commit)
    for round in (2, 3):
        next_round(coordinator)
        assert coordinator.state.spare == {"b"}
        assert "b" in coordinator.state.assigned
        assert isinstance(coordinator.count("a")[-1], Commit), round


def test_spare_device_counts_if_it_is_in_time_and_is_waited_for_again() -> None:
    coordinator = training("a", "b", config=LONG)
    coordinator.count("a")
    coordinator.run_out()
    next_round(coordinator)
    coordinator.count("b")
    assert coordinator.state.phase is RoundPhase.TRAINING
    assert coordinator.count("a")[-1] == Commit(2, ("a", "b"), (), (), ())
    next_round(coordinator)
    assert coordinator.state.spare == frozenset()


def test_round_of_silent_devices_alone_waits_for_them() -> None:
    coordinator = training("a", "b", config=LONG)
    coordinator.run_out()
    next_round(coordinator)
    assert coordinator.state.spare == frozenset()
    coordinator.count("a")
    assert coordinator.state.phase is RoundPhase.TRAINING


def test_slow_device_that_delivers_within_the_deadline_is_no_longer_spare() -> None:
    coordinator = training("a", "b", config=LONG)
    coordinator.count("a")
    coordinator.run_out()
    next_round(coordinator)
    slow = coordinator.movement("b")
    coordinator.count("a")
    next_round(coordinator)
    assert coordinator.state.spare == {"b"}
    assert outcome(coordinator.tell(slow)) is Outcome.LATE
    assert not coordinator.state.fleet.standings


def test_device_that_withdraws_is_not_silent() -> None:
    coordinator = training("a", "b", "c", config=LONG)
    coordinator.tell(bid("b", None))
    coordinator.run_out()
    assert coordinator.state.fleet.standings.keys() == {"a", "c"}


# -- the last few of many ------------------------------------------------------------------------


def many(number: int, **changes: Any) -> Coordinator:
    names = [f"d{each:02}" for each in range(number)]
    config = replace(LONG, min_devices=number, train_deadline_s=600.0, **changes)
    return training(*names, config=config)


def test_last_few_of_many_have_as_much_time_again() -> None:
    coordinator = many(20)
    coordinator.now = 30.0
    coordinator.count(*(f"d{each:02}" for each in range(18)))
    assert coordinator.state.deadline == 600.0
    coordinator.now = 40.0
    coordinator.count("d18")
    assert coordinator.state.deadline == 80.0
    coordinator.now = 79.0
    assert coordinator.tell(Tick()) == []
    coordinator.now = 80.0
    (commit,) = coordinator.tell(Tick())
    assert isinstance(commit, Commit)
    assert len(commit.fresh) == 19


@pytest.mark.parametrize(("number", "changes"), [(19, {}), (20, {"quorum": 1.0})])
def test_small_rounds_and_those_told_to_wait_for_all(number: int, changes: dict[str, Any]) -> None:
    coordinator = many(number, **changes)
    coordinator.now = 40.0
    coordinator.count(*(f"d{each:02}" for each in range(number - 1)))
    assert coordinator.state.deadline == 600.0


# -- claims --------------------------------------------------------------------------------------


def claims(config: RoundsConfig, samples: dict[str, int]) -> dict[str, int]:
    coordinator = Coordinator(*samples, config=replace(config, min_devices=len(samples)))
    coordinator.tell(*(replace(bid(name), samples=said) for name, said in samples.items()))
    assert coordinator.state.phase is RoundPhase.TRAINING
    return {name: coordinator.state.bids[name].samples for name in samples}


def test_claimed_samples_are_capped_by_the_median() -> None:
    assert claims(LONG, {"a": 10, "b": 20, "c": 30, "d": 2**40}) == {
        "a": 10,
        "b": 20,
        "c": 30,
        "d": 100,
    }
    assert claims(LONG, {"a": 10, "b": 2**40}) == {"a": 10, "b": 50}
    assert claims(replace(LONG, samples_limit=1.0), {"a": 9, "b": 7, "c": 5})["a"] == 7


def test_lone_claim_is_capped_by_what_was_heard_before() -> None:
    fleet = new_fleet(PLAN).heard([replace(bid("a"), samples=100), replace(bid("b"), samples=50)])
    (capped,) = fleet.capped([replace(bid("c"), samples=2**40)], 5.0)
    assert capped.samples == 5 * 75
    (unknown,) = new_fleet(PLAN).capped([Bid(device="c", round=1, level=1.0, reason="x")], 5.0)
    assert unknown.samples == 0


def test_capped_samples_weigh_what_a_movement_counts_with() -> None:
    coordinator = Coordinator("a", "b", "c", config=replace(LONG, min_devices=3))
    coordinator.tell(*(replace(bid(name), samples=10) for name in "ab"))
    coordinator.tell(replace(bid("c"), samples=2**40))
    (keep,) = coordinator.tell(coordinator.movement("c", samples=2**40))
    assert keep.arrival.contribution.samples == 50  # type: ignore[union-attr]
    assert coordinator.state.fleet.total_samples == 70


def test_receipt_of_a_kept_movement_is_no_verdict() -> None:
    coordinator = training("a", "b", config=LONG)
    receipt = said(Receipt, coordinator.count("a"))
    assert receipt.outcome is Outcome.KEPT
