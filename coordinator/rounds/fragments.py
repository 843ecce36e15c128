"""Asynchronous training as a state machine without I/O: every arrival moves the model at once.

Each device works at its own pace. Of one device, while the run goes on:

    stage      event                       next      effects
    ---------  --------------------------  --------  ---------------------------------------------
    –          Joined                      ASKED     Send(RoundOpen), once enough devices are there
    ASKED      Bid (level)                 TRAINING  Reserve, Send(Assignment)
    ASKED      Bid (skip)                  RESTING   –
    TRAINING   Bid (skip): withdrawn       RESTING   Release
    TRAINING   Movement that fits          KEEPING   Keep
    TRAINING   Movement that does not      RESTING   Release, Send(Receipt: rejected)
    KEEPING    Kept                        ASKED     Apply, Send(Receipt: counted), Send(RoundOpen)
                                           –         Apply, Send(Receipt: counted), and for each
                                                     device Release, RoundClosed, at the last
    ASKED      its deadline                ASKED     Send(RoundOpen)
    RESTING    its deadline                ASKED     Send(RoundOpen)
    TRAINING   its deadline                ASKED     Release, Send(RoundOpen)
    other      Movement                    same      Send(Receipt: late, or counted if it was)

Rules:
- `version` counts updates of the global model; `round` numbers the openings, all devices together,
  so each device sees its own rounds go forward. A movement is as old as the versions that passed
  since its device's fragment was reserved.
- Where the rule's one fragment is the whole model, devices are told so when they are asked, and a
  lower offer is a skip all the same.
- `Reserve` keeps the fragment as it is now: the device fetches that, and the rule needs it again.
- What a device sends at the wrong time is ignored or receipted; a `Kept` at the wrong time raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from coordinator.aggregate.arrivals import Expected, GroupsByAxis, MovementRefused, check_arrival
from coordinator.aggregate.rules import FedRaa
from coordinator.masks import Situation
from coordinator.rounds.config import RunConfig
from coordinator.rounds.events import Joined, Keep, Kept, Left, Send, Tick
from coordinator.rounds.fleet import FleetRecord, new_fleet
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
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.streams import stream


class Stage(Enum):
    """What a device is doing, as far as the coordinator knows."""

    ASKED = "asked for a bid"
    TRAINING = "training"
    KEEPING = "its movement is being stored"
    RESTING = "resting"


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsConfig(RunConfig):
    """Settings of an asynchronous run: it ends after `updates` movements."""

    rule: FedRaa
    updates: Count
    rest_s: Seconds = 30.0
    """Seconds after a skip before a device is asked again."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Keep these groups' weights as they are, for the device to fetch and for the rule."""

    device: str
    round: int
    groups: GroupsByAxis


@dataclass(frozen=True, slots=True)
class Release:
    """What was reserved for a device is not needed any more."""

    device: str
    round: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Mix a kept movement into the model; it is `age` updates old. Also releases its fragment."""

    device: str
    round: int
    age: int


Event = Joined | Left | Bid | Movement | Replay | Kept | Tick
Effect = Send | Keep | Reserve | Release | Apply


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What one device is at."""

    stage: Stage
    round: int
    deadline: float
    bid: Bid | None = None
    groups: GroupsByAxis | None = None
    version: int = 0
    """The model's version that its fragment was taken from."""


@dataclass(frozen=True, slots=True)
class FragmentsState:
    """All the coordinator remembers. Made by `start`."""

    fleet: FleetRecord
    version: int = 0
    openings: int = 0
    running: bool = False
    finished: bool = False
    devices: frozenset[str] = frozenset()
    work: Mapping[str, DeviceWork] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    """The newest round of each device whose movement was applied."""

    @property
    def deadline(self) -> float | None:
        """When to send `Tick` at the latest."""
        waiting = [w.deadline for w in self.work.values() if w.stage is not Stage.KEEPING]
        return min(waiting, default=None)


Step = tuple[FragmentsState, list[Effect]]


def start(config: FragmentsConfig) -> FragmentsState:
    """The state before anybody joined."""
    return FragmentsState(new_fleet(config.plan))


def handle(config: FragmentsConfig, state: FragmentsState, event: Event, now: float) -> Step:
    """The state after an event at time `now` (seconds, any origin), and what to do about it."""
    match event:
        case Joined(device):
            return _on_joined(config, state, device, now)
        case Bid():
            return _on_bid(config, state, event, now)
        case Movement():
            return _on_movement(config, state, event, now)
        case Replay():
            unasked = "this run is asynchronous and takes no replays"
            device = event.movement.device
            return state, [_receipt(device, event.round, Outcome.REJECTED, unasked)]
        case Kept(device, round):
            return _on_kept(config, state, device, round, now)
        case Left():
            return state, []  # it may come back in time; its deadline tells
        case Tick():
            return _on_tick(config, state, now)


def _on_joined(config: FragmentsConfig, state: FragmentsState, device: str, now: float) -> Step:
    if device in state.devices or state.finished:
        return replace(state, devices=state.devices | {device}), []
    state = replace(state, devices=state.devices | {device})
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
    state = replace(state, openings=round, work={**state.work, device: work})
    return state, [Send(device, config.opening(round, whole=not config.rule.fragments))]


