"""Movements and replays arrive in a run in rounds: what counts, what memory takes, what is refused.

A part of the machine in `rounds.py`, which has its table and rules.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.aggregate.arrivals import Arrival, Expected, MovementRefused, check_arrival
from coordinator.rounds.events import Keep
from coordinator.rounds.state import (
    RoundPhase,
    RoundsConfig,
    RoundsState,
    Step,
    expected_of,
    receipt_of,
)
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import MAX_REASON_CHARACTERS, Bid, Movement, Outcome, Replay


def on_movement(config: RoundsConfig, state: RoundsState, movement: Movement) -> Step:
    """A movement has come: of the present round, of a closed one, or of none there was."""
    device, round = movement.device, movement.round
    if round > state.round:
        future = f"round {round} has not begun; this is round {state.round}"
        return state, [receipt_of(device, round, Outcome.REJECTED, future)]
    if round == state.round and state.phase in (RoundPhase.BIDDING, RoundPhase.TRAINING):
        return _on_current(config, state, movement)
    past = state.past.get(round)
    if past is None:
        old = f"round {round} is more than {config.max_staleness} rounds ago"
        return state, [receipt_of(device, round, Outcome.LATE, old)]
    if device in past.outcomes:
        return state, [receipt_of(device, round, past.outcomes[device])]
    if (device, round) in state.keeping_late:
        return state, []
    try:
        arrival = _checked(config, state, movement, past.expected.get(device))
    except MovementRefused as refusal:
        return state, [receipt_of(device, round, Outcome.REJECTED, str(refusal))]
    if remembers(config, state):
        state = replace(state, keeping_late=state.keeping_late | {(device, round)})
        return _learned(state, arrival), [Keep(round, arrival)]
    return state, [receipt_of(device, round, Outcome.LATE, _is_closed(state, round))]


def _on_current(config: RoundsConfig, state: RoundsState, movement: Movement) -> Step:
    device, round = movement.device, movement.round
    if device in state.counted:
        return state, [receipt_of(device, round, Outcome.COUNTED)]
    if device in state.keeping:
        return state, []
    try:
        arrival = _checked(config, state, movement, expected_of(state).get(device))
    except MovementRefused as refusal:
        return _reject(state, device, str(refusal))
    state = replace(state, keeping=state.keeping | {device})
    return _learned(state, arrival), [Keep(round, arrival)]


def on_replay(config: RoundsConfig, state: RoundsState, replay: Replay) -> Step:
    """A movement has come again, to speak for a device that skips."""
    movement, device = replay.movement, replay.movement.device
    bid = state.bids.get(device)
    if replay.round > state.round:
        future = f"round {replay.round} has not begun; this is round {state.round}"
        return state, [receipt_of(device, replay.round, Outcome.REJECTED, future)]
    open_now = (
        state.phase in (RoundPhase.BIDDING, RoundPhase.TRAINING) and replay.round == state.round
    )
    if not open_now:
        closed = _is_closed(state, replay.round)
        return state, [receipt_of(device, replay.round, Outcome.LATE, closed)]
    if device in state.replayed:
        return state, [receipt_of(device, replay.round, Outcome.COUNTED)]
    if device in state.keeping_replays:
        return state, []
    if bid is None or not bid.replays:
        unasked = "no replay was announced for this round"
        return state, [receipt_of(device, replay.round, Outcome.REJECTED, unasked)]
    past = state.past.get(movement.round)
    age = state.round - movement.round
    try:
        if age > replay_within(config):
            raise MovementRefused(f"it is {age} rounds old; the rule takes {replay_within(config)}")
        expected = None if past is None else past.expected.get(device)
        arrival = _checked(config, state, movement, expected)
    except MovementRefused as refusal:
        return _reject(state, device, str(refusal))
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


def _learned(state: RoundsState, arrival: Arrival) -> RoundsState:
    usual = state.fleet.usual.learn(arrival.scale)
    return replace(state, fleet=replace(state.fleet, usual=usual))


def _reject(state: RoundsState, device: str, refusal: str) -> Step:
    """Refuse what came for the present round, and wait no longer for whoever sent it."""
    receipt = receipt_of(device, state.round, Outcome.REJECTED, refusal)
    bid = state.bids.get(device)
    if device not in state.assigned and not (bid is not None and bid.replays):
        return state, [receipt]
    reason = f"skip: rejected: {refusal}"[:MAX_REASON_CHARACTERS]
    skip = Bid(device=device, round=state.round, level=None, reason=reason)
    return withdraw(state, skip), [receipt]


def withdraw(state: RoundsState, skip: Bid) -> RoundsState:
    """Stop waiting for a device; it counts as a skip."""
    return replace(
        state,
        bids={**state.bids, skip.device: skip},
        assigned={name: g for name, g in state.assigned.items() if name != skip.device},
        keeping=state.keeping - {skip.device},
        keeping_replays=state.keeping_replays - {skip.device},
    )


def on_kept(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    """What a device sent is stored. Raises `StateError` for what was never to be stored."""
    if not 1 <= round <= state.round or device not in state.devices:
        raise StateError(f"a movement of {device!r} was kept that round {round} never had")
    current = round == state.round and state.phase in (RoundPhase.BIDDING, RoundPhase.TRAINING)
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
    return state, [receipt_of(device, round, Outcome.COUNTED)]


def unkept(state: RoundsState, device: str, round: int) -> RoundsState:
    """What a device sent could not be stored: it may come again, and is waited for as before.

    Its scale stays among what is usual: that it was fit to be learned from has not changed.
    """
    state = replace(state, keeping_late=state.keeping_late - {(device, round)})
    if round != state.round:
        return state
    return replace(
        state,
        keeping=state.keeping - {device},
        keeping_replays=state.keeping_replays - {device},
    )


def _on_kept_late(config: RoundsConfig, state: RoundsState, device: str, round: int) -> Step:
    past = state.past.get(round)
    state = replace(state, keeping_late=state.keeping_late - {(device, round)})
    if past is not None and device in past.outcomes:
        return state, [receipt_of(device, round, past.outcomes[device])]
    takes = past is not None and device in past.expected and remembers(config, state)
    if past is None or not takes:
        why = "the round closed, or the device withdrew, before the movement was stored"
        return state, [receipt_of(device, round, Outcome.LATE, why)]
    outcomes = {**past.outcomes, device: Outcome.MEMORY}
    state = replace(
        state,
        late=state.late | {(device, round)},
        past={**state.past, round: replace(past, outcomes=outcomes)},
    )
    return state, [receipt_of(device, round, Outcome.MEMORY, _is_closed(state, round))]


def remembers(config: RoundsConfig, state: RoundsState) -> bool:
    """Whether a movement that came too late still has a use: a commit that takes it is to come."""
    last = state.round - state.void >= config.rounds
    over = state.phase is RoundPhase.FINISHED or (last and state.phase is RoundPhase.CLOSING)
    return config.rule.remembers == "movements" and not over


def replay_within(config: RoundsConfig) -> int:
    """How old a replay may be: what the rule takes, and its assignment is still known."""
    return min(config.rule.replay_within, config.max_staleness)


def _is_closed(state: RoundsState, round: int) -> str:
    return f"round {round} is closed; round {state.round} is {state.phase.value}"
