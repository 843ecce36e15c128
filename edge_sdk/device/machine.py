"""The device's logic as a state machine without I/O.

    phase      event                 next        effects
    ---------  --------------------  ----------  -----------------------------------------
    IDLE       RoundOpen             DECIDING    Decide
    DECIDING   Decided (level)       BIDDING     Send(Bid)
    DECIDING   Decided (skip)        IDLE        Send(Bid), and SendReplay if the round wants one
    DECIDING   RoundOpen             DECIDING    Decide
    BIDDING    Assignment            FETCHING    Fetch
    BIDDING    RoundOpen             DECIDING    Decide
    BIDDING    RoundClosed           IDLE        –
    FETCHING   Fetched               TRAINING    Train
    FETCHING   Found                 IDLE        Resend: it was trained before the device stopped
    TRAINING   Finished              IDLE        Keep, Send(Movement)
    FETCHING,  Failed                IDLE        Send(Bid: skip), which withdraws the offer
    TRAINING
    FETCHING,  RoundOpen             unchanged   –; taken up when the present work is done
    TRAINING
    any        Receipt               unchanged   Forget
    any        Connected             unchanged   Resend, for every movement without a receipt

Rules:
- A message of the coordinator that the table does not list is late, early or a duplicate: it is
  ignored. A local event that the table does not list is a bug: it raises `StateError`.
- Rounds only go forward: a `RoundOpen` that is not newer than the newest seen is ignored.
- A movement is kept until its receipt, however many rounds go by, and sent again on `LinkUp`.
- A `Decided` for another round than the present one was overtaken by a newer round: ignored.
- Where the round wants replays, a skip is spoken for by the last movement, if the device keeps a
  copy and it is young enough. A replay is not kept: one that is lost is a silent skip.
- Whatever raises has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from edge_sdk.decide.decision import Code, Decision
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import (
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array


class DevicePhase(Enum):
    """What the device is doing."""

    IDLE = "idle"
    DECIDING = "deciding"
    BIDDING = "bidding"
    FETCHING = "fetching"
    TRAINING = "training"


# -- events: messages of the coordinator, and these local ones ---------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What a device says of itself in every bid; None: not known."""

    samples: int
    compute: float | None = None
    """Parameters × samples per second."""
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """The device has looked at itself and answers this round."""

    round: int
    decision: Decision
    facts: Facts


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The submodel's blocks and buffers are here."""

    blocks: Blocks
    buffers: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Found:
    """The movement that the assignment asks for was made already, and has no receipt."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Training has produced a movement."""

    movement: Movement


@dataclass(frozen=True, slots=True)
class Failed:
    """Fetching or training ended without a movement."""

    reason: str
    code: Code = "failed"


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link is up, for the first time or again: what was sent before may be lost."""


Event = (
    RoundOpen
    | Assignment
    | Receipt
    | RoundClosed
    | Decided
    | Fetched
    | Found
    | Finished
    | Failed
    | LinkUp
)


# -- effects: what the app does next -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decide:
    """Look at the device and answer with `Decided`."""

    opened: RoundOpen


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the weights of these groups and answer with `Fetched` or `Failed`."""

    opened: RoundOpen
    assignment: Assignment


@dataclass(frozen=True, slots=True, eq=False)
class Train:
    """Train and answer with `Finished` or `Failed`."""

    opened: RoundOpen
    assignment: Assignment
    level: float
    """What the device had offered."""
    blocks: Blocks
    buffers: dict[str, Array]


@dataclass(frozen=True, slots=True)
class KeepMovement:
    """Store the movement until its receipt."""

    movement: Movement


@dataclass(frozen=True, slots=True)
class Forget:
    """The movement of this round has its receipt, which says what became of it."""

    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Resend:
    """Send the kept movement of this round once more."""

    round: int


