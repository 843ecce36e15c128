"""The asynchronous machine: its table, versions and ages, and what devices get told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.aggregate.rules import ASYNC_RULES
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.events import Accept, Joined, Keep, Kept, Send, Tick
from coordinator.rounds.fragments import (
    Apply,
    Effect,
    Evaluated,
    Event,
    FragmentsConfig,
    FragmentsState,
    Release,
    Reserve,
    Stage,
    handle,
    start,
)
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.unit.coordinator.rounds.driven import Driven, offer, outcome, said

PLAN = ModelPlan(
    axes=(Axis("a", (1, 1, 1)),),
    tensors=(Tensor("w", "float32", (Dim(3, 0), Dim(2))), Tensor("bias", "float32", (Dim(2),))),
)
CONFIG = FragmentsConfig(
    plan=PLAN,
    rule=ASYNC_RULES["fed-raa"](),
    masks=make_masks("gre-raa"),
    local_rule=LocalRule(learning_rate=0.1),
    updates=100,
    steps=1,
    batch_size=1,
    min_devices=2,
    seed=5,
    bid_s=10,
    train_deadline_s=100,
    rest_s=30,
)


class Coordinator(Driven[FragmentsConfig, FragmentsState, Event, Effect]):
    def __init__(self, *devices: str, config: FragmentsConfig = CONFIG) -> None:
        super().__init__(config, start(config), handle, devices)

    def round(self, device: str) -> int:
        return self.state.work[device].round

    def bid(self, device: str, level: float | None = 1.0) -> list[Effect]:
        return self.tell(Bid(device=device, round=self.round(device), level=level, reason="so"))

    def movement(self, device: str, **changes: Any) -> Movement:
        return self.movement_of(device, 1.0, **{"round": self.round(device), **changes})

    def update(self, device: str) -> list[Effect]:
        """The device's movement comes and is stored."""
        return self.tell(self.movement(device), Kept(device, self.round(device)))


def opened(effect: Effect) -> tuple[str, int]:
    assert isinstance(effect, Send)
    return effect.device, said(RoundOpen, [effect]).round


def test_run_begins_when_enough_devices_are_there_and_newcomers_join_in() -> None:
    coordinator = Coordinator("b")
    assert coordinator.state.work == {}
    assert [opened(effect) for effect in coordinator.tell(Joined("a"))] == [("a", 1), ("b", 2)]
    assert [opened(effect) for effect in coordinator.tell(Joined("c"))] == [("c", 3)]
    assert coordinator.tell(Joined("c")) == []


def test_offer_gets_a_fragment_that_is_reserved_first() -> None:
    coordinator = Coordinator("a", "b")
    reserve, send = coordinator.bid("a", 0.4)
    assert isinstance(reserve, Reserve)
    assert isinstance(send, Send)
    assert send.message == Assignment(device="a", round=1, groups=reserve.groups)
    assert len(reserve.groups["a"]) == 1


def test_every_update_is_a_version_receipted_and_followed_by_the_next_opening() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    coordinator.bid("b")
    for _ in range(3):
        round = coordinator.round("b")
        apply, receipt, again = coordinator.update("b")
        assert apply == Apply("b", round)
        assert outcome([receipt]) is Outcome.COUNTED
        assert opened(again)[0] == "b"
        coordinator.bid("b")
    coordinator.update("a")
    assert coordinator.state.version == 4


def test_rounds_of_each_device_go_forward() -> None:
    coordinator = Coordinator("a", "b")
    seen: dict[str, list[int]] = {"a": [1], "b": [2]}
    for name in "abbaab":
        coordinator.bid(name)
        seen[name].append(opened(coordinator.update(name)[-1])[1])
    assert all(rounds == sorted(set(rounds)) for rounds in seen.values())


def test_fragments_are_dealt_to_the_least_updated() -> None:
    coordinator = Coordinator("a", "b")
    for _ in range(9):
        coordinator.bid("a")
        coordinator.update("a")
    # Block 3, the bias, is in every fragment.
    assert coordinator.state.fleet.times_covered.tolist() == [3, 3, 3, 9]


