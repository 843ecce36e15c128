"""Asynchronous training as a state machine without I/O: every arrival updates the model at once.

Each device works at its own pace. For one device, while the run lasts:

    stage      event                       next      effects
    ---------  --------------------------  --------  ---------------------------------------------
    –          Joined                      ASKED     Send(RoundOpen), once enough devices joined
    ASKED      Bid (level)                 TRAINING  Reserve, Send(Assignment)
    ASKED      Bid (skip)                  RESTING   –
    ASKED      Bid (level) of a device     RESTING   Send(Receipt: rejected, with the reason)
               that is quarantined
    TRAINING   Bid (skip): withdrawn       RESTING   Release
    TRAINING   Bid (level): it restarted   TRAINING  Send(Assignment) again
    TRAINING   Movement that fits          KEEPING   Keep
    TRAINING   Movement that does not      RESTING   Release, Send(Receipt: rejected)
    KEEPING    Kept                        ASKED     Apply, Send(Receipt: counted), Send(RoundOpen)
                                           –         after the last update: Apply, Send(Receipt:
                                                     counted), then Release and
                                                     Send(RoundClosed) for each device
    any        Evaluated that ends the run  –         Release and Send(RoundClosed) for each device
    ASKED      its deadline                ASKED     Send(RoundOpen)
    RESTING    its deadline                ASKED     Send(RoundOpen)
    TRAINING   its deadline                ASKED     Release, Send(RoundOpen)
    other      Movement                    same      Send(Receipt: late, or counted if it was)
    any        Offer                       same      Accept, or Send(Receipt) if the outcome is
                                                     known before the bytes arrive

Rules:
- `version` counts updates: movements that the rule took, whether or not it collects several before
  it moves the model. `round` numbers the openings of all devices together, so each device sees
  increasing numbers. A movement's age is the number of changes of the model since the version its
  fragment came from; the performer of `Reserve` knows that version.
- If the rule's only fragment is the whole model, devices are told so when asked, and a lower offer
  counts as a skip.
- `Reserve` keeps the fragment in its current state: the device fetches it, and the rule uses it
  again.
- Arrivals have no cohort: they are judged by the longest movement that training can make and by
  the usual size of the past, at once, and their receipts are verdicts. A claim of samples is
  judged by the mean of earlier ones.
- A message at the wrong time is ignored or receipted; a `Kept` at the wrong time raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from coordinator.aggregate.arrivals import Expected, GroupsByAxis, MovementRefused, check_arrival
from coordinator.aggregate.rules import AsyncRule
from coordinator.masks import Situation
from coordinator.rounds.arrivals import REFUSED
from coordinator.rounds.config import UNMEASURED, Best, RunConfig, best_of
from coordinator.rounds.events import (
    Accept,
    Joined,
    Keep,
    Kept,
    Left,
    Released,
    Send,
    Tick,
    Uploaded,
)
from coordinator.rounds.fleet import FleetRecord, new_fleet
from coordinator.rounds.persistent import Heap, PersistentMap, PersistentSet, merged
from coordinator.rounds.reputation import closed, declines, released
from edge_sdk.program.records import replace
from edge_sdk.program.settings import Count, Seconds
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import (
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    Replay,
    RoundClosed,
)
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.uploads import Upload


class Stage(Enum):
    """Stage of a device, as far as the coordinator knows."""

    ASKED = "asked for a bid"
    TRAINING = "training"
    KEEPING = "its movement is being stored"
    RESTING = "resting"


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsConfig(RunConfig):
    """Settings of an asynchronous run, which ends after `updates` movements at the latest."""

    rule: AsyncRule
    updates: Count
    rest_s: Seconds = 30.0
    """Seconds after a skip before a device is asked again."""

    def is_over(self, version: int, best: Best, every: int) -> bool:
        """True if there is nothing left to do after this many updates; `every`: of a report."""
        return version >= self.updates or self.stops_early(best, version, every)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Keep the current weights of these groups, for the device to fetch and for the rule."""

    device: str
    round: int
    groups: GroupsByAxis


@dataclass(frozen=True, slots=True)
class Release:
    """Drop the fragment reserved for a device."""

    device: str
    round: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Mix a kept movement into the model and release its fragment."""

    device: str
    round: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The newest model was evaluated for a report; there is one after `every` updates.

    `accuracy` is from 0 to 1; None if it is not known.
    """

    accuracy: float | None
    every: int


