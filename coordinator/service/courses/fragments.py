"""The course of an asynchronous run: performs the effects of `coordinator/rounds/fragments.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival, GroupsByAxis
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.rounds import events, fragments
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState, Stage
from coordinator.rounds.persistent import PersistentMap
from coordinator.rounds.report import DeviceRound, device_round
from coordinator.rounds.reputation import declines, quarantined
from coordinator.run.folder import Checkpoint, RunError
from coordinator.run.steering.orders import OrderedStanding, Steered
from coordinator.run.steering.settings import Settings, with_settings
from coordinator.service.courses.parts import (
    Parts,
    Said,
    Wait,
    judged,
    judgement_event,
    log_receipt,
    missing_devices,
    upload_of,
)
from coordinator.service.courses.surveying import Surveying
from coordinator.service.overview.onlooker import BlockEntries
from coordinator.service.reports import report_updates
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.delivery import Choice
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import SurveyFinding
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)


class FragmentsCourse:
    """An asynchronous run. Each device gets the model version that its opening named.

    - A checkpoint and a report follow every `report_every` updates; the accuracy of a report may
      end the run early.
    - After the last update, devices survey the levels where the coordinator has no data to. The run
      ends with the result; after a crash they are asked again.
    - A movement that counts gets its receipt once a checkpoint contains it, at most `save_s` of the
      store later: a crash loses everything after the last checkpoint. Movements that the rule has
      taken and not used yet are part of the checkpoint.
    """

    def __init__(
        self,
        config: FragmentsConfig,
        parts: Parts,
        checkpoint: Checkpoint,
        *,
        report_every: int | None = None,
        steered: Steered | None = None,
    ) -> None:
        """`report_every` is the number of updates that reports count as a round; None means a
        report after every `min_devices` updates, numbered by updates. `config`: as in run.toml.
        `steered`: what operators changed of it; None: nothing."""
        steered = Steered() if steered is None else steered
        self._base, self._wanted = config, steered.settings
        config = self._config = with_settings(config, steered.settings)
        self._parts = parts
        self._report_every = config.min_devices if report_every is None else report_every
        self._round_updates = 1 if report_every is None else report_every
        self._state = replace(
            fragments.start(config),
            fleet=replace(checkpoint.fleet, norms=self._norms()),
            version=checkpoint.round,
            best=checkpoint.best,
            openings=parts.store.opened,
            counted=PersistentMap(checkpoint.counted),
            finished=config.is_over(checkpoint.round, checkpoint.best, self._report_every),
            held=steered.paused is not None or steered.stopping is not None,
        )
        self._judged = self._saved_orders = checkpoint.orders
        for each in steered.judged_since(checkpoint.orders):
            fleet = judged(self._state.fleet, each)
            self._state, self._judged = replace(self._state, fleet=fleet), each.number
        self._arrivals: dict[str, Arrival] = {}
        self._openings: dict[str, RoundOpen] = {}
        """Last opening sent to each device."""
        self._window: list[tuple[DeviceRound, GroupsByAxis]] = []
        """Lines of the updates since the last report, and the groups they trained."""
        self._skips: dict[str, Bid] = {}
        """Skips of devices that rested since the last report."""
        self._resting: dict[str, Bid] = {}
        """Skips of devices that are resting now."""
        self._saved = checkpoint.round
        self._measured: LevelScores | None = None
        """The levels of the newest model, which a report is due about."""
        self._scores = checkpoint.levels if checkpoint.levels.levels else config.unscored()
        """The levels as they were last evaluated, perhaps some updates ago."""
        self._check_pending()
        parts.store.clear_kept()
        parts.outlet.publish()
        parts.deliver_kept(checkpoint, current=self._state.finished)
        best = parts.store.best()
        self._best = None if best is None else best.levels.best
        """Accuracy of the best model that was offered for inference; None: none was."""
        self._unsaved: set[tuple[str, int]] = set()
        """(device, round) of movements that no checkpoint contains yet."""
        self._owed: dict[tuple[str, int], tuple[events.Send, Upload | None]] = {}
        """Receipts of those movements, and their uploads."""
        self._save_by: float | None = None
        self._started = time.perf_counter()
        self._surveying = Surveying(config, parts.outlet)
        self._present: set[str] = set()
        self._ending: list[Said] = []
        """Messages that end the run, held back until its levels are surveyed."""
        told = any(each.statistics_devices is not None for each in self._scores.levels)
        if self._state.finished and parts.asks_devices and not told:
            self._present = set(checkpoint.devices)
            self._ending.append(events.Broadcast(self._end))
            self._begin_survey()

    def _check_pending(self) -> None:
        """Drop movements that an earlier process collected for a rule that is not this run's."""
        model = self._parts.model
        if model.pending is not None and not isinstance(self._config.rule, FedBuff):
            number = model.pending.number
            was = "movements that were" if number > 1 else "movement that was"
            log.warning(
                "%d %s collected for fedbuff %s left out",
                *(number, was, "are" if number > 1 else "is"),
            )
            model.pending = None

    def _norms(self) -> NDArray[np.float64] | None:
        """Squared norm of each block, if movements are bounded by it."""
        clips = self._config.local_rule.clip_norm is not None
        return self._parts.model.norms if clips else None

    @property
    def state(self) -> FragmentsState:
        """The machine's state."""
        return self._state

    @property
    def resumed(self) -> bool:
        """Always False: assignments were for a model version that is gone."""
        return False

    @property
    def finished(self) -> bool:
        """True if there is nothing left to do."""
        return self._state.finished and not self._surveying.under_way

    @property
    def surveying(self) -> Surveying:
        """The survey of the levels, if one is under way."""
        return self._surveying

    @property
    def config(self) -> FragmentsConfig:
        """Settings with which devices are asked now."""
        return self._config

    @property
    def wanted(self) -> FragmentsConfig:
        """Settings as operators want them, perhaps from the next round on only."""
        return with_settings(self._base, self._wanted)

    @property
    def entries(self) -> BlockEntries | None:
        """Movements that memory holds of each block; None: there is no memory."""
        return None

    @property
    def idle(self) -> bool:
        """True if no device has anything to do, and no survey is under way."""
        return self._state.idle and not self._surveying.under_way

    @property
    def judged(self) -> int:
        """Number of the newest order about a device that was taken up."""
        return self._judged

    @property
    def saved_orders(self) -> int:
        """Number of the newest order about a device that a checkpoint has."""
        return self._saved_orders

    @property
    def deadline(self) -> float | None:
        """Latest time to send `Tick`; None if there is no deadline."""
        known = (self._state.deadline, self._save_by, self._surveying.deadline)
        return min((each for each in known if each is not None), default=None)

    @property
    def round(self) -> int:
        """Number of updates so far."""
        return self._state.version

    @property
    def phase(self) -> str:
        """The run's phase in words."""
        if self._surveying.under_way:
            return "surveying levels"
        if self._state.finished:
            return "finished"
        return "collecting movements" if self._state.running else "waiting for devices"

    @property
    def waits_for(self) -> Wait | None:
        """Return the reason why the run waits now; None: it does not."""
        state = self._state
        if self._surveying.under_way:
            return Wait("survey", "the answers of devices to a survey")
        if not state.running and not state.finished:
            return missing_devices(len(state.devices), self._config.min_devices)
        return None if state.finished else Wait("movements", "movements of devices")

    def handle(self, event: fragments.Event | SurveyFinding, now: float) -> list[Said]:
        """Perform the effects of an event and return the messages to send."""
        said = self._surveyed(event, now)
        if isinstance(event, SurveyFinding):
            return said
        if isinstance(event, events.Left):
            self._parts.outlet.left(event.device)
        upload, pending = upload_of(event), [event]
        settled = upload is None
        try:
            while pending:
                before, happened = self._state, pending.pop(0)
                self._state, effects = fragments.handle(self._config, before, happened, now)
                self._note_skip(happened)
                if isinstance(happened, Bid):
                    self._show_bid(before, happened)
                while effects:
                    effect = effects.pop(0)
                    if isinstance(effect, events.Send) and isinstance(effect.message, Receipt):
                        settled = self._give(effect, effect.message, happened, upload, said)
                    else:
                        pending += self._perform(effect, before, said)
                    if isinstance(effect, fragments.Apply) and self._measured is not None:
                        ending = self._judge(self._measured, now)
                        if ending:  # nobody is asked any more
                            effects = [each for each in effects if not _opens(each)]
                        effects += ending
                if self._state.finished and not before.finished:
                    said.append(events.Broadcast(self._end))
        finally:
            if upload is not None and not settled:
                self._parts.store.settle(upload, None)
        if self._surveying.under_way:
            self._ending += [each for each in said if _ends(each)]
            said = [each for each in said if not _ends(each)]
        if self._unsaved and self._save_by is None:
            self._save_by = now + self._parts.store.save_s
        if self._save_by is not None and now >= self._save_by:
            self._save()
        return [*self._paid(), *said]

    # -- orders of operators ----------------------------------------------------------------

    def hold(self, held: bool, now: float) -> list[Said]:
        """Ask no device any more, or ask them again."""
        return [] if held == self._state.held else self.handle(events.RoundsHeld(held), now)

    def check(self, settings: Settings) -> FragmentsConfig:
        """Return the run's settings with these changed. Raises `ConfigError` if they do not fit."""
        return with_settings(self._base, settings)

    def change(self, settings: Settings, now: float) -> list[Said]:
        """Change settings for devices that are asked from now on; no others differ from run.toml.

        The run's end, and what ends it, is by the new settings at once.
        """
        self._config, self._wanted = with_settings(self._base, settings), dict(settings)
        # By the new settings, enough devices may be there.
        return self.handle(events.RoundsHeld(self._state.held), now)

    def judge(self, judgement: OrderedStanding, now: float) -> list[Said]:
        """Quarantine a device, or release it."""
        self._judged = judgement.number
        return self.handle(judgement_event(judgement), now)

    def _show_bid(self, before: FragmentsState, bid: Bid) -> None:
        """Tell the onlooker of a bid that the machine took."""
        work = before.work.get(bid.device)
        if work is not None and work.round == bid.round:
            now = self._state.work.get(bid.device)
            taken = None if now is None else now.bid
            self._parts.onlooker.bid(bid if taken is None else replace(taken, code=bid.code))

    def _note_skip(self, happened: fragments.Event) -> None:
        """Note for the next report a device that skips or was rejected."""
        if isinstance(happened, events.Uploaded):
            happened = happened.sent
        if isinstance(happened, Bid | Movement):
            work = self._state.work.get(happened.device)
            if work is not None and work.stage is Stage.RESTING and work.bid is not None:
                self._skips[happened.device] = self._resting[happened.device] = work.bid

    def proceed(self, now: float) -> list[Said]:
        """Say a survey once the model is published; nothing else of an asynchronous run waits."""
        return [*self._surveying.proceed(self._answering, now)]

    @property
    def _answering(self) -> set[str]:
        """Devices that may answer a survey."""
        return self._present - quarantined(self._state.fleet.standings).keys()

    @property
    def _end(self) -> RoundClosed:
        return RoundClosed(round=max(1, self._state.openings))

    def _begin_survey(self) -> None:
        """Let devices survey the levels of the last model, which a checkpoint contains."""
        self._parts.outlet.publish()
        scores, round = self._config.unscored(), self._end.round
        self._surveying.begin(round, scores, self._answering, self._state.fleet)

    def _surveyed(self, event: fragments.Event | SurveyFinding, now: float) -> list[Said]:
        """Pass an event on to the survey; its result ends the run."""
        match event:
            case events.Joined(device):
                self._present.add(device)
            case events.Left(device):
                self._present.discard(device)
        if not isinstance(event, SurveyFinding | events.Joined | events.Left | events.Tick):
            return []
        standings = self._state.fleet.standings
        if isinstance(event, SurveyFinding | events.Joined) and declines(standings, event.device):
            return []
        scores = self._surveying.handle(event, now)
        if scores is None:
            return []
        try:
            self._report(scores)
        except Exception as error:
            raise RunError("the result of a survey could not be stored") from error
        ending, self._ending = self._ending, []
        return ending

    def say_again(self, device: str | None = None) -> list[Said]:
        """Resend the last messages to all devices, or to one."""
        said: list[Said] = []
        for name in sorted(self._state.work) if device is None else [device]:
            work = self._state.work.get(name)
            if work is None:
                continue
            if work.stage in (Stage.ASKED, Stage.TRAINING) and name in self._openings:
                said.append(events.Send(name, self._openings[name]))
            if work.stage is Stage.TRAINING and work.groups is not None:
                groups = work.groups
                again = Assignment(device=name, round=work.round, groups=groups)
                said.append(events.Send(name, again))
        return said

    def excuses(self) -> dict[str, str]:
        """Reasons why devices did not train since the last report, by device name."""
        return {name: bid.reason for name, bid in self._skips.items()}

    def close(self) -> list[Said]:
        """Save the current model as a checkpoint and return the messages still to send."""
        if self._state.version > self._saved:
            self._save()
        return self._paid()

    def kill(self) -> None:
        """Stop as a crash would, writing nothing."""

    def _perform(
        self, effect: fragments.Effect, before: FragmentsState, said: list[Said]
    ) -> list[fragments.Event]:
        parts = self._parts
        match effect:
            case events.Send(device, RoundOpen() as opening):
                parts.store.note_opened(opening.round)
                self._resting.pop(device, None)
                self._openings[device] = parts.outlet.opening(opening, device)
                parts.onlooker.asked((device,), opening.round)
                said.append(events.Send(device, self._openings[device]))
            case events.Send(device, Assignment(round=round)):
                parts.onlooker.assigned(device, round)
                said.append(effect)
            case events.Send() | events.Accept():
                said.append(effect)
            case events.Keep(round, arrival, upload):
                device = arrival.contribution.device
                try:
                    parts.store.keep(upload, device, round)
                except OSError:
                    self._state = before  # the device may send it again
                    raise
                self._arrivals[device] = arrival
                parts.onlooker.kept(arrival, round)
                return [events.Kept(device, round)]
            case fragments.Reserve(device, round, groups):
                parts.outlet.reserve(device, round, groups)
            case fragments.Release(device, round):
                parts.model.release(device, round)
            case fragments.Apply(device, round):
                try:
                    self._apply(device, round, before)
                except Exception as error:
                    raise RunError(f"a movement from {device!r} could not be applied") from error
        return []

    def _give(
        self,
        effect: events.Send,
        receipt: Receipt,
        happened: fragments.Event,
        upload: Upload | None,
        said: list[Said],
    ) -> bool:
        """Give a receipt now, or later when a checkpoint has the movement; True if given now."""
        key = effect.device, receipt.round
        if key not in self._unsaved:
            said.append(effect)
            # A movement that counts was counted when it was applied.
            counted = receipt.outcome is Outcome.COUNTED
            self._parts.give(receipt, happened, upload, count=not counted)
            return True
        self._owed.setdefault(key, (effect, upload))
        if isinstance(happened, Offer):
            said.append(events.Accept(happened))  # it has arrived whole; its receipt follows
        return False

    def _apply(self, device: str, round: int, before: FragmentsState) -> None:
        parts, arrival = self._parts, self._arrivals.pop(device)
        groups, bid = arrival.groups, before.work[device].bid
        self._openings.pop(device, None)
        fetched = parts.outlet.fetched_bytes(device, groups)
        age = parts.outlet.applied(device, groups)
        if bid is not None:
            plan = self._config.plan
            bid = replace(bid, level=min(plan.levels(groups).values(), default=1.0))
            line = device_round(plan, bid, arrival, norms=None, bytes_down=fetched)
            self._window.append((replace(line, staleness=age), groups))
        parts.model.mix(self._config.rule, arrival, age)
        if self._state.finished:
            parts.model.settle(self._config.rule)
        fleet = replace(self._state.fleet, norms=self._norms())
        self._state = replace(self._state, fleet=fleet)
        self._unsaved.add((device, round))
        parts.tally.outcomes[Outcome.COUNTED.value] += 1
        if self._state.finished and parts.asks_devices:
            self._save()
            self._begin_survey()
        elif self._state.version % self._report_every == 0 or self._state.finished:
            self._measured = parts.score(self._config)

    def _judge(self, scores: LevelScores, now: float) -> list[fragments.Effect]:
        """Report the newest model; returns what tells devices if its accuracy ends the run."""
        self._measured = None
        evaluated = fragments.Evaluated(scores.best, self._report_every)
        self._state, ending = fragments.handle(self._config, self._state, evaluated, now)
        try:
            self._report(scores)
        except Exception as error:
            raise RunError("a report could not be stored") from error
        return ending

    def _paid(self) -> list[Said]:
        """Return the owed receipts for movements that a checkpoint now contains."""
        if self._unsaved or not self._owed:
            return []
        owed, self._owed = self._owed, {}
        for send, upload in owed.values():
            if isinstance(send.message, Receipt):
                log_receipt(send.message)
                if upload is not None:
                    self._parts.store.settle(upload, send.message)
        return [send for send, _ in owed.values()]

    def _report(self, scores: LevelScores) -> None:
        parts, model = self._parts, self._parts.model
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        report = report_updates(
            self._config,
            self._state,
            self._window,
            self._skips,
            scores,
            norms=model.norms,
            noise=model.noise,
            seconds=seconds,
            every=self._round_updates,
        )
        self._window, self._skips = [], dict(self._resting)
        self._scores = scores
        line = parts.describe(report)
        self._save(line)
        parts.record(report, line)
        parts.onlooker.model(self._state.fleet, self._state.version)
        is_best = scores.best is not None and (self._best is None or scores.best > self._best)
        choices: tuple[Choice, ...] = ("latest", "best") if is_best else ("latest",)
        state = self._state
        levels = parts.trained(scores, state.fleet)
        delivered = parts.deliver(choices, state.version, levels, final=state.finished)
        if is_best and delivered:
            self._best = scores.best
        if state.finished:
            self._deliver_best()

    def _deliver_best(self) -> None:
        """Offer the best model if it was not published when it was made."""
        best = self._parts.store.best()
        accuracy = None if best is None else best.levels.best
        if best is None or accuracy is None or self._parts.rollout is not None:
            return
        if self._best is None or accuracy > self._best:
            self._best = accuracy
            self._parts.deliver_best(best, {"best"})

    def _save(self, line: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, with the line of a report if there is one."""
        state, model = self._state, self._parts.model
        self._parts.store.save(
            Checkpoint(
                round=state.version,
                committed=state.version,
                version=model.version,
                theta=model.theta,
                buffers=model.buffers,
                fleet=state.fleet,
                devices=state.devices,
                best=state.best,
                counted=state.counted,
                levels=self._scores,
                pending=model.pending,
                line=line,
                orders=self._judged,
            )
        )
        self._saved_orders = self._judged
        self._state = replace(state, fleet=state.fleet.settled())
        self._saved = state.version
        self._unsaved.clear()
        self._save_by = None
        self._parts.prune()
        self._parts.store.clear_kept()


def _opens(effect: fragments.Effect) -> bool:
    """True if an effect asks a device to take part again."""
    return isinstance(effect, events.Send) and isinstance(effect.message, RoundOpen)


def _ends(said: Said) -> bool:
    """True if a message tells devices that the run is over."""
    return isinstance(said, events.Broadcast | events.Send) and isinstance(
        said.message, RoundClosed
    )
