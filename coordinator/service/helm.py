"""The helm of a served run: orders of operators, which its loop carries out.

Each order is checked, then put on disk (`run/steering/orders.py`), then performed on the course. So
an order that was answered outlives the process, and one that is refused has changed nothing.
Methods are for the loop's thread; `service/admission/requests.py` brings orders there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from coordinator.errors import ConfigError
from coordinator.rounds.reputation import quarantined
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.errors import RunError
from coordinator.run.steering.orders import GivenBy, OrderedStanding, Steering, StopOrder
from coordinator.run.steering.settings import Settings, check_fits, length_of
from coordinator.service.courses.fragments import FragmentsCourse
from coordinator.service.courses.parts import PAUSED, Said, Wait
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.service.overview.facts import settings_of
from coordinator.service.overview.overview import Overview
from edge_sdk.program.settings.reader import nearest

log = logging.getLogger(__name__)

Answer = dict[str, Any]
"""A JSON value."""


class Helm:
    """Steers a run that is served."""

    def __init__(
        self,
        steering: Steering,
        course: RoundsCourse | FragmentsCourse,
        *,
        now: Callable[[], float],
        perform: Callable[[list[Said]], None],
        devices: Set[str],
        max_devices: int,
        measured: bool,
        overview: Overview,
    ) -> None:
        """`perform` says what an order makes the course say. `devices` are those of earlier
        processes. `measured` is True if the coordinator measures the accuracy. `overview` is told
        of every order."""
        self._steering = steering
        self._course = course
        self._now, self._perform = now, perform
        self._devices = devices
        self._max_devices, self._measured = max_devices, measured
        self.broken: Exception | None = None
        """The failure of an order, which is on disk or may be: nothing more is certain, so the
        process must end, and the next one carries the order out. Or another failure of the run."""
        self._overview = overview
        self._show()

    @property
    def paused(self) -> GivenBy | None:
        """Who paused the run, and when."""
        return self._steering.steered.paused

    @property
    def stopping(self) -> StopOrder | None:
        """The stop that was asked for."""
        return self._steering.steered.stopping

    @property
    def stops(self) -> bool:
        """True if the process is to end now."""
        order = self.stopping
        return order is not None and (order.when == "now" or self._course.idle)

    @property
    def waits_for(self) -> Wait | None:
        """The reason why the run waits now; None: it does not."""
        paused = self.paused
        if paused is None or not self._course.idle or self._course.finished:
            return self._course.waits_for
        since = datetime.fromtimestamp(paused.time, timezone.utc)
        return Wait(PAUSED, f"paused by {paused.by} since {since:%Y-%m-%d %H:%M} UTC")

    @property
    def state(self) -> Answer:
        """What operators changed: `paused`, `stopping`, and the `changes` of settings."""
        steered = self._steering.steered
        return {
            "paused": None if steered.paused is None else asdict(steered.paused),
            "stopping": None if steered.stopping is None else steered.stopping.when,
            "changes": {name: asdict(each) for name, each in steered.changes.items()},
        }

    # -- orders -----------------------------------------------------------------------------

    def pause(self, by: str) -> Answer:
        """Let no further round open; the open one goes on to its end."""
        self._check_open()
        return self._hold(lambda: self._steering.pause(by), f"paused by {by}")

    def resume(self, by: str) -> Answer:
        """Let rounds open again."""
        return self._hold(lambda: self._steering.resume(by), f"resumed by {by}")

    def stop(self, when: str, by: str) -> Answer:
        """Let the process end, after the open round or now; one whose run is complete may go on
        for a while, for devices that try its last model."""
        words = f"{by} asked for a stop ({'at once' if when == 'now' else 'after this round'})"
        return self._hold(lambda: self._steering.stop(when, by), words)

    def stopped(self) -> None:
        """Note that the stop was carried out; the process is about to end."""
        self._ordered(self._steering.stopped)
        self._show()

    def lengthen(self, more: int, by: str) -> Answer:
        """Add rounds, or updates."""
        steering = self._steering
        changed = self._ordered(lambda: steering.lengthen(more, by))
        if not self._course.finished:
            self._take_up()
        self._tell()
        name = length_of(steering.steered.file)
        value = steering.steered.value(name)
        log.info("%s: %s = %s", by, name, value, extra={"facts": {"event": "set", name: value}})
        note = "the run had ended: start serve again to go on" if self._course.finished else None
        return {"changed": changed, "name": name, "value": value, "note": note}

    def change(self, name: str, value: object, by: str) -> Answer:
        """Change a setting from the next round on."""
        steering, was = self._steering, self._steering.steered.value(name)
        settings = steering.preview(name, value)
        self._check(settings)
        changed = self._ordered(lambda: steering.change(name, value, by))
        self._take_up()
        if changed:
            self._tell()
        new = steering.steered.value(name)
        if changed:
            facts = {"event": "set", "name": name, "value": new, "was": was}
            log.info("%s: %s = %s (was %s)", by, name, new, was, extra={"facts": facts})
        file = steering.steered.file.get(name)
        return {"changed": changed, "name": name, "value": new, "was": was, "file": file}

    def quarantine(self, device: str, reason: str, by: str) -> Answer:
        """Quarantine a device; its movement in the open round is rejected."""
        known = self._known
        if device not in known:
            raise ConfigError(f"the run has no device {device!r}{nearest(device, sorted(known))}")
        steering, saved = self._steering, self._course.saved_orders
        if device in (each["device"] for each in self.quarantined()):
            raise ConfigError(f"{device!r} is quarantined already: tessera-coordinator quarantined")
        found = self._ordered(lambda: steering.quarantine(device, reason, by, saved=saved))
        facts = {"event": "quarantined", "device": device}
        log.warning("%s is quarantined: %s", device, found.words, extra={"facts": facts})
        self._judge(found)
        return _row(device, found.round, 0, found.words)

    def allow(self, device: str, by: str) -> Answer:
        """Release a device from quarantine; return its row from now on, whose `since` is None."""
        rows = [each["device"] for each in self.quarantined()]
        if device not in rows:
            known = ", ".join(rows) or "none"
            raise ConfigError(f"{device!r} is not quarantined; quarantined devices: {known}")
        steering, saved = self._steering, self._course.saved_orders
        found = self._ordered(lambda: steering.allow(device, by, saved=saved))
        log.info("%s is released", device, extra={"facts": {"event": "released", "device": device}})
        self._judge(found)
        return _row(device, None, 0, found.words)

    def quarantined(self) -> list[Answer]:
        """Return the devices whose bids are declined, or will be once a closed round is done."""
        standings = quarantined(self._course.state.fleet.standings)
        rows = {
            name: _row(name, each.quarantined, each.refusals, each.reason)
            for name, each in standings.items()
        }
        for each in self._steering.steered.judged_since(self._course.judged):
            rows.pop(each.device, None)
            if each.quarantined:
                rows[each.device] = _row(each.device, each.round, 0, each.words)
        return [rows[name] for name in sorted(rows)]

    # -- performing -------------------------------------------------------------------------

    @property
    def _known(self) -> set[str]:
        return {*self._devices, *self._course.state.devices}

    def _check_open(self) -> None:
        if self._course.finished:
            raise ConfigError("the run has ended; to go on: tessera-coordinator rounds RUN +20")

    def _check(self, settings: Settings) -> None:
        """Raise `ConfigError` unless the run can go on with these settings changed."""
        machine = self._course.check(settings)
        check_fits(machine, measured=self._measured, max_devices=self._max_devices)

    def _hold(self, order: Callable[[], bool], words: str) -> Answer:
        changed = self._ordered(order)
        if changed:
            log.info("%s", words, extra={"facts": {"event": "steered"}})
            self._tell()
        held = self.paused is not None or self.stopping is not None
        self._carry_out(lambda: self._course.hold(held, self._now()))
        waits = self.waits_for
        return {"changed": changed, **self.state, "waits_for": waits and waits.words}

    def _judge(self, judgement: OrderedStanding) -> None:
        self._tell()
        self._carry_out(lambda: self._course.judge(judgement, self._now()))
        course = self._course
        self._overview.model(course.state.fleet, course.round, entries=course.entries)

    def _tell(self) -> None:
        """Tell the overview of the last order."""
        if (line := self._steering.line) is not None:
            self._overview.line(line)
        self._show()

    def _show(self) -> None:
        """Tell the overview what holds now."""
        paused, stopping = self.paused, self.stopping
        if paused is None:
            self._overview.resumed()
        else:
            self._overview.paused(paused.by, paused.time)
        self._overview.stopping(None if stopping is None else stopping.when)
        wanted = self._course.wanted
        length = wanted.rounds if isinstance(wanted, RoundsConfig) else wanted.updates
        self._overview.settings(settings_of(wanted), length)

    def _take_up(self) -> None:
        settings = self._steering.steered.settings
        self._carry_out(lambda: self._course.change(settings, self._now()))

    def _carry_out(self, order: Callable[[], list[Said]]) -> None:
        """Let the course do what an order on disk says, and say what that makes it say."""
        try:
            self._perform(order())
        except Exception as error:
            self.broken = error
            raise

    def _ordered(self, order: Callable[[], Any]) -> Any:
        """Put an order on disk. If the disk fails, nobody knows what is there."""
        try:
            return order()
        except OSError as error:
            self.broken = error
            raise RunError(f"the order could not be stored: {error}") from error


def _row(device: str, since: int | None, refusals: int, reason: str) -> Answer:
    return {"device": device, "since": since, "refusals": refusals, "reason": reason}
