"""The connection to a broker, as both sides see it.

A link does not promise delivery. Whatever `publish` accepted reaches the broker at least once (so
sometimes twice) and in order per topic and connection, if the link lives long enough; what the
broker does with it is the broker's affair. Transfers therefore have receipts of their own.

Sessions are clean: a broker keeps nothing for us while we are away. What it would keep is capped
and dropped without a word on the brokers we know, and old control messages help nobody; on
`Connected` each side asks for, and says again, what counts now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from edge_sdk.transport.settings import LinkError

MAX_NAME = 100
"""Characters of a link's name. Client ids are a little longer, and AWS IoT Core takes 128."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The link works: both connections are up, with every subscription known when they came up.

    `first`: never before. Otherwise messages may have been missed since `Disconnected`. Messages
    of subscriptions may arrive a little before this event.
    """

    first: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The link does not work, or does not yet, and why, for people; it goes on trying.

    Said once, and again only when the reason changes, or with every denial: `denials` is how often
    in a row the broker refused our name, password or certificate, which time alone does not cure.
    """

    reason: str
    denials: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A message. `retained`: the broker had kept it from before we subscribed."""

    topic: str
    payload: bytes
    retained: bool


@dataclass(frozen=True, slots=True)
class Writable:
    """`publish` returned False some time ago; there is room again."""

    bulk: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker did not take a subscription, or a message, which the link has now given up."""

    topic: str
    reason: str


LinkEvent: TypeAlias = Connected | Disconnected | Received | Writable | Refused
Deliver: TypeAlias = Callable[[LinkEvent], None]


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker says for us when we vanish without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class Link(Protocol):
    """Two connections to one broker: control, and bulk, so that chunks never hold up control.

    Every method may be called from any thread; none but `close` waits for the network.
    """

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """Send a message, now or when the broker is back; an empty retained one clears the topic.

        False, and nothing is queued, when too much is waiting (4 MiB of bulk, 8 MiB of control)
        or the link was closed; after the former, `Writable` follows. Raises LinkError for a topic
        with wildcards or none at all.
        """

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """Receive what fits, over that connection; repeated after every reconnect.

        What is published afterwards over the same connection reaches the broker later, so an
        answer to it is not missed. Subscribing again makes the broker send its retained messages
        again. Raises LinkError for a malformed filter.
        """

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """Receive it no more; what is still under way is dropped."""

    def acknowledged(self, *, bulk: bool = False) -> bool:
        """Whether the broker has everything that was published over that connection."""

    def silence_s(self, *, bulk: bool = False) -> float:
        """Seconds since any byte came over that connection, a part of a message too.

        Infinite: none has. What is asked for may be on its way while bytes come.
        """

    def reconnect(self, will: Will | None = None) -> None:
        """End both connections without a goodbye and connect anew, from now on with this will.

        For a link that says it works and does not. None: with the will it has. What was not
        acknowledged is sent again.
        """

    def close(self) -> None:
        """Send what is queued, for at most FLUSH_S, and say goodbye, so that no will is sent.

        No event is delivered once it has returned. Not to be called from `deliver`.
        """

    def kill(self) -> None:
        """End at once as a crash would: nothing is sent, and the broker sends the will."""


class OpenLink(Protocol):
    """What opens links: `functools.partial(open_link, settings)`."""

    def __call__(self, *, name: str, deliver: Deliver, will: Will | None = None) -> Link:
        """As `open_link`."""


def check_name(name: str) -> None:
    """Raise LinkError for a name that cannot be a client id."""
    if not 0 < len(name) <= MAX_NAME or not all(c.isascii() and c.isprintable() for c in name):
        raise LinkError(f"name {name!r}: 1 to {MAX_NAME} printable ASCII characters")
