"""The interface of a connection to a broker.

A link does not promise delivery. Whatever `publish` accepts reaches the broker at least once (so
sometimes twice) and in order per topic and connection, if the link lives long enough. What the
broker does with it is up to the broker, so transfers have their own receipts.

Sessions are clean: a broker keeps nothing for us while we are away. The brokers we know cap such
queues and drop messages silently, and old control messages help nobody. On `Connected`, each side
asks for, and repeats, what is current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from edge_sdk.transport.settings import LinkError

MAX_NAME = 100
"""Most characters of a link's name. Client ids are slightly longer, and AWS IoT Core takes 128."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The link works: both connections are up, with the subscriptions made before.

    `first`: for the first time. Otherwise messages may have been missed since `Disconnected`.
    Messages of subscriptions may arrive shortly before this event.
    """

    first: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The link does not work (yet), with the reason for people; it keeps trying.

    Delivered once, and again only when the reason changes or with every denial: `denials` counts
    how often in a row the broker refused our name, password or certificate. Waiting does not cure
    that.
    """

    reason: str
    denials: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A message. `retained`: the broker kept it from before we subscribed."""

    topic: str
    payload: bytes
    retained: bool


@dataclass(frozen=True, slots=True)
class Writable:
    """There is room again after `publish` returned False."""

    bulk: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker rejected a subscription or a message, which the link has now given up."""

    topic: str
    reason: str


LinkEvent: TypeAlias = Connected | Disconnected | Received | Writable | Refused
Deliver: TypeAlias = Callable[[LinkEvent], None]


@dataclass(frozen=True, slots=True)
class Will:
    """Message the broker sends for us when we vanish without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class Link(Protocol):
    """Two connections to one broker, control and bulk, so that chunks never delay control.

    Every method may be called from any thread; only `close` waits for the network.
    """

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """Send a message, now or when the broker is back; an empty retained one clears the topic.

        Returns False and queues nothing if too much is waiting (4 MiB of bulk, 8 MiB of control),
        in which case `Writable` follows, or if the link is closed. Raises LinkError for an empty
        topic or one with wildcards.
        """

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """Receive matching messages over that connection; repeated after every reconnect.

        Messages published afterwards over the same connection reach the broker later, so no answer
        to them is missed. Subscribing again makes the broker resend its retained messages. Raises
        LinkError for a malformed filter.
        """

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """Stop receiving; messages still on their way are dropped."""

    def acknowledged(self, *, bulk: bool = False) -> bool:
        """True if the broker has everything that was published over that connection."""

    def silence_s(self, *, bulk: bool = False) -> float:
        """Seconds since any byte, even of part of a message, arrived over that connection.

        Infinite: none has. While bytes arrive, an answer may be on its way.
        """

    def reconnect(self, will: Will | None = None) -> None:
        """End both connections without a goodbye and reconnect, from now on with this will.

        For a link that claims to work but does not. None keeps the current will. Unacknowledged
        messages are sent again.
        """

    def close(self, *, flush: bool = True) -> None:
        """Send queued messages, for at most FLUSH_S, and say goodbye, so that no will is sent.

        Without `flush`, queued messages are dropped. No event is delivered after it returns. Must
        not be called from `deliver`.
        """

    def kill(self) -> None:
        """End at once, like a crash: nothing is sent, and the broker sends the will."""


class OpenLink(Protocol):
    """Opens links: `functools.partial(open_link, settings)`."""

    def __call__(self, *, name: str, deliver: Deliver, will: Will | None = None) -> Link:
        """Open a link, as `open_link` does."""


def check_name(name: str) -> None:
    """Raise LinkError for a name that cannot be a client id."""
    if not 0 < len(name) <= MAX_NAME or not all(c.isascii() and c.isprintable() for c in name):
        raise LinkError(f"name {name!r}: use 1 to {MAX_NAME} printable ASCII characters")
