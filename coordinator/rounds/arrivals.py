"""Arriving movements and replays of a synchronous run: kept, put into memory, or refused.

Part of the machine in `synchronous.py`, which has its table and rules.
"""

from __future__ import annotations

from coordinator.aggregate.arrivals import Arrival, Expected, MovementRefused, check_arrival
from coordinator.rounds.events import Accept, Keep, Send
from coordinator.rounds.persistent import PersistentSet, as_persistent
from coordinator.rounds.reputation import declines
from coordinator.rounds.state import (
    PastRound,
    RoundPhase,
    RoundsConfig,
    RoundsState,
    Step,
    expected_of,
    receipt_of,
)
from edge_sdk.program.records import replace
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import MAX_REASON_CHARACTERS, Bid, Movement, Outcome, Replay
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.transport.uploads import Upload

DISOWNED = "the operator had it forgotten"
REFUSED = "rejected"
"""Code of the skip that stands for a device whose movement was refused."""


def settled(
    config: RoundsConfig, state: RoundsState, device: str, round: int, answers: int | None = None
) -> Send | None:
    """Return the receipt for a movement of this round if its bytes cannot change the outcome.

    `answers` is the round that a replay is sent for; None for a fresh movement. Returns None if
    the movement is wanted.
    """
    if (wanted := answers or round) > state.round:
        future = f"round {wanted} has not begun; this is round {state.round}"
        return receipt_of(device, wanted, Outcome.REJECTED, future)
    current = wanted == state.round
    collects = current and state.phase in (RoundPhase.BIDDING, RoundPhase.TRAINING)
    open = collects or (current and state.phase is RoundPhase.CLOSING)
    if open and device in (state.kept if answers is None else state.replayed):
        return receipt_of(device, wanted, Outcome.KEPT)
    if answers is not None:
        late = receipt_of(device, answers, Outcome.LATE, _is_closed(state, answers))
        return None if collects else late
    if collects:
        return None if device in state.assigned else _unasked(state, device, round)
    past = state.past.get(round)
    is_old = state.round - round >= config.max_staleness
    if past is None or (is_old and device not in past.expected):
        old = f"round {round} is more than {config.max_staleness} rounds old, or was interrupted"
        return receipt_of(device, round, Outcome.LATE, old)
    if device in past.outcomes:
        return receipt_of(device, round, past.outcomes[device], past.reasons.get(device, ""))
    if device not in past.expected:
        return _unasked(state, device, round)
    if declined := declines(state.fleet.standings, device):
        return receipt_of(device, round, Outcome.REJECTED, declined)
    if not remembers(config, state):
        return receipt_of(device, round, Outcome.LATE, _is_closed(state, round))
    return None


def _unasked(state: RoundsState, device: str, round: int) -> Send:
    reason = (
        f"{device!r} has no assignment in round {round}: it got none, withdrew, or was already "
        "rejected"
    )
    known = state.refused.get(device, reason) if round == state.round else reason
    return receipt_of(device, round, Outcome.REJECTED, known)


def on_offer(config: RoundsConfig, state: RoundsState, offer: Offer) -> Step:
    """Accept an offered movement or replay, or answer with its receipt."""
    known = settled(config, state, offer.device, offer.round, offer.answers)
    return state, [Accept(offer) if known is None else known]


def on_movement(
    config: RoundsConfig, state: RoundsState, movement: Movement, upload: Upload | None = None
) -> Step:
    """Handle a movement, whether its round is open, closed or unknown."""
    device, round = movement.device, movement.round
    known = settled(config, state, device, round)
    if known is not None:
        return state, [known]
    past = state.past.get(round)
    if past is not None:
        return _on_late(config, state, movement, past, upload)
    if device in state.keeping:
        return state, []
    try:
        arrival = _checked(config, state, movement, expected_of(config, state, device))
    except MovementRefused as refusal:
        return _reject(state, device, str(refusal))
    state = replace(state, keeping=state.keeping.putting(device, arrival.scale))
    return state, [Keep(round, arrival, upload)]


def _on_late(
    config: RoundsConfig,
    state: RoundsState,
    movement: Movement,
    past: PastRound,
    upload: Upload | None,
) -> Step:
    device, round = movement.device, movement.round
    if (device, round) in state.keeping_late:
        return state, []
    try:
        arrival = _checked(config, state, movement, past.expected.get(device))
    except MovementRefused as refusal:
        state = replace(state, refused=state.refused.putting(device, str(refusal)))
        return state, [receipt_of(device, round, Outcome.REJECTED, str(refusal))]
    state = replace(state, keeping_late=state.keeping_late.adding((device, round)))
    return state, [Keep(round, arrival, upload)]


def on_replay(
    config: RoundsConfig, state: RoundsState, replay: Replay, upload: Upload | None = None
) -> Step:
    """Handle a replay: an earlier movement sent again by a device that skips."""
    movement, device = replay.movement, replay.movement.device
    known = settled(config, state, device, movement.round, replay.round)
    if known is not None:
        return state, [known]
    if device in state.keeping_replays:
        return state, []
    bid = state.bids.get(device)
    if bid is None or not bid.replays:
        unasked = "no replay was announced for this round"
        return state, [receipt_of(device, replay.round, Outcome.REJECTED, unasked)]
    past = state.past.get(movement.round)
    age = state.round - movement.round
    try:
        if age > replay_within(config):
            raise MovementRefused(
                f"it is {age} rounds old; the rule takes at most {replay_within(config)}"
            )
        expected = None if past is None else past.expected.get(device)
        arrival = _checked(config, state, movement, expected)
    except MovementRefused as refusal:
        return _reject(state, device, str(refusal))
    state = replace(state, keeping_replays=state.keeping_replays.putting(device, arrival.scale))
    return state, [Keep(replay.round, arrival, upload)]


