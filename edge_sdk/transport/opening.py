"""Open a link to a broker over MQTT."""

from __future__ import annotations

from edge_sdk.transport.link import Deliver, Link, Will, check_name
from edge_sdk.transport.settings import BrokerSettings


def open_link(
    settings: BrokerSettings, *, name: str, deliver: Deliver, will: Will | None = None
) -> Link:
    """Start a link over MQTT 5 or 3.1.1. Returns at once; `Connected` or `Disconnected` follow.

    `name` is the client id of the control connection, `<name>-bulk` that of the other. A broker
    that sees a second connection with the same id ends the first.
    `deliver` is called from the link's own threads, possibly two at a time: it should put the event
    in a queue and return. It must not block, because the connection is not served meanwhile.
    Raises LinkError for settings that cannot work.
    """
    # paho is loaded when a link is opened, not when the SDK is imported.
    from edge_sdk.transport.mqtt.link import MqttLink

    check_name(name)
    link = MqttLink(settings, name=name, deliver=deliver, will=will)
    link.start()
    return link
