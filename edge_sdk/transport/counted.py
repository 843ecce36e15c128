"""A link that counts the bytes it was given, for the owner of a device."""

from __future__ import annotations

from collections.abc import Callable

from edge_sdk.transport.link import Link, Will


class CountedLink:
    """A `Link` that tells the bytes of topic and payload of everything it accepts to publish."""

    def __init__(self, link: Link, count: Callable[[int], None]) -> None:
        self._link = link
        self._count = count

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """See `Link.publish`."""
        accepted = self._link.publish(topic, payload, retain=retain, bulk=bulk)
        if accepted:
            self._count(len(topic) + len(payload))
        return accepted

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.subscribe`."""
        self._link.subscribe(topic_filter, bulk=bulk)

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.unsubscribe`."""
        self._link.unsubscribe(topic_filter, bulk=bulk)

    def acknowledged(self, *, bulk: bool = False) -> bool:
        """See `Link.acknowledged`."""
        return self._link.acknowledged(bulk=bulk)

    def silence_s(self, *, bulk: bool = False) -> float:
        """See `Link.silence_s`."""
        return self._link.silence_s(bulk=bulk)

    def reconnect(self, will: Will | None = None) -> None:
        """See `Link.reconnect`."""
        self._link.reconnect(will)

    def close(self, *, flush: bool = True) -> None:
        """See `Link.close`."""
        self._link.close(flush=flush)

    def kill(self) -> None:
        """See `Link.kill`."""
        self._link.kill()
