"""The device's logic as a state machine without I/O.

    phase      event                 next        effects
    ---------  --------------------  ----------  -----------------------------------------
    IDLE       RoundOpen             DECIDING    Decide
    DECIDING   Decided (level)       BIDDING     SendMessage: a bid
    DECIDING   Decided (skip)        IDLE        SendMessage: a skip; SendReplay if it is wanted
    DECIDING   RoundOpen             DECIDING    Decide
    BIDDING    Assignment            FETCHING    Fetch
    BIDDING    RoundOpen             DECIDING    Decide
    BIDDING    RoundClosed           IDLE        –
    BIDDING    Receipt (rejected)    IDLE        –; the bid is declined
    BIDDING    Withdrawn             IDLE        SendMessage: a skip, which withdraws the offer
    other      Withdrawn             unchanged   –; training that is to end says so by `Failed`
    FETCHING   Fetched               TRAINING    Train
    FETCHING   Found                 IDLE        Resend: it was trained before the device stopped
    TRAINING   Finished              IDLE        KeepMovement, SendMessage: the movement
    FETCHING,  Failed                IDLE        SendMessage: a skip, which withdraws the offer
    TRAINING
    FETCHING,  RoundOpen             unchanged   –; taken up when the present work is done
    TRAINING
    DECIDING,  RoundOpen by          IDLE        –; the earlier round is over
    BIDDING    invitation, newer
    other      RoundOpen by          unchanged   –; only the invitation, a RoundOpen without this
               invitation                        flag, is answered
    IDLE,      Survey                EXAMINING   Examine; the round that it names is over
    BIDDING
    DECIDING,  Survey                unchanged   –; taken up when the present work is done, unless a
    FETCHING,                                    newer round was opened by then
    TRAINING,
    EXAMINING
    EXAMINING  Examined              IDLE        SendMessage: a finding for every level
    EXAMINING  RoundOpen             unchanged   –; taken up when the present work is done
    any        Survey that was       unchanged   SendMessage: the same findings again; as a new
               answered last                     survey if a level of it did not come
    any        RoundOpen with        unchanged   SendMessage: a skip; it is not the newest round
               another plan
    any        Receipt (kept)        unchanged   –; the verdict is awaited
    any        Receipt, a verdict    unchanged   Forget
    any        RoundOpen, newer than unchanged   Resend too: its verdict was missed
               a kept movement
    any        LinkUp                unchanged   Resend, for every movement without a verdict
    IDLE,      Restarted             DECIDING    Resend, as above; Decide, for the round heard last
    DECIDING,
    BIDDING
    FETCHING,  Restarted             unchanged   Resend, as above
    TRAINING,
    EXAMINING

Rules:
- A coordinator's message that the table does not list is late, early or a duplicate and is ignored.
  A local event that the table does not list is a bug and raises `StateError`.
- This module alone decides which round is the newest. Rounds only go forward: a `RoundOpen` that is
  not newer is ignored. The first one after `Restarted` may go back, because a coordinator can be
  restarted from an older checkpoint. An invitation is newer than the announcement of its round,
  whichever comes first.
- A survey of an older round than the newest is over and is ignored; so is one for other devices.
- A movement is kept until its verdict, however many rounds pass, and sent again on `LinkUp`. One
  that the coordinator has (*kept*) is offered again only to learn the verdict.
- A `Decided` for an older round than the newest is ignored.
- If the round wants replays, a device that skips sends its last movement again, provided that it
  keeps a copy and the copy is young enough. A replay is not kept: a lost one is a silent skip.
- A call that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from edge_sdk.decide.decision import Code, Decision
from edge_sdk.program.records import replace
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
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array, Raw


class DevicePhase(Enum):
    """The step of a round that a device has reached."""

    IDLE = "idle"
    DECIDING = "deciding"
    BIDDING = "bidding"
    FETCHING = "fetching"
    TRAINING = "training"
    EXAMINING = "examining levels"


# -- events: messages of the coordinator, and these local ones ---------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts a device reports with every bid; None means unknown."""

    samples: int
    compute: float | None = None
    """Parameters × samples a second."""
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """The device's answer to a round."""

    round: int
    decision: Decision
    facts: Facts


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The submodel's weights, as arrays or blocks, and its buffers have arrived."""

    weights: Mapping[str, Array] | Blocks
    buffers: dict[str, Array]
    control: Blocks | None = None
    """The global variate of the same blocks, in a round with variates."""
    spare: Raw | None = None
    """Memory for as many values, which nobody needs any more."""


@dataclass(frozen=True, slots=True)
class Found:
    """The assigned movement was made earlier and still waits for its receipt."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Training produced a movement."""

    movement: Movement


@dataclass(frozen=True, slots=True)
class Failed:
    """Fetching or training ended without a movement."""

    reason: str
    code: Code = "failed"


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The device cannot keep its offer: its owner paused it, or another task goes first."""

    reason: str
    code: Code


@dataclass(frozen=True, slots=True)
class Examined:
    """A survey is answered: a finding for each of its levels that came."""

    findings: tuple[SurveyFinding, ...]


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link is up, for the first time or again; earlier messages may be lost."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The coordinator was started again and knows no bid for the open round."""

    opened: RoundOpen | None = None
    """The round heard of last, even one that was ignored as old; None: none was."""