def test_fragments_under_way_count_as_updated_when_the_next_is_dealt() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, min_devices=1))
    coordinator.tell(Joined("c"))
    for name in "abc":
        coordinator.bid(name)
    assert sorted(groups["a"] for groups in coordinator.groups.values()) == [(0,), (1,), (2,)]


def test_skip_rests_and_is_asked_again() -> None:
    coordinator = Coordinator("a", "b")
    assert coordinator.bid("a", None) == []
    coordinator.now = 10.0
    assert [opened(effect)[0] for effect in coordinator.tell(Tick())] == ["b"]
    assert coordinator.state.work["a"].stage is Stage.RESTING
    assert coordinator.state.deadline == 20.0
    coordinator.now = 30.0
    assert {opened(effect)[0] for effect in coordinator.tell(Tick())} == {"a", "b"}


def test_withdrawn_and_overdue_work_is_released() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    assert coordinator.bid("a", None) == [Release("a", 1)]
    coordinator.bid("b")
    late = coordinator.movement("b")
    coordinator.now = 100.0
    effects = coordinator.tell(Tick())
    assert Release("b", 2) in effects
    assert outcome(coordinator.tell(late)) is Outcome.LATE


def test_movement_that_does_not_fit_is_rejected_and_its_device_rests() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    release, receipt = coordinator.tell(coordinator.movement("a", payload=b"garbage"))
    assert release == Release("a", 1)
    assert outcome([receipt]) is Outcome.REJECTED
    assert coordinator.state.work["a"].stage is Stage.RESTING
    assert coordinator.state.version == 0


def test_device_that_started_anew_gets_its_assignment_again() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    (again,) = coordinator.bid("a")
    groups = coordinator.groups["a"]
    assert again == Send("a", Assignment(device="a", round=1, groups=groups))


def test_offer_is_accepted_while_it_is_awaited_and_else_answered() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    wanted, early = offer("a", 1), offer("b", 2)
    assert coordinator.tell(wanted) == [Accept(wanted)]
    assert outcome(coordinator.tell(early)) is Outcome.LATE
    assert outcome(coordinator.tell(offer("a", 1, answers=2))) is Outcome.REJECTED
    coordinator.update("a")
    assert outcome(coordinator.tell(wanted)) is Outcome.COUNTED


def test_deadline_is_the_earliest_that_holds_however_often_devices_go_on() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    for _ in range(100):
        coordinator.now += 1.0
        coordinator.update("a")
        assert coordinator.state.deadline == min(
            work.deadline for work in coordinator.state.work.values()
        )
        if coordinator.now == 50.0:
            coordinator.tell(Tick())
        if coordinator.now < 90.0:
            coordinator.bid("a")
        else:
            break
    assert coordinator.state.agenda_size <= 2 * len(coordinator.state.work) + 16


def test_second_copy_counts_once() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    movement = coordinator.movement("a")
    (keep,) = coordinator.tell(movement)
    assert isinstance(keep, Keep)
    assert coordinator.tell(movement) == []
    coordinator.tell(Kept("a", 1))
    (receipt,) = coordinator.tell(movement)
    assert outcome([receipt]) is Outcome.COUNTED
    assert coordinator.state.version == 1


def test_run_ends_after_its_updates() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, updates=1))
    coordinator.bid("a")
    coordinator.bid("b")
    unfinished = coordinator.movement("b")
    *_, release, closed = coordinator.update("a")
    assert release == Release("b", 2)
    assert closed == Send("b", RoundClosed(round=2))
    assert coordinator.state.finished
    assert coordinator.state.deadline is None
    assert outcome(coordinator.tell(unfinished)) is Outcome.LATE
    assert outcome(coordinator.tell(Kept("b", 2))) is Outcome.LATE
    assert coordinator.tell(Joined("c")) == []