Event = (
    Joined | Left | Bid | Offer | Movement | Replay | Uploaded | Kept | Evaluated | Released | Tick
)
Effect = Send | Accept | Keep | Reserve | Release | Apply


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """State of one device."""

    stage: Stage
    round: int
    deadline: float
    bid: Bid | None = None
    groups: GroupsByAxis | None = None
    limit: float | None = None
    """Longest movement that honest training makes of them; None: there is no bound."""


@dataclass(frozen=True, slots=True)
class FragmentsState:
    """Everything the coordinator remembers. Made by `start`."""

    fleet: FleetRecord
    version: int = 0
    openings: int = 0
    running: bool = False
    finished: bool = False
    best: Best = UNMEASURED
    """Best accuracy so far, and the number of updates it took."""
    devices: PersistentSet[str] = field(default_factory=PersistentSet)
    work: PersistentMap[str, DeviceWork] = field(default_factory=PersistentMap)
    counted: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """Per device, the newest round whose movement was applied."""
    under_way: Indices | None = None
    """Per block, the number of devices training it now; None if none ever did."""
    agenda: Heap[Due] | None = None
    """Deadlines, earliest first. The first one is valid; others may belong to finished work."""
    agenda_size: int = 0

    @property
    def deadline(self) -> float | None:
        """Latest time to send `Tick`; None if there is no deadline."""
        return None if self.agenda is None else self.agenda.first[0]


Due = tuple[float, str, int]
"""A deadline with its device and round."""

Step = tuple[FragmentsState, list[Effect]]


def start(config: FragmentsConfig) -> FragmentsState:
    """Make the state before any device has joined."""
    return FragmentsState(new_fleet(config.plan))


def handle(config: FragmentsConfig, state: FragmentsState, event: Event, now: float) -> Step:
    """Return the state after an event at time `now` (seconds, any origin), and the effects."""
    after, effects = _react(config, state, event, now)
    return after if after is state else _tidied(after), effects


def _react(config: FragmentsConfig, state: FragmentsState, event: Event, now: float) -> Step:
    match event:
        case Joined(device):
            return _on_joined(config, state, device, now)
        case Bid():
            return _on_bid(config, state, event, now)
        case Offer():
            known = _settled(state, event.device, event.round, event.answers)
            return state, [Accept(event) if known is None else known]
        case Movement():
            return _on_movement(config, state, event, None, now)
        case Uploaded(Movement() as movement, upload):
            return _on_movement(config, state, movement, upload, now)
        case (Replay() as replay) | Uploaded(Replay() as replay):
            return state, [_no_replays(replay.movement.device, replay.round)]
        case Kept(device, round):
            return _on_kept(config, state, device, round, now)
        case Evaluated(accuracy, every):
            state = replace(state, best=best_of(state.best, accuracy, state.version))
            over = not state.finished and config.is_over(state.version, state.best, every)
            return _ended(state) if over else (state, [])
        case Released(device):
            standings = released(state.fleet.standings, device)
            return replace(state, fleet=replace(state.fleet, standings=standings)), []
        case Tick():
            return _on_tick(config, state, now)
        case _:
            return state, []  # a device that left may return before its deadline


# -- deadlines -----------------------------------------------------------------------------------


def _with_work(state: FragmentsState, device: str, work: DeviceWork) -> FragmentsState:
    """Return the state with a device's new work and its deadline."""
    due = Heap((work.deadline, device, work.round))
    return replace(
        state,
        work=state.work.putting(device, work),
        agenda=merged(state.agenda, due),
        agenda_size=state.agenda_size + 1,
    )


def _tidied(state: FragmentsState) -> FragmentsState:
    """Drop outdated deadlines at the front of the agenda; drop all of them if it grew too long."""
    agenda, size = state.agenda, state.agenda_size
    if size > 2 * len(state.work) + 16:
        agenda, size = None, 0
        for device, work in state.work.items():
            agenda, size = merged(agenda, Heap((work.deadline, device, work.round))), size + 1
    while agenda is not None and not _holds(state, agenda.first):
        agenda, size = agenda.rest(), size - 1
    return state if agenda is state.agenda else replace(state, agenda=agenda, agenda_size=size)


def _holds(state: FragmentsState, due: Due) -> bool:
    deadline, device, round = due
    work = state.work.get(device)
    return (
        work is not None
        and (work.deadline, work.round) == (deadline, round)
        and work.stage is not Stage.KEEPING
    )


# -- devices -------------------------------------------------------------------------------------


