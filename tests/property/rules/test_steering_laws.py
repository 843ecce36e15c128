"""Laws of a run that operators hold, let go and bar devices from, at any moment and repeatedly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.aggregate.rules import ASYNC_RULES, RULES
from coordinator.masks import make_masks
from coordinator.rounds import fragments, synchronous
from coordinator.rounds.events import (
    Barred,
    Broadcast,
    Joined,
    Keep,
    Kept,
    Left,
    Released,
    RoundsHeld,
    Send,
    Tick,
)
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState, Stage
from coordinator.rounds.reputation import declines
from coordinator.rounds.state import RoundPhase, RoundsConfig, RoundsState
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Bid, RoundOpen
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.messages import make_movement

PLAN = ModelPlan(axes=(Axis("a", (1, 1)),), tensors=(Tensor("w", "float32", (Dim(2, 0), Dim(2))),))
COMMON: dict[str, Any] = {
    "plan": PLAN,
    "local_rule": LocalRule(learning_rate=0.1),
    "steps": 1,
    "batch_size": 1,
    "min_devices": 2,
    "seed": 5,
    "bid_s": 10.0,
    "train_deadline_s": 100.0,
}
ROUNDS = RoundsConfig(
    **COMMON, rule=RULES["ra-fed"](), masks=make_masks("random"), rounds=10**6, quorum=1.0
)
UPDATES = FragmentsConfig(
    **COMMON, rule=ASYNC_RULES["fed-raa"](), masks=make_masks("gre-raa"), updates=10**6
)
NAMES = st.sampled_from("abc")
LONGEST_S = 300.0
"""Seconds in which an open round, or the work of a device, ends by itself."""


def opened(effect: object) -> int:
    """The number of the round that is opened to somebody; 0: none is."""
    if isinstance(effect, Broadcast | Send) and isinstance(effect.message, RoundOpen):
        return effect.message.round
    return 0


class Steered(RuleBasedStateMachine):
    """What both machines have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.state: Any = None

    def step(self, event: object) -> list[Any]:
        raise NotImplementedError

    def tell(self, event: object) -> None:
        pending = [event]
        while pending:
            held, newest = self.state.held, self.newest()
            happened = pending.pop(0)
            for effect in self.step(happened):
                lets_go = isinstance(happened, RoundsHeld)
                assert opened(effect) <= newest or lets_go or not held
                if isinstance(effect, Keep):
                    pending.append(Kept(effect.arrival.contribution.device, effect.round))

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.tell(Joined(name))

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.tell(Left(name))

    @rule()
    def everybody_leaves(self) -> None:
        for name in "abc":
            self.tell(Left(name))

    @rule()
    def everybody_bids(self) -> None:
        for name in "abc":
            self.bid(name, 1.0)

    def bid(self, name: str, level: float | None) -> None:
        raise NotImplementedError

    @rule(seconds=st.sampled_from([0.0, 1.0, 11.0, 101.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.tell(RoundsHeld(held))
        before = self.state
        self.tell(RoundsHeld(held))  # once more changes nothing
        assert self.state == before

    @rule(name=NAMES)
    def bar(self, name: str) -> None:
        self.tell(Barred(name, "so (anna)", 1))
        before = self.state.fleet.standings
        self.tell(Barred(name, "so (anna)", 1))
        assert self.state.fleet.standings == before

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.tell(Released(name))

    @rule()
    def come_to_rest(self) -> None:
        """A run that is held comes to rest by itself, without devices, and goes on after it."""
        self.tell(RoundsHeld(True))
        for _ in range(4):
            if self.state.deadline is not None:
                self.now = max(self.now, self.state.deadline)
            self.tell(Tick())
        assert self.resting()
        rested = self.state
        self.now += LONGEST_S
        self.tell(Tick())
        assert self.state == rested

    def resting(self) -> bool:
        raise NotImplementedError

    def newest(self) -> int:
        """The number of the newest opening."""
        raise NotImplementedError


class SteeredRounds(Steered):
    """The machine of rounds; a commit takes a moment, in which anything may come."""

    @initialize()
    def begin(self) -> None:
        self.state: RoundsState = synchronous.start(ROUNDS)
        self.join("a")
        self.join("b")

    def step(self, event: Any) -> list[Any]:
        self.state, effects = synchronous.handle(ROUNDS, self.state, event, self.now)
        return effects

    @rule(name=NAMES, level=st.sampled_from([1.0, 0.5, None]))
    def one_bids(self, name: str, level: float | None) -> None:
        self.bid(name, level)

    def bid(self, name: str, level: float | None) -> None:
        self.tell(Bid(device=name, round=self.state.round, level=level, reason="so", samples=1))

    @rule(name=NAMES)
    def send(self, name: str) -> None:
        state = self.state
        groups = state.assigned.get(name) or {"a": (0, 1)}
        self.tell(make_movement(PLAN, groups, 1.0, device=name, round=max(1, state.round)))

    @rule()
    def commit(self) -> None:
        if self.state.phase is RoundPhase.CLOSING:
            self.tell(synchronous.Committed(self.state.round))
        else:
            before = self.state
            with pytest.raises(StateError):
                self.tell(synchronous.Committed(self.state.round))
            assert self.state == before

    def newest(self) -> int:
        return self.state.round

    def resting(self) -> bool:
        if self.state.phase is RoundPhase.CLOSING:
            self.tell(synchronous.Committed(self.state.round))
        return self.state.phase is RoundPhase.WAITING and self.state.deadline is None

    @invariant()
    def barred_devices_owe_nothing(self) -> None:
        state = self.state
        if state is None or state.phase not in (RoundPhase.BIDDING, RoundPhase.TRAINING):
            return
        for name in "abc":
            if declines(state.fleet.standings, name):
                assert name not in state.assigned or name in state.kept
                assert state.phase is not RoundPhase.BIDDING or name not in state.bids

    @invariant()
    def nobody_waits_for_a_round_that_could_open(self) -> None:
        state = self.state
        if state is None or state.phase is not RoundPhase.WAITING or state.held:
            return
        free = [name for name in state.present if not declines(state.fleet.standings, name)]
        assert not free or len(state.present) < ROUNDS.min_devices


class SteeredFragments(Steered):
    """The asynchronous machine."""

    @initialize()
    def begin(self) -> None:
        self.state: FragmentsState = fragments.start(UPDATES)
        self.join("a")
        self.join("b")

    def step(self, event: Any) -> list[Any]:
        self.state, effects = fragments.handle(UPDATES, self.state, event, self.now)
        return effects

    @rule(name=NAMES, level=st.sampled_from([1.0, 0.5, None]))
    def one_bids(self, name: str, level: float | None) -> None:
        self.bid(name, level)

    def bid(self, name: str, level: float | None) -> None:
        work = self.state.work.get(name)
        round = 1 if work is None else work.round
        self.tell(Bid(device=name, round=round, level=level, reason="so", samples=1))

    @rule(name=NAMES)
    def send(self, name: str) -> None:
        work = self.state.work.get(name)
        groups = {"a": (0, 1)} if work is None or work.groups is None else work.groups
        round = 1 if work is None else work.round
        self.tell(make_movement(PLAN, groups, 1.0, device=name, round=round))

    def newest(self) -> int:
        return self.state.openings

    def resting(self) -> bool:
        return self.state.idle

    @invariant()
    def fragments_are_held_by_those_who_train(self) -> None:
        state = self.state
        if state is None or state.under_way is None:
            return
        training = [
            work.groups
            for work in state.work.values()
            if work.stage in (Stage.TRAINING, Stage.KEEPING) and work.groups is not None
        ]
        assert (state.under_way == PLAN.coverage(training)).all()

    @invariant()
    def barred_devices_do_not_train(self) -> None:
        for name, work in () if self.state is None else self.state.work.items():
            if declines(self.state.fleet.standings, name):
                assert work.stage is not Stage.TRAINING

    @invariant()
    def everybody_has_work_unless_the_run_is_held(self) -> None:
        state = self.state
        if state is not None and state.running and not state.held:
            assert set(state.work) == set(state.devices)


TestSteeredRounds = SteeredRounds.TestCase
TestSteeredFragments = SteeredFragments.TestCase
TestSteeredRounds.settings = TestSteeredFragments.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