def updates(coordinator: Coordinator, number: int) -> None:
    for _ in range(number):
        coordinator.bid("a")
        coordinator.update("a")


def test_accuracy_ends_the_run_for_every_device() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, target_accuracy=0.9))
    coordinator.bid("b")
    updates(coordinator, 2)
    assert coordinator.tell(Evaluated(0.89, 2)) == []
    assert coordinator.tell(Evaluated(None, 2)) == []
    updates(coordinator, 2)
    effects = coordinator.tell(Evaluated(0.9, 2))
    assert effects == [
        Send("a", RoundClosed(round=coordinator.state.openings)),
        Release("b", 2),
        Send("b", RoundClosed(round=2)),
    ]
    assert coordinator.state.finished
    assert (coordinator.state.best, coordinator.state.deadline) == ((0.9, 4), None)
    assert coordinator.tell(Evaluated(0.95, 2)) == []
    assert coordinator.tell(Joined("c")) == []


def test_patience_counts_reports_without_a_better_model() -> None:
    coordinator = Coordinator("a", "b", config=replace(CONFIG, patience=2))
    ended = []
    for accuracy in (None, 0.5, 0.6, 0.6, 0.55):
        updates(coordinator, 3)
        ended.append(bool(coordinator.tell(Evaluated(accuracy, 3))))
    assert ended == [False, False, False, False, True]
    assert coordinator.state.best == (0.6, 9)


@pytest.mark.parametrize(
    ("rule", "whole"), [("fedasync", True), ("fed-raa", False), ("fedbuff", True)]
)
def test_devices_are_told_whether_only_the_whole_model_is_of_use(rule: str, whole: bool) -> None:
    masks = make_masks("random") if whole else CONFIG.masks
    config = replace(CONFIG, rule=ASYNC_RULES[rule](), masks=masks)
    coordinator = Coordinator("a", config=config)
    asked = coordinator.tell(Joined("b"))
    coordinator.bid("b", None)
    coordinator.now = 1e6  # its rest is over, and so is a's time to bid
    asked += coordinator.tell(Tick())
    assert len(asked) == 4
    for effect in asked:
        assert said(RoundOpen, [effect]).whole is whole


def test_whole_model_rule_takes_lower_offers_as_skips() -> None:
    whole = replace(CONFIG, rule=ASYNC_RULES["fedasync"](), masks=make_masks("random"))
    coordinator = Coordinator("a", "b", config=whole)
    assert coordinator.bid("a", 0.5) == []
    assert coordinator.state.work["a"].stage is Stage.RESTING
    reserve, _ = coordinator.bid("b", 1.0)
    assert isinstance(reserve, Reserve)
    assert dict(reserve.groups) == PLAN.all_groups()


def test_replay_is_rejected() -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    replay = Replay(round=9, movement=coordinator.movement("a"))
    assert outcome(coordinator.tell(replay)) is Outcome.REJECTED


@pytest.mark.parametrize("event", [Kept("a", 1), Kept("stranger", 1), Kept("a", 7)])
def test_kept_at_the_wrong_time_raises_and_changes_nothing(event: Event) -> None:
    coordinator = Coordinator("a", "b")
    coordinator.bid("a")
    before = coordinator.state
    with pytest.raises(StateError):
        coordinator.tell(event)
    assert coordinator.state == before


@pytest.mark.parametrize(
    "bid",
    [
        Bid(device="stranger", round=1, level=1.0, reason="so"),
        Bid(device="a", round=9, level=1.0, reason="so"),
    ],
)
def test_untimely_bid_changes_nothing(bid: Bid) -> None:
    coordinator = Coordinator("a", "b")
    before = coordinator.state
    assert coordinator.tell(bid) == []
    assert coordinator.state == before


@pytest.mark.parametrize("name", ["updates", "rest_s", "min_devices"])
def test_run_of_nothing_is_refused(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=name):
        replace(CONFIG, **nothing)
