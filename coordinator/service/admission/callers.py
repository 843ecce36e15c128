"""Devices the coordinator listens to, and its treatment of those that send useless messages.

A run listens to a limited number of names. The log reports a device's bad messages a few times, and
the device itself is told from time to time (`Complaint`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from coordinator.service.admission.inbox import Inbox
from coordinator.service.admission.limits import (
    COMPLAINT,
    MUTED_S,
    OFFER,
    USELESS,
    WARNING,
    Buckets,
)
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.transfer import Complaint

log = logging.getLogger(__name__)


class Callers:
    """Devices that send messages through an inbox."""

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float], max_devices: int) -> None:
        self._inbox = inbox
        self._clock = clock
        self._max_devices = max_devices
        self._offers = Buckets(OFFER, max_devices)
        self._offered: dict[str, int] = {}
        """Newest round that each known device offered an upload for."""
        self._useless = Buckets(USELESS, max_devices)
        self._warnings = Buckets(WARNING, max_devices)
        self._complaints = Buckets(COMPLAINT, max_devices)

    def __contains__(self, device: str) -> bool:
        return device in self._inbox.known

    def know(self, devices: Iterable[str]) -> None:
        """Listen to these devices, however many: they took part before."""
        self._inbox.known.update(devices)

    def admit(self, device: str) -> bool:
        """Listen to a device from now on, after a valid message; True if there is room for it."""
        known = self._inbox.known
        if device in known:
            return True
        if len(known) < self._max_devices:
            known.add(device)
            return True
        if not self._inbox.full:
            self._inbox.full = True
            log.error(
                "%d devices are known, the limit set by [round] max_devices: %s and all other new "
                "names are ignored",
                len(known),
                device,
                extra={"facts": {"event": "full", "device": device}},
            )
        return False

    def check_offer(self, device: str, round: int) -> None:
        """Raise `MessageError` if a device offers new uploads too often.

        The first one for a newer round is always welcome: rounds may be as short as they like.
        """
        if round > self._offered.get(device, -1):
            self._offered[device] = round
        elif not self._offers.take(device, self._clock()):
            raise MessageError("too many offers of new uploads")

    def note_useless(self, device: str) -> None:
        """Count a useless chunk of a device; after too many, ignore its chunks for a while."""
        if not self._useless.take(device, self._clock()):
            self._inbox.mute(device, MUTED_S)

    def warn(self, device: str, text: str) -> Complaint | None:
        """Log why a message was dropped; returns None if its sender was told recently."""
        now, known = self._clock(), device in self
        # Unknown names share one budget of warnings.
        loud = self._warnings.take(device if known else "?", now)
        log.log(
            logging.WARNING if loud else logging.DEBUG,
            "dropped a message from %s: %s",
            device,
            text,
            extra={"facts": {"event": "dropped", "device": device}},
        )
        told = not known or not self._complaints.take(device, now)
        return None if told else Complaint(device=device, reason=text)
