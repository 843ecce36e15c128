"""Synchronous rounds as a state machine without I/O.

    phase     event                          next      effects
    --------  -----------------------------  --------  -------------------------------------------
    WAITING   Joined, enough devices         BIDDING   Broadcast(RoundOpen)
    BIDDING   Joined                         BIDDING   Send(RoundOpen) to the newcomer
    BIDDING   last Bid, or the deadline      TRAINING  Send(Assignment) to all who offered a level
                                             CLOSING   Commit, if nobody did
    TRAINING  Movement that fits             TRAINING  Keep
    TRAINING  Kept                           TRAINING  Send(Receipt: counted)
    TRAINING  Movement that does not fit     TRAINING  Send(Receipt: rejected); no longer waited for
    TRAINING  Bid (skip): withdrawn          TRAINING  –
    TRAINING  last of them, or the deadline  CLOSING   Commit
    CLOSING   Committed                      BIDDING   Broadcast(RoundClosed), Broadcast(RoundOpen)
                                             FINISHED  Broadcast(RoundClosed), after the last round
    other     Movement that does not fit     same      Send(Receipt: rejected, with the reason)
    any       Movement of a round now closed same      Send(Receipt: late)
    any       Kept, too late to count        same      Send(Receipt: late)

Rules:
- What a device sends at the wrong time is ignored or receipted, never an error; a local event at
  the wrong time (`Kept`, `Committed`) raises `StateError` and changes nothing.
- A movement counts once: while the first copy is being stored a second one is ignored, and later
  it gets the first one's receipt again.
- Time comes in with every event; `state.deadline` says when to send `Tick` at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy
from edge_sdk.protocol.errors import ProtocolError, StateError
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.messages import (
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.streams import stream

GroupsByAxis = Mapping[str, tuple[int, ...]]


class Phase(Enum):
    """What the coordinator is doing."""

    WAITING = "waiting for devices"
    BIDDING = "collecting bids"
    TRAINING = "collecting movements"
    CLOSING = "closing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig:
    """What a run is. `bid_s` and `train_s` are how long a round waits at the most."""

    plan: ModelPlan
    masks: MaskPolicy
    rule: LocalRule
    rounds: int
    steps: int
    batch_size: int
    min_devices: int
    seed: int
    bid_s: float = 10.0
    train_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "batch_size", "min_devices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("bid_s", "train_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")


# -- events: messages of devices, and these local ones -------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A device is there."""

    device: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A movement is stored."""

    device: str
    round: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The round's new model is in place."""

    round: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Joined | Bid | Movement | Kept | Committed | Tick


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tell every device."""

    message: RoundOpen | RoundClosed


@dataclass(frozen=True, slots=True)
class Send:
    """Tell one device."""

    device: str
    message: RoundOpen | Assignment | Receipt


@dataclass(frozen=True, slots=True)
class Keep:
    """Store a movement and answer with `Kept`."""

    movement: Movement


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply the rule to these devices' movements, in this order; answer with `Committed`."""

    round: int
    devices: tuple[str, ...]


Effect = Broadcast | Send | Keep | Commit


@dataclass(frozen=True, slots=True)
class RoundsState:
    """All the coordinator remembers about the present round."""

    phase: Phase = Phase.WAITING
    round: int = 0
    deadline: float | None = None
    devices: frozenset[str] = frozenset()
    bids: Mapping[str, Bid] = field(default_factory=dict)
    assigned: Mapping[str, GroupsByAxis] = field(default_factory=dict)
    keeping: frozenset[str] = frozenset()
    """Devices whose movement is being stored."""
    counted: frozenset[str] = frozenset()


Step = tuple[RoundsState, list[Effect]]


def handle(config: RoundsConfig, state: RoundsState, event: Event, now: float) -> Step:
    """The state after an event at time `now` (seconds, any origin), and what to do about it."""
    match event:
        case Joined(device):
            return _on_joined(config, state, device, now)
        case Bid():
            return _on_bid(config, state, event, now)
        case Movement():
            return _on_movement(config, state, event)
        case Kept(device, round):
            return _on_kept(state, device, round)
        case Tick():
            if state.deadline is None or now < state.deadline:
                return state, []
            if state.phase is Phase.BIDDING:
                return _assign(config, state, now)
            return _close(state)
        case Committed(round) if state.phase is Phase.CLOSING and round == state.round:
            closed = Broadcast(RoundClosed(round=round))
            if round == config.rounds:
                return replace(state, phase=Phase.FINISHED), [closed]
            state, effects = _open(config, state, now)
            return state, [closed, *effects]
        case _:
            raise StateError(f"{event} cannot happen while {state.phase.value}")


def _on_joined(config: RoundsConfig, state: RoundsState, device: str, now: float) -> Step:
    known = device in state.devices
    state = replace(state, devices=state.devices | {device})
    if state.phase is Phase.WAITING and len(state.devices) >= config.min_devices:
        return _open(config, state, now)
    if state.phase is Phase.BIDDING and not known:
        return state, [Send(device, _opening(config, state.round))]
    return state, []


def _on_bid(config: RoundsConfig, state: RoundsState, bid: Bid, now: float) -> Step:
    if bid.round != state.round or bid.device not in state.devices:
        return state, []
    if state.phase is Phase.BIDDING:
        state = replace(state, bids={**state.bids, bid.device: bid})
        if state.devices <= state.bids.keys():
            return _assign(config, state, now)
        return state, []
    withdraws = bid.level is None and bid.device in state.assigned
    if state.phase is Phase.TRAINING and withdraws and bid.device not in state.counted:
        return _withdraw(state, bid)
    return state, []


