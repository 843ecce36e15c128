"""Synchronous rounds as a state machine without I/O.

    phase     event                          next      effects
    --------  -----------------------------  --------  -------------------------------------------
    WAITING   Joined, enough devices         BIDDING   Broadcast(RoundOpen)
    BIDDING   Joined                         BIDDING   Send(RoundOpen) to the newcomer
    BIDDING   last Bid, or the deadline      TRAINING  Send(Assignment) to all who offered a level
                                             CLOSING   Commit, if nothing is awaited
    TRAINING  Movement that fits             TRAINING  Keep
    BIDDING,  Replay that fits               same      Keep
    TRAINING
    BIDDING,  Kept                           same      Send(Receipt: counted)
    TRAINING
    TRAINING  Movement, Replay: unfit        TRAINING  Send(Receipt: rejected); no longer waited for
    TRAINING  Bid (skip): withdrawn          TRAINING  –
    TRAINING  last of them, or the deadline  CLOSING   Commit
    CLOSING   Committed                      BIDDING   Broadcast(RoundClosed), Broadcast(RoundOpen)
                                             FINISHED  Broadcast(RoundClosed), after the last round
    other     Movement, Replay: unfit        same      Send(Receipt: rejected, with the reason)
    any       Movement of a round now closed same      Keep, where the rule remembers movements;
                                                       else Send(Receipt: late)
    any       Kept, too late to count        same      Send(Receipt: memory), or (Receipt: late)

Rules:
- What a device sends at the wrong time is ignored or receipted, never an error; a local event at
  the wrong time (`Kept`, `Committed`) raises `StateError` and changes nothing.
- A movement counts once: while the first copy is being stored a second one is ignored, and later
  it gets the first one's receipt again.
- Assignments are kept for `max_staleness` rounds: a late or replayed movement is checked against
  what its device was to train in the round it names.
- Where the rule takes whole models only, a lower offer is a skip.
- Time comes in with every event; `state.deadline` says when to send `Tick` at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from coordinator.arrivals import Arrival, GroupsByAxis, Refused, check_arrival
from coordinator.fleet import Fleet, new_fleet
from coordinator.masks import Situation
from coordinator.rules import Rule
from coordinator.run_config import RunConfig
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages import (
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.streams import stream


class Phase(Enum):
    """What the coordinator is doing."""

    WAITING = "waiting for devices"
    BIDDING = "collecting bids"
    TRAINING = "collecting movements"
    CLOSING = "closing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig(RunConfig):
    """What a run in rounds is."""

    rule: Rule
    rounds: int
    max_staleness: int = 50
    """Rounds after which a late movement, a replay or an entry of memory is too old."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        self._check_counts("rounds", "max_staleness")


