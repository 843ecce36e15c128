"""The course of an asynchronous run: `fragments.py` and what performs its effects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from coordinator.aggregate.arrivals import Arrival
from coordinator.rounds import events, fragments
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState, Stage
from coordinator.run.folder import Checkpoint, RunError
from coordinator.service.courses import Clock, Parts, Said, is_news, receipt_for
from coordinator.service.outgoing.publishing import Published, stamp
from coordinator.service.reports import report_updates
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.protocol.packs.packs import find_packs

PUBLISHING_SHARE = 0.2
"""Of the time, at most, that goes into publishing versions."""
MAX_EARLIER = 8
"""Versions, the newest, that are held for devices that may be evaluating them."""
SAVE_S = 5.0
"""How long a receipt waits for the checkpoint that has its movement."""


class FragmentsCourse:
    """An asynchronous run. A device is served the version that its opening named.

    - A version is published when a device is to be told of it, the link has taken the one before,
      and publishing does not take too much of the time. Else the device is told of the newest one
      that was; how old its movement is then counts from that.
    - A checkpoint is written, and a report made, after as many updates as devices are needed.
    - A movement that counts gets its receipt when a checkpoint has it, after `SAVE_S` at the
      latest: what comes after the last checkpoint is lost in a crash.
    """

    def __init__(
        self, config: FragmentsConfig, parts: Parts, checkpoint: Checkpoint, clock: Clock
    ) -> None:
        self._config = config
        self._parts = parts
        self._clock = clock
        self._state = replace(
            fragments.start(config),
            fleet=checkpoint.fleet,
            version=checkpoint.version,
            openings=parts.run.opened,
            counted=checkpoint.counted,
            finished=checkpoint.version >= config.updates,
        )
        self._arrivals: dict[str, Arrival] = {}
        self._openings: dict[str, tuple[RoundOpen, Published]] = {}
        """Of each device, what it was last told, and the version that named."""
        self._earlier: dict[str, int] = {}
        """Of devices that are there, the version of their last movement: they may be evaluating it.
        Of all versions, the newest `MAX_EARLIER`."""
        self._window: list[tuple[Bid, Arrival, int]] = []
        self._skips: dict[str, Bid] = {}
        self._saved = checkpoint.version
        parts.receiving.clear_kept()
        self._published = parts.publish()
        self._newest = (parts.model.serve(), parts.model.buffers)
        """What was published last, as most devices will ask for it."""
        self._publish_after = clock()
        self._changed: set[int] = set()
        """Packs that differ from the version that was published last."""
        self._unsaved: set[tuple[str, int]] = set()
        """(device, round) of movements that no checkpoint has yet."""
        self._owed: list[events.Send] = []
        """Their receipts."""
        self._save_by: float | None = None
        self._started = time.perf_counter()

    @property
    def state(self) -> FragmentsState:
        """The machine's state."""
        return self._state

    @property
    def resumed(self) -> bool:
        """Never: what devices had to do was for a version that is gone."""
        return False

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self._state.finished

    @property
    def deadline(self) -> float | None:
        """When to send `Tick` at the latest."""
        due = [each for each in (self._state.deadline, self._save_by) if each is not None]
        return min(due, default=None)

    def handle(self, event: fragments.Event, now: float) -> list[Said]:
        """What is to be said after an event."""
        said: list[Said] = []
        if isinstance(event, events.Left):
            self._earlier.pop(event.device, None)
        if isinstance(event, Bid):
            if event.level is None:
                self._skips[event.device] = event
            elif (work := self._training(event.device)) and work.round == event.round:
                return self._assignment(event.device)  # it started anew, or missed it
        pending = [event]
        while pending:
            before, happened = self._state, pending.pop(0)
            self._state, effects = fragments.handle(self._config, before, happened, now)
            for effect in effects:
                pending += self._perform(effect, before, happened, said)
            if self._state.finished and not before.finished:
                said.append(events.Broadcast(RoundClosed(round=self._state.openings)))
        if self._unsaved and self._save_by is None:
            self._save_by = now + SAVE_S
        if self._save_by is not None and now >= self._save_by:
            self._save()
        return [*self._paid(), *said]

    def proceed(self, _now: float) -> list[Said]:
        """There is nothing to wait for: versions follow each other as movements come."""
        return []

    def settled(self, offer: Offer) -> Receipt | None:
        """The receipt for something that need not be sent: its outcome is known."""
        device, state = offer.device, self._state
        if offer.answers is not None:
            return receipt_for(offer, Outcome.REJECTED, "this run takes no replays")
        if (device, offer.round) in self._unsaved:
            return None  # all of it is here; its receipt is to come
        if offer.round == state.counted.get(device):
            return receipt_for(offer, Outcome.COUNTED)
        work = state.work.get(device)
        if work is None or work.round != offer.round:
            return receipt_for(offer, Outcome.LATE, f"round {offer.round} of this device is over")
        return None

    def say_again(self, device: str | None = None) -> list[Said]:
        """What devices, or one, may have missed: what they were last told."""
        said: list[Said] = []
        for name, work in sorted(self._state.work.items()):
            if device is not None and name != device:
                continue
            if work.stage in (Stage.ASKED, Stage.TRAINING) and name in self._openings:
                said.append(events.Send(name, self._openings[name][0]))
            said += self._assignment(name)
        return said

    def close(self) -> list[Said]:
        """Stop where we are: the model as it is becomes a checkpoint. What is still to be said."""
        if self._state.version > self._saved:
            self._save()
        return self._paid()

    def kill(self) -> None:
        """End as a crash would: nothing is written."""

    def _perform(
        self,
        effect: fragments.Effect,
        before: FragmentsState,
        happened: fragments.Event,
        said: list[Said],
    ) -> list[fragments.Event]:
        parts = self._parts
        match effect:
            case events.Send(device, RoundOpen() as opening):
                parts.run.note_opened(opening.round)
                self._publish_if_due()
                opening = stamp(opening, parts.run.about.run, self._published)
                self._openings[device] = (opening, self._published)
                said.append(events.Send(device, opening))
            case events.Send(device, Receipt() as receipt):
                self._give(effect, device, receipt, happened, said)
            case events.Send():
                said.append(effect)
            case events.Keep(round, arrival):
                try:
                    parts.keep(round, arrival)
                except OSError:
                    self._state = before  # it may come again
                    raise
                device = arrival.contribution.device
                self._arrivals[device] = arrival
                return [events.Kept(device, round)]
            case fragments.Reserve(device, round, groups):
                published = self._openings[device][1]
                if published is self._published:
                    parts.model.reserve_cut(device, round, groups, *self._newest)
                else:
                    parts.model.reserve_from(device, round, groups, published, parts.chunks)
            case fragments.Release(device, round):
                parts.model.release(device, round)
            case fragments.Apply(device):
                try:
                    self._apply(device, before)
                except Exception as error:
                    raise RunError(f"a movement of {device!r} could not be applied") from error
        return []

    def _give(
        self,
        effect: events.Send,
        device: str,
        receipt: Receipt,
        happened: fragments.Event,
        said: list[Said],
    ) -> None:
        """Give a receipt, now or when a checkpoint has the movement."""
        if (device, receipt.round) in self._unsaved:
            if effect not in self._owed:
                self._owed.append(effect)
            return
        said.append(effect)
        if receipt.outcome is Outcome.COUNTED:
            if is_news(happened, receipt):
                self._parts.log(receipt)
        else:
            self._parts.note(receipt)

    def _apply(self, device: str, before: FragmentsState) -> None:
        parts, plan = self._parts, self._config.plan
        arrival, bid = self._arrivals.pop(device), before.work[device].bid
        _, published = self._openings.pop(device)
        if bid is not None:
            level = max(plan.levels(arrival.groups).values(), default=1.0)
            fetched = published.needed_bytes(plan, arrival.groups)
            self._window.append((replace(bid, level=level), arrival, fetched))
        # What the device trained from is as old as its opening, which may be before its bid.
        parts.model.mix(self._config.rule, arrival, before.version - published.version)
        self._hold(device, published.version)
        self._changed.update(find_packs(plan).of_submodel(plan, plan.choose(arrival.groups)))
        self._unsaved.add((device, arrival.contribution.made))
        parts.outcomes[Outcome.COUNTED.value] += 1
        if self._state.version % self._config.min_devices == 0 or self._state.finished:
            self._report()

    def _hold(self, device: str, version: int) -> None:
        """Let a device evaluate the version that it trained from."""
        self._earlier[device] = version
        oldest = sorted(set(self._earlier.values()))[-MAX_EARLIER:][0]
        self._earlier = {name: held for name, held in self._earlier.items() if held >= oldest}

    def _publish_if_due(self) -> None:
        parts, begun, last = self._parts, self._clock(), self._published
        is_newest = last.version == parts.model.version
        if is_newest or not parts.publisher.drained or begun < self._publish_after:
            return
        held = {each.version for _, each in self._openings.values()}
        held |= {last.version, *self._earlier.values()}
        encoded = parts.model.serve()
        # int8 is rounded at random, so that all of a version is another.
        since = None if encoded.encoding.kind == "int8" else last
        self._published = parts.publish(held, since=since, changed=self._changed)
        self._newest = (encoded, parts.model.buffers)
        self._changed.clear()
        now = self._clock()
        self._publish_after = now + (now - begun) * (1 / PUBLISHING_SHARE - 1)

    def _paid(self) -> list[Said]:
        """The receipts that were owed for what a checkpoint has now."""
        if self._unsaved:
            return []
        owed, self._owed = self._owed, []
        for each in owed:
            if isinstance(each.message, Receipt):
                self._parts.log(each.message)
        return list(owed)

    def _report(self) -> None:
        parts, model = self._parts, self._parts.model
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        report = report_updates(
            self._config,
            self._state,
            self._window,
            self._skips,
            norms=model.norms,
            noise=model.noise,
            seconds=seconds,
        )
        self._window, self._skips = [], {}
        self._save()
        parts.record(report, None if parts.evaluate is None else parts.evaluate(model))

    def _save(self) -> None:
        state, model = self._state, self._parts.model
        self._parts.run.save(
            Checkpoint(
                round=state.version,
                committed=state.version,
                version=model.version,
                theta=model.theta,
                buffers=model.buffers,
                fleet=state.fleet,
                devices=state.devices,
                counted=state.counted,
            )
        )
        self._saved = state.version
        self._unsaved.clear()
        self._save_by = None
        self._parts.prune()
        self._parts.receiving.clear_kept()

    def _training(self, device: str) -> fragments.DeviceWork | None:
        work = self._state.work.get(device)
        return work if work is not None and work.stage is Stage.TRAINING else None

    def _assignment(self, device: str) -> list[Said]:
        work = self._training(device)
        if work is None or work.groups is None:
            return []
        groups: Mapping[str, tuple[int, ...]] = work.groups
        return [events.Send(device, Assignment(device=device, round=work.round, groups=groups))]
