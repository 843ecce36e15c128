"""The course of a synchronous run: performs the effects of `coordinator/rounds/synchronous.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.memory import Memory
from coordinator.aggregate.rules import Scaffold
from coordinator.errors import ConfigError, StopRequestedError
from coordinator.rounds import events
from coordinator.rounds import synchronous as rounds
from coordinator.rounds.arrivals import DISOWNED, unkept
from coordinator.rounds.config import best_of
from coordinator.rounds.fleet import FleetRecord
from coordinator.rounds.persistent import PersistentSet
from coordinator.rounds.report import RoundReport, level_reports
from coordinator.rounds.reputation import declines, quarantined
from coordinator.rounds.survey import SurveyEvent
from coordinator.rounds.synchronous import OpenRound, RoundPhase, RoundsConfig, RoundsState
from coordinator.run.errors import RunError
from coordinator.run.folder import Checkpoint
from coordinator.run.forgetting import Forgotten
from coordinator.run.journal import terms_of
from coordinator.run.steering.orders import OrderedStanding, Steered
from coordinator.run.steering.settings import Settings, with_settings
from coordinator.service.close import RoundFindings, RoundWeights, close_round, weights_of
from coordinator.service.courses.parts import (
    Parts,
    Said,
    Wait,
    judged,
    judgement_event,
    listed,
    missing_devices,
    upload_of,
)
from coordinator.service.courses.surveying import Surveying
from coordinator.service.overview.blocks import step_squares
from coordinator.service.overview.onlooker import BlockEntries
from coordinator.service.reports import report_round
from coordinator.task.levels import LevelScores
from edge_sdk.decide.budget import OFTEN
from edge_sdk.protocol.messages.delivery import Choice
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    Replay,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import SurveyFinding
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.protocol.plan.blocks import Float32

log = logging.getLogger(__name__)

T = TypeVar("T")
Steps = Generator[Future[Any], None, None]
"""A commit: between its steps, work beside the loop is awaited."""
_Moved = tuple[RoundFindings, float, Float32 | None]
"""Findings in a round, the error of its encoding, and the weights before if anybody asks."""

MANY_OUTDATED = 10
"""Skips that were too old to count, before anybody is warned."""


class RoundsCourse:
    """A synchronous run. A commit is complete once its model is published; then call `proceed`.
    Commits take steps, with work beside the loop between them (`service/aside.py`): call `advance`
    when any is done.

    Resumes the round that was open when the previous process stopped. Raises `RunError` if the
    settings by which devices train in it have changed since.

    Orders of operators: a changed setting holds from the next round on, so a round has one value of
    each from its opening to its commit. A word about a device that comes while a closed round waits
    for its commit is taken up after it: the round may have to be closed again, to the same bits.
    """

    def __init__(
        self,
        config: RoundsConfig,
        parts: Parts,
        checkpoint: Checkpoint,
        memory: Memory | None,
        now: float,
        steered: Steered | None = None,
    ) -> None:
        """`config`: as in run.toml. `steered`: what operators changed of it; None: nothing."""
        steered = Steered() if steered is None else steered
        self._base, self._wanted = config, steered.settings
        self._settings = self._settings_of_round(parts, checkpoint)
        """Changed settings that are in force."""
        config = self._config = with_settings(config, self._settings)
        self._parts = parts
        self._memory = memory
        self._moments = None
        if config.robust.name == "root" and parts.root is None:
            raise ConfigError('robust = "root" compares devices with data of yours: give it')
        if config.vectors is not None:
            self._moments = parts.store.moments(config.plan, config.vectors, checkpoint)
        if isinstance(config.rule, Scaffold) and self._moments is not None:
            parts.model.steer(self._moments.current[0], len(checkpoint.devices))
        opened = parts.store.opened
        self._norms = parts.model.norms
        self._committed = checkpoint.committed
        self._state = replace(
            rounds.start(config, self._norms),
            fleet=replace(checkpoint.fleet, norms=self._norms),
            round=opened,
            void=opened - checkpoint.committed,
            best=checkpoint.best,
            devices=PersistentSet(checkpoint.devices),
            past=checkpoint.past,
        )
        self._paused = steered.paused is not None or steered.stopping is not None
        self._judged = checkpoint.orders
        """Number of the newest order about a device that the fleet's record has."""
        self._saved_orders = checkpoint.orders
        self._later: list[OrderedStanding] = []
        """Words about devices that came while a closed round waited for its commit."""
        if config.is_over(checkpoint.committed, checkpoint.best):
            self._state = replace(self._state, phase=RoundPhase.FINISHED)
        self._arrivals: dict[tuple[str, int], Arrival] = {}
        self._due: rounds.Committed | None = None
        self._closed: _ClosedRound | None = None
        """A round whose commit waits for the result of a survey."""
        self._steps: Steps | None = None
        """Steps of a commit that is under way."""
        self._awaited: Future[Any] | None = None
        """Work that the next step needs."""
        self._works: list[Future[Any]] = []
        """All work of the newest commit."""
        self._failure: BaseException | None = None
        """The error of a commit that failed: the process must end."""
        self._surveying = Surveying(config, parts.outlet)
        self._outdated, self._skips = 0, 0
        """Skips so far in this process that were too old to count, and all; none once warned."""
        self._squares: Future[NDArray[np.float64]] | None = None
        """Squared norm of each block's newest step; None: not known."""
        self._newcomers = set[str]()
        """Devices that the newest checkpoint does not know."""
        self._held: list[rounds.Event] = []
        """Movements that arrived since the round closed; they wait for its commit."""
        interrupted = self._interrupted(checkpoint)
        if interrupted is not None:
            self._newcomers.update(interrupted.newcomers)
        if interrupted is None:
            self._take_up()
        parts.outlet.publish()
        parts.deliver_kept(checkpoint)
        self._started = time.perf_counter()
        self._resumed = self._reopening = interrupted is not None
        self._was_closed = interrupted is not None and interrupted.closed
        self._resume(interrupted, now)
        self._obey(steered, interrupted, now)
        self._journalled = self._state.assigned, self._state.refused
        """Contents of `round.json`."""

    def _settings_of_round(self, parts: Parts, checkpoint: Checkpoint) -> Settings:
        """Return the changed settings of the open round; without one, those that are wanted."""
        opened = parts.store.interrupted()
        if opened is None or not _is_open(opened, parts, checkpoint):
            return self._wanted
        return dict(opened.settings)

    def _obey(self, steered: Steered, opened: OpenRound | None, now: float) -> None:
        """Take up the orders that no checkpoint has, one after the other, as they came."""
        closed = opened is not None and opened.closed
        for each in steered.judged_since(self._judged):
            if opened is not None and closed and each.number > opened.orders:
                self._later.append(each)
                continue
            self._note_judgement(each)
            if opened is not None and not closed:
                self._state = rounds.without_barred(self._state)
        held = self._paused or self._wanted != self._settings
        self._state = replace(self._state, held=held)
        if held and self._state.phase is RoundPhase.BIDDING:  # the run is not to wait for devices
            self._state = replace(self._state, deadline=now + self._config.bid_s)

    def _note_judgement(self, judgement: OrderedStanding) -> None:
        """Take up an order about a device before anything else happens."""
        fleet = judged(self._state.fleet, judgement)
        self._state, self._judged = replace(self._state, fleet=fleet), judgement.number

    def _interrupted(self, checkpoint: Checkpoint) -> OpenRound | None:
        """Return the round to resume; None if no round is open. Raises `RunError`."""
        opened = self._parts.store.interrupted()
        if opened is None or not _is_open(opened, self._parts, checkpoint) or self.finished:
            return None
        try:
            self._parts.store.check_terms(terms_of(self._config))
        except RunError as error:
            if opened.bidding:  # nothing was made by the old terms
                log.warning("%s; nobody has begun it, so round %d is void", error, opened.round)
                return None
            self.kill()
            raise
        return opened

    def _resume(self, opened: OpenRound | None, now: float) -> None:
        """Resume the open round, if any, and count the movements that were kept."""
        state = self._state
        if opened is None:
            self._parts.store.forget_round()
        else:
            self._parts.store.reopen_round(opened)
            # A resumed round is not void: it has not ended.
            state = replace(state, void=opened.round - 1 - self._committed)
            state = rounds.resume(self._config, state, opened, now)
        for sent in self._parts.store.kept():
            before = state
            state, keep = rounds.recount(self._config, state, sent)
            if keep is not None:
                device = keep.arrival.contribution.device
                self._arrivals[device, keep.round] = keep.arrival
                if (device, keep.round) in state.late:  # others are counted at the close
                    self._note_memory(device, keep.round)
            elif not _is_done_with(before, sent):
                movement = sent.movement if isinstance(sent, Replay) else sent
                log.error(
                    "the movement of %r for round %d had a receipt but can no longer be used",
                    movement.device,
                    movement.round,
                )
        self._state = state
        if opened is None:
            if not self._arrivals:
                self._parts.store.clear_kept()  # else at the next commit
            return
        had = f"{len(state.kept)} of {len(state.assigned)} movements"
        log.info(
            "round %d resumes %s",
            state.round,
            "where devices were bidding: they bid again" if opened.bidding else f"with {had}",
            extra={"facts": {"event": "resumed", "round": state.round}},
        )

    def _note_memory(self, device: str, round: int) -> None:
        """Count a late movement that an earlier process kept for memory."""
        why = "an earlier process kept it"
        receipt = Receipt(device=device, round=round, outcome=Outcome.MEMORY, reason=why)
        self._parts.tally.note(receipt)

    @property
    def resumed(self) -> bool:
        """True if the open round was already open when this process started."""
        return self._resumed

    @property
    def state(self) -> RoundsState:
        """The machine's state."""
        return self._state

    @property
    def finished(self) -> bool:
        """True if there is nothing left to do."""
        return self._state.phase is RoundPhase.FINISHED

    @property
    def deadline(self) -> float | None:
        """Latest time to send `Tick`; None if there is no deadline."""
        return self._surveying.deadline if self._surveying.under_way else self._state.deadline

    @property
    def surveying(self) -> Surveying:
        """The survey of the levels, if one is under way."""
        return self._surveying

    @property
    def config(self) -> RoundsConfig:
        """Settings of the round that is open, or opens next."""
        return self._config

    @property
    def wanted(self) -> RoundsConfig:
        """Settings as operators want them, perhaps from the next round on only."""
        return with_settings(self._base, self._wanted)

    @property
    def entries(self) -> BlockEntries | None:
        """Movements that memory holds of each block; None: there is no memory."""
        return None if self._memory is None else self._memory.entries

    @property
    def idle(self) -> bool:
        """True if no round is open, and the last one is committed and known to devices."""
        between = self._state.phase in (RoundPhase.WAITING, RoundPhase.FINISHED)
        return between and self._due is None and not self._is_closing

    @property
    def committing(self) -> bool:
        """True while a commit is under way beside the loop."""
        return self._steps is not None

    @property
    def broken(self) -> bool:
        """True once a commit failed: nothing more is certain, so the process must end."""
        return self._failure is not None

    @property
    def _is_closing(self) -> bool:
        """True while a round is closed, and its model is not committed, nor will be if that
        failed."""
        return self._closed is not None or self.committing or self.broken

    @property
    def judged(self) -> int:
        """Number of the newest order about a device that was taken up."""
        return self._judged

    @property
    def saved_orders(self) -> int:
        """Number of the newest order about a device that a checkpoint has."""
        return self._saved_orders

    @property
    def round(self) -> int:
        """Number of the newest round."""
        return self._state.round

    @property
    def phase(self) -> str:
        """The run's phase in words."""
        if self._surveying.under_way:
            return "surveying levels"
        return self._state.phase.value

    @property
    def waits_for(self) -> Wait | None:
        """Return the reason why the run waits now; None: it does not."""
        state = self._state
        if self._surveying.under_way:
            return Wait("survey", f"round {state.round}: the answers of devices to a survey")
        match state.phase:
            case RoundPhase.WAITING:
                barred = [
                    each for each in quarantined(state.fleet.standings) if each in state.present
                ]
                return missing_devices(len(state.present), self._config.min_devices, barred)
            case RoundPhase.BIDDING:
                owing = [name for name in state.selected if name not in state.bids]
                return Wait("bids", f"round {state.round}: bids of {listed(owing)}")
            case RoundPhase.TRAINING:
                done = (state.kept, state.keeping, state.spare)
                owing = [name for name in state.assigned if not any(name in each for each in done)]
                owing += state.replaying
                return Wait("movements", f"round {state.round}: movements of {listed(owing)}")
            case _:
                return None

    def handle(self, event: rounds.Event | SurveyFinding, now: float) -> list[Said]:
        """Perform the effects of an event and return the messages to send."""
        self._surveyed(event, now)
        if isinstance(event, SurveyFinding) or self._holds_back(event):
            return []
        said = self._give_back(event) if isinstance(event, events.Disowned) else []
        upload, pending = upload_of(event), [event]
        settled = upload is None
        try:
            while pending:
                happened = pending.pop(0)
                before = self._state
                self._state, effects = rounds.handle(self._config, before, happened, now)
                if isinstance(happened, events.Joined) and happened.device not in before.devices:
                    self._newcomers.add(happened.device)
                if isinstance(happened, Bid):
                    self._show_bid(before, happened)
                self._note_assignments()
                for effect in effects:
                    if isinstance(effect, events.Send) and isinstance(effect.message, Receipt):
                        verdict = isinstance(happened, rounds.Committed)
                        counts = not verdict and not _is_decided(before, effect.message)
                        self._parts.give(effect.message, happened, upload, count=counts)
                        settled = True
                    pending += self._perform(effect, said)
                if self._state.void > before.void:
                    self._note_void(before)
                bidding = before.phase is RoundPhase.BIDDING
                if bidding and self._state.phase is RoundPhase.WAITING:
                    self._parts.store.forget_round()  # it is void
        finally:
            if upload is not None and not settled:
                self._parts.store.settle(upload, None)
        return [*said, *self._keep_up(now)]

    def _note_void(self, ended: RoundsState) -> None:
        """Log why a round is void."""
        if ended.deadline is None:
            why = "no device is there, and no further round is to open"
        elif not ended.bids:
            why = f"no device answered within {self._config.bid_s:g} s"
        else:
            why = (
                f"too few devices offered to train: {len(ended.bids)} of {len(ended.selected)} "
                f"answered, and min_participants is {self._config.min_participants}"
            )
        log.info(
            "round %d is void: %s",
            ended.round,
            why,
            extra={"facts": {"event": "void", "round": ended.round}},
        )

    # -- orders of operators ----------------------------------------------------------------

    def hold(self, held: bool, now: float) -> list[Said]:
        """Let no further round open, or let rounds open again."""
        self._paused = held
        return self._keep_up(now)

    def check(self, settings: Settings) -> RoundsConfig:
        """Return the run's settings with these changed. Raises `ConfigError` if they do not fit."""
        return with_settings(self._base, settings)

    def change(self, settings: Settings, now: float) -> list[Said]:
        """Change settings from the next round on: these, and no others, differ from run.toml."""
        with_settings(self._base, settings)
        self._wanted = dict(settings)
        # Also if it may open as before: by the new settings, enough devices may be there.
        return self._keep_up(now) or self.handle(events.RoundsHeld(self._state.held), now)

    def judge(self, judgement: OrderedStanding, now: float) -> list[Said]:
        """Quarantine a device, or release it; after the commit, if a closed round waits for it."""
        if self._is_closing or self._was_closed:
            self._later.append(judgement)
            return []
        self._judged = judgement.number
        return self.handle(judgement_event(judgement), now)

    def _keep_up(self, now: float) -> list[Said]:
        """Take up changed settings if no round is open, and tell the machine if one may open."""
        if self.idle:
            self._take_up()
        held = self._paused or self._wanted != self._settings
        return [] if held == self._state.held else self.handle(events.RoundsHeld(held), now)

    def _take_up(self) -> None:
        """Let changed settings be in force."""
        if self._wanted != self._settings:
            self._settings = self._wanted
            self._config = with_settings(self._base, self._settings)

    def _show_bid(self, before: RoundsState, bid: Bid) -> None:
        """Tell the onlooker of a bid that the machine took."""
        if bid.round == before.round and bid.device in before.selected:
            taken = self._state.bids.get(bid.device)
            self._parts.onlooker.bid(bid if taken is None or bid.level is None else taken)

    def proceed(self, now: float) -> list[Said]:
        """Continue after a commit, or resume the open round, once its model is published."""
        if self._reopening:
            self._reopening = False
            if self._was_closed:
                self._was_closed = False
                return self.handle(events.Tick(), now)
            opening = rounds.opening_of(self._config, self._state)
            opening = self._parts.outlet.opening(opening)
            return [events.Broadcast(opening), *self.handle(events.Tick(), now)]
        if self._surveying.under_way:
            return [*self._surveying.proceed(self._answering, now)]
        committed, self._due = self._due, None
        if committed is None:
            return []
        later, self._later = self._later, []
        for judgement in later:
            self.judge(judgement, now)
        self._take_up()
        self._state = replace(self._state, held=self._paused)
        said, held, self._held = self.handle(committed, now), self._held, []
        return [*said, *(each for event in held for each in self.handle(event, now))]

    def _holds_back(self, event: rounds.Event) -> bool:
        """True if an event waits for the commit of a closed round, or is repeated by its device.

        A movement that came between would count, or not, by whether this process is killed.
        """
        if not (self._was_closed or self._is_closing):
            return False
        if isinstance(event, Movement | Replay | events.Uploaded):
            self._held.append(event)
            return True
        # A commit that is under way is over soon, and a survey is not.
        return not self.committing and isinstance(event, Offer | Bid)

    def _give_back(self, disowned: events.Disowned) -> list[Said]:
        """Reject the movements of a forgotten device that wait for a commit."""
        device, said = disowned.device, list[Said]()
        waiting, self._held = self._held, []
        for event in waiting:
            sent = event.sent if isinstance(event, events.Uploaded) else event
            if not isinstance(sent, Movement | Replay) or _sender(sent) != device:
                self._held.append(event)
                continue
            rejected = Outcome.REJECTED
            receipt = Receipt(device=device, round=sent.round, outcome=rejected, reason=DISOWNED)
            self._parts.give(receipt, event, upload_of(event))
            said.append(events.Send(device, receipt))
        return said

    def _note_assignments(self) -> None:
        """Write assignments to the journal: before devices hear of them, and on a withdrawal.

        The opening of the round is there already, since before devices heard of it.
        """
        state = self._state
        assigned = state.phase in (RoundPhase.TRAINING, RoundPhase.CLOSING)
        known, refused = self._journalled
        changed = state.phase is RoundPhase.TRAINING and state.refused is not refused
        if assigned and (state.assigned is not known or changed):
            self._journal()
            self._journalled = state.assigned, state.refused

    def _journal(self, *, closed: bool = False) -> None:
        state = self._state
        opened = OpenRound(
            round=state.round,
            selected=state.selected,
            bids=state.bids,
            assigned=state.assigned,
            bidding=state.phase is RoundPhase.BIDDING,
            refused=state.refused,
            closed=closed,
            settings=self._settings,
            orders=self._judged,
            newcomers=frozenset(self._newcomers),
        )
        self._parts.store.open_round(opened, terms_of(self._config))

    def say_again(self, device: str | None = None) -> list[Said]:
        """Resend invitations, and assignments of devices still training; to all, or to one device.

        A device that was started again needs both: it follows assignments of its own bids only.
        """
        state = self._state
        bids, trains = (state.phase is each for each in (RoundPhase.BIDDING, RoundPhase.TRAINING))
        invites = self._config.invites(state.round) and (bids or trains)
        asked = state.assigned if trains else state.selected if invites else ()
        names = sorted(asked) if device is None else [device] * (device in asked)
        owing = [each for each in names if each not in state.kept and each not in state.keeping]
        said: list[Said] = []
        if invites:
            invitation = self._parts.outlet.opening(rounds.invitation_of(self._config, state))
            said += [events.Send(name, invitation) for name in owing]
        if trains:
            again = rounds.assignments_of(self._config, state, owing)
            said += [events.Send(each.device, each) for each in again]
        return said

    def excuses(self) -> dict[str, str]:
        """Reasons why devices are not training in the current round, by device name."""
        bids = self._state.bids.items()
        return {name: bid.reason for name, bid in bids if bid.level is None}

    def close(self) -> list[Said]:
        """Stop here. The open round and its kept movements are already on disk."""
        self.kill()
        return []

    def kill(self) -> None:
        """Stop as a crash would, writing nothing more than what is being written."""
        wait(self._works)
        if self._memory is not None:
            self._memory.close()

    def _perform(self, effect: rounds.Effect, said: list[Said]) -> list[rounds.Event]:
        match effect:
            case events.Broadcast(RoundOpen() as opening):
                self._journal()
                self._started = time.perf_counter()
                self._parts.onlooker.asked(self._state.selected, opening.round)
                said.append(events.Broadcast(self._parts.outlet.opening(opening)))
            case events.Send(device, RoundOpen() as opening):
                self._parts.onlooker.asked((device,), opening.round)
                said.append(events.Send(device, self._parts.outlet.opening(opening)))
            case events.Send(device, Assignment(round=round)):
                self._parts.onlooker.assigned(device, round)
                said.append(effect)
            case events.Broadcast() | events.Send() | events.Accept():
                said.append(effect)
            case events.Keep(round, arrival, upload):
                device = arrival.contribution.device
                try:
                    self._parts.store.keep(upload, device, round)
                except OSError:
                    self._state = unkept(self._state, device, round)
                    raise
                self._arrivals[device, round] = arrival
                self._parts.onlooker.kept(arrival, round)
                return [events.Kept(device, round)]
            case rounds.Commit():
                self._begin(self._close(effect))
        return []

    # -- committing -------------------------------------------------------------------------

    def _begin(self, steps: Steps) -> None:
        """Take the steps of a commit as far as possible."""
        self._steps, self._awaited = steps, None
        self.advance()

    def advance(self, *, to_the_end: bool = False) -> bool:
        """Take the next steps of a commit that is under way, as far as the work beside the loop is
        done, or `to_the_end`; True if any was taken. Raises `RunError`, and `ConfigError` or
        `StopRequestedError` as whoever evaluates does. After an error, that one is raised again,
        but `to_the_end` there is nothing to do.
        """
        went_on = False
        if self._failure is not None and not to_the_end:
            raise self._failure
        if self._steps is None and self._failure is None:
            self._check_rest()
        while self._steps is not None and (
            self._awaited is None or to_the_end or self._awaited.done()
        ):
            if self._awaited is not None:
                wait([self._awaited])
            self._awaited, went_on = self._step_on(self._steps), True
        return went_on

    def _step_on(self, steps: Steps) -> Future[Any] | None:
        """Take a step; return the work that the next one needs, None after the last."""
        try:
            awaited = next(steps, None)
        except BaseException as error:
            # A partial commit cannot be continued; a new process restarts from the last. Whatever
            # else fails in it is waited for, and not told.
            self._steps, self._awaited, self._failure = None, None, error
            told = isinstance(error, ConfigError | StopRequestedError)  # it says what to do
            if told or not isinstance(error, Exception):
                raise
            self._failure = RunError(f"round {self._state.round} could not be committed")
            raise self._failure from error
        if awaited is None:
            self._steps = self._awaited = None
        return awaited

    def _check_rest(self) -> None:
        """Raise `RunError` if what is left of a commit failed: the disk does."""
        done = [work for work in self._works if work.done()]
        self._works = [work for work in self._works if work not in done]
        try:
            for work in done:
                work.result()
        except Exception as error:
            self._failure = RunError("files of a committed round could not be removed")
            raise self._failure from error

    def _aside(self, work: Callable[[], T]) -> Future[T]:
        """Begin a part of the commit beside the loop."""
        future = self._parts.aside.begin(work)
        self._works.append(future)
        return future

    def forget(self, device: str, work: Callable[[Memory | None], Forgotten]) -> Forgotten:
        """Let go of a device's movements; `work` removes what is on disk and in memory.

        The caller tells the machine with `Disowned`. Raises `ConfigError` while a closed round
        waits for its commit, which has it already.
        """
        if self._is_closing or self._was_closed:
            raise ConfigError(
                f"round {self._state.round} is closed and about to be committed: try again once "
                "it is"
            )
        wait(self._works)  # what is left of the last commit
        forgotten = work(self._memory)
        for key in [key for key in self._arrivals if key[0] == device]:
            del self._arrivals[key]
        return forgotten

    def _close(self, commit: rounds.Commit) -> Steps:
        """Move the model; the commit follows at once, or after a survey of its levels.

        Nobody but this work beside the loop uses the model, the memory and the arrivals meanwhile;
        of the machine's state, which goes on changing, it gets copies alone.
        """
        parts, norms, began = self._parts, self._norms, self._state
        weights = weights_of(self._config, began, commit)
        # From here on, nothing that comes counts in this round: not after a crash, either.
        self._journal(closed=True)
        before, self._works = self._works, []
        for work in before:  # what is left of the last commit
            yield work
            work.result()
        moving = self._aside(partial(self._move, self._config, commit, weights))
        yield moving
        found, noise, before_it = moving.result()
        self._works.remove(moving)  # which holds the model as it was before
        del moving
        fleet, limit = self._taught(commit), self._config.robust.agreement
        if found.agreements and limit is not None:
            fleet = fleet.compared(commit.round, found.agreements, limit)
        state = self._state = replace(self._state, fleet=fleet)
        levels = self._config.unscored()
        report = report_round(
            self._config,
            state,
            commit,
            self._arrivals,
            self._memory,
            levels,
            trust=found.trust,
            norms=norms,
            noise=noise,
            fetched={
                device: parts.outlet.fetched_bytes(device, state.assigned[device])
                for device in commit.fresh
            },
            seconds=time.perf_counter() - self._started,
        )
        if before_it is not None:
            sizes = self._config.plan.block_sizes
            self._squares = self._aside(partial(step_squares, parts.model.theta, before_it, sizes))
            del before_it  # it is as large as the model
        # Who joins meanwhile has no share in this model.
        closed = _ClosedRound(commit, replace(state, devices=began.devices), report)
        if not self._is_surveyed():
            yield from self._commit(closed, None)
            return
        packing = self._aside(parts.outlet.pack)
        yield packing
        self._closed = replace(closed, published=True)
        packing.result()()
        self._surveying.begin(commit.round, levels, self._answering, state.fleet)

    def _move(self, config: RoundsConfig, commit: rounds.Commit, weights: RoundWeights) -> _Moved:
        """Move the model, and write what memory takes; nothing is committed."""
        parts, model = self._parts, self._parts.model
        noise, before = model.noise, model.theta
        found = close_round(
            config,
            weights,
            commit,
            model,
            self._memory,
            self._arrivals,
            moments=self._moments,
            threads=parts.threads,
            scratch=parts.store.scratch,
            root=None if parts.root is None else parts.root(config, model, commit.round),
        )
        return found, noise, before if parts.onlooker.watches else None

    def _judge(
        self, config: RoundsConfig, scores: LevelScores | None
    ) -> tuple[LevelScores, NDArray[np.float64]]:
        """Return the levels of the new model, evaluated unless a survey did, and its norms."""
        parts = self._parts
        if parts.store.describes:
            parts.model.digest  # noqa: B018  it is kept, for the round's line
        return parts.score(config) if scores is None else scores, parts.model.norms

    def _is_surveyed(self) -> bool:
        """True if devices survey the levels of the model that is about to be committed."""
        committed, every = self._committed + 1, self._config.survey_every
        last = self._config.is_over(committed, self._state.best)
        return self._parts.asks_devices and (last or (every > 0 and committed % every == 0))

    @property
    def _answering(self) -> Set[str]:
        """Devices that may answer a survey; after a restart, those of the round return."""
        state = self._state
        names = state.present | state.selected if state.resumed else state.present
        return names - quarantined(state.fleet.standings).keys()

    def _surveyed(self, event: SurveyFinding | rounds.Event, now: float) -> None:
        """Pass an event on to the survey, whose result completes the commit."""
        if isinstance(event, (SurveyFinding, events.Joined)) and declines(
            self._state.fleet.standings, event.device
        ):
            return
        if isinstance(event, SurveyEvent):
            scores = self._surveying.handle(event, now)
            if scores is not None and self._closed is not None:
                closed, self._closed = self._closed, None
                self._begin(self._commit(closed, scores))

    def _commit(self, closed: _ClosedRound, scores: LevelScores | None) -> Steps:
        """Commit a closed round. `scores`: those of a survey; None: there was none.

        The checkpoint is on disk before memory is committed, memory before the line of history,
        and the line before the round's journal and movements go. Chunks may go to the broker at
        any time: nobody asks for them before the next round opens.
        """
        parts, model, memory = self._parts, self._parts.model, self._memory
        packing = None if closed.published else self._aside(parts.outlet.pack)
        judging = self._aside(partial(self._judge, self._config, scores))
        yield judging
        scores, norms = judging.result()
        known = self._state.fleet  # a release in the survey, a delivery in the commit
        fleet = replace(closed.state.fleet, standings=known.standings, agreements=known.agreements)
        state = replace(closed.state, fleet=fleet)
        commit, vectors = closed.commit, self._config.vectors
        levels = level_reports(self._config.plan, state.fleet, scores)
        report = replace(closed.report, levels=levels, deploy=scores.deploy)
        parts.tally.close(commit.round, [*commit.fresh, *commit.replayed], commit.refused)
        line = parts.describe(report)
        checkpoint = Checkpoint(
            round=commit.round,
            committed=self._committed + 1,
            version=model.version,
            theta=model.theta,
            buffers=model.buffers,
            fleet=state.fleet,
            best=best_of(state.best, scores.best, self._committed + 1),
            devices=state.devices,
            past=state.past,
            levels=scores,
            optimizer="none" if vectors is None else vectors.name,
            memory=memory is not None,
            line=line,
            orders=self._judged,
        )
        saving = self._aside(parts.store.saving(checkpoint))
        preparing = None if memory is None else self._aside(memory.prepare)
        if packing is not None:
            yield packing
            packing.result()()
        if preparing is not None:
            yield preparing
            preparing.result()
        yield saving
        saving.result()
        if memory is not None:
            remembering = self._aside(partial(memory.commit, tidy=False))
            yield remembering
            remembering.result()
        self._norms, self._committed = norms, checkpoint.committed
        self._saved_orders = checkpoint.orders
        self._newcomers.difference_update(checkpoint.devices)
        parts.record(report, line)
        tidying = self._aside(self._tidy)
        yield tidying
        tidying.result()
        known = self._state.fleet
        fleet = replace(
            state.fleet.settled(), standings=known.standings, agreements=known.agreements
        )
        self._state = replace(self._state, fleet=fleet)
        entries = None if memory is None else memory.entries
        squares = None
        if self._squares is not None:
            yield self._squares
            squares = self._squares.result()
        parts.onlooker.model(self._state.fleet, commit.round, entries=entries, squares=squares)
        self._warn_of_age(report)
        arrivals, self._arrivals = self._arrivals, {}
        is_best = scores.best is not None and scores.best > state.best[0]
        choices: tuple[Choice, ...] = ("latest", "best") if is_best else ("latest",)
        parts.deliver(choices, commit.round, parts.trained(scores, state.fleet))
        self._due = rounds.Committed(commit.round, self._norms, scores.best)
        # The next round need not wait for this, but its close does.
        self._aside(partial(self._let_go, arrivals, parts.needed))

    def _tidy(self) -> None:
        """Remove what a restart would close the round with."""
        self._parts.store.forget_round()
        self._parts.store.clear_kept()

    def _let_go(self, arrivals: dict[tuple[str, int], Arrival], needed: Collection[int]) -> None:
        """Let go of a committed round's movements, and of files that nobody needs any more."""
        if self._memory is not None:
            self._memory.tidy()
        self._parts.store.prune(needed)
        arrivals.clear()  # unmaps them

    def _warn_of_age(self, report: RoundReport) -> None:
        """Say once that many skipping devices do not count, because they train too rarely."""
        if self._skips < 0:
            return
        self._outdated += report.outdated
        self._skips += sum(each.level is None for each in report.devices)
        if self._outdated < MANY_OUTDATED or self._outdated < OFTEN * self._skips:
            return
        log.warning(
            "round %d: %d of %d skips so far did not count, because the device's last movement was "
            "older than horizon = %s rounds: set a horizon of several times the rounds between two "
            'trainings of a device, or "none"',
            report.round,
            self._outdated,
            self._skips,
            self._config.rule.counts_within,
            extra={"facts": {"event": "horizon", "round": report.round}},
        )
        self._skips = -1

    def _taught(self, commit: rounds.Commit) -> FleetRecord:
        """Return the fleet's record with those who taught the model beside the fresh movements."""
        fleet = self._state.fleet
        keys = [(device, commit.round) for device in commit.replayed]
        if self._memory is not None:
            keys += commit.late
        for key in keys:
            arrival = self._arrivals[key]
            if key not in commit.late or self._config.rule.takes(arrival.contribution):
                fleet = fleet.taught(self._config.plan, {key[0]: arrival.groups})
        return fleet