def _on_joined(config: FragmentsConfig, state: FragmentsState, device: str, now: float) -> Step:
    known = device in state.devices
    if not known:
        state = replace(state, devices=state.devices.adding(device))
    if known or state.finished:
        return state, []
    if state.running:
        return _ask(config, state, device, now)
    if len(state.devices) < config.min_devices:
        return state, []
    state, effects = replace(state, running=True), []
    for name in sorted(state.devices):
        state, asked = _ask(config, state, name, now)
        effects += asked
    return state, effects


def _ask(config: FragmentsConfig, state: FragmentsState, device: str, now: float) -> Step:
    round = state.openings + 1
    work = DeviceWork(Stage.ASKED, round, now + config.bid_s)
    state = _with_work(replace(state, openings=round), device, work)
    return state, [Send(device, config.opening(round, whole=config.rule.whole_models))]


def _on_bid(config: FragmentsConfig, state: FragmentsState, bid: Bid, now: float) -> Step:
    work = state.work.get(bid.device)
    if work is None or bid.round != work.round:
        return state, []
    if work.stage is Stage.ASKED:
        if config.rule.whole_models and bid.level is not None and bid.level < 1:
            reason = f"skip: offered {bid.level:.0%}, but the rule takes whole models only"
            bid = replace(bid, level=None, reason=reason)
        if bid.level is None:
            return _rest(config, state, bid, now), []
        if declined := declines(state.fleet.standings, bid.device):
            skip = replace(bid, level=None, reason=f"skip: {declined}"[:MAX_REASON_CHARACTERS])
            rejected = _receipt(bid.device, bid.round, Outcome.REJECTED, declined)
            return _rest(config, state, skip, now), [rejected]
        return _assign(config, state, bid, now)
    if work.stage is Stage.TRAINING and bid.level is None:
        state = _unburdened(config, state, work)
        return _rest(config, state, bid, now), [Release(bid.device, work.round)]
    if work.stage is Stage.TRAINING and work.groups is not None:  # it restarted, or missed it
        groups = work.groups
        return state, [Send(bid.device, _assignment(bid.device, work.round, groups))]
    return state, []


def _assign(config: FragmentsConfig, state: FragmentsState, bid: Bid, now: float) -> Step:
    work, device = state.work[bid.device], bid.device
    (capped,) = state.fleet.capped([bid], config.samples_limit)
    fleet = state.fleet.heard([capped])
    situation = Situation(
        plan=config.plan,
        round=work.round,
        offers=[bid],
        last_covered=fleet.last_covered,
        times_covered=fleet.times_covered,
        norms=None,
        stream=stream(config.seed, "masks", work.round),
        under_way=_under_way(config, state),
    )
    groups = config.masks(situation)[device]
    training = DeviceWork(
        Stage.TRAINING,
        work.round,
        now + config.train_deadline_s,
        capped,
        groups,
        config.limit(groups, fleet.norms),
    )
    under_way = _under_way(config, state) + config.plan.coverage([groups])
    state = _with_work(replace(state, fleet=fleet, under_way=under_way), device, training)
    send = Send(device, _assignment(device, work.round, groups))
    return state, [Reserve(device, work.round, groups), send]


def _assignment(device: str, round: int, groups: GroupsByAxis) -> Assignment:
    return Assignment(device=device, round=round, groups=groups)


def _under_way(config: FragmentsConfig, state: FragmentsState) -> Indices:
    """Per block, the number of devices training it now."""
    return config.plan.coverage([]) if state.under_way is None else state.under_way


def _unburdened(config: FragmentsConfig, state: FragmentsState, work: DeviceWork) -> FragmentsState:
    """Return the state in which a device no longer holds its fragment."""
    if work.groups is None:
        return state
    under_way = _under_way(config, state) - config.plan.coverage([work.groups])
    return replace(state, under_way=under_way)


def _rest(config: FragmentsConfig, state: FragmentsState, bid: Bid, now: float) -> FragmentsState:
    resting = DeviceWork(Stage.RESTING, state.work[bid.device].round, now + config.rest_s, bid)
    return _with_work(state, bid.device, resting)


def _settled(
    state: FragmentsState, device: str, round: int, answers: int | None = None
) -> Send | None:
    """Return the receipt for a movement of this round if its bytes cannot change the outcome."""
    if answers is not None:
        return _no_replays(device, answers)
    if round == state.counted.get(device):
        return _receipt(device, round, Outcome.COUNTED)
    work = state.work.get(device)
    if work is None or work.round != round or work.stage not in (Stage.TRAINING, Stage.KEEPING):
        gone = f"no movement of {device!r} for round {round} is expected any more"
        return _receipt(device, round, Outcome.LATE, gone)
    return None