def _on_movement(config: RoundsConfig, state: RoundsState, movement: Movement) -> Step:
    current = movement.round == state.round
    if current and movement.device in state.counted:
        return state, [_receipt(movement, Outcome.COUNTED)]
    if current and movement.device in state.keeping:
        return state, []
    refusal = _refusal(config, state, movement)
    if refusal is not None:
        receipt = _receipt(movement, Outcome.REJECTED, refusal)
        if not (current and state.phase is Phase.TRAINING and movement.device in state.assigned):
            return state, [receipt]
        state, effects = _give_up_on(state, movement.device, f"skip: rejected: {refusal}")
        return state, [receipt, *effects]
    if not (current and state.phase is Phase.TRAINING):
        closed = f"round {movement.round} is closed; round {state.round} is {state.phase.value}"
        return state, [_receipt(movement, Outcome.LATE, closed)]
    return replace(state, keeping=state.keeping | {movement.device}), [Keep(movement)]


def _give_up_on(state: RoundsState, device: str, reason: str) -> Step:
    """Stop waiting for a device that was assigned groups; it counts as a skip."""
    skip = Bid(device=device, round=state.round, level=None, reason=reason[:MAX_REASON_CHARACTERS])
    return _withdraw(state, skip)


def _withdraw(state: RoundsState, skip: Bid) -> Step:
    state = replace(
        state,
        bids={**state.bids, skip.device: skip},
        assigned={name: g for name, g in state.assigned.items() if name != skip.device},
        keeping=state.keeping - {skip.device},
    )
    return _close_if_complete(state)


def _on_kept(state: RoundsState, device: str, round: int) -> Step:
    if not 1 <= round <= state.round or device not in state.devices:
        raise StateError(f"a movement of {device!r} was kept that round {round} never had")
    current = round == state.round and state.phase is Phase.TRAINING
    if not current or device not in state.keeping:
        if current and device in state.counted:
            raise StateError(f"the movement of {device!r} was kept twice")
        why = "the round closed, or the device withdrew, before the movement was stored"
        late = Receipt(device=device, round=round, outcome=Outcome.LATE, reason=why)
        return state, [Send(device, late)]
    state = replace(state, counted=state.counted | {device}, keeping=state.keeping - {device})
    receipt = Send(device, Receipt(device=device, round=round, outcome=Outcome.COUNTED))
    state, effects = _close_if_complete(state)
    return state, [receipt, *effects]


def _open(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    opened = RoundsState(
        phase=Phase.BIDDING,
        round=state.round + 1,
        deadline=now + config.bid_s,
        devices=state.devices,
    )
    return opened, [Broadcast(_opening(config, opened.round))]


def _assign(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    offers = sorted(
        (bid for bid in state.bids.values() if bid.level is not None), key=lambda bid: bid.device
    )
    chosen = config.masks(config.plan, offers, stream(config.seed, "masks", state.round))
    state = replace(
        state, phase=Phase.TRAINING, deadline=now + config.train_s, assigned=dict(chosen)
    )
    assignments: list[Effect] = [
        Send(device, Assignment(device=device, round=state.round, groups=groups))
        for device, groups in chosen.items()
    ]
    closing, effects = _close_if_complete(state)
    return closing, [*assignments, *effects]


def _close_if_complete(state: RoundsState) -> Step:
    return _close(state) if state.counted >= state.assigned.keys() else (state, [])


def _close(state: RoundsState) -> Step:
    commit = Commit(state.round, tuple(sorted(state.counted)))
    return replace(state, phase=Phase.CLOSING, deadline=None), [commit]


def _opening(config: RoundsConfig, round: int) -> RoundOpen:
    return RoundOpen(
        round=round,
        plan_hash=config.plan.hash,
        rule=config.rule,
        steps=config.steps,
        batch_size=config.batch_size,
        bid_s=config.bid_s,
        train_s=config.train_s,
    )


def _receipt(movement: Movement, outcome: Outcome, reason: str = "") -> Send:
    receipt = Receipt(device=movement.device, round=movement.round, outcome=outcome, reason=reason)
    return Send(movement.device, receipt)


def _refusal(config: RoundsConfig, state: RoundsState, movement: Movement) -> str | None:
    """Why a movement cannot be used at all, or None."""
    plan = config.plan
    if movement.plan_hash != plan.hash:
        return f"it is for plan {movement.plan_hash[:12]}…, this task has {plan.hash[:12]}…"
    if movement.round > state.round:
        return f"round {movement.round} has not begun; this is round {state.round}"
    if movement.round == state.round and movement.device not in state.assigned:
        return f"no groups were assigned to {movement.device!r} in round {movement.round}"
    try:
        chosen = plan.choose(movement.groups)
        assigned = state.assigned.get(movement.device) if movement.round == state.round else None
        if assigned is not None and chosen != plan.choose(assigned):
            return "it holds other groups than were assigned"
        expected = plan.block_ids(chosen)
        movement.blocks.check(expected, plan.block_sizes)
        plan.check_statistics(movement.statistics, movement.groups)
    except ProtocolError as error:
        return str(error)
    arrays = (movement.blocks.values, *movement.statistics.values())
    if not all(np.isfinite(array).all() for array in arrays):
        return "it holds numbers that are not finite"
    return None
