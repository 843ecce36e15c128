"""Ends the connections that a revoked participant still has.

A broker looks at a certificate when a connection begins, and never again: the list of revoked
certificates keeps its owner out, but ends no connection that stands. MQTT allows each client id one
connection, the newest, and here the id is the name in the certificate. So the authority, which can
be anybody, connects once under the revoked name: the broker ends the older connections and sends
their wills. The certificates for that last minutes, and their keys are deleted at once.

This is of use only after the broker has read the list; else the revoked device would just come
back. So certificates that only the newest list has must be refused first.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.operate.identity.authority import CA, LISTED, VALID, Passes
from coordinator.operate.identity.files import write_file
from coordinator.operate.identity.index import BrokerPlace
from edge_sdk.protocol.messages.topics import BULK
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings

ANSWER_S = 10.0
"""Seconds to wait for a broker's answer."""
AGAIN_S = 0.1
"""Seconds between two tests of a broker that was told to read the list."""


class Takeover(Enum):
    """Outcome of ending somebody's connections."""

    ENDED = "ended"
    UNREAD = "unread"
    """The broker has not read the newest list, and lets revoked certificates in."""
    UNREACHED = "unreached"
    """The broker does not answer, or does not know the authority."""


@dataclass(frozen=True, slots=True)
class _Answer:
    accepted: bool
    denied: bool
    reason: str = ""


def end_connections(place: BrokerPlace, passes: Passes, *, within_s: float) -> tuple[Takeover, str]:
    """End the connections of a revoked name at a broker; returns the outcome and its reason.

    `within_s`: seconds that the broker may take to read the list; 0: it should have done so.
    """
    by = time.monotonic() + within_s
    with TemporaryDirectory(prefix="tessera-") as text:
        folder = Path(text)
        for name, file in passes.files.items():
            write_file(folder / name, file)
        while not (answer := _enter(place, passes.name, folder, LISTED)).denied:
            if not answer.accepted:
                return Takeover.UNREACHED, answer.reason
            if time.monotonic() >= by:
                return Takeover.UNREAD, ""
            time.sleep(AGAIN_S)
        answer = _enter(place, passes.name, folder, VALID)
    return (Takeover.ENDED if answer.accepted else Takeover.UNREACHED), answer.reason


def _enter(place: BrokerPlace, name: str, folder: Path, which: str) -> _Answer:
    """Connect, on both connections, and leave again."""
    settings = BrokerSettings(
        host=place.host,
        port=place.port,
        tls=True,
        ca=folder / CA,
        certificate=folder / f"{which}.pem",
        key=folder / f"{which}.key",
        bulk_certificate=folder / f"{which}{BULK}.pem",
        bulk_key=folder / f"{which}{BULK}.key",
    )
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    link = open_link(settings, name=name, deliver=events.put)
    try:
        while True:
            match events.get(timeout=ANSWER_S):
                case Connected():
                    return _Answer(accepted=True, denied=False)
                case Disconnected(reason, denials):
                    return _Answer(accepted=False, denied=denials > 0, reason=reason)
    except queue.Empty:
        return _Answer(accepted=False, denied=False, reason="no answer")
    finally:
        link.close()