@dataclass(frozen=True, slots=True)
class SendReplay:
    """Send the copy of the movement made in round `made` as the answer to `round`."""

    round: int
    made: int


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to the coordinator."""

    message: Bid | Movement


Effect = Decide | Fetch | Train | KeepMovement | Forget | Resend | SendReplay | SendMessage


@dataclass(frozen=True, slots=True)
class DeviceState:
    """All a device remembers between events."""

    name: str
    phase: DevicePhase = DevicePhase.IDLE
    opened: RoundOpen | None = None
    """The round the device is busy with, or was last."""
    newest: RoundOpen | None = None
    """The newest round heard of; taken up when the present work is done."""
    assignment: Assignment | None = None
    unreceipted: frozenset[int] = frozenset()
    """Rounds whose movement is kept until the receipt comes."""
    offered: float | None = None
    """The level of the last bid; None: a skip."""
    copy: int | None = None
    """The round of the movement of which a copy is kept for replays."""


Step = tuple[DeviceState, list[Effect]]


def handle(state: DeviceState, event: Event) -> Step:
    """The state after an event, and what to do about it."""
    match event:
        case RoundOpen():
            return _on_round_open(state, event)
        case Assignment():
            return _on_assignment(state, event)
        case Receipt():
            if event.round not in state.unreceipted or event.device != state.name:
                return state, []
            left = state.unreceipted - {event.round}
            rejected = event.outcome is Outcome.REJECTED and state.copy == event.round
            state = replace(state, unreceipted=left, copy=None if rejected else state.copy)
            return state, [Forget(event.round, event.outcome)]
        case RoundClosed():
            if state.phase is DevicePhase.BIDDING and event.round == _opened(state).round:
                return replace(state, phase=DevicePhase.IDLE), []
            return state, []
        case LinkUp():
            return state, [Resend(round) for round in sorted(state.unreceipted)]
        case Decided() if state.newest is not None and event.round < state.newest.round:
            return state, []
        case Decided() if (
            state.phase is DevicePhase.DECIDING and event.round == _opened(state).round
        ):
            return _on_decided(state, event)
        case Fetched() if state.phase is DevicePhase.FETCHING:
            level = state.offered or 1.0
            work = Train(_opened(state), _assignment(state), level, event.blocks, event.buffers)
            return replace(state, phase=DevicePhase.TRAINING), [work]
        case Found() if state.phase is DevicePhase.FETCHING:
            round = _opened(state).round
            done, effects = _next_round(state)
            return done, [Resend(round), *effects]
        case Finished() if state.phase is DevicePhase.TRAINING:
            movement = event.movement
            kept = state.unreceipted | {movement.round}
            copy = movement.round if movement.keeps_copy else None
            done, effects = _next_round(replace(state, unreceipted=kept, copy=copy))
            return done, [KeepMovement(event.movement), SendMessage(event.movement), *effects]
        case Failed() if state.phase in (DevicePhase.FETCHING, DevicePhase.TRAINING):
            round = _opened(state).round
            reason = event.reason[:MAX_REASON_CHARACTERS] or "skip: it failed without a word"
            bid = Bid(device=state.name, round=round, level=None, reason=reason, code=event.code)
            done, effects = _next_round(state)
            return done, [SendMessage(bid), *effects]
        case _:
            raise StateError(f"{type(event).__name__} cannot happen while {state.phase.value}")


def _on_round_open(state: DeviceState, event: RoundOpen) -> Step:
    if state.newest is not None and event.round <= state.newest.round:
        return state, []
    state = replace(state, newest=event)
    if state.phase in (DevicePhase.FETCHING, DevicePhase.TRAINING):
        return state, []
    return _next_round(state)


def _on_decided(state: DeviceState, event: Decided) -> Step:
    opened, decision = _opened(state), event.decision
    skips = decision.level is None
    age = None if state.copy is None else opened.round - state.copy
    replays = skips and age is not None and age <= opened.replay_within
    bid = Bid(
        device=state.name,
        round=opened.round,
        level=decision.level,
        reason=decision.reason,
        samples=event.facts.samples,
        replays=replays,
        compute=event.facts.compute,
        bytes_per_s=event.facts.bytes_per_s,
        code=decision.code,
    )
    effects: list[Effect] = [SendMessage(bid)]
    if replays and state.copy is not None:
        effects.append(SendReplay(opened.round, state.copy))
    phase = DevicePhase.IDLE if skips else DevicePhase.BIDDING
    return replace(state, phase=phase, offered=decision.level), effects


def _on_assignment(state: DeviceState, event: Assignment) -> Step:
    fits = state.phase is DevicePhase.BIDDING and event.round == _opened(state).round
    if not fits or event.device != state.name:
        return state, []
    state = replace(state, phase=DevicePhase.FETCHING, assignment=event)
    return state, [Fetch(_opened(state), event)]


def _next_round(state: DeviceState) -> Step:
    """Turn to the newest round if it is not the one just dealt with, else rest."""
    if state.newest is None or state.newest == state.opened:
        return replace(state, phase=DevicePhase.IDLE, assignment=None), []
    opened = state.newest
    state = replace(state, phase=DevicePhase.DECIDING, opened=opened, assignment=None)
    return state, [Decide(opened)]


def _opened(state: DeviceState) -> RoundOpen:
    if state.opened is None:
        raise StateError(f"no round is open while {state.phase.value}")
    return state.opened


def _assignment(state: DeviceState) -> Assignment:
    if state.assignment is None:
        raise StateError(f"no assignment while {state.phase.value}")
    return state.assignment
