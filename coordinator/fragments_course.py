"""The course of an asynchronous run: `fragments.py` and what performs its effects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from coordinator import events, fragments
from coordinator.arrivals import Arrival
from coordinator.courses import Parts, Said, receipt_for
from coordinator.fragments import FragmentsConfig, FragmentsState, Stage
from coordinator.publishing import Published, stamp
from coordinator.round_report import report_updates
from coordinator.runs import Checkpoint, RunError
from edge_sdk.protocol.messages import Assignment, Bid, Outcome, Receipt, RoundClosed, RoundOpen
from edge_sdk.protocol.transfer import Offer


class FragmentsCourse:
    """An asynchronous run. A device is served the version that its opening named.

    A checkpoint is written, and a report made, after as many updates as devices are needed.
    """

    def __init__(self, config: FragmentsConfig, parts: Parts, checkpoint: Checkpoint) -> None:
        self._config = config
        self._parts = parts
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
        """Of each device, the version of its last movement: it may be evaluating that."""
        self._window: list[tuple[Bid, Arrival, int]] = []
        self._skips: dict[str, Bid] = {}
        self._saved = checkpoint.version
        self._published = parts.publish(())
        self._started = time.perf_counter()

    @property
    def state(self) -> FragmentsState:
        """The machine's state."""
        return self._state

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self._state.finished

    @property
    def deadline(self) -> float | None:
        """When to send `Tick` at the latest."""
        return self._state.deadline

    def handle(self, event: fragments.Event, now: float) -> list[Said]:
        """What is to be said after an event."""
        said: list[Said] = []
        if isinstance(event, Bid):
            if event.level is None:
                self._skips[event.device] = event
            elif (work := self._training(event.device)) and work.round == event.round:
                return self._assignment(event.device)  # it started anew, or missed it
        pending = [event]
        while pending:
            before = self._state
            self._state, effects = fragments.handle(self._config, before, pending.pop(0), now)
            for effect in effects:
                pending += self._perform(effect, before, said)
            if self._state.finished and not before.finished:
                said.append(events.Broadcast(RoundClosed(round=self._state.openings)))
        return said

    def proceed(self, _now: float) -> list[Said]:
        """There is nothing to wait for: versions follow each other as movements come."""
        return []

    def settled(self, offer: Offer) -> Receipt | None:
        """The receipt for something that need not be sent: its outcome is known."""
        device, state = offer.device, self._state
        if offer.answers is not None:
            return receipt_for(offer, Outcome.REJECTED, "this run takes no replays")
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

    def close(self) -> None:
        """Stop where we are: the model as it is becomes a checkpoint."""
        if self._state.version > self._saved:
            self._save()

    def _perform(
        self, effect: fragments.Effect, before: FragmentsState, said: list[Said]
    ) -> list[fragments.Event]:
        parts = self._parts
        match effect:
            case events.Send(device, RoundOpen() as opening):
                parts.run.note_opened(opening.round)
                opening = stamp(opening, parts.run.about.run, self._published)
                self._openings[device] = (opening, self._published)
                said.append(events.Send(device, opening))
            case events.Send():
                said.append(effect)
            case events.Keep(round, arrival):
                parts.keep(round, arrival)
                device = arrival.contribution.device
                self._arrivals[device] = arrival
                return [events.Kept(device, round)]
            case fragments.Reserve(device, round, groups):
                published = self._openings[device][1]
                parts.model.reserve_from(device, round, groups, published, parts.chunks)
            case fragments.Release(device, round):
                parts.model.release(device, round)
            case fragments.Apply(device):
                try:
                    self._apply(device, before)
                except Exception as error:
                    raise RunError(f"a movement of {device!r} could not be applied") from error
        return []

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
        self._earlier[device] = published.version
        held = {each.version for _, each in self._openings.values()}
        self._published = parts.publish(held | set(self._earlier.values()))
        if self._state.version % self._config.min_devices == 0 or self._state.finished:
            self._report()

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
        self._parts.save(
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
        self._parts.receiving.clear_kept()

    def _training(self, device: str) -> fragments.Work | None:
        work = self._state.work.get(device)
        return work if work is not None and work.stage is Stage.TRAINING else None

    def _assignment(self, device: str) -> list[Said]:
        work = self._training(device)
        if work is None or work.groups is None:
            return []
        groups: Mapping[str, tuple[int, ...]] = work.groups
        return [events.Send(device, Assignment(device=device, round=work.round, groups=groups))]
