"""Synchronous rounds as a state machine without I/O.

    phase     event                          next      effects
    --------  -----------------------------  --------  -------------------------------------------
    WAITING   Joined, enough devices         BIDDING   Broadcast(RoundOpen); by invitation: also
                                                       Send(RoundOpen) to the devices drawn
    BIDDING   Joined                         BIDDING   Send(RoundOpen) to the newcomer; by
                                                       invitation: only to one that was drawn
    BIDDING   Left                           BIDDING   –; its bid is no longer waited for
    BIDDING   last Bid, or the deadline      TRAINING  Send(Assignment) to the devices picked
                                             CLOSING   Commit, if nothing is awaited
                                             BIDDING   Broadcast(RoundOpen) of the next round, if
                                                       at the deadline too few offered: it is void
                                             WAITING   –, if then fewer than `min_devices` are there
                                             BIDDING   –, if too few offered and none is present:
                                                       the round stays open for newcomers; by
                                                       invitation, the next opens some time after
                                                       one that was not drawn
    TRAINING  Movement that fits             TRAINING  Keep
    BIDDING,  Replay that fits               same      Keep
    TRAINING
    BIDDING,  Kept                           same      Send(Receipt: kept)
    TRAINING
    BIDDING,  Bid (level) of a device that   same      Send(Receipt: rejected, with the reason)
    TRAINING  is quarantined
    TRAINING  Movement, Replay: unfit        TRAINING  Send(Receipt: rejected); no longer waited for
    TRAINING  Bid (skip): withdrawn          TRAINING  –
    TRAINING  Bid (level) of a device with   TRAINING  Send(Assignment) again: it restarted
              an assignment
    TRAINING  Left: all still awaited        TRAINING  –; the deadline is `away_s` from now
    TRAINING  Joined: one of them is back    TRAINING  –; the earlier deadline holds again
    TRAINING  almost all of many are kept    TRAINING  –; the deadline is as far away as the
                                                       assignments, in the past, are
    TRAINING  enough kept, or the deadline   CLOSING   Commit
    CLOSING   Committed                      BIDDING   Send(Receipt: counted or rejected) for every
                                                       movement and replay that was kept, then
                                                       Broadcast(RoundClosed), Broadcast(RoundOpen)
                                             FINISHED  the same without the opening, after the last
                                                       round or when a stop condition is met
                                             WAITING   the same without the opening, if fewer than
                                                       `min_devices` are present
    any       Disowned                       same      –; its movements are no longer waited for,
                                                       and one that was kept is rejected
    any       Released                       same      –; a device's bids are answered again
    any       Barred                         same      –; a device's bids are declined; it is not
                                                       waited for, and a movement that was kept is
                                                       rejected at the close
    WAITING,  Bid (level) for the round that same      Send(RoundClosed): the device bids anew, as
    FINISHED  is over                                  after a restart, and its verdict stands
    any       RoundsHeld                     same      –; once no round is open, none opens
    BIDDING   RoundsHeld, nobody present     WAITING   –; the round is void
    WAITING   RoundsHeld: no longer; enough  BIDDING   Broadcast(RoundOpen)
    other     Movement, Replay: unfit        same      Send(Receipt: rejected, with the reason)
    any       Offer                          same      Accept, or Send(Receipt) if the outcome is
                                                       known before the bytes arrive
    any       Movement of a round now closed same      Keep, if the rule remembers movements; else
                                                       Send(Receipt: late)
    any       Kept, too late to count        same      Send(Receipt: memory), or (Receipt: late)

Rules:
- A device's message at the wrong time is ignored or receipted, never an error; a local event at
  the wrong time (`Kept`, `Committed`) raises `StateError` and changes nothing.
- A movement counts once: while the first copy is being stored a second one is ignored, and later
  it gets the first one's receipt again.
- A movement is judged three times. On arrival: its form, the longest movement that training can
  make (`aggregate/bound.py`), and the usual size of the past. At the close: its size beside the
  others of the round. So its receipt says *kept*, and the verdict follows with the commit; until
  then a repeated movement gets *kept* again, and afterwards the verdict. What is usual is learnt
  at the close, from those that count, in order of their names. Late movements have no cohort:
  their receipt is the verdict.
- Samples are those of the bids, but at most `samples_limit` times the median of the round.
- Devices that are quarantined are not asked; rounds do not wait for spare ones (`reputation.py`).
- Assignments are kept for `max_staleness` rounds: a late or replayed movement is checked against
  its device's assignment in the round it names.
- If only whole models are useful, devices are told so when the round opens, and a lower offer still
  counts as a skip, because a device may not have understood.
- With `participants`, `participants` × `over_selection` devices are drawn, except in a warm-up; the
  round closes when `quorum` of the wanted movements are here. Without a quorum it waits for all; of
  20 or more, the last 5 % get as much time again as the others took.
- `select = "before"` draws of all devices that are present when the round opens; the draw depends
  on their names, the seed and the round alone. The round is by invitation: all other devices wait
  for the next one and are counted nowhere. A drawn device that leaves or stays silent is a skip.
- `select = "after"` asks everybody and draws among the offers. A device that offered but was not
  picked does not count as a skip.
- A device that left may soon return with its movement, so the round waits for it, but only for
  `away_s` once all devices still present have answered.
- `resume` and `recount` continue a round that was open when the previous process stopped: its
  devices have their assignments, and movements with a receipt are on disk. If they were bidding,
  the same devices bid again, once `min_devices` are back; a draw is not repeated.
- While the machine is held, the open round goes on to its end, and a round that would open next
  does not: the machine waits. Which devices are present is kept up meanwhile.
- Time comes with every event; `state.deadline` is the latest time to send `Tick`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.screening import cohort_objections
from coordinator.masks import Situation, level_choices
from coordinator.rounds.arrivals import (
    on_disowned,
    on_kept,
    on_movement,
    on_offer,
    on_replay,
    refused_bid,
    replay_within,
    withdraw,
)
from coordinator.rounds.config import best_of
from coordinator.rounds.events import (
    Barred,
    Broadcast,
    Disowned,
    Joined,
    Keep,
    Kept,
    Left,
    Released,
    RoundsHeld,
    Send,
    Tick,
    Uploaded,
)
from coordinator.rounds.fleet import FleetRecord, new_fleet
from coordinator.rounds.persistent import PersistentMap, PersistentSet
from coordinator.rounds.reputation import (
    GOOD,
    closed,
    declines,
    delivered,
    quarantined,
)
from coordinator.rounds.state import (
    NEARLY,
    ROUNDING,
    Commit,
    Committed,
    Effect,
    Event,
    OpenRound,
    PastRound,
    RoundPhase,
    RoundsConfig,
    RoundsState,
    Step,
    expected_of_all,
    receipt_of,
)
from edge_sdk.program.records import replace
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.protocol.streams import stream

__all__ = [
    "Commit",
    "Committed",
    "Effect",
    "Event",
    "OpenRound",
    "PastRound",
    "RoundPhase",
    "RoundsConfig",
    "RoundsState",
    "Step",
    "assignments_of",
    "handle",
    "invitation_of",
    "opening_of",
    "recount",
    "resume",
    "start",
    "trained_level",
    "without_barred",
]

MOST_UNCOUNTED = 8
"""Old assignments that are kept for a device whose movements since did not count."""


def start(config: RoundsConfig, norms: NDArray[np.float64] | None = None) -> RoundsState:
    """Make the state before the first round; `norms` of the initial weights, if used by masks."""
    return RoundsState(new_fleet(config.plan, norms))


def handle(config: RoundsConfig, state: RoundsState, event: Event, now: float) -> Step:
    """Return the state after an event at time `now` (seconds, any origin), and the effects."""
    state, effects = _react(config, state, event, now)
    if state.phase is not RoundPhase.TRAINING:
        return state, effects
    wanted, here = _progress(config, state)
    if not _is_enough(config, state, wanted, here):
        return _mind_rest(config, state, wanted, here, now), effects
    state, closing = _close(config, state)
    return state, [*effects, *closing]


def resume(config: RoundsConfig, state: RoundsState, opened: OpenRound, now: float) -> RoundsState:
    """Reopen the round that was open when the previous process stopped, with nothing counted yet.

    `recount` then counts the movements on disk; a `Tick` after that closes a complete round, and
    one that was closed already.
    """
    if opened.bidding:
        return replace(
            state,
            phase=RoundPhase.BIDDING,
            round=opened.round,
            refused=PersistentMap(opened.refused),
            devices=PersistentSet(state.devices | opened.selected | opened.newcomers),
            selected=PersistentSet(opened.selected),
            resumed=True,
        )
    deadline = now if opened.closed else now + config.train_deadline_s
    return replace(
        state,
        phase=RoundPhase.TRAINING,
        round=opened.round,
        refused=PersistentMap(opened.refused),
        spare=_spare(state, opened.assigned),
        deadline=deadline,
        train_by=deadline,
        fleet=state.fleet.heard(opened.bids.values()),
        devices=PersistentSet(state.devices | opened.selected | opened.newcomers),
        selected=PersistentSet(opened.selected),
        bids=PersistentMap(opened.bids),
        assigned=PersistentMap(opened.assigned),
        replaying=_replaying(opened.bids.values(), state.replayed),
        resumed=True,
    )


def recount(
    config: RoundsConfig, state: RoundsState, sent: Movement | Replay
) -> tuple[RoundsState, Keep | None]:
    """Take up a movement kept by the previous process; None if it can no longer be used.

    It is checked as on arrival: the bound and the usual size are those of the last commit.
    """
    if isinstance(sent, Replay):
        after, effects = on_replay(config, _announced(state, sent), sent)
    else:
        after, effects = on_movement(config, state, sent)
    for effect in effects:
        if isinstance(effect, Keep):
            device = effect.arrival.contribution.device
            return replace(on_kept(config, after, device, effect.round)[0], bids=state.bids), effect
    return state, None


def _announced(state: RoundsState, replay: Replay) -> RoundsState:
    """Return the state with the bid that came before a replay, which nobody has any more."""
    bids = state.phase is RoundPhase.BIDDING and replay.round == state.round
    return replace(state, bids=_with_replay(state, replay.movement.device)) if bids else state


def _with_replay(state: RoundsState, device: str) -> PersistentMap[str, Bid]:
    """Return the bids with a skip of a device that has already sent its replay."""
    reason = "skip: its replay of this round is here"
    skip = Bid(device=device, round=state.round, level=None, reason=reason, replays=True)
    return state.bids.putting(device, skip)


def without_barred(state: RoundsState) -> RoundsState:
    """Withdraw the devices from a resumed round that were quarantined since it opened.

    A movement that was kept stays; it is rejected at the close.
    """
    for name in quarantined(state.fleet.standings):
        if state.phase is RoundPhase.BIDDING:
            state = _left_out(state, name)
            continue
        owes = name in state.assigned or name in state.replaying
        if owes and name not in state.kept:
            declined = declines(state.fleet.standings, name)
            state = withdraw(state, refused_bid(name, state.round, declined))
    return state


def _react(config: RoundsConfig, state: RoundsState, event: Event, now: float) -> Step:
    match event:
        case Joined(device):
            return _on_joined(config, state, device, now)
        case Left(device):
            return _on_left(config, state, device, now)
        case Bid():
            return _on_bid(config, state, event, now)
        case Offer():
            return on_offer(config, _delivering(state, event.device, event.round, now), event)
        case Movement():
            state = _delivering(state, event.device, event.round, now)
            return on_movement(config, state, event)
        case Replay():
            return on_replay(config, state, event)
        case Uploaded(Movement() as movement, upload):
            return on_movement(config, state, movement, upload)
        case Uploaded(Replay() as replay, upload):
            return on_replay(config, state, replay, upload)
        case Kept(device, round):
            return on_kept(config, state, device, round)
        case Disowned(device):
            return on_disowned(state, device)
        case Released(device):
            state = replace(state, fleet=state.fleet.released(device))
            if state.phase is RoundPhase.WAITING and _are_enough(config, state):
                return _open(config, state, now)
            return state, []
        case Barred():
            return _on_barred(config, state, event, now)
        case RoundsHeld(held):
            return _on_held(config, state, held, now)
        case Tick():
            if state.deadline is None or now < state.deadline:
                return state, []
            if state.phase is RoundPhase.BIDDING:
                return _assign(config, state, now)
            return _close(config, state)
        case Committed(round) if state.phase is RoundPhase.CLOSING and round == state.round:
            return _on_committed(config, state, event, now)
        case _:
            raise StateError(f"{event} cannot happen while {state.phase.value}")


# -- devices come and bid ------------------------------------------------------------------------


def _on_joined(config: RoundsConfig, state: RoundsState, device: str, now: float) -> Step:
    known = device in state.present
    state = replace(
        state,
        devices=state.devices.adding(device),
        present=state.present.adding(device),
        away=state.away.dropping(device),
    )
    if state.phase is RoundPhase.WAITING and _are_enough(config, state):
        return _open(config, state, now)
    if state.phase is not RoundPhase.BIDDING or known or declines(state.fleet.standings, device):
        return state, []
    # Where nobody was there, others return too: a draw waits for them, but not for ever.
    deadline = state.deadline
    if deadline is None and not _awaits_return(config, state):
        deadline = now + config.bid_s
    if config.invites(state.round) and device not in state.selected:
        return replace(state, deadline=deadline), []
    state = replace(state, selected=state.selected.adding(device), deadline=deadline)
    return state, [Send(device, invitation_of(config, state))]


def _on_left(config: RoundsConfig, state: RoundsState, device: str, now: float) -> Step:
    state = replace(state, present=state.present.dropping(device))
    if device not in state.selected:
        return state, []
    state = replace(state, away=state.away.adding(device))
    if state.phase is not RoundPhase.BIDDING or device in state.bids:
        return state, []
    if not config.invites(state.round):
        state = replace(state, selected=state.selected.dropping(device))
    return _assign_if_complete(config, state, now)


def _on_barred(config: RoundsConfig, state: RoundsState, event: Barred, now: float) -> Step:
    """Quarantine a device; the open round goes on without it."""
    device = event.device
    state = replace(state, fleet=state.fleet.shut_out(device, event.round, event.reason))
    if state.phase is RoundPhase.BIDDING and device in state.selected:
        return _assign_if_complete(config, _left_out(state, device), now)
    return (without_barred(state) if state.phase is RoundPhase.TRAINING else state), []


def _left_out(state: RoundsState, device: str) -> RoundsState:
    """Leave a device out of the round that is being bid for."""
    return replace(
        state,
        selected=state.selected.dropping(device),
        bids=state.bids.dropping(device),
        away=state.away.dropping(device),
    )


def _awaits_return(config: RoundsConfig, state: RoundsState) -> bool:
    """True in a resumed round that is bid for, if too few devices for a round are back.

    Its time for bids has not begun then, so no deadline is over; while rounds are held, it is not
    waited for anybody.
    """
    return state.resumed and not state.held and len(state.present) < config.min_devices


def _on_held(config: RoundsConfig, state: RoundsState, held: bool, now: float) -> Step:
    state = replace(state, held=held)
    if held and state.phase is RoundPhase.BIDDING and state.deadline is None:
        return _open_anew(config, state, now)  # it would wait for newcomers
    if state.phase is RoundPhase.WAITING and _are_enough(config, state):
        return _open(config, state, now)
    return state, []


def _on_bid(config: RoundsConfig, state: RoundsState, bid: Bid, now: float) -> Step:
    if bid.round != state.round:
        return state, []
    between = state.phase in (RoundPhase.WAITING, RoundPhase.FINISHED)
    past = state.past.get(bid.round)
    if between and bid.level is not None and past is not None and bid.device in past.outcomes:
        return state, [Send(bid.device, RoundClosed(round=bid.round))]
    if bid.device not in state.selected:
        declined = declines(state.fleet.standings, bid.device)
        if bid.level is None:
            return state, []
        if declined:
            return state, [receipt_of(bid.device, bid.round, Outcome.REJECTED, declined)]
        return state, [Send(bid.device, RoundClosed(round=bid.round))] if between else []
    if state.phase is RoundPhase.BIDDING:
        has_replayed = bid.device in state.replayed or bid.device in state.keeping_replays
        if has_replayed and bid.device in state.bids:
            return state, []  # it has already bid in this round
        if has_replayed and not bid.replays:  # it bid otherwise before the coordinator restarted
            state = replace(state, bids=_with_replay(state, bid.device))
        else:
            state = replace(state, bids=state.bids.putting(bid.device, bid))
        return _assign_if_complete(config, state, now)
    owes = bid.device in state.assigned and bid.device not in state.kept
    if state.phase is not RoundPhase.TRAINING or not owes:
        return state, []
    if bid.level is None:
        return withdraw(state, bid), []
    return state, [Send(bid.device, each) for each in assignments_of(config, state, [bid.device])]


def _open(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    round = state.round + 1
    invites = config.invites(round)
    welcome = state.present
    for name in quarantined(state.fleet.standings):
        welcome = welcome.dropping(name)
    opened = RoundsState(
        state.fleet,
        phase=RoundPhase.BIDDING,
        round=round,
        deadline=now + config.bid_s,
        devices=state.devices,
        present=state.present,
        void=state.void,
        best=state.best,
        selected=_drawn(config, round, welcome) if invites else welcome,
        refused=state.refused,
        keeping_late=state.keeping_late,
        late=state.late,
        past=state.past,
    )
    effects: list[Effect] = [Broadcast(opening_of(config, opened))]
    if invites:
        invitation = invitation_of(config, opened)
        effects += [Send(device, invitation) for device in sorted(opened.selected)]
    return opened, effects


def _open_anew(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    """Open the next round; the current one had too few offers."""
    return _open_if_enough(config, replace(state, void=state.void + 1), now)


def _open_if_enough(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    """Open the next round, or wait until enough devices are present for it."""
    if not _are_enough(config, state):
        return replace(state, phase=RoundPhase.WAITING, deadline=None), []
    return _open(config, state, now)


def _are_enough(config: RoundsConfig, state: RoundsState) -> bool:
    """True if a round can open. Quarantined devices are there too: they must not stop the run."""
    if state.held:
        return False
    barred = sum(name in state.present for name in quarantined(state.fleet.standings))
    return barred < len(state.present) >= config.min_devices


def _waiting(state: RoundsState) -> Step:
    """Wait for the next device, without a deadline."""
    return replace(state, deadline=None), []


def _drawn(config: RoundsConfig, round: int, present: PersistentSet[str]) -> PersistentSet[str]:
    """Draw the devices that are invited, of all that are present."""
    wanted = config.drawn(round)
    if wanted is None or wanted >= len(present):
        return PersistentSet(present)
    draws = stream(config.seed, "selection", round)
    return PersistentSet(present.at(draws.choice(len(present), wanted, replace=False)))


def _assign_if_complete(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    """Assign work once all bids are in; waits for the deadline if offers are too few."""
    if not state.bids or len(state.bids) + len(state.away) < len(state.selected):
        return state, []
    gone = sum(name not in state.bids and name in state.selected for name in state.away)
    if len(state.bids) + gone < len(state.selected):
        return state, []
    largest = _largest(config, state)
    usable = [_usable(config, state.round, bid, largest).level for bid in state.bids.values()]
    enough = sum(level is not None for level in usable) >= config.min_participants
    return _assign(config, state, now) if enough else (state, [])


def _assign(config: RoundsConfig, state: RoundsState, now: float) -> Step:
    if state.resumed:  # replays of the process before, whose devices did not bid again
        for name in [each for each in state.replayed if each not in state.bids]:
            state = replace(state, bids=_with_replay(state, name))
    largest = _largest(config, state)
    bids = {name: _usable(config, state.round, bid, largest) for name, bid in state.bids.items()}
    offers = [bids[name] for name in sorted(bids) if bids[name].level is not None]
    few = len(offers) < config.min_participants
    if few and not state.present and not state.held:
        return _waiting(state)  # a new round would find no devices either
    if few:
        return _open_anew(config, state, now)
    offers, passed_over = _pick(config, state.round, offers)
    bids = {bid.device: bid for bid in state.fleet.capped(bids.values(), config.samples_limit)}
    fleet = state.fleet.heard(bids.values())
    situation = Situation(
        plan=config.plan,
        round=state.round,
        offers=offers,
        last_covered=fleet.last_covered,
        times_covered=fleet.times_covered,
        norms=fleet.norms,
        stream=stream(config.seed, "masks", state.round),
        importance=fleet.importance,
    )
    assigned = config.masks(situation) if offers else {}
    deadline = now + config.train_deadline_s
    selected = state.selected
    if passed_over:
        bids = {name: bid for name, bid in bids.items() if name not in passed_over}
        selected = PersistentSet(name for name in selected if name not in passed_over)
    state = replace(
        state,
        phase=RoundPhase.TRAINING,
        deadline=deadline,
        train_by=deadline,
        fleet=fleet,
        bids=PersistentMap(bids),
        selected=selected,
        assigned=PersistentMap(assigned),
        spare=_spare(state, assigned),
        replaying=_replaying(bids.values(), state.replayed),
    )
    return state, [Send(each.device, each) for each in assignments_of(config, state, assigned)]


def _pick(config: RoundsConfig, round: int, offers: list[Bid]) -> tuple[list[Bid], frozenset[str]]:
    """Return the offers picked, and the devices whose offers are not."""
    wanted = config.drawn(round)
    if wanted is None or wanted >= len(offers):
        return offers, frozenset()
    order = stream(config.seed, "selection", round).permutation(len(offers))
    taken = sorted(int(number) for number in order[:wanted])
    picked = [offers[number] for number in taken]
    return picked, frozenset(bid.device for bid in offers) - {bid.device for bid in picked}


def assignments_of(
    config: RoundsConfig, state: RoundsState, devices: Iterable[str]
) -> list[Assignment]:
    """Make the assignments of these devices; the same each time in a round."""
    narrower = config.narrower(state.round)
    return [
        Assignment(device=device, round=state.round, groups=groups, widths=narrower.within(groups))
        for device in devices
        for groups in [state.assigned[device]]
    ]


def _largest(config: RoundsConfig, state: RoundsState) -> float:
    """Return the largest level that the round trains.

    A model never shrinks: a level that was trained before, in all its blocks, stays, even if the
    run has become longer or did not grow at first.
    """
    planned = config.largest(state.round - state.void)
    return planned if planned == 1 else max(planned, trained_level(config, state.fleet))


def trained_level(config: RoundsConfig, fleet: FleetRecord) -> float:
    """Return the largest level that was trained in all its blocks; 0 if none was."""
    plan, covered = config.plan, fleet.times_covered > 0
    choices = level_choices(config.masks, plan, config.levels).items()
    held = {level: plan.covers(plan.choose(groups)) for level, groups in choices}
    return max((level for level, blocks in held.items() if covered[blocks].all()), default=0.0)


def _usable(config: RoundsConfig, round: int, bid: Bid, largest: float) -> Bid:
    """Return the bid, turned into a skip if the rule cannot use its offer.

    An offer is for no more than the largest level that the round trains.
    """
    if bid.replays and not config.rule.replay_within:
        bid = replace(bid, replays=False)
    if bid.level is None:
        return bid
    if bid.level == 1 or not config.wants_whole(round):
        return bid if bid.level <= largest else replace(bid, level=largest)
    reason = f"skip: offered {bid.level:.0%}, but the rule takes whole models only"
    return replace(bid, level=None, reason=reason)


# -- the round closes ----------------------------------------------------------------------------


def _spare(state: RoundsState, assigned: Iterable[str]) -> frozenset[str]:
    """Return the devices that the round does not wait for; none if there are no others."""
    standings = state.fleet.standings
    if not standings:
        return frozenset()
    names = set(assigned)
    spare = frozenset(name for name in names if standings.get(name, GOOD).silent)
    return spare if len(spare) < len(names) else frozenset()


def _progress(config: RoundsConfig, state: RoundsState) -> tuple[int, int]:
    """Return the number of movements that are wanted, and of those that are here."""
    wanted, here = len(state.assigned), len(state.kept)
    if state.spare:
        wanted -= sum(name in state.assigned for name in state.spare)
        here -= sum(name in state.kept for name in state.spare)
    if config.participants is not None and not config.warms_up(state.round):
        wanted = min(wanted, config.participants)
    return wanted, here


def _is_enough(
    config: RoundsConfig, state: RoundsState, wanted: int, here: int, share: float | None = None
) -> bool:
    """True if enough movements are here; `share` is the quorum, that of the settings if None."""
    share = (config.quorum or 1.0) if share is None else share
    return here >= math.ceil(share * wanted - ROUNDING) and not state.replaying


def _mind_rest(
    config: RoundsConfig, state: RoundsState, wanted: int, here: int, now: float
) -> RoundsState:
    """Shorten the deadline if only devices that left, or the last few of many, are awaited."""
    if state.train_by is None:
        return state
    away_by, rest_by = None, state.rest_by
    if state.away and _owed_by_absent(state):
        away_by = now + config.away_s if state.away_by is None else state.away_by
    if (
        config.quorum is None
        and rest_by is None
        and _is_enough(config, state, wanted, here, NEARLY)
    ):
        began = state.train_by - config.train_deadline_s
        rest_by = now + max(0.0, now - began)
    deadline = min(each for each in (state.train_by, away_by, rest_by) if each is not None)
    if (deadline, away_by, rest_by) == (state.deadline, state.away_by, state.rest_by):
        return state
    return replace(state, deadline=deadline, away_by=away_by, rest_by=rest_by)


def _owed_by_absent(state: RoundsState) -> bool:
    """True if movements are still owed, and only by devices that left."""
    owed = len(state.assigned) - len(state.kept) - len(state.keeping) - len(state.spare)
    if owed > len(state.away):
        return False  # so most calls cost nothing
    done = state.kept, state.keeping, state.spare
    owing = chain(
        (name for name in state.assigned if not any(name in each for each in done)),
        (name for name in state.replaying if name not in state.keeping_replays),
    )
    owes = False
    for name in owing:
        if name not in state.away:
            return False
        owes = True
    return owes


def _delivering(state: RoundsState, device: str, round: int, now: float) -> RoundsState:
    """Note that a device delivers late, but no later than the round might have waited."""
    standings, past = state.fleet.standings, state.past.get(round)
    if not standings or past is None or device not in past.expected:
        return state
    if past.train_by is None or now > past.train_by:
        return state
    return replace(state, fleet=replace(state.fleet, standings=delivered(standings, device)))


def _replaying(bids: Iterable[Bid], replayed: Container[str]) -> PersistentSet[str]:
    return PersistentSet(bid.device for bid in bids if bid.replays and bid.device not in replayed)


def _close(config: RoundsConfig, state: RoundsState) -> Step:
    """Close the round: decide which of the kept movements count, and what is held against whom."""
    shut_out = _shut_out(state)
    objections = {**_objections(config, state, shut_out), **shut_out}
    fresh = {name: scale for name, scale in state.kept.items() if name not in objections}
    replayed = {name: scale for name, scale in state.replayed.items() if name not in objections}
    commit = Commit(
        round=state.round,
        fresh=tuple(sorted(fresh)),
        replayed=tuple(sorted(replayed)),
        silent=tuple(
            sorted(name for name in state.selected if name not in fresh and name not in replayed)
        ),
        late=tuple(sorted(state.late)),
        refused=dict(sorted(objections.items())),
    )
    past = _recent(config, state)
    past[state.round] = PastRound(
        expected_of_all(config, state),
        {
            name: Outcome.REJECTED if name in objections else Outcome.COUNTED
            for name in sorted(state.kept)
        },
        {name: reason for name, reason in commit.refused.items() if name in state.kept},
        state.train_by,
        config.local_rule.learning_rate,
    )
    # An incomplete round closes at a deadline, also in a process that was started since.
    complete = _is_enough(config, state, *_progress(config, state))
    owed = () if complete else chain(state.assigned, state.replaying)
    refused = {**state.refused, **objections}
    standings = closed(
        state.fleet.standings,
        state.round,
        counted=chain(fresh, replayed),
        refused={name: why for name, why in refused.items() if name not in shut_out},
        silent=[name for name in owed if name not in state.kept],
        quarantine_after=config.quarantine_after,
    )
    fleet = state.fleet.learned(fresh).covered(
        config.plan, state.round, {name: state.assigned[name] for name in commit.fresh}
    )
    if config.measures(state.round):
        fleet = fleet.measured(config.plan, fresh)
    skips = {name: refused_bid(name, state.round, why) for name, why in commit.refused.items()}
    state = replace(
        state,
        phase=RoundPhase.CLOSING,
        deadline=None,
        bids=state.bids.merging(skips),
        objections=objections,
        late=PersistentSet(),
        past=past,
        fleet=replace(fleet, standings=standings),
    )
    return state, [commit]


def _recent(config: RoundsConfig, state: RoundsState) -> dict[int, PastRound]:
    """Return the closed rounds whose assignments are still needed.

    Where a replay may be of any age, older rounds keep those of the devices that may still send
    their movement again: the ones of which no later movement counted, and of each of these the
    last `MOST_UNCOUNTED` assignments beside the one that counted.
    """
    horizon = state.round - config.max_staleness
    past = {number: entry for number, entry in state.past.items() if number > horizon}
    if not (config.rule.ageless and config.rule.replay_within):
        return past
    last, since = state.fleet.trained, Counter[str]()
    for number in sorted((each for each in state.past if each <= horizon), reverse=True):
        entry = state.past[number]
        kept = {
            name: each
            for name, each in entry.expected.items()
            if last.get(name, 0) == number
            or (last.get(name, 0) < number and since[name] < MOST_UNCOUNTED)
        }
        since.update(kept.keys())
        if kept:
            past[number] = replace(
                entry,
                expected=kept,
                outcomes={n: each for n, each in entry.outcomes.items() if n in kept},
                reasons={n: each for n, each in entry.reasons.items() if n in kept},
            )
    return dict(sorted(past.items()))


def _shut_out(state: RoundsState) -> dict[str, str]:
    """Return the devices that were quarantined after their movement was kept, and why."""
    standings = state.fleet.standings
    if not standings:
        return {}
    names = sorted({*state.kept, *state.replayed})
    return {name: why for name in names if (why := declines(standings, name))}


def _objections(
    config: RoundsConfig, state: RoundsState, shut_out: Container[str]
) -> dict[str, str]:
    """Return the devices whose movement stands out among those of the round, and why."""
    if config.cohort_limit is None:
        return {}
    kept, replayed = (
        {name: scale for name, scale in each.items() if name not in shut_out} if shut_out else each
        for each in (state.kept, state.replayed)
    )
    return cohort_objections(config.plan, kept, replayed, config.cohort_limit)


def _on_committed(config: RoundsConfig, state: RoundsState, event: Committed, now: float) -> Step:
    committed = event.round - state.void
    best = best_of(state.best, event.accuracy, committed)
    verdicts = _verdicts(state)
    fleet = replace(state.fleet, norms=event.norms)
    state = replace(state, fleet=fleet, best=best, refused=PersistentMap())
    closing: list[Effect] = [*verdicts, Broadcast(RoundClosed(round=event.round))]
    if config.is_over(committed, best):
        return replace(state, phase=RoundPhase.FINISHED), closing
    state, effects = _open_if_enough(config, state, now)
    return state, [*closing, *effects]


def _verdicts(state: RoundsState) -> list[Effect]:
    """Return the verdict on every movement and replay that was kept for the round."""
    return [
        receipt_of(name, state.round, Outcome.REJECTED, state.objections[name])
        if name in state.objections
        else receipt_of(name, state.round, Outcome.COUNTED)
        for name in sorted({*state.kept, *state.replayed})
    ]


def opening_of(config: RoundsConfig, state: RoundsState) -> RoundOpen:
    """Make the message that opens a round to all devices, or announces one by invitation."""
    return replace(invitation_of(config, state), by_invitation=config.invites(state.round))


def invitation_of(config: RoundsConfig, state: RoundsState) -> RoundOpen:
    """Make the message that asks a single device to take part in a round."""
    return config.opening(
        state.round,
        whole=config.wants_whole(state.round),
        warmup=config.warms_up(state.round) or config.measures(state.round),
        replay_within=replay_within(config),
        rounds_left=max(1, config.rounds - (state.round - state.void) + 1),
        largest=_largest(config, state),
    )
