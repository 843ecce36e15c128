"""Synchronous rounds as a state machine without I/O.

    phase     event                          next      effects
    --------  -----------------------------  --------  -------------------------------------------
    WAITING   Joined, enough devices         BIDDING   Broadcast(RoundOpen)
    BIDDING   Joined                         BIDDING   Send(RoundOpen) to the newcomer
    BIDDING   Left                           BIDDING   –; its bid is no longer waited for
    BIDDING   last Bid, or the deadline      TRAINING  Send(Assignment) to those who are picked
                                             CLOSING   Commit, if nothing is awaited
                                             BIDDING   Broadcast(RoundOpen) of the next round, if
                                                       at the deadline too few offered: it is void
    TRAINING  Movement that fits             TRAINING  Keep
    BIDDING,  Replay that fits               same      Keep
    TRAINING
    BIDDING,  Kept                           same      Send(Receipt: counted)
    TRAINING
    TRAINING  Movement, Replay: unfit        TRAINING  Send(Receipt: rejected); no longer waited for
    TRAINING  Bid (skip): withdrawn          TRAINING  –
    TRAINING  Bid (level) of one who has     TRAINING  Send(Assignment) again: it started anew
              groups already
    TRAINING  enough of them, the deadline   CLOSING   Commit
    CLOSING   Committed                      BIDDING   Broadcast(RoundClosed), Broadcast(RoundOpen)
                                             FINISHED  Broadcast(RoundClosed), after the last round
                                                       or when a stop condition is met
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
- With `participants`, that many of the offers are picked, times `over_selection`; the round closes
  when `quorum` of those wanted have sent their movement. Who offered and was not picked was not
  selected: its silence is no skip.
- Time comes in with every event; `state.deadline` says when to send `Tick` at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from coordinator.arrivals import Arrival, Expected, GroupsByAxis, Refused, check_arrival
from coordinator.errors import ConfigError
from coordinator.events import Broadcast, Joined, Keep, Kept, Left, Send, Tick
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
    participants: int | None = None
    """How many movements a round is to have; None: one of everybody who offers."""
    over_selection: float = 1.0
    """How many more devices are picked, as a factor: some never finish."""
    quorum: float = 1.0
    """The share of the movements wanted at which a round closes without waiting for the rest."""
    min_participants: int = 0
    """With fewer offers a round is void: nothing is trained, and it does not count."""
    target_accuracy: float | None = None
    """Stop when the model is this good; None: go on."""
    patience: int | None = None
    """Stop after this many rounds without a better model; None: go on."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        self._check_counts("rounds", "max_staleness")
        for name in ("participants", "patience"):
            if getattr(self, name) is not None:
                self._check_counts(name)
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"quorum is a share in (0, 1], not {self.quorum!r}")
        if not (math.isfinite(self.over_selection) and self.over_selection >= 1):
            raise ConfigError(f"over_selection is a factor of 1 or more, not {self.over_selection}")
        if self.over_selection > 1 and self.participants is None:
            raise ConfigError("over_selection needs participants: how many movements are wanted")
        if self.min_participants < 0:
            raise ConfigError(f"min_participants must not be negative: {self.min_participants}")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ConfigError(f"target_accuracy is a share, not {self.target_accuracy!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """The round's new model is in place; `norms` per block, where the policy uses them.

    `accuracy`: how good it is, a share; None where nobody evaluates.
    """

    round: int
    norms: NDArray[np.float64] | None = None
    accuracy: float | None = None


Event = Joined | Left | Bid | Movement | Replay | Kept | Committed | Tick
"""Messages of devices, and what happens at the edge."""


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
    """A closed round: what devices were to do, and what became of the movements that came."""

    expected: Mapping[str, Expected]
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True, slots=True)
class RoundsState:
    """All the coordinator remembers between events. Made by `start`."""

    fleet: Fleet
    phase: Phase = Phase.WAITING
    round: int = 0
    deadline: float | None = None
    devices: frozenset[str] = frozenset()
    """All devices that were ever there."""
    present: frozenset[str] = frozenset()
    """Those that are there now."""
    void: int = 0
    """Rounds that had too few offers."""
    best: tuple[float, int] = (-math.inf, 0)
    """The best accuracy so far, and after which round."""
    selected: frozenset[str] = frozenset()
    """Devices that were asked to take part in the present round."""
    bids: Mapping[str, Bid] = field(default_factory=dict)
    assigned: Mapping[str, GroupsByAxis] = field(default_factory=dict)
    keeping: frozenset[str] = frozenset()
    """Devices whose movement of this round is being stored."""
    keeping_replays: frozenset[str] = frozenset()
    keeping_late: frozenset[tuple[str, int]] = frozenset()
    """(device, round) of movements of closed rounds that are being stored."""
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
        case Left(device):
            return _on_left(config, state, device, now)
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
        case Committed(round) if state.phase is Phase.CLOSING and round == state.round:
            return _on_committed(config, state, event, now)
        case _:
            raise StateError(f"{event} cannot happen while {state.phase.value}")


# -- devices come and bid ------------------------------------------------------------------------


def _on_joined(config: RoundsConfig, state: RoundsState, device: str, now: float) -> Step:
    known = device in state.present
    state = replace(state, devices=state.devices | {device}, present=state.present | {device})
    if state.phase is Phase.WAITING and len(state.present) >= config.min_devices:
        return _open(config, state, now)
    if state.phase is Phase.BIDDING and not known:
        state = replace(state, selected=state.selected | {device})
        return state, [Send(device, _opening(config, state.round))]
    return state, []


def _on_left(config: RoundsConfig, state: RoundsState, device: str, now: float) -> Step:
    state = replace(state, present=state.present - {device})
    if state.phase is Phase.BIDDING and device not in state.bids:
        state = replace(state, selected=state.selected - {device})
        return _assign_if_complete(config, state, now)
    return state, []


def _on_bid(config: RoundsConfig, state: RoundsState, bid: Bid, now: float) -> Step:
    if bid.round != state.round or bid.device not in state.selected:
        return state, []
    if state.phase is Phase.BIDDING:
        if bid.device in state.replayed | state.keeping_replays:
            return state, []  # its word for this round is said
        state = replace(state, bids={**state.bids, bid.device: bid})
        return _assign_if_complete(config, state, now)
    owes = bid.device in state.assigned and bid.device not in state.counted
    if state.phase is not Phase.TRAINING or not owes:
        return state, []
    if bid.level is None:
        return _withdraw(config, state, bid)
    return state, [_assignment(state, bid.device)]


def _open(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    opened = RoundsState(
        state.fleet,
        phase=Phase.BIDDING,
        round=state.round + 1,
        deadline=now + config.bid_s,
        devices=state.devices,
        present=state.present,
        void=state.void,
        best=state.best,
        selected=state.present,
        keeping_late=state.keeping_late,
        late=state.late,
        past=state.past,
    )
    return opened, [Broadcast(_opening(config, opened.round))]


def _assign_if_complete(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    """With nobody there, or too few offers, there is nothing to do before the deadline."""
    complete = bool(state.selected) and state.selected <= state.bids.keys()
    usable = [_usable(config, state.round, bid).level for bid in state.bids.values()]
    enough = sum(level is not None for level in usable) >= config.min_participants
    return _assign(config, state, now) if complete and enough else (state, [])


def _assign(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    bids = {name: _usable(config, state.round, bid) for name, bid in state.bids.items()}
    offers = [bids[name] for name in sorted(bids) if bids[name].level is not None]
    if len(offers) < config.min_participants:
        return _open(config, replace(state, void=state.void + 1), now)
    offers, passed_over = _pick(config, state.round, offers)
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
        bids={name: bid for name, bid in bids.items() if name not in passed_over},
        selected=state.selected - passed_over,
        assigned=assigned,
    )
    assignments: list[Effect] = [_assignment(state, device) for device in assigned]
    closing, effects = _close_if_complete(config, state)
    return closing, [*assignments, *effects]


def _pick(config: RoundsConfig, round: int, offers: list[Bid]) -> tuple[list[Bid], frozenset[str]]:
    """The offers that are taken up, and whose are not."""
    wanted = len(offers)
    if config.participants is not None:
        wanted = math.ceil(config.participants * config.over_selection)
    if wanted >= len(offers):
        return offers, frozenset()
    order = stream(config.seed, "selection", round).permutation(len(offers))
    taken = sorted(int(number) for number in order[:wanted])
    picked = [offers[number] for number in taken]
    return picked, frozenset(bid.device for bid in offers) - {bid.device for bid in picked}


def _assignment(state: RoundsState, device: str) -> Send:
    groups = state.assigned[device]
    return Send(device, Assignment(device=device, round=state.round, groups=groups))


def _usable(config: RoundsConfig, round: int, bid: Bid) -> Bid:
    """The bid, as a skip where the rule has no use for what it offers."""
    rule = config.rule
    if bid.replays and not rule.replay_within:
        bid = replace(bid, replays=False)
    whole = rule.whole_models or round <= rule.warmup_rounds
    if bid.level is None or bid.level == 1 or not whole:
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
    if (device, round) in state.keeping_late:
        return state, []
    try:
        arrival = _checked(config, state, movement, past.expected.get(device))
    except Refused as refusal:
        return state, [_receipt(device, round, Outcome.REJECTED, str(refusal))]
    if _remembers(config, state):
        state = replace(state, keeping_late=state.keeping_late | {(device, round)})
        return _learned(state, arrival), [Keep(round, arrival)]
    return state, [_receipt(device, round, Outcome.LATE, _is_closed(state, round))]


def _on_current(config: RoundsConfig, state: RoundsState, movement: Movement) -> Step:
    device, round = movement.device, movement.round
    if device in state.counted:
        return state, [_receipt(device, round, Outcome.COUNTED)]
    if device in state.keeping:
        return state, []
    try:
        arrival = _checked(config, state, movement, _expected(state).get(device))
    except Refused as refusal:
        return _reject(config, state, device, str(refusal))
    state = replace(state, keeping=state.keeping | {device})
    return _learned(state, arrival), [Keep(round, arrival)]


def _on_replay(config: RoundsConfig, state: RoundsState, replay: Replay) -> Step:
    movement, device = replay.movement, replay.movement.device
    bid = state.bids.get(device)
    if replay.round > state.round:
        future = f"round {replay.round} has not begun; this is round {state.round}"
        return state, [_receipt(device, replay.round, Outcome.REJECTED, future)]
    open_now = state.phase in (Phase.BIDDING, Phase.TRAINING) and replay.round == state.round
    if not open_now:
        closed = _is_closed(state, replay.round)
        return state, [_receipt(device, replay.round, Outcome.LATE, closed)]
    if device in state.replayed:
        return state, [_receipt(device, replay.round, Outcome.COUNTED)]
    if device in state.keeping_replays:
        return state, []
    if bid is None or not bid.replays:
        unasked = "no replay was announced for this round"
        return state, [_receipt(device, replay.round, Outcome.REJECTED, unasked)]
    past = state.past.get(movement.round)
    age = state.round - movement.round
    try:
        if age > _replay_within(config):
            raise Refused(f"it is {age} rounds old; the rule takes {_replay_within(config)}")
        expected = None if past is None else past.expected.get(device)
        arrival = _checked(config, state, movement, expected)
    except Refused as refusal:
        return _reject(config, state, device, str(refusal))
    state = replace(state, keeping_replays=state.keeping_replays | {device})
    return _learned(state, arrival), [Keep(replay.round, arrival)]


def _checked(
    config: RoundsConfig, state: RoundsState, movement: Movement, expected: Expected | None
) -> Arrival:
    return check_arrival(
        config.plan,
        movement,
        expected,
        config.encoding,
        config.local_rule.learning_rate,
        state.fleet.usual,
        config.rms_limit,
    )


def _expected(state: RoundsState) -> dict[str, Expected]:
    """What each device is to do in the present round."""
    return {
        name: Expected(groups, bid.level or 1.0, bid.samples)
        for name, groups in state.assigned.items()
        if (bid := state.bids.get(name)) is not None
    }


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
        keeping_replays=state.keeping_replays - {skip.device},
    )
    return _close_if_complete(config, state)


def _on_kept(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    if not 1 <= round <= state.round or device not in state.devices:
        raise StateError(f"a movement of {device!r} was kept that round {round} never had")
    current = round == state.round and state.phase in (Phase.BIDDING, Phase.TRAINING)
    if current and device in state.keeping:
        counted, keeping = state.counted | {device}, state.keeping - {device}
        state = replace(state, counted=counted, keeping=keeping)
    elif current and device in state.keeping_replays:
        replayed, keeping = state.replayed | {device}, state.keeping_replays - {device}
        state = replace(state, replayed=replayed, keeping_replays=keeping)
    elif current and device in state.counted | state.replayed:
        raise StateError(f"the movement of {device!r} was kept twice")
    else:
        return _on_kept_late(config, state, device, round)
    closing, effects = _close_if_complete(config, state)
    return closing, [_receipt(device, round, Outcome.COUNTED), *effects]


def _on_kept_late(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    past = state.past.get(round)
    state = replace(state, keeping_late=state.keeping_late - {(device, round)})
    if past is not None and device in past.outcomes:
        return state, [_receipt(device, round, past.outcomes[device])]
    takes = past is not None and device in past.expected and _remembers(config, state)
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
    last = state.round - state.void >= config.rounds
    over = state.phase is Phase.FINISHED or (last and state.phase is Phase.CLOSING)
    return config.rule.remembers == "movements" and not over


# -- the round closes ----------------------------------------------------------------------------


def _close_if_complete(config: RoundsConfig, state: RoundsState) -> Step:
    if state.phase is not Phase.TRAINING:
        return state, []
    replaying = {name for name, bid in state.bids.items() if bid.replays}
    wanted = len(state.assigned)
    if config.participants is not None:
        wanted = min(wanted, config.participants)
    enough = len(state.counted) >= math.ceil(config.quorum * wanted)
    return _close(config, state) if enough and state.replayed >= replaying else (state, [])


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
    past[state.round] = PastRound(_expected(state), outcomes)
    state = replace(
        state,
        phase=Phase.CLOSING,
        deadline=None,
        late=frozenset(),
        past=past,
        fleet=state.fleet.covered(config.plan, state.round, counted),
    )
    return state, [commit]


def _on_committed(config: RoundsConfig, state: RoundsState, event: Committed, now: float) -> Step:
    accuracy, best = event.accuracy, state.best
    if accuracy is not None and accuracy > best[0]:
        best = (accuracy, event.round)
    state = replace(state, fleet=replace(state.fleet, norms=event.norms), best=best)
    closed = Broadcast(RoundClosed(round=event.round))
    if _is_over(config, state, accuracy):
        return replace(state, phase=Phase.FINISHED), [closed]
    state, effects = _open(config, state, now)
    return state, [closed, *effects]


def _is_over(config: RoundsConfig, state: RoundsState, accuracy: float | None) -> bool:
    if state.round - state.void >= config.rounds:
        return True
    if accuracy is None:
        return False
    reached = config.target_accuracy is not None and accuracy >= config.target_accuracy
    stuck = config.patience is not None and state.round - state.best[1] >= config.patience
    return reached or stuck


def _opening(config: RoundsConfig, round: int) -> RoundOpen:
    rule = config.rule
    whole = round <= rule.warmup_rounds
    return config.opening(round, whole=whole, replay_within=_replay_within(config))


def _replay_within(config: RoundsConfig) -> int:
    """How old a replay may be: what the rule takes, and its assignment is still known."""
    return min(config.rule.replay_within, config.max_staleness)


def _is_closed(state: RoundsState, round: int) -> str:
    return f"round {round} is closed; round {state.round} is {state.phase.value}"


def _receipt(device: str, round: int, outcome: Outcome, reason: str = "") -> Send:
    return Send(device, Receipt(device=device, round=round, outcome=outcome, reason=reason))
