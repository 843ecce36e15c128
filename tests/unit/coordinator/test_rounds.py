"""The coordinator's state machine: its table, deadlines, and what devices get told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.errors import ConfigError
from coordinator.masks import MASKS
from coordinator.rounds import (
    Broadcast,
    Commit,
    Committed,
    Effect,
    Event,
    Joined,
    Keep,
    Kept,
    Phase,
    RoundsConfig,
    RoundsState,
    Send,
    Tick,
    handle,
)
from edge_sdk.protocol.blocks import Blocks
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.messages import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.protocol.specs import Axis, Buffer, Dim, Tensor

PLAN = ModelPlan(
    axes=(Axis("a", (2, 2)), Axis("b", (1, 1, 1))),
    tensors=(
        Tensor("w", "float32", (Dim(4, 0), Dim(3, 1))),
        Tensor("bias", "float32", (Dim(4, 0),)),
    ),
    buffers=(Buffer("mean", "float32", (Dim(4, 0),), statistic=True),),
)
CONFIG = RoundsConfig(
    plan=PLAN,
    masks=MASKS["random"],
    rule=LocalRule(learning_rate=0.1),
    rounds=2,
    steps=3,
    batch_size=4,
    min_devices=2,
    seed=5,
    bid_s=10,
    train_s=100,
)


class Coordinator:
    """The machine with a clock that the test turns."""

    def __init__(self, *devices: str) -> None:
        self.state = RoundsState()
        self.now = 0.0
        self.groups: dict[str, Mapping[str, tuple[int, ...]]] = {}
        for device in devices:
            self.tell(Joined(device))

    def tell(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            self.state, effects = handle(CONFIG, self.state, event, self.now)
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.message, Assignment):
                    self.groups[effect.device] = effect.message.groups
        return effects

    def movement(self, name: str, **changes: Any) -> Movement:
        groups = self.groups[name]
        ids = PLAN.block_ids(PLAN.choose(groups))
        values = np.ones(int(PLAN.block_sizes[ids].sum()), dtype=np.float32)
        width = sum(PLAN.axes[0].groups[g] for g in groups["a"])
        whole = Movement(
            device=name,
            round=1,
            plan_hash=PLAN.hash,
            groups=groups,
            blocks=Blocks(ids, values),
            statistics={"mean": np.zeros(width, dtype=np.float32)},
            learning_rate=0.1,
            samples=1,
            loss=1.0,
            train_s=1.0,
        )
        return replace(whole, **changes)


def bid(device: str, level: float | None = 0.5, round: int = 1) -> Bid:
    return Bid(device=device, round=round, level=level, reason="because")


def training(*devices: str) -> Coordinator:
    coordinator = Coordinator(*devices)
    coordinator.tell(*(bid(device) for device in devices))
    assert coordinator.state.phase is Phase.TRAINING
    return coordinator


def outcome(effects: list[Effect]) -> tuple[Outcome, str]:
    (effect,) = effects
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Receipt)
    return effect.message.outcome, effect.message.reason


def test_first_round_opens_when_enough_devices_are_there() -> None:
    coordinator = Coordinator("a")
    assert coordinator.state.phase is Phase.WAITING
    (effect,) = coordinator.tell(Joined("b"))
    assert isinstance(effect, Broadcast)
    assert isinstance(effect.message, RoundOpen)
    assert (effect.message.round, effect.message.plan_hash) == (1, PLAN.hash)


def test_newcomer_during_bidding_is_told_and_waited_for() -> None:
    coordinator = Coordinator("a", "b")
    (effect,) = coordinator.tell(Joined("c"))
    assert isinstance(effect, Send)
    assert isinstance(effect.message, RoundOpen)
    assert coordinator.tell(bid("a"), bid("b")) == []
    coordinator.tell(bid("c"))
    assert coordinator.state.phase is Phase.TRAINING
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
    assert coordinator.tell(bid("a", None), bid("b", None)) == [Commit(1, ())]


def test_round_runs_to_the_next_and_to_the_end() -> None:
    coordinator = training("b", "a")
    for device in ("b", "a"):
        movement = coordinator.movement(device)
        assert coordinator.tell(movement) == [Keep(movement)]
        effects = coordinator.tell(Kept(device, 1))
        receipt = Receipt(device=device, round=1, outcome=Outcome.COUNTED)
        assert effects[0] == Send(device, receipt)
    assert effects[1:] == [Commit(1, ("a", "b"))]
    closed, opened = coordinator.tell(Committed(1))
    assert closed == Broadcast(RoundClosed(round=1))
    assert isinstance(opened, Broadcast)
    assert opened.message.round == 2
    coordinator.tell(bid("a", None, 2), bid("b", None, 2))
    assert coordinator.tell(Committed(2)) == [Broadcast(RoundClosed(round=2))]
    assert coordinator.state.phase is Phase.FINISHED


def test_silent_devices_are_not_waited_for_beyond_the_deadlines() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(bid("a"))
    coordinator.now = 9.9
    assert coordinator.tell(Tick()) == []
    coordinator.now = 10.0
    coordinator.tell(Tick())
    assert coordinator.state.phase is Phase.TRAINING
    assert set(coordinator.state.assigned) == {"a"}
    coordinator.now = 109.9
    assert coordinator.tell(Tick()) == []
    coordinator.now = 110.0
    assert coordinator.tell(Tick()) == [Commit(1, ())]


def test_withdrawn_offer_is_not_waited_for() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"), Kept("a", 1))
    assert coordinator.tell(bid("b", None)) == [Commit(1, ("a",))]
    assert coordinator.state.bids["b"].level is None


def test_second_copy_gets_the_same_receipt_and_counts_once() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"), Kept("a", 1))
    assert outcome(coordinator.tell(coordinator.movement("a")))[0] is Outcome.COUNTED
    assert coordinator.state.counted == {"a"}


def test_movement_after_the_close_is_late() -> None:
    coordinator = training("a", "b")
    late = coordinator.movement("b")
    coordinator.tell(coordinator.movement("a"), Kept("a", 1))
    coordinator.now = 1000.0
    coordinator.tell(Tick())
    got, reason = outcome(coordinator.tell(late))
    assert (got, "round 1 is closed" in reason) == (Outcome.LATE, True)
    coordinator.tell(Committed(1))
    assert outcome(coordinator.tell(late))[0] is Outcome.LATE


def test_movement_kept_after_the_deadline_is_late() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"))
    coordinator.now = 1000.0
    assert coordinator.tell(Tick()) == [Commit(1, ())]
    assert outcome(coordinator.tell(Kept("a", 1)))[0] is Outcome.LATE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"plan_hash": "f" * 64}, "plan ffffffffffff"),
        ({"round": 7}, "has not begun"),
        ({"device": "stranger"}, "no groups were assigned"),
        ({"groups": PLAN.all_groups()}, "other groups"),
        ({"blocks": Blocks(np.arange(1), np.ones(1, dtype=np.float32))}, "block"),
        ({"statistics": {}}, "missing"),
    ],
)
def test_movement_that_does_not_fit_is_rejected_with_the_reason(
    changes: dict[str, Any], says: str
) -> None:
    coordinator = training("a", "b")
    got, reason = outcome(coordinator.tell(coordinator.movement("a", **changes)))
    assert got is Outcome.REJECTED
    assert says in reason
    assert not coordinator.state.counted | coordinator.state.keeping


def test_rejected_movement_is_not_waited_for_and_shows_as_a_skip() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("b"), Kept("b", 1))
    _, commit = coordinator.tell(coordinator.movement("a", statistics={}))
    assert commit == Commit(1, ("b",))
    skip = coordinator.state.bids["a"]
    assert skip.level is None
    assert "rejected" in skip.reason


def test_groups_may_come_as_lists_in_any_order() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.tell(bid("a", 1.0), bid("b", 1.0))
    lists = {axis: list(reversed(groups)) for axis, groups in coordinator.groups["a"].items()}
    movement = coordinator.movement("a", groups=lists)
    assert coordinator.tell(movement) == [Keep(movement)]


def test_copy_that_comes_while_the_first_is_stored_is_ignored() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"))
    assert coordinator.tell(coordinator.movement("a")) == []
    assert outcome(coordinator.tell(Kept("a", 1)))[0] is Outcome.COUNTED


def test_movement_stored_after_its_device_withdrew_is_late() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"), bid("a", None))
    assert outcome(coordinator.tell(Kept("a", 1)))[0] is Outcome.LATE
    assert coordinator.state.counted == frozenset()


def test_movement_stored_when_the_next_round_is_open_is_late() -> None:
    coordinator = training("a", "b")
    coordinator.tell(coordinator.movement("a"))
    coordinator.now = 1000.0
    coordinator.tell(Tick(), Committed(1))
    assert coordinator.state.round == 2
    assert outcome(coordinator.tell(Kept("a", 1)))[0] is Outcome.LATE


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.CLOSING, Phase.FINISHED])
def test_tick_without_a_deadline_does_nothing(phase: Phase) -> None:
    state = RoundsState(phase=phase, round=1)
    assert handle(CONFIG, state, Tick(), 1e9) == (state, [])


@pytest.mark.parametrize(
    "name", ["rounds", "steps", "batch_size", "min_devices", "bid_s", "train_s"]
)
def test_run_of_nothing_is_refused(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=name):
        replace(CONFIG, **nothing)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_movement_that_is_not_finite_is_rejected(value: float) -> None:
    coordinator = training("a", "b")
    movement = coordinator.movement("a")
    movement.blocks.values[-1] = value
    got, reason = outcome(coordinator.tell(movement))
    assert (got, "not finite" in reason) == (Outcome.REJECTED, True)


@pytest.mark.parametrize("event", [bid("a", round=2), bid("stranger"), Tick()])
def test_untimely_word_changes_nothing(event: Event) -> None:
    coordinator = training("a", "b")
    before = coordinator.state
    assert coordinator.tell(event) == []
    assert coordinator.state == before


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (Phase.BIDDING, Kept("a", 2)),
        (Phase.BIDDING, Kept("a", 0)),
        (Phase.BIDDING, Committed(1)),
        (Phase.TRAINING, Committed(1)),
        (Phase.TRAINING, Kept("stranger", 1)),
        (Phase.TRAINING, Kept("a", 2)),
    ],
)
def test_local_event_at_the_wrong_time_raises_and_changes_nothing(
    phase: Phase, event: Event
) -> None:
    coordinator = training("a", "b") if phase is Phase.TRAINING else Coordinator("a", "b")
    before = coordinator.state
    with pytest.raises(StateError):
        coordinator.tell(event)
    assert coordinator.state == before