def _no_replays(device: str, round: int) -> Send:
    unasked = "this run is asynchronous and accepts no replays"
    return _receipt(device, round, Outcome.REJECTED, unasked)


def _on_movement(
    config: FragmentsConfig,
    state: FragmentsState,
    movement: Movement,
    upload: Upload | None,
    now: float,
) -> Step:
    device, round = movement.device, movement.round
    known = _settled(state, device, round)
    if known is not None:
        return state, [known]
    work = state.work[device]
    if work.stage is Stage.KEEPING:
        return state, []
    try:
        arrival = check_arrival(
            config.plan,
            movement,
            _expected(work),
            config.up,
            config.local_rule.learning_rate,
            state.fleet.usual,
            config.rms_limit,
        )
    except MovementRefused as refusal:
        reason = f"skip: rejected: {refusal}"[:MAX_REASON_CHARACTERS]
        skip = Bid(device=device, round=round, level=None, reason=reason, code=REFUSED)
        state = _rest(config, _unburdened(config, state, work), skip, now)
        state = _judged(config, state, refused={device: str(refusal)})
        rejected = _receipt(device, round, Outcome.REJECTED, str(refusal))
        return state, [Release(device, round), rejected]
    fleet = replace(state.fleet, usual=state.fleet.usual.learn(arrival.scale))
    keeping = replace(work, stage=Stage.KEEPING)
    state = replace(state, fleet=fleet, work=state.work.putting(device, keeping))
    return state, [Keep(round, arrival, upload)]


def _on_kept(
    config: FragmentsConfig, state: FragmentsState, device: str, round: int, now: float
) -> Step:
    work = state.work.get(device)
    if state.finished and device in state.devices:
        return state, [_receipt(device, round, Outcome.LATE, "the run has ended")]
    if work is None or work.stage is not Stage.KEEPING or work.round != round:
        raise StateError(f"no movement of {device!r} is being stored for round {round}")
    groups = {} if work.groups is None else work.groups
    version = state.version + 1
    state = _judged(config, state, counted=[device])
    state = replace(
        _unburdened(config, state, work),
        version=version,
        fleet=state.fleet.covered(config.plan, version, {device: groups}),
        counted=state.counted.putting(device, round),
        work=state.work.dropping(device),
    )
    effects: list[Effect] = [
        Apply(device, round),
        _receipt(device, round, Outcome.COUNTED),
    ]
    if version < config.updates:
        state, asked = _ask(config, state, device, now)
        return state, [*effects, *asked]
    state, ending = _ended(state)
    return state, [*effects, *ending]


def _ended(state: FragmentsState) -> Step:
    """Return the state after the last update, and what tells the devices at work."""
    effects: list[Effect] = []
    for name, other in sorted(state.work.items()):
        if other.stage in (Stage.TRAINING, Stage.KEEPING):
            effects.append(Release(name, other.round))
        effects.append(Send(name, RoundClosed(round=other.round)))
    return replace(state, finished=True, work=PersistentMap()), effects


def _on_tick(config: FragmentsConfig, state: FragmentsState, now: float) -> Step:
    due: list[str] = []
    agenda, size = state.agenda, state.agenda_size
    while agenda is not None and agenda.first[0] <= now:
        if _holds(state, agenda.first):
            due.append(agenda.first[1])
        agenda, size = agenda.rest(), size - 1
    if not due:
        return state, []
    state = replace(state, agenda=agenda, agenda_size=size)
    effects: list[Effect] = []
    for device in sorted(due):
        work = state.work[device]
        if work.stage is Stage.TRAINING:
            state = _unburdened(config, state, work)
            effects.append(Release(device, work.round))
        state, asked = _ask(config, state, device, now)
        effects += asked
    return state, effects


def _expected(work: DeviceWork) -> Expected | None:
    if work.groups is None or work.bid is None:
        return None
    return Expected(work.groups, work.bid.level or 1.0, work.bid.samples, work.limit)


def _judged(
    config: FragmentsConfig,
    state: FragmentsState,
    *,
    counted: Sequence[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
) -> FragmentsState:
    """Return the state once a movement counted or was refused."""
    standings = closed(
        state.fleet.standings,
        state.openings,
        counted=counted,
        refused=refused,
        silent=(),
        quarantine_after=config.quarantine_after,
    )
    return replace(state, fleet=replace(state.fleet, standings=standings))


def _receipt(device: str, round: int, outcome: Outcome, reason: str = "") -> Send:
    return Send(device, Receipt(device=device, round=round, outcome=outcome, reason=reason))
