"""The coordinator's state machine: its table, deadlines, and what devices get told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.rules import RULES
from coordinator.aggregate.rules.ccfl import Ccfl1
from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.arrivals import unkept
from coordinator.rounds.events import Accept, Broadcast, Joined, Keep, Kept, Left, Send, Tick
from coordinator.rounds.state import Selection
from coordinator.rounds.synchronous import (
    Commit,
    Committed,
    Effect,
    Event,
    RoundPhase,
    RoundsConfig,
    RoundsState,
    handle,
    opening_of,
    start,
)
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from tests.messages import make_movement
from tests.unit.coordinator.rounds.driven import Driven, offer, outcome, refusal, said

PLAN = ModelPlan(
    axes=(Axis("a", (2, 2)), Axis("b", (1, 1, 1))),
    tensors=(
        Tensor("w", "float32", (Dim(4, 0), Dim(3, 1))),
        Tensor("bias", "float32", (Dim(4, 0),)),
    ),
    buffers=(Buffer("mean", "float32", (Dim(4, 0),), statistic=True),),
)
CONFIG = RoundsConfig(
    min_participants=0,
    plan=PLAN,
    rule=RULES["ra-fed"](),
    masks=make_masks("random"),
    local_rule=LocalRule(learning_rate=0.1),
    rounds=2,
    steps=3,
    batch_size=4,
    min_devices=2,
    seed=5,
    bid_s=10,
    train_deadline_s=100,
)


NORMS = np.ones(PLAN.block_count)


class Coordinator(Driven[RoundsConfig, RoundsState, Event, Effect]):
    def __init__(self, *devices: str, config: RoundsConfig = CONFIG) -> None:
        super().__init__(config, start(config, NORMS), handle, devices)

    def movement(self, name: str, value: float = 1.0, **changes: Any) -> Movement:
        return self.movement_of(name, value, **{"round": self.state.round, "level": 0.5, **changes})

    def count(self, *names: str, value: float = 1.0) -> list[Effect]:
        """Movements of these devices come and are stored."""
        effects: list[Effect] = []
        for name in names:
            effects = self.tell(self.movement(name, value), Kept(name, self.state.round))
        return effects

    def run_out(self) -> list[Effect]:
        """The deadline comes."""
        self.now += 1000.0
        return self.tell(Tick())


def payload(groups: Groups, value: float = 1.0, kind: str = "fp32") -> bytes:
    return bytes(make_movement(PLAN, groups, value, encoding=Encoding.parse(kind)).payload)


def commit(
    round: int,
    fresh: tuple[str, ...] = (),
    silent: tuple[str, ...] = (),
    replayed: tuple[str, ...] = (),
    late: tuple[tuple[str, int], ...] = (),
) -> Commit:
    return Commit(round, fresh, replayed, silent, late)


def bid(device: str, level: float | None = 0.5, round: int = 1) -> Bid:
    return Bid(device=device, round=round, level=level, reason="because")


def training(*devices: str, config: RoundsConfig = CONFIG) -> Coordinator:
    coordinator = Coordinator(*devices, config=config)
    coordinator.tell(*(bid(device) for device in devices))
    assert coordinator.state.phase is RoundPhase.TRAINING
    return coordinator


def test_first_round_opens_when_enough_devices_are_there() -> None:
    coordinator = Coordinator("a")
    assert coordinator.state.phase is RoundPhase.WAITING
    opened = said(RoundOpen, coordinator.tell(Joined("b")))
    assert (opened.round, opened.plan_hash) == (1, PLAN.hash)


def test_newcomer_during_bidding_is_told_and_waited_for() -> None:
    coordinator = Coordinator("a", "b")
    said(RoundOpen, coordinator.tell(Joined("c")))
    assert coordinator.tell(bid("a"), bid("b")) == []
    coordinator.tell(bid("c"))
    assert coordinator.state.phase is RoundPhase.TRAINING
    assert coordinator.tell(Joined("d")) == []


def test_assignments_go_to_those_who_offered_and_fit_their_level() -> None:
    coordinator = Coordinator("a", "b", "c")
    effects = coordinator.tell(bid("a", 0.5), bid("b", None), bid("c", 1.0))
    assert [effect.device for effect in effects if isinstance(effect, Send)] == ["a", "c"]
    assert {axis: len(g) for axis, g in coordinator.groups["a"].items()} == {"a": 1, "b": 1}
    assert dict(coordinator.groups["c"]) == PLAN.all_groups()


def test_assignments_do_not_depend_on_the_order_of_bids() -> None:
    one, other = Coordinator("a", "b", "c"), Coordinator("c", "b", "a")
    one.tell(bid("a"), bid("b"), bid("c"))
    other.tell(bid("c"), bid("a"), bid("b"))
    assert one.groups == other.groups


def test_round_of_skips_closes_at_once() -> None:
    coordinator = Coordinator("a", "b")
    assert coordinator.tell(bid("a", None), bid("b", None)) == [commit(1, silent=("a", "b"))]


def test_round_runs_to_the_next_and_to_the_end() -> None:
    coordinator = training("b", "a")
    for device in ("b", "a"):
        movement = coordinator.movement(device)
        (keep,) = coordinator.tell(movement)
        assert isinstance(keep, Keep)
        assert (keep.round, keep.arrival.movement) == (1, movement)
        assert keep.arrival.groups == coordinator.groups[device]
        effects = coordinator.tell(Kept(device, 1))
        receipt = Receipt(device=device, round=1, outcome=Outcome.KEPT)
        assert effects[0] == Send(device, receipt)
    assert effects[1:] == [commit(1, ("a", "b"))]
    *verdicts, closed, opened = coordinator.tell(Committed(1))
    assert verdicts == [
        Send(device, Receipt(device=device, round=1, outcome=Outcome.COUNTED)) for device in "ab"
    ]
    assert closed == Broadcast(RoundClosed(round=1))
    assert isinstance(opened, Broadcast)
    assert opened.message.round == 2
    coordinator.tell(bid("a", None, 2), bid("b", None, 2))
    assert coordinator.tell(Committed(2)) == [Broadcast(RoundClosed(round=2))]
    assert coordinator.state.phase is RoundPhase.FINISHED


def test_silent_devices_are_not_waited_for_beyond_the_deadlines() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(bid("a"))
    coordinator.now = 9.9
    assert coordinator.tell(Tick()) == []
    coordinator.now = 10.0
    coordinator.tell(Tick())
    assert coordinator.state.phase is RoundPhase.TRAINING
    assert set(coordinator.state.assigned) == {"a"}
    coordinator.now = 109.9
    assert coordinator.tell(Tick()) == []
    coordinator.now = 110.0
    assert coordinator.tell(Tick()) == [commit(1, silent=("a", "b"))]


def test_withdrawn_offer_is_not_waited_for() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"), Kept("a", 1))
    assert coordinator.tell(bid("b", None)) == [commit(1, ("a",), silent=("b",))]
    assert coordinator.state.bids["b"].level is None


def test_second_copy_gets_the_same_receipt_and_counts_once() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"), Kept("a", 1))
    assert outcome(coordinator.tell(coordinator.movement("a"))) is Outcome.KEPT
    assert set(coordinator.state.kept) == {"a"}


def test_movement_after_the_close_is_late() -> None:
    coordinator = training("a", "b")
    late = coordinator.movement("b")
    coordinator.tell(coordinator.movement("a"), Kept("a", 1))
    coordinator.run_out()
    receipt = said(Receipt, coordinator.tell(late))
    assert (receipt.outcome, "round 1 is closed" in receipt.reason) == (Outcome.LATE, True)
    coordinator.tell(Committed(1))
    assert outcome(coordinator.tell(late)) is Outcome.LATE


def test_movement_kept_after_the_deadline_is_late() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"))
    assert coordinator.run_out() == [commit(1, silent=("a", "b"))]
    assert outcome(coordinator.tell(Kept("a", 1))) is Outcome.LATE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan_hash": "f" * 64}, "plan ffffffffffff"),
        ({"round": 7}, "has not begun"),
        ({"device": "stranger"}, "'stranger' has no assignment"),
        ({"statistics": {"mean": np.full(2, np.inf, dtype=np.float32)}}, "not finite"),
        ({"statistics": {"mean": np.full(2, -2e9, dtype=np.float32)}}, "beyond"),
        *(({"value": value}, "not finite") for value in (np.nan, np.inf, -np.inf)),
        *(({"value": value}, "beyond") for value in (2e9, -2e9)),
        ({"payload": payload(PLAN.all_groups())}, "other groups"),
        # Groups are looked at before anything is unpacked.
        ({"payload": payload(PLAN.all_groups())[: -4 * PLAN.parameters]}, "other groups"),
        ({"payload": b"garbage"}, "blocks"),
        ({"payload": payload(PLAN.all_groups(), kind="int8")}, "asks for fp32"),
        ({"statistics": {}}, "missing"),
        ({"learning_rate": 0.001}, "learning rate 0.001; the round's is 0.1"),
    ],
)
def test_movement_that_does_not_fit_is_rejected_with_the_reason(
    changes: dict[str, Any], says: str
) -> None:
    coordinator = training("a", "b")
    assert says in refusal(coordinator.tell(coordinator.movement("a", **changes)))
    assert not {*coordinator.state.kept, *coordinator.state.keeping}


def test_payload_cut_short_is_rejected() -> None:
    coordinator = training("a", "b")
    cut = coordinator.movement("a").payload[:-1]
    assert "bytes" in refusal(coordinator.tell(coordinator.movement("a", payload=cut)))


def test_rejected_movement_is_not_waited_for_and_shows_as_a_skip() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("b"), Kept("b", 1))
    _, closed = coordinator.tell(coordinator.movement("a", statistics={}))
    assert closed == commit(1, ("b",), silent=("a",))
    skip = coordinator.state.bids["a"]
    assert skip.level is None
    assert "rejected" in skip.reason


def test_copy_that_comes_while_the_first_is_stored_is_ignored() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"))
    assert coordinator.tell(coordinator.movement("a")) == []
    assert outcome(coordinator.tell(Kept("a", 1))) is Outcome.KEPT


def test_movement_stored_after_its_device_withdrew_is_late() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"), bid("a", None))
    assert outcome(coordinator.tell(Kept("a", 1))) is Outcome.LATE
    assert set(coordinator.state.kept) == frozenset()


def test_movement_stored_when_the_next_round_is_open_is_late() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"))
    coordinator.now = 1000.0
    coordinator.tell(Tick(), Committed(1))
    assert coordinator.state.round == 2
    assert outcome(coordinator.tell(Kept("a", 1))) is Outcome.LATE


@pytest.mark.parametrize("phase", [RoundPhase.WAITING, RoundPhase.CLOSING, RoundPhase.FINISHED])
def test_tick_without_a_deadline_does_nothing(phase: RoundPhase) -> None:
    state = replace(start(CONFIG), phase=phase, round=1)
    assert handle(CONFIG, state, Tick(), 1e9) == (state, [])


@pytest.mark.parametrize("event", [bid("a", round=2), bid("stranger"), Tick()])
def test_untimely_word_changes_nothing(event: Event) -> None:
    coordinator = training("a", "b")
    before = coordinator.state
    assert coordinator.tell(event) == []
    assert coordinator.state == before


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (RoundPhase.BIDDING, Kept("a", 2)),
        (RoundPhase.BIDDING, Kept("a", 0)),
        (RoundPhase.BIDDING, Committed(1)),
        (RoundPhase.TRAINING, Committed(1)),
        (RoundPhase.TRAINING, Kept("stranger", 1)),
        (RoundPhase.TRAINING, Kept("a", 2)),
    ],
)
def test_local_event_at_the_wrong_time_raises_and_changes_nothing(
    phase: RoundPhase, event: Event
) -> None:
    coordinator = training("a", "b") if phase is RoundPhase.TRAINING else Coordinator("a", "b")
    before = coordinator.state
    with pytest.raises(StateError):
        coordinator.tell(event)
    assert coordinator.state == before


def test_offer_is_accepted_where_the_bytes_matter_and_changes_nothing() -> None:
    coordinator = training("a", "b")
    before, wanted = coordinator.state, offer("a", 1)
    assert coordinator.tell(wanted) == [Accept(wanted)]
    assert coordinator.state is before


@pytest.mark.parametrize(
    ("device", "round", "answers", "expected"),
    [
        ("a", 1, None, Outcome.KEPT),
        ("stranger", 1, None, Outcome.REJECTED),
        ("b", 2, None, Outcome.REJECTED),
        ("b", 1, 2, Outcome.REJECTED),
    ],
)
def test_offer_whose_outcome_is_known_is_answered_as_its_movement_would_be(
    device: str, round: int, answers: int | None, expected: Outcome
) -> None:
    coordinator = training("a", "b")
    coordinator.count("a")
    movement = coordinator.movement("a", device=device, round=round)
    sent = movement if answers is None else Replay(round=answers, movement=movement)
    (answer,) = coordinator.tell(offer(device, round, answers=answers))
    assert outcome([answer]) is expected
    assert coordinator.tell(sent) == [answer]


def test_offer_for_a_closed_round_is_accepted_where_the_rule_remembers() -> None:
    for config, kind in ((CONFIG, Send), (REMEMBERING, Accept)):
        coordinator = training("a", "b", config=config)
        coordinator.count("a")
        coordinator.run_out()
        (answer,) = coordinator.tell(offer("b", 1))
        assert isinstance(answer, kind)


# -- memory, replays, whole models ---------------------------------------------------------------

REMEMBERING = replace(CONFIG, rule=RULES["ram-fed"](), rounds=9)
REPLAYING = replace(CONFIG, rule=Ccfl1(horizon=2), rounds=9)


def next_round(coordinator: Coordinator, *skipping: str) -> list[Effect]:
    """Commit the round and let all devices bid in the next one."""
    round = coordinator.state.round + 1
    coordinator.tell(Committed(round - 1))
    return coordinator.tell(
        *(
            bid(name, None if name in skipping else 0.5, round)
            for name in sorted(coordinator.state.devices)
        )
    )


def test_late_movement_enters_memory_where_the_rule_has_one() -> None:
    coordinator = training("a", "b", config=REMEMBERING)
    late = coordinator.movement("b")
    coordinator.count("a")
    assert coordinator.run_out() == [commit(1, ("a",), silent=("b",))]
    next_round(coordinator)
    (keep,) = coordinator.tell(late)
    assert isinstance(keep, Keep)
    assert (keep.round, keep.arrival.contribution.made) == (1, 1)
    assert outcome(coordinator.tell(Kept("b", 1))) is Outcome.MEMORY
    assert outcome(coordinator.tell(late)) is Outcome.MEMORY
    assert coordinator.count("b", "a")[-1] == commit(2, ("a", "b"), late=(("b", 1),))
    next_round(coordinator)
    assert coordinator.count("a", "b")[-1] == commit(3, ("a", "b"))


def test_movement_stored_after_the_deadline_enters_memory() -> None:
    coordinator = training("a", "b", config=REMEMBERING)
    coordinator.tell(coordinator.movement("a"))
    coordinator.run_out()
    assert outcome(coordinator.tell(Kept("a", 1))) is Outcome.MEMORY


def test_movement_stored_as_the_run_ends_is_late() -> None:
    coordinator = training("a", "b", config=replace(REMEMBERING, rounds=1))
    coordinator.tell(coordinator.movement("a"))
    coordinator.run_out()
    assert outcome(coordinator.tell(Kept("a", 1))) is Outcome.LATE


def test_receipt_that_was_lost_is_given_again_in_later_rounds() -> None:
    coordinator = training("a", "b")
    sent = coordinator.movement("a")
    coordinator.count("a", "b")
    next_round(coordinator)
    assert outcome(coordinator.tell(sent)) is Outcome.COUNTED
    assert set(coordinator.state.kept) == frozenset()


def test_late_movement_is_checked_against_the_round_it_names() -> None:
    coordinator = training("a", "b", config=REMEMBERING)
    coordinator.count("a")
    coordinator.run_out()
    wrong = coordinator.movement("b", payload=payload(PLAN.all_groups()))
    assert "other groups" in refusal(coordinator.tell(wrong))
    assert "no assignment" in refusal(coordinator.tell(coordinator.movement("b", device="c")))


def test_assignments_are_forgotten_after_max_staleness() -> None:
    coordinator = training("a", "b", config=replace(REMEMBERING, max_staleness=2))
    late = coordinator.movement("b")
    coordinator.count("a")
    coordinator.run_out()
    for _ in range(2):
        next_round(coordinator)
        coordinator.count("a", "b")
    receipt = said(Receipt, coordinator.tell(late))
    assert (receipt.outcome, "more than 2 rounds old" in receipt.reason) == (Outcome.LATE, True)


def replay_round() -> tuple[Coordinator, Movement]:
    """Round 2, in which b skips and announces a replay of what it made in round 1."""
    coordinator = training("a", "b", config=REPLAYING)
    made = coordinator.movement("b")
    coordinator.count("a", "b")
    coordinator.tell(Committed(1), bid("a", round=2))
    coordinator.tell(replace(bid("b", None, 2), replays=True))
    assert coordinator.state.phase is RoundPhase.TRAINING
    return coordinator, made


def test_replay_is_waited_for_and_counts_for_the_round_it_answers() -> None:
    coordinator, made = replay_round()
    assert len(coordinator.count("a")) == 1
    (keep,) = coordinator.tell(Replay(round=2, movement=made))
    assert isinstance(keep, Keep)
    assert (keep.round, keep.arrival.contribution.made) == (2, 1)
    assert coordinator.tell(Replay(round=2, movement=made)) == []
    receipt, closed = coordinator.tell(Kept("b", 2))
    assert outcome([receipt]) is Outcome.KEPT
    assert closed == commit(2, ("a",), replayed=("b",))


def test_replay_that_could_not_be_stored_may_come_again() -> None:
    coordinator, made = replay_round()
    coordinator.count("a")
    coordinator.tell(Replay(round=2, movement=made))
    coordinator.state = unkept(coordinator.state, "b", 2)
    (keep,) = coordinator.tell(Replay(round=2, movement=made))
    assert isinstance(keep, Keep)
    assert coordinator.tell(Kept("b", 2))[-1] == commit(2, ("a",), replayed=("b",))


def test_replay_may_come_before_all_have_bid() -> None:
    coordinator = training("a", "b", config=REPLAYING)
    made = coordinator.movement("b")
    coordinator.count("a", "b")
    coordinator.tell(Committed(1), replace(bid("b", None, 2), replays=True))
    coordinator.tell(Replay(round=2, movement=made), Kept("b", 2))
    assert outcome(coordinator.tell(Replay(round=2, movement=made))) is Outcome.KEPT
    coordinator.tell(bid("a", round=2))
    assert coordinator.count("a")[-1] == commit(2, ("a",), replayed=("b",))


def test_replay_that_does_not_fit_is_rejected_and_not_waited_for() -> None:
    coordinator, made = replay_round()
    coordinator.count("a")
    receipt, closed = coordinator.tell(
        Replay(round=2, movement=replace(made, payload=payload(PLAN.all_groups())))
    )
    assert outcome([receipt]) is Outcome.REJECTED
    assert closed == commit(2, ("a",), silent=("b",))


def test_replay_that_is_too_old_is_rejected() -> None:
    coordinator = training("a", "b", config=REPLAYING)
    made = coordinator.movement("b")
    coordinator.count("a", "b")
    for _ in range(2):
        next_round(coordinator, "b")
        coordinator.count("a")
    coordinator.tell(Committed(3), bid("a", round=4), replace(bid("b", None, 4), replays=True))
    assert "3 rounds old" in refusal(coordinator.tell(Replay(round=4, movement=made)))


def test_replay_nobody_announced_is_rejected_and_one_after_the_close_late() -> None:
    coordinator, made = replay_round()
    other = Replay(round=2, movement=replace(made, device="a"))
    assert "announced" in refusal(coordinator.tell(other))
    coordinator.run_out()
    assert outcome(coordinator.tell(Replay(round=2, movement=made))) is Outcome.LATE


def test_rule_for_whole_models_takes_lower_offers_as_skips() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, rule=RULES["fedavg"]()))
    coordinator.tell(bid("a", 1.0), bid("b", 0.5))
    assert set(coordinator.state.assigned) == {"a"}
    skip = coordinator.state.bids["b"]
    assert skip.level is None
    assert "whole models" in skip.reason


@pytest.mark.parametrize(
    ("rule", "whole"), [("fedavg", True), ("fedvarp", True), ("ra-fed", False)]
)
def test_every_opening_says_whether_only_whole_models_are_of_use(rule: str, whole: bool) -> None:
    """To all in every round, to who comes in between, and to who asks after a restart."""
    config = replace(CONFIG, rule=RULES[rule](), rounds=3)
    coordinator = Coordinator("a", config=config)
    said = [*coordinator.tell(Joined("b")), *coordinator.tell(Joined("c"))]
    coordinator.tell(*(bid(name, None) for name in "abc"))
    said += coordinator.tell(Committed(1))
    openings = [
        effect.message
        for effect in said
        if isinstance(effect, Broadcast | Send) and isinstance(effect.message, RoundOpen)
    ]
    assert [opened.round for opened in openings] == [1, 1, 2]
    openings.append(opening_of(config, coordinator.state))
    assert {(opened.whole, opened.warmup) for opened in openings} == {(whole, False)}


def test_opening_asks_for_whole_models_while_warming_up_and_for_replays() -> None:
    warm = replace(CONFIG, rule=RamFed(warmup_rounds=1))
    coordinator = Coordinator("a", config=warm)
    (first,) = coordinator.tell(Joined("b"))
    coordinator.tell(bid("a", None), bid("b", None))
    _, second = coordinator.tell(Committed(1))
    for effect, whole in ((first, True), (second, False)):
        opened = said(RoundOpen, [effect])
        assert (opened.whole, opened.warmup, opened.replay_within) == (whole, whole, 0)
    opened = said(RoundOpen, Coordinator("a", config=REPLAYING).tell(Joined("b")))
    assert opened.replay_within == 2


def test_masks_that_measure_ask_for_whole_models_and_take_what_comes() -> None:
    config = replace(CONFIG, masks=make_masks("prunefl", period=2), rounds=4)
    coordinator = Coordinator("a", config=config)
    opened = said(RoundOpen, coordinator.tell(Joined("b")))
    assert (opened.whole, opened.warmup) == (False, True)
    coordinator.tell(bid("a", 1.0), bid("b", 0.5))
    assert coordinator.groups["a"] == PLAN.full_groups() != coordinator.groups["b"]
    coordinator.count("a", value=0.25)
    coordinator.count("b", value=0.5)
    measured = coordinator.state.fleet.importance
    assert measured is not None
    per_value = (0.25 / config.local_rule.learning_rate) ** 2  # of the whole model alone
    np.testing.assert_allclose(measured, per_value * PLAN.block_sizes, rtol=1e-6)
    opened = said(RoundOpen, coordinator.tell(Committed(1, NORMS))[-1:])
    assert (opened.round, opened.warmup) == (2, False)
    coordinator.tell(bid("a", 1.0, round=2), bid("b", 1.0, round=2))
    assert coordinator.groups["a"] == coordinator.groups["b"]
    coordinator.count("a", "b", value=5.0)
    assert coordinator.state.fleet.importance is measured


def test_coverage_is_remembered_from_round_to_round() -> None:
    coordinator = training("a", "b", config=REMEMBERING)
    coordinator.count("a")
    coordinator.run_out()
    held = PLAN.covers(PLAN.choose(coordinator.groups["a"]))
    fleet = coordinator.state.fleet
    assert np.array_equal(fleet.last_covered, np.where(held, 1, 0))
    assert np.array_equal(fleet.times_covered, np.where(held, 1, 0))
    assert fleet.trained == {"a": 1}


def test_movement_far_larger_than_usual_is_rejected_and_nothing_else_affected() -> None:
    coordinator = training("a", "b", config=replace(REMEMBERING, rms_limit=10.0, rounds=99))
    for _ in range(20):
        coordinator.count("a", "b")
        next_round(coordinator)
    before = coordinator.state.fleet.usual
    assert "times the RMS" in refusal(coordinator.tell(coordinator.movement("a", 11.0)))
    assert coordinator.state.fleet.usual is before
    assert coordinator.count("b")[-1] == commit(21, ("b",), silent=("a",))


def test_device_that_replayed_cannot_bid_again_in_the_same_round() -> None:
    coordinator = training("a", "b", config=REPLAYING)
    made = coordinator.movement("b")
    coordinator.count("a", "b")
    coordinator.tell(Committed(1), replace(bid("b", None, 2), replays=True))
    coordinator.tell(Replay(round=2, movement=made))
    assert coordinator.tell(bid("b", 1.0, 2)) == []
    coordinator.tell(Kept("b", 2))
    assert coordinator.tell(bid("b", 1.0, 2)) == []
    coordinator.tell(bid("a", round=2))
    assert set(coordinator.state.assigned) == {"a"}
    assert coordinator.count("a")[-1] == commit(2, ("a",), replayed=("b",))


def test_replay_under_a_rule_that_takes_none_is_not_waited_for() -> None:
    coordinator = training("a", "b", config=replace(CONFIG, rounds=9))
    coordinator.count("a", "b")
    coordinator.tell(Committed(1), bid("a", round=2))
    coordinator.tell(replace(bid("b", None, 2), replays=True))
    assert coordinator.count("a")[-1] == commit(2, ("a",), silent=("b",))


def test_replay_for_a_round_to_come_is_rejected() -> None:
    coordinator, made = replay_round()
    assert "has not begun" in refusal(coordinator.tell(Replay(round=7, movement=made)))


def test_second_copy_of_a_late_movement_is_stored_once_and_enters_memory_once() -> None:
    coordinator = training("a", "b", config=REMEMBERING)
    late = coordinator.movement("b")
    coordinator.count("a")
    coordinator.run_out()
    next_round(coordinator)
    assert len(coordinator.tell(late)) == 1
    assert coordinator.tell(late) == []
    coordinator.tell(Kept("b", 1))
    coordinator.count("b", "a")
    coordinator.tell(Committed(2))
    assert outcome(coordinator.tell(Kept("b", 1))) is Outcome.MEMORY
    assert coordinator.state.late == frozenset()


def test_level_and_samples_count_as_bid_whatever_the_movement_says() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(replace(bid("a"), samples=7), bid("b"))
    (keep,) = coordinator.tell(coordinator.movement("a", level=1.0, samples=2**40))
    assert isinstance(keep, Keep)
    part = keep.arrival.contribution
    assert (part.level, part.samples) == (0.5, 7)


def test_warm_up_takes_whole_models_only() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, rule=RamFed(warmup_rounds=1)))
    coordinator.tell(bid("a", 0.5), bid("b", 1.0))
    assert set(coordinator.state.assigned) == {"b"}


def test_replays_are_asked_for_only_as_far_back_as_assignments_are_known() -> None:
    config = replace(CONFIG, rule=Ccfl1(horizon=9), max_staleness=4)
    assert said(RoundOpen, Coordinator("a", config=config).tell(Joined("b"))).replay_within == 4


def test_replays_of_any_age_are_taken_where_the_rule_has_no_limit() -> None:
    config = replace(CONFIG, rule=Ccfl1(horizon="none"), max_staleness=2, rounds=20)
    coordinator = training("a", "b", "c", config=config)
    made = coordinator.movement("b")
    coordinator.count("a", "b", "c")
    for round in range(2, 8):
        coordinator.tell(Committed(round - 1), bid("a", round=round), bid("c", round=round))
        coordinator.tell(replace(bid("b", None, round), replays=True))
        (keep,) = coordinator.tell(Replay(round=round, movement=made))
        assert isinstance(keep, Keep)
        coordinator.tell(Kept("b", round))
        assert coordinator.count("a", "c")[-1] == commit(round, ("a", "c"), replayed=("b",))
    past = coordinator.state.past
    assert [*past] == [1, 6, 7]  # of older rounds, what is still needed
    assert set(past[1].expected) == {"b"}
    for _ in range(2):
        next_round(coordinator)
        coordinator.count("a", "b", "c")
    assert 1 not in coordinator.state.past  # b has a newer movement now


def test_late_movement_of_an_old_round_is_late_even_if_replays_have_no_limit() -> None:
    config = replace(CONFIG, rule=Ccfl1(horizon="none"), max_staleness=2, rounds=20)
    coordinator = training("a", "b", config=config)
    sent = coordinator.movement("a")
    coordinator.count("a", "b")
    for _ in range(4):
        next_round(coordinator, "b")
        coordinator.count("a")
    assert 1 in coordinator.state.past
    assert outcome(coordinator.tell(sent)) is Outcome.LATE


# -- who takes part, and when it is over ----------------------------------------------------------


def test_device_that_left_is_not_waited_for_and_is_asked_when_it_is_back() -> None:
    coordinator = Coordinator("a", "b", "c")
    assert coordinator.tell(bid("a"), bid("b")) == []
    coordinator.tell(Left("c"))
    assert coordinator.state.phase is RoundPhase.TRAINING
    assert coordinator.count("a", "b")[-1] == commit(1, ("a", "b"))
    coordinator.tell(Committed(1))
    assert coordinator.state.selected == {"a", "b"}
    said(RoundOpen, coordinator.tell(Joined("c")))
    assert coordinator.state.selected == {"a", "b", "c"}


def test_bid_of_a_device_that_left_still_stands() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(bid("a"), Left("a"))
    coordinator.tell(bid("b"))
    assert set(coordinator.state.assigned) == {"a", "b"}


def test_round_without_anybody_waits_for_its_deadline() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(Left("a"))
    assert coordinator.tell(Left("b")) == []
    assert coordinator.state.phase is RoundPhase.BIDDING
    assert coordinator.run_out() == [commit(1)]


def test_device_that_started_anew_gets_its_assignment_again() -> None:
    coordinator = training("a", "b")
    groups = coordinator.groups["a"]
    (again,) = coordinator.tell(bid("a"))
    assert again == Send("a", Assignment(device="a", round=1, groups=groups))
    coordinator.count("a")
    assert coordinator.tell(bid("a")) == []


SEVERAL = replace(
    CONFIG,
    plan=ModelPlan(
        axes=(Axis("a", (1,) * 4), Axis("b", (1, 1))),
        tensors=(Tensor("w", "float32", (Dim(4, 0), Dim(2, 1))),),
    ),
    masks=make_masks("nested"),
    local_rule=LocalRule(learning_rate=0.1, widths="sandwich"),
)


def assigned(effects: list[Effect]) -> dict[str, Assignment]:
    """The assignments among some effects."""
    sent = [each for each in effects if isinstance(each, Send)]
    return {each.device: each.message for each in sent if isinstance(each.message, Assignment)}


def test_assignment_names_the_narrower_submodels_within_it_largest_first() -> None:
    coordinator = Coordinator("a", "b", config=SEVERAL)
    for name in "cd":
        coordinator.tell(Joined(name))
    offers = {"a": 1.0, "b": 0.6, "c": 0.5, "d": 0.25}
    work = assigned(coordinator.tell(*(bid(name, level) for name, level in offers.items())))
    three, two, one = [{"a": ids, "b": (0,)} for ids in ((0, 1, 2), (0, 1), (0,))]
    assert work["a"].groups == SEVERAL.plan.all_groups()
    assert work["a"].widths == (three, two, one)
    assert work["b"].groups == work["c"].groups == two
    assert work["b"].widths == work["c"].widths == (one,)
    assert (work["d"].groups, work["d"].widths) == (one, ())
    (again,) = assigned(coordinator.tell(bid("b", 0.6))).values()
    assert again == work["b"]


def test_narrower_submodels_are_those_of_the_levels_of_the_run() -> None:
    config = replace(SEVERAL, levels=(1.0, 0.5))
    coordinator = Coordinator("a", "b", config=config)
    work = assigned(coordinator.tell(bid("a", 1.0), bid("b", 0.75)))
    assert work["a"].widths == work["b"].widths == ({"a": (0, 1), "b": (0,)},)
    assert opening_of(config, coordinator.state).levels == (1.0, 0.5)


def test_core_masks_turn_the_narrower_submodels_too() -> None:
    coordinator = Coordinator("a", "b", config=replace(SEVERAL, masks=make_masks("core")))
    seen = []
    for round in (1, 2):
        work = assigned(coordinator.tell(bid("a", 1.0, round), bid("b", 0.5, round)))
        assert work["b"].groups in work["a"].widths
        seen.append(work["b"].groups["a"])
        coordinator.tell(bid("a", None, round), bid("b", None, round), Committed(round))
    assert seen == [(0, 1), (0, 2)]


def test_narrower_submodels_are_named_in_rounds_of_whole_models_too() -> None:
    for rule in (RamFed(warmup_rounds=1), RULES["fedavg"]()):
        coordinator = Coordinator("a", "b", config=replace(SEVERAL, rule=rule))
        work = assigned(coordinator.tell(bid("a", 1.0), bid("b", 0.5)))
        assert {name: len(each.widths) for name, each in work.items()} == {"a": 3}


def test_devices_that_train_their_own_width_hear_of_no_others() -> None:
    own = replace(SEVERAL, local_rule=LocalRule(learning_rate=0.1))
    coordinator = Coordinator("a", "b", config=own)
    work = assigned(coordinator.tell(bid("a", 1.0), bid("b", 0.5)))
    assert {each.widths for each in work.values()} == {()}
    assert opening_of(own, coordinator.state).levels == ()
    assert opening_of(SEVERAL, coordinator.state).levels == (1.0, 0.75, 0.5, 0.25)


@pytest.mark.parametrize(
    "levels", [(), (0.5,), (0.5, 1.0), (1.0, 0.5, 0.5), (1.0, 0.0), (2.0, 1.0), (1.0, np.nan)]
)
def test_levels_that_are_no_falling_shares_of_the_model_are_refused(
    levels: tuple[float, ...],
) -> None:
    with pytest.raises(ConfigError, match="largest first, beginning with 1"):
        replace(CONFIG, levels=levels)


def test_static_masks_whose_levels_do_not_nest_are_refused_with_several_widths() -> None:
    rising, falling = (
        ModelPlan((Axis("a", groups),), (Tensor("w", "float32", (Dim(10, 0),)),))
        for groups in ((1, 3, 6), (6, 3, 1))
    )
    replace(SEVERAL, plan=rising, masks=make_masks("static"))
    replace(SEVERAL, plan=falling)
    with pytest.raises(ConfigError, match="do not ascend in size"):
        replace(SEVERAL, plan=falling, masks=make_masks("static"))


def test_participants_are_picked_and_the_others_are_not_selected() -> None:
    config = replace(CONFIG, select="after", participants=2, over_selection=1.5)
    coordinator = Coordinator("a", "b", config=config)
    for name in "cdef":
        coordinator.tell(Joined(name))
    coordinator.tell(*(bid(name) for name in "abcde"), bid("f", None))
    picked = sorted(coordinator.state.assigned)
    assert len(picked) == 3
    assert coordinator.state.selected == {*picked, "f"}
    first, second, third = picked
    coordinator.count(first)
    closed = coordinator.count(second)[-1]
    assert closed == commit(1, (first, second), silent=tuple(sorted((third, "f"))))


@pytest.mark.parametrize("select", ["before", "after"])
def test_picks_differ_from_round_to_round_but_not_from_run_to_run(select: Selection) -> None:
    def picks() -> list[tuple[str, ...]]:
        config = replace(CONFIG, select=select, participants=1, rounds=12)
        coordinator = Coordinator("a", "b", config=config)
        found = []
        for round in range(1, 12):
            coordinator.tell(bid("a", round=round), bid("b", round=round))
            found.append(tuple(coordinator.state.assigned))
            coordinator.run_out()
            coordinator.tell(Committed(round))
        return found

    assert picks() == picks()
    assert set(picks()) == {("a",), ("b",)}


def test_quorum_closes_the_round_early() -> None:
    coordinator = training("a", "b", "c", "d", config=replace(CONFIG, quorum=0.5))
    coordinator.count("c")
    assert coordinator.count("a")[-1] == commit(1, ("a", "c"), silent=("b", "d"))


def test_round_with_too_few_offers_is_void_and_does_not_count() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, min_participants=2, rounds=1))
    assert coordinator.tell(bid("a"), bid("b", None)) == []
    assert said(RoundOpen, coordinator.run_out()).round == 2
    coordinator.tell(bid("a", round=2), bid("b", round=2))
    coordinator.count("a", "b")
    coordinator.tell(Committed(2))
    assert coordinator.state.phase is RoundPhase.FINISHED


def test_round_that_everybody_left_stays_open_for_whoever_comes() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, min_participants=1))
    coordinator.tell(Left("a"), Left("b"))
    assert coordinator.run_out() == []
    assert (coordinator.state.round, coordinator.state.void) == (1, 0)
    assert coordinator.run_out() == []
    coordinator.tell(Joined("b"))
    assert coordinator.state.deadline == coordinator.now + CONFIG.bid_s
    coordinator.tell(bid("b"))
    assert coordinator.state.phase is RoundPhase.TRAINING
    assert coordinator.state.assigned.keys() == {"b"}


def test_round_that_somebody_came_back_to_is_void_when_nobody_offers() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, min_participants=1))
    coordinator.tell(Left("a"), Left("b"))
    coordinator.run_out()
    coordinator.tell(Joined("a"))
    coordinator.run_out()
    assert (coordinator.state.phase, coordinator.state.void) == (RoundPhase.WAITING, 1)
    coordinator.tell(Joined("b"))
    assert (coordinator.state.round, coordinator.state.void) == (2, 1)


def test_every_round_waits_for_the_least_number_of_devices() -> None:
    coordinator = Coordinator("a", "b", "c", config=replace(CONFIG, rounds=9))
    coordinator.tell(*(bid(name, None) for name in "abc"), Left("b"))
    assert coordinator.tell(Committed(1))[1:] != []  # two are enough
    coordinator.tell(bid("a", None, 2), bid("c", None, 2), Left("c"))
    (closed,) = coordinator.tell(Committed(2))
    assert closed == Broadcast(RoundClosed(round=2))
    state = coordinator.state
    assert (state.phase, state.deadline, state.round) == (RoundPhase.WAITING, None, 2)
    assert coordinator.tell(Left("a"), Joined("a"), bid("a", 1.0, 2)) == []
    (opened,) = coordinator.tell(Joined("c"))
    assert isinstance(opened, Broadcast)
    assert opened.message.round == 3
    assert set(coordinator.state.selected) == {"a", "c"}


@pytest.mark.parametrize(
    ("options", "accuracies", "rounds"),
    [
        ({"target_accuracy": 0.9}, [0.5, 0.89, 0.9], 3),
        ({"patience": 2}, [0.5, 0.6, 0.6, 0.55], 4),
        ({"patience": 1}, [None, None, None], None),
        ({"target_accuracy": 0.9, "patience": 3}, [0.5, 0.4, 0.3], None),
    ],
)
def test_run_stops_when_it_is_good_enough_or_stuck(
    options: dict[str, Any], accuracies: list[float | None], rounds: int | None
) -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, rounds=99, **options))
    for round, accuracy in enumerate(accuracies, start=1):
        assert coordinator.state.phase is RoundPhase.BIDDING
        coordinator.tell(bid("a", None, round), bid("b", None, round))
        coordinator.tell(Committed(round, accuracy=accuracy))
    over = coordinator.state.phase is RoundPhase.FINISHED
    assert over == (rounds is not None)


def test_void_rounds_try_nobodys_patience() -> None:
    config = replace(CONFIG, rounds=99, patience=2, min_participants=1)
    coordinator = Coordinator("a", "b", config=config)

    def commit_next(accuracy: float) -> RoundPhase:
        round = coordinator.state.round
        coordinator.tell(bid("a", round=round), bid("b", None, round))
        coordinator.count("a")
        coordinator.tell(Committed(round, accuracy=accuracy))
        return coordinator.state.phase

    for accuracy in (0.5, 0.4):
        for _ in range(3):
            coordinator.run_out()
        assert commit_next(accuracy) is RoundPhase.BIDDING
    assert commit_next(0.4) is RoundPhase.FINISHED


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"steps": 0},
        {"batch_size": 0},
        {"min_devices": 0},
        {"max_staleness": 0},
        {"bid_s": 0},
        {"train_deadline_s": 0},
        {"rms_limit": 0},
        {"participants": 0},
        {"patience": 0},
        {"quorum": 0},
        {"quorum": 1.1},
        {"over_selection": 0.5, "participants": 3},
        {"over_selection": 2.0},
        {"min_participants": -1},
        {"target_accuracy": 1.5},
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        replace(CONFIG, **options)


# -- devices that left while training ------------------------------------------------------------


def test_devices_that_left_are_waited_for_a_little_once_the_others_have_answered() -> None:
    coordinator = training("a", "b", "c")
    coordinator.now = 20.0
    coordinator.tell(Left("b"))
    assert coordinator.state.deadline == 100  # a and c may still need all the time there is
    coordinator.count("a")
    coordinator.now = 30.0
    coordinator.count("c")
    assert coordinator.state.deadline == 40
    coordinator.now = 39.0
    assert coordinator.tell(Tick()) == []
    coordinator.now = 40.0
    assert coordinator.tell(Tick()) == [commit(1, ("a", "c"), silent=("b",))]


def test_device_that_is_back_has_all_the_time_there_was() -> None:
    coordinator = training("a", "b")
    coordinator.count("a")
    coordinator.now = 50.0
    coordinator.tell(Left("b"))
    assert coordinator.state.deadline == 60
    coordinator.now = 55.0
    coordinator.tell(Joined("b"))
    assert coordinator.state.deadline == 100
    coordinator.now = 95.0
    coordinator.tell(Left("b"))
    assert coordinator.state.deadline == 100  # never beyond the round's own
    assert coordinator.count("b")[-1] == commit(1, ("a", "b"))


def test_wait_for_the_absent_begins_once() -> None:
    coordinator = training("a", "b", "c")
    coordinator.count("a")
    coordinator.tell(Left("b"), Left("c"))
    assert coordinator.state.deadline == 10
    coordinator.now = 6.0
    coordinator.tell(Left("b"), bid("z"), Tick())
    assert coordinator.state.deadline == 10


def test_device_that_left_before_its_assignment_is_waited_for_a_little() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(bid("a"), Left("a"), bid("b"))
    assert set(coordinator.state.assigned) == {"a", "b"}
    coordinator.count("b")
    assert coordinator.state.deadline == 10


def test_movement_that_is_being_stored_is_waited_for_whoever_left() -> None:
    coordinator = training("a", "b")
    coordinator.count("a")
    coordinator.tell(coordinator.movement("b"), Left("b"))
    assert coordinator.state.deadline == 100
    assert coordinator.tell(Kept("b", 1))[-1] == commit(1, ("a", "b"))


def test_next_round_knows_nothing_of_who_left_in_the_last() -> None:
    coordinator = training("a", "b")
    coordinator.tell(Left("b"))
    coordinator.count("a")
    coordinator.now = 10.0
    coordinator.tell(Tick(), Committed(1), Joined("b"))
    assert coordinator.state.away == frozenset()
    coordinator.tell(bid("a", round=2), bid("b", round=2))
    assert coordinator.state.deadline == 110