# -- events: messages of devices, and these local ones -------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A device is there."""

    device: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What a device sent for a round is stored."""

    device: str
    round: int


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """The round's new model is in place; `norms` per block, where the policy uses them."""

    round: int
    norms: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Joined | Bid | Movement | Replay | Kept | Committed | Tick


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
    """Store what a device sent for this round and answer with `Kept`."""

    round: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply the rule and answer with `Committed`. All names are sorted.

    `fresh` and `replayed` are devices whose movement, or replay, was kept for this round; `silent`
    ones were selected and sent neither; `late` are (device, round) of movements that memory takes.
    """

    round: int
    fresh: tuple[str, ...]
    replayed: tuple[str, ...]
    silent: tuple[str, ...]
    late: tuple[tuple[str, int], ...]


Effect = Broadcast | Send | Keep | Commit


@dataclass(frozen=True, slots=True)
class PastRound:
    """A closed round: what was assigned, and what became of the movements that came."""

    assigned: Mapping[str, GroupsByAxis]
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True, slots=True)
class RoundsState:
    """All the coordinator remembers between events. Made by `start`."""

    fleet: Fleet
    phase: Phase = Phase.WAITING
    round: int = 0
    deadline: float | None = None
    devices: frozenset[str] = frozenset()
    selected: frozenset[str] = frozenset()
    """Devices that were asked to take part in the present round."""
    bids: Mapping[str, Bid] = field(default_factory=dict)
    assigned: Mapping[str, GroupsByAxis] = field(default_factory=dict)
    keeping: frozenset[str] = frozenset()
    """Devices whose movement or replay of this round is being stored."""
    counted: frozenset[str] = frozenset()
    replayed: frozenset[str] = frozenset()
    late: frozenset[tuple[str, int]] = frozenset()
    """Movements of closed rounds that are stored and enter memory at the next commit."""
    past: Mapping[int, PastRound] = field(default_factory=dict)


Step = tuple[RoundsState, list[Effect]]


def start(config: RoundsConfig, norms: NDArray[np.float64] | None = None) -> RoundsState:
    """The state before the first round; `norms` of the initial weights, if the policy uses them."""
    return RoundsState(new_fleet(config.plan, norms))


def handle(config: RoundsConfig, state: RoundsState, event: Event, now: float) -> Step:
    """The state after an event at time `now` (seconds, any origin), and what to do about it."""
    match event:
        case Joined(device):
            return _on_joined(config, state, device, now)
        case Bid():
            return _on_bid(config, state, event, now)
        case Movement():
            return _on_movement(config, state, event)
        case Replay():
            return _on_replay(config, state, event)
        case Kept(device, round):
            return _on_kept(config, state, device, round)
        case Tick():
            if state.deadline is None or now < state.deadline:
                return state, []
            if state.phase is Phase.BIDDING:
                return _assign(config, state, now)
            return _close(config, state)
        case Committed(round, norms) if state.phase is Phase.CLOSING and round == state.round:
            state = replace(state, fleet=replace(state.fleet, norms=norms))
            closed = Broadcast(RoundClosed(round=round))
            if round == config.rounds:
                return replace(state, phase=Phase.FINISHED), [closed]
            state, effects = _open(config, state, now)
            return state, [closed, *effects]
        case _:
            raise StateError(f"{event} cannot happen while {state.phase.value}")


# -- devices come and bid ------------------------------------------------------------------------


def _on_joined(config: RoundsConfig, state: RoundsState, device: str, now: float) -> Step:
    known = device in state.devices
    state = replace(state, devices=state.devices | {device})
    if state.phase is Phase.WAITING and len(state.devices) >= config.min_devices:
        return _open(config, state, now)
    if state.phase is Phase.BIDDING and not known:
        state = replace(state, selected=state.selected | {device})
        return state, [Send(device, _opening(config, state.round))]
    return state, []


def _on_bid(config: RoundsConfig, state: RoundsState, bid: Bid, now: float) -> Step:
    if bid.round != state.round or bid.device not in state.selected:
        return state, []
    if state.phase is Phase.BIDDING:
        state = replace(state, bids={**state.bids, bid.device: bid})
        if state.selected <= state.bids.keys():
            return _assign(config, state, now)
        return state, []
    withdraws = bid.level is None and bid.device in state.assigned
    if state.phase is Phase.TRAINING and withdraws and bid.device not in state.counted:
        return _withdraw(config, state, bid)
    return state, []


def _open(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    opened = RoundsState(
        state.fleet,
        phase=Phase.BIDDING,
        round=state.round + 1,
        deadline=now + config.bid_s,
        devices=state.devices,
        selected=state.devices,
        late=state.late,
        past=state.past,
    )
    return opened, [Broadcast(_opening(config, opened.round))]


def _assign(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    bids = {name: _usable(config, bid) for name, bid in state.bids.items()}
    offers = [bids[name] for name in sorted(bids) if bids[name].level is not None]
    fleet = state.fleet.heard(bids.values())
    situation = Situation(
        plan=config.plan,
        round=state.round,
        offers=offers,
        last_covered=fleet.last_covered,
        times_covered=fleet.times_covered,
        norms=fleet.norms,
        stream=stream(config.seed, "masks", state.round),
    )
    assigned = config.masks(situation) if offers else {}
    state = replace(
        state,
        phase=Phase.TRAINING,
        deadline=now + config.train_s,
        fleet=fleet,
        bids=bids,
        assigned=assigned,
    )
    assignments: list[Effect] = [
        Send(device, Assignment(device=device, round=state.round, groups=groups))
        for device, groups in assigned.items()
    ]
    closing, effects = _close_if_complete(config, state)
    return closing, [*assignments, *effects]


def _usable(config: RoundsConfig, bid: Bid) -> Bid:
    """The bid, as a skip where the rule has no use for what it offers."""
    if bid.level is None or bid.level == 1 or not config.rule.whole_models:
        return bid
    reason = f"skip: offered {bid.level:.0%}, but the rule takes whole models only"
    return replace(bid, level=None, reason=reason)


# -- movements arrive ----------------------------------------------------------------------------


def _on_movement(config: RoundsConfig, state: RoundsState, movement: Movement) -> Step:
    device, round = movement.device, movement.round
    if round > state.round:
        future = f"round {round} has not begun; this is round {state.round}"
        return state, [_receipt(device, round, Outcome.REJECTED, future)]
    if round == state.round and state.phase in (Phase.BIDDING, Phase.TRAINING):
        return _on_current(config, state, movement)
    past = state.past.get(round)
    if past is None:
        old = f"round {round} is more than {config.max_staleness} rounds ago"
        return state, [_receipt(device, round, Outcome.LATE, old)]
    if device in past.outcomes:
        return state, [_receipt(device, round, past.outcomes[device])]
    try:
        arrival = _checked(config, state, movement, past.assigned.get(device))
    except Refused as refusal:
        return state, [_receipt(device, round, Outcome.REJECTED, str(refusal))]
    if _remembers(config, state):
        return _learned(state, arrival), [Keep(round, arrival)]
    return state, [_receipt(device, round, Outcome.LATE, _is_closed(state, round))]


def _on_current(config: RoundsConfig, state: RoundsState, movement: Movement) -> Step:
    device, round = movement.device, movement.round
    if device in state.counted:
        return state, [_receipt(device, round, Outcome.COUNTED)]
    if device in state.keeping:
        return state, []
    try:
        arrival = _checked(config, state, movement, state.assigned.get(device))
    except Refused as refusal:
        return _reject(config, state, device, str(refusal))
    return _keep(state, round, arrival)


def _on_replay(config: RoundsConfig, state: RoundsState, replay: Replay) -> Step:
    movement, device = replay.movement, replay.movement.device
    bid = state.bids.get(device)
    open_now = state.phase in (Phase.BIDDING, Phase.TRAINING) and replay.round == state.round
    if not open_now:
        closed = _is_closed(state, replay.round)
        return state, [_receipt(device, replay.round, Outcome.LATE, closed)]
    if device in state.replayed:
        return state, [_receipt(device, replay.round, Outcome.COUNTED)]
    if device in state.keeping:
        return state, []
    if bid is None or not bid.replays:
        unasked = "no replay was announced for this round"
        return state, [_receipt(device, replay.round, Outcome.REJECTED, unasked)]
    past = state.past.get(movement.round)
    age = state.round - movement.round
    try:
        if age > config.rule.replay_within:
            raise Refused(f"it is {age} rounds old; the rule takes {config.rule.replay_within}")
        assigned = None if past is None else past.assigned.get(device)
        arrival = _checked(config, state, movement, assigned)
    except Refused as refusal:
        return _reject(config, state, device, str(refusal))
    return _keep(state, replay.round, arrival)


def _checked(
    config: RoundsConfig, state: RoundsState, movement: Movement, assigned: GroupsByAxis | None
) -> Arrival:
    return check_arrival(
        config.plan,
        movement,
        assigned,
        config.encoding,
        config.local_rule.learning_rate,
        state.fleet.usual,
        config.rms_limit,
    )


def _keep(state: RoundsState, round: int, arrival: Arrival) -> Step:
    state = replace(state, keeping=state.keeping | {arrival.contribution.device})
    return _learned(state, arrival), [Keep(round, arrival)]


def _learned(state: RoundsState, arrival: Arrival) -> RoundsState:
    usual = state.fleet.usual.learn(arrival.scale)
    return replace(state, fleet=replace(state.fleet, usual=usual))


def _reject(config: RoundsConfig, state: RoundsState, device: str, refusal: str) -> Step:
    """Refuse what came for the present round, and wait no longer for whoever sent it."""
    receipt = _receipt(device, state.round, Outcome.REJECTED, refusal)
    bid = state.bids.get(device)
    if device not in state.assigned and not (bid is not None and bid.replays):
        return state, [receipt]
    reason = f"skip: rejected: {refusal}"[:MAX_REASON_CHARACTERS]
    skip = Bid(device=device, round=state.round, level=None, reason=reason)
    state, effects = _withdraw(config, state, skip)
    return state, [receipt, *effects]


def _withdraw(config: RoundsConfig, state: RoundsState, skip: Bid) -> Step:
    """Stop waiting for a device; it counts as a skip."""
    state = replace(
        state,
        bids={**state.bids, skip.device: skip},
        assigned={name: g for name, g in state.assigned.items() if name != skip.device},
        keeping=state.keeping - {skip.device},
    )
    return _close_if_complete(config, state)


def _on_kept(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    if not 1 <= round <= state.round or device not in state.devices:
        raise StateError(f"a movement of {device!r} was kept that round {round} never had")
    current = round == state.round and state.phase in (Phase.BIDDING, Phase.TRAINING)
    if current and device in state.counted | state.replayed:
        raise StateError(f"the movement of {device!r} was kept twice")
    if not current or device not in state.keeping:
        return _on_kept_late(config, state, device, round)
    fresh = device in state.assigned
    state = replace(
        state,
        counted=state.counted | {device} if fresh else state.counted,
        replayed=state.replayed if fresh else state.replayed | {device},
        keeping=state.keeping - {device},
    )
    closing, effects = _close_if_complete(config, state)
    return closing, [_receipt(device, round, Outcome.COUNTED), *effects]


def _on_kept_late(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    past = state.past.get(round)
    takes = past is not None and device in past.assigned and _remembers(config, state)
    if past is None or not takes:
        why = "the round closed, or the device withdrew, before the movement was stored"
        return state, [_receipt(device, round, Outcome.LATE, why)]
    outcomes = {**past.outcomes, device: Outcome.MEMORY}
    state = replace(
        state,
        late=state.late | {(device, round)},
        past={**state.past, round: replace(past, outcomes=outcomes)},
    )
    return state, [_receipt(device, round, Outcome.MEMORY, _is_closed(state, round))]


def _remembers(config: RoundsConfig, state: RoundsState) -> bool:
    """Whether a movement that came too late still has a use: a commit that takes it is to come."""
    over = state.round == config.rounds and state.phase in (Phase.CLOSING, Phase.FINISHED)
    return config.rule.remembers == "movements" and not over


# -- the round closes ----------------------------------------------------------------------------


def _close_if_complete(config: RoundsConfig, state: RoundsState) -> Step:
    replaying = {name for name, bid in state.bids.items() if bid.replays}
    awaited = state.assigned.keys() | replaying
    done = state.counted | state.replayed
    complete = state.phase is Phase.TRAINING and done >= awaited
    return _close(config, state) if complete else (state, [])


def _close(config: RoundsConfig, state: RoundsState) -> Step:
    heard = state.counted | state.replayed
    commit = Commit(
        round=state.round,
        fresh=tuple(sorted(state.counted)),
        replayed=tuple(sorted(state.replayed)),
        silent=tuple(sorted(state.selected - heard)),
        late=tuple(sorted(state.late)),
    )
    counted = {name: state.assigned[name] for name in commit.fresh}
    outcomes = dict.fromkeys(commit.fresh, Outcome.COUNTED)
    horizon = state.round - config.max_staleness
    past = {number: entry for number, entry in state.past.items() if number > horizon}
    past[state.round] = PastRound(state.assigned, outcomes)
    state = replace(
        state,
        phase=Phase.CLOSING,
        deadline=None,
        late=frozenset(),
        past=past,
        fleet=state.fleet.covered(config.plan, state.round, counted),
    )
    return state, [commit]


def _opening(config: RoundsConfig, round: int) -> RoundOpen:
    rule = config.rule
    whole = round <= rule.warmup_rounds
    return config.opening(round, whole=whole, replay_within=rule.replay_within)


def _is_closed(state: RoundsState, round: int) -> str:
    return f"round {round} is closed; round {state.round} is {state.phase.value}"


def _receipt(device: str, round: int, outcome: Outcome, reason: str = "") -> Send:
    return Send(device, Receipt(device=device, round=round, outcome=outcome, reason=reason))
