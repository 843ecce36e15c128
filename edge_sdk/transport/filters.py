"""MQTT topics and topic filters: validation and matching."""

from __future__ import annotations

from edge_sdk.transport.settings import LinkError

MAX_TOPIC_BYTES = 65_535


def check_topic(topic: str) -> None:
    """Raise LinkError unless messages can be published to the topic."""
    _check(topic)
    if "+" in topic or "#" in topic:
        raise LinkError(f"topic {topic!r}: + and # are for subscriptions only")


def check_filter(topic_filter: str) -> None:
    """Raise LinkError unless the filter can be subscribed to."""
    _check(topic_filter)
    levels = topic_filter.split("/")
    for index, level in enumerate(levels):
        if ("+" in level and level != "+") or (
            "#" in level and (level != "#" or index != len(levels) - 1)
        ):
            raise LinkError(
                f"filter {topic_filter!r}: + stands for one whole level, # for all the rest"
            )


def matches(topic: str, topic_filter: str) -> bool:
    """True if a subscription to the filter receives the topic. Both must be well formed."""
    if topic == topic_filter:
        return True
    wanted, given = topic_filter.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in "+#":
        return False
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index == len(given) or level not in ("+", given[index]):
            return False
    return len(wanted) == len(given)


def _check(text: str) -> None:
    if not text or "\0" in text or len(text.encode()) > MAX_TOPIC_BYTES:
        raise LinkError(f"topic {text[:80]!r}: must be 1 to {MAX_TOPIC_BYTES} bytes without NUL")