def _checked(
    config: RoundsConfig, state: RoundsState, movement: Movement, expected: Expected | None
) -> Arrival:
    return check_arrival(
        config.plan,
        movement,
        expected,
        config.up,
        config.local_rule.learning_rate,
        state.fleet.usual,
        config.rms_limit,
    )


def _reject(state: RoundsState, device: str, refusal: str) -> Step:
    """Refuse a movement for the current round and stop waiting for its device."""
    receipt = receipt_of(device, state.round, Outcome.REJECTED, refusal)
    bid = state.bids.get(device)
    state = replace(state, refused=state.refused.putting(device, refusal))
    if device not in state.assigned and not (bid is not None and bid.replays):
        return state, [receipt]
    return withdraw(state, refused_bid(device, state.round, refusal)), [receipt]


def refused_bid(device: str, round: int, refusal: str) -> Bid:
    """Return the skip that stands for a device whose movement was refused."""
    reason = f"skip: rejected: {refusal}"[:MAX_REASON_CHARACTERS]
    return Bid(device=device, round=round, level=None, reason=reason, code=REFUSED)


def on_disowned(state: RoundsState, device: str) -> Step:
    """Let go of a device's movements that no commit has yet; in the open round it is a skip."""
    had = device in state.kept or device in state.replayed
    owes = device in state.assigned
    state = replace(
        state,
        kept=state.kept.dropping(device),
        replayed=state.replayed.dropping(device),
        late=PersistentSet(key for key in state.late if key[0] != device),
    )
    if state.phase not in (RoundPhase.BIDDING, RoundPhase.TRAINING) or not (had or owes):
        return state, []
    state = withdraw(state, refused_bid(device, state.round, DISOWNED))
    return state, [receipt_of(device, state.round, Outcome.REJECTED, DISOWNED)] if had else []


def withdraw(state: RoundsState, skip: Bid) -> RoundsState:
    """Stop waiting for a device; it counts as a skip."""
    return replace(
        state,
        bids=state.bids.putting(skip.device, skip),
        assigned=state.assigned.dropping(skip.device),
        keeping=state.keeping.dropping(skip.device),
        keeping_replays=state.keeping_replays.dropping(skip.device),
        replaying=state.replaying.dropping(skip.device),
    )


def on_kept(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    """Note that a device's upload is stored. Raises `StateError` if no `Keep` asked for it."""
    if not 1 <= round <= state.round or device not in state.devices:
        raise StateError(f"round {round} has no movement of {device!r} that could be kept")
    current = round == state.round and state.phase in (RoundPhase.BIDDING, RoundPhase.TRAINING)
    if current and device in state.keeping:
        kept = state.kept.putting(device, state.keeping[device])
        state = replace(state, kept=kept, keeping=state.keeping.dropping(device))
    elif current and device in state.keeping_replays:
        state = replace(
            state,
            replayed=state.replayed.putting(device, state.keeping_replays[device]),
            replaying=state.replaying.dropping(device),
            keeping_replays=state.keeping_replays.dropping(device),
        )
    elif current and (device in state.kept or device in state.replayed):
        raise StateError(f"the movement of {device!r} was kept twice")
    else:
        return _on_kept_late(config, state, device, round)
    return state, [receipt_of(device, round, Outcome.KEPT)]


def unkept(state: RoundsState, device: str, round: int) -> RoundsState:
    """Note that a device's upload could not be stored; the round still waits for it."""
    state = replace(state, keeping_late=state.keeping_late.dropping((device, round)))
    if round != state.round:
        return state
    return replace(
        state,
        keeping=state.keeping.dropping(device),
        keeping_replays=state.keeping_replays.dropping(device),
    )


def _on_kept_late(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    past = state.past.get(round)
    state = replace(state, keeping_late=state.keeping_late.dropping((device, round)))
    if past is not None and device in past.outcomes:
        outcome, reason = past.outcomes[device], past.reasons.get(device, "")
        return state, [receipt_of(device, round, outcome, reason)]
    takes = past is not None and device in past.expected and remembers(config, state)
    if past is None or not takes:
        why = "the round closed, or the device withdrew, before the movement was stored"
        return state, [receipt_of(device, round, Outcome.LATE, why)]
    past = replace(past, outcomes=as_persistent(past.outcomes).putting(device, Outcome.MEMORY))
    late, all_past = state.late.adding((device, round)), as_persistent(state.past)
    state = replace(state, late=late, past=all_past.putting(round, past))
    return state, [receipt_of(device, round, Outcome.MEMORY, _is_closed(state, round))]


def remembers(config: RoundsConfig, state: RoundsState) -> bool:
    """True if a late movement is still useful, because a later commit will take it."""
    last = state.round - state.void >= config.rounds
    over = state.phase is RoundPhase.FINISHED or (last and state.phase is RoundPhase.CLOSING)
    return config.rule.remembers == "movements" and not over


def replay_within(config: RoundsConfig) -> int:
    """Largest age in rounds at which the rule accepts a replay and its assignment is known."""
    within = config.rule.replay_within
    return within if config.rule.ageless else min(within, config.max_staleness)


def _is_closed(state: RoundsState, round: int) -> str:
    return f"round {round} is closed; round {state.round} is {state.phase.value}"