@dataclass(frozen=True, slots=True)
class _ClosedRound:
    """A round that moved the model and is not committed yet."""

    commit: rounds.Commit
    state: RoundsState
    """The machine's state when the round closed."""
    report: RoundReport
    published: bool = False
    """True if devices have the model already."""


def _is_open(opened: OpenRound, parts: Parts, checkpoint: Checkpoint) -> bool:
    """True if the journal's round is the newest one, and not committed.

    A crash may have come before its number was noted: then nobody has heard of it.
    """
    return opened.round >= parts.store.opened and opened.round > checkpoint.round


def _is_decided(state: RoundsState, receipt: Receipt) -> bool:
    """True if a receipt repeats the verdict on a movement, which its round's report counts."""
    past = state.past.get(receipt.round)
    return past is not None and receipt.device in past.outcomes


def _sender(sent: Movement | Replay) -> str:
    """Return the device that sent this."""
    return sent.movement.device if isinstance(sent, Replay) else sent.device


def _is_done_with(state: RoundsState, sent: Movement | Replay) -> bool:
    """True if a kept upload is already in the model or in memory, or belongs to a void round."""
    if isinstance(sent, Replay):
        collects = state.phase in (RoundPhase.BIDDING, RoundPhase.TRAINING)
        return sent.round < state.round or not collects
    past = state.past.get(sent.round)
    if past is None:
        return sent.round < min(state.past, default=0)
    return sent.device in past.outcomes