def _on_bid(config: FragmentsConfig, state: FragmentsState, bid: Bid, now: float) -> Step:
    work = state.work.get(bid.device)
    if work is None or bid.round != work.round:
        return state, []
    if work.stage is Stage.ASKED:
        if not config.rule.fragments and bid.level is not None and bid.level < 1:
            reason = f"skip: offered {bid.level:.0%}, but the rule takes whole models only"
            bid = replace(bid, level=None, reason=reason)
        if bid.level is None:
            return _rest(config, state, bid, now), []
        return _assign(config, state, bid, now)
    if work.stage is Stage.TRAINING and bid.level is None:
        return _rest(config, state, bid, now), [Release(bid.device, work.round)]
    return state, []


def _assign(config: FragmentsConfig, state: FragmentsState, bid: Bid, now: float) -> Step:
    work, device = state.work[bid.device], bid.device
    fleet = state.fleet.heard([bid])
    situation = Situation(
        plan=config.plan,
        round=work.round,
        offers=[bid],
        last_covered=fleet.last_covered,
        times_covered=fleet.times_covered + _under_way(config, state),
        norms=None,
        stream=stream(config.seed, "masks", work.round),
    )
    groups = config.masks(situation)[device]
    training = DeviceWork(
        Stage.TRAINING, work.round, now + config.train_s, bid, groups, state.version
    )
    state = replace(state, fleet=fleet, work={**state.work, device: training})
    assignment = Assignment(device=device, round=work.round, groups=groups)
    return state, [Reserve(device, work.round, groups), Send(device, assignment)]


def _under_way(config: FragmentsConfig, state: FragmentsState) -> Indices:
    """Per block, how many devices hold it at this moment: as good as updated, for the policy."""
    busy = (Stage.TRAINING, Stage.KEEPING)
    return config.plan.coverage(
        work.groups
        for work in state.work.values()
        if work.stage in busy and work.groups is not None
    )


def _rest(config: FragmentsConfig, state: FragmentsState, bid: Bid, now: float) -> FragmentsState:
    resting = DeviceWork(Stage.RESTING, state.work[bid.device].round, now + config.rest_s, bid)
    return replace(state, work={**state.work, bid.device: resting})


def _on_movement(
    config: FragmentsConfig, state: FragmentsState, movement: Movement, now: float
) -> Step:
    device, round = movement.device, movement.round
    work = state.work.get(device)
    if round == state.counted.get(device):
        return state, [_receipt(device, round, Outcome.COUNTED)]
    if work is None or work.round != round or work.stage not in (Stage.TRAINING, Stage.KEEPING):
        gone = f"nothing is awaited of {device!r} for round {round} any more"
        return state, [_receipt(device, round, Outcome.LATE, gone)]
    if work.stage is Stage.KEEPING:
        return state, []
    try:
        arrival = check_arrival(
            config.plan,
            movement,
            _expected(work),
            config.encoding,
            config.local_rule.learning_rate,
            state.fleet.usual,
            config.rms_limit,
        )
    except MovementRefused as refusal:
        reason = f"skip: rejected: {refusal}"[:MAX_REASON_CHARACTERS]
        skip = Bid(device=device, round=round, level=None, reason=reason)
        state = _rest(config, state, skip, now)
        rejected = _receipt(device, round, Outcome.REJECTED, str(refusal))
        return state, [Release(device, round), rejected]
    fleet = replace(state.fleet, usual=state.fleet.usual.learn(arrival.scale))
    keeping = replace(work, stage=Stage.KEEPING)
    state = replace(state, fleet=fleet, work={**state.work, device: keeping})
    return state, [Keep(round, arrival)]


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
    state = replace(
        state,
        version=version,
        fleet=state.fleet.covered(config.plan, version, {device: groups}),
        counted={**state.counted, device: round},
        work={name: other for name, other in state.work.items() if name != device},
    )
    effects: list[Effect] = [
        Apply(device, round, version - 1 - work.version),
        _receipt(device, round, Outcome.COUNTED),
    ]
    if version < config.updates:
        state, asked = _ask(config, state, device, now)
        return state, [*effects, *asked]
    for name, other in sorted(state.work.items()):
        if other.stage in (Stage.TRAINING, Stage.KEEPING):
            effects.append(Release(name, other.round))
        effects.append(Send(name, RoundClosed(round=other.round)))
    return replace(state, finished=True, work={}), effects


def _on_tick(config: FragmentsConfig, state: FragmentsState, now: float) -> Step:
    effects: list[Effect] = []
    for device, work in sorted(state.work.items()):
        if work.stage is Stage.KEEPING or now < work.deadline:
            continue
        if work.stage is Stage.TRAINING:
            effects.append(Release(device, work.round))
        state, asked = _ask(config, state, device, now)
        effects += asked
    return state, effects


def _expected(work: DeviceWork) -> Expected | None:
    if work.groups is None or work.bid is None:
        return None
    return Expected(work.groups, work.bid.level or 1.0, work.bid.samples)


def _receipt(device: str, round: int, outcome: Outcome, reason: str = "") -> Send:
    return Send(device, Receipt(device=device, round=round, outcome=outcome, reason=reason))