Event = (
    RoundOpen
    | Assignment
    | Receipt
    | RoundClosed
    | Survey
    | Decided
    | Fetched
    | Found
    | Finished
    | Failed
    | Withdrawn
    | Examined
    | LinkUp
    | Restarted
)


# -- effects: the app's next steps ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decide:
    """Look at the device and answer with `Decided`."""

    opened: RoundOpen


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the weights of these groups and answer with `Fetched`, `Found` or `Failed`."""

    opened: RoundOpen
    assignment: Assignment


@dataclass(frozen=True, slots=True, eq=False)
class Train:
    """Train and answer with `Finished` or `Failed`."""

    opened: RoundOpen
    assignment: Assignment
    level: float
    """The level that the device offered."""
    weights: Mapping[str, Array] | Blocks
    """See `Fetched`."""
    buffers: dict[str, Array]
    passes: int = 2
    """See `Decision.passes`."""
    control: Blocks | None = None
    """See `Fetched`."""
    spare: Raw | None = None
    """See `Fetched`."""


@dataclass(frozen=True, slots=True)
class Examine:
    """Run the survey's levels as far as the device can afford that; answer with `Examined`."""

    survey: Survey


@dataclass(frozen=True, slots=True)
class KeepMovement:
    """Store the movement until its verdict."""

    movement: Movement


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the movement of this round: its verdict has come."""

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

    message: Bid | Movement | SurveyFinding


Effect = (
    Decide | Fetch | Train | Examine | KeepMovement | Forget | Resend | SendReplay | SendMessage
)

WORKING = (DevicePhase.FETCHING, DevicePhase.TRAINING, DevicePhase.EXAMINING)
"""Phases whose work is finished before anything else begins."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Everything a device remembers between events."""

    name: str
    plan_hash: str
    """The task's plan; a round for another one is skipped."""
    phase: DevicePhase = DevicePhase.IDLE
    opened: RoundOpen | None = None
    """The round the device works on, or worked on last."""
    newest: RoundOpen | None = None
    """The newest round; taken up when the present work is done."""
    may_go_back: bool = False
    """The next round may be older than the newest: the coordinator was started again."""
    assignment: Assignment | None = None
    unreceipted: frozenset[int] = frozenset()
    """Rounds whose movement waits for its verdict."""
    kept: frozenset[int] = frozenset()
    """Those of them whose movement the coordinator has, as far as this process was told."""
    offered: float | None = None
    """The level of the last bid; None: a skip."""
    passes: int = 2
    """See `Decision.passes`, of the last bid."""
    copy: int | None = None
    """The round of the movement that is kept for replays."""
    survey: Survey | None = None
    """The survey that is examined, or taken up when the present work is done."""
    pending: Survey | None = None
    """While one is examined: the next one."""
    answered: Survey | None = None
    """The last survey that was answered, with `findings`."""
    findings: tuple[SurveyFinding, ...] = ()


Step = tuple[DeviceState, list[Effect]]


def handle(state: DeviceState, event: Event) -> Step:
    """Return the state after an event and the effects to perform, in order."""
    match event:
        case RoundOpen():
            return _on_round_open(state, event)
        case Assignment():
            return _on_assignment(state, event)
        case Receipt():
            return _on_receipt(state, event)
        case RoundClosed():
            if state.phase is DevicePhase.BIDDING and event.round == _opened(state).round:
                return replace(state, phase=DevicePhase.IDLE), []
            return state, []
        case Survey():
            return _on_survey(state, event)
        case Examined() if state.phase is DevicePhase.EXAMINING:
            findings, after = event.findings, state.pending
            state = replace(state, pending=None, answered=state.survey, findings=findings)
            again = after is None or _is_answered(state, after)
            done, effects = _next_round(replace(state, survey=None if again else after))
            return done, [*map(SendMessage, findings), *effects]
        case LinkUp():
            return state, _resend_all(state)
        case Restarted():
            return _on_restarted(state, event)
        case Decided() if state.newest is not None and event.round < state.newest.round:
            return state, []
        case Decided() if (
            state.phase is DevicePhase.DECIDING and event.round == _opened(state).round
        ):
            return _on_decided(state, event)
        case Fetched() if state.phase is DevicePhase.FETCHING:
            work = Train(
                _opened(state),
                _assignment(state),
                state.offered or 1.0,
                event.weights,
                event.buffers,
                state.passes,
                event.control,
                event.spare,
            )
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
            done, effects = _next_round(state)
            return done, [_withdrawal(state, event), *effects]
        case Withdrawn() if state.phase is DevicePhase.BIDDING:
            done, effects = _next_round(state)
            return done, [_withdrawal(state, event), *effects]
        case Withdrawn():
            return state, []
        case _:
            raise StateError(f"{type(event).__name__} cannot happen while {state.phase.value}")


def _withdrawal(state: DeviceState, event: Failed | Withdrawn) -> SendMessage:
    round = _opened(state).round
    reason = event.reason[:MAX_REASON_CHARACTERS] or "skip: failed without a reason"
    return SendMessage(
        Bid(device=state.name, round=round, level=None, reason=reason, code=event.code)
    )


def _on_receipt(state: DeviceState, event: Receipt) -> Step:
    if event.device != state.name:
        return state, []
    round, rejected = event.round, event.outcome is Outcome.REJECTED
    if round not in state.unreceipted:
        bids = state.phase is DevicePhase.BIDDING and round == _opened(state).round
        return (replace(state, phase=DevicePhase.IDLE) if bids and rejected else state), []
    if event.outcome is Outcome.KEPT:
        return replace(state, kept=state.kept | {round}), []
    state = replace(
        state,
        unreceipted=state.unreceipted - {round},
        kept=state.kept - {round},
        copy=None if rejected and state.copy == round else state.copy,
    )
    return state, [Forget(round, event.outcome)]


def _on_round_open(state: DeviceState, event: RoundOpen) -> Step:
    # A verdict comes before the next opening: one that is still awaited was missed.
    missed = frozenset(round for round in state.kept if round < event.round)
    if not missed:
        return _on_newer_round(state, event)
    state, effects = _on_newer_round(replace(state, kept=state.kept - missed), event)
    return state, [*map(Resend, sorted(missed)), *effects]


def _on_newer_round(state: DeviceState, event: RoundOpen) -> Step:
    if event.plan_hash != state.plan_hash:
        return state, [] if event.by_invitation else [SendMessage(_refusal(state, event))]
    if _is_old(state, event):
        return state, []
    state = replace(state, newest=event, may_go_back=False)
    if state.phase in WORKING:
        return state, []
    return _next_round(state)


def _on_survey(state: DeviceState, event: Survey) -> Step:
    asked = not event.devices or state.name in event.devices
    if event.plan_hash != state.plan_hash or not asked or _is_over(state, event):
        return state, []
    if _is_answered(state, event):
        return state, [SendMessage(finding) for finding in state.findings]
    if state.phase is DevicePhase.EXAMINING:
        return replace(state, pending=event), []
    state = replace(state, survey=event)
    if state.phase in (DevicePhase.IDLE, DevicePhase.BIDDING):
        return _next_survey(state)
    return state, []


def _is_answered(state: DeviceState, survey: Survey) -> bool:
    """True if the last survey that was answered is this one, and all its levels came."""
    return survey == state.answered and len(state.findings) == len(survey.levels)


def _is_over(state: DeviceState, survey: Survey) -> bool:
    """True if a newer round than the survey's was opened, or announced, since."""
    return state.newest is not None and state.newest.round > survey.round


def _next_survey(state: DeviceState) -> Step:
    """Take up the survey that waits, if it is not over."""
    if state.survey is None:
        return state, []
    if _is_over(state, state.survey):
        return replace(state, survey=None), []
    return replace(state, phase=DevicePhase.EXAMINING), [Examine(state.survey)]


def _is_old(state: DeviceState, event: RoundOpen) -> bool:
    newest = state.newest
    if newest is None or event.round > newest.round:
        return False
    if event.round == newest.round and event.by_invitation != newest.by_invitation:
        return event.by_invitation  # the invitation is here already
    return not state.may_go_back or event == newest


def _refusal(state: DeviceState, event: RoundOpen) -> Bid:
    theirs, ours = event.plan_hash[:12], state.plan_hash[:12]
    reason = f"skip: the round is for plan {theirs}…, the task has {ours}…"
    return Bid(device=state.name, round=event.round, level=None, reason=reason, code="plan")


def _on_restarted(state: DeviceState, event: Restarted) -> Step:
    effects = _resend_all(state)
    if state.phase not in WORKING:
        state = replace(state, phase=DevicePhase.IDLE, opened=None, newest=None)
        if event.opened is not None:
            state, more = _on_round_open(state, event.opened)
            effects += more
    return replace(state, may_go_back=True), effects


def _resend_all(state: DeviceState) -> list[Effect]:
    return [Resend(round) for round in sorted(state.unreceipted)]


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
    state = replace(state, phase=phase, offered=decision.level, passes=decision.passes)
    state, more = _next_survey(state)
    return state, [*effects, *more]


def _on_assignment(state: DeviceState, event: Assignment) -> Step:
    fits = state.phase is DevicePhase.BIDDING and event.round == _opened(state).round
    if not fits or event.device != state.name:
        return state, []
    state = replace(state, phase=DevicePhase.FETCHING, assignment=event)
    return state, [Fetch(_opened(state), event)]


def _next_round(state: DeviceState) -> Step:
    """Take up the newest round, or rest if it was just dealt with or is for invited devices."""
    if state.newest is None or state.newest == state.opened or state.newest.by_invitation:
        return _next_survey(replace(state, phase=DevicePhase.IDLE, assignment=None))
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
