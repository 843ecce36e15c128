"""The device of `wire.cases.bids`, in a separate process: it bids all the time.

    python -m benchmarks.network.wire.cases.bidding_process SETTINGS

SETTINGS is a JSON file with the broker's settings and the work to do. A bid's reason is the time at
which it was published, its round the phase.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from edge_sdk.device.transfer.sending import Sending
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Credit
from edge_sdk.protocol.messages.wire import decode_received, encode_message
from edge_sdk.transport.link import Connected, Link, LinkEvent, Received, Writable
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import MAX_CHUNK_BYTES, BrokerSettings
from edge_sdk.transport.uploads import Outgoing

TASK, DEVICE, RUN = "bids", "bidder", "0123456789abcdef"
QUIET, BUSY, OVER = 1, 2, 3
"""Phases: nothing else moves, bulk moves, nothing more will come."""
WAIT_S = 60.0
"""Limit for the other side's next message."""


def main(path: str) -> None:
    """Bid alone, then beside uploads, then announce the end."""
    settings: dict[str, Any] = json.loads(Path(path).read_text())
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    topics = Topics(TASK)
    link = open_link(BrokerSettings(**settings["broker"]), name=DEVICE, deliver=events.put)
    try:
        link.subscribe(topics.down_control(DEVICE))
        while not isinstance(events.get(timeout=WAIT_S), Connected):
            pass
        for _ in range(settings["quiet_bids"]):
            _bid(link, topics, QUIET)
            time.sleep(settings["every_s"])
        data, over = os.urandom(settings["upload_bytes"]), threading.Event()
        bidding = threading.Thread(target=_bid_until, args=(link, topics, over, settings))
        bidding.start()
        try:
            for number in range(settings["uploads"]):
                _upload(link, topics, events, data, number + 1)
        finally:
            over.set()
            bidding.join()
        _bid(link, topics, OVER)
    finally:
        link.close()


def _bid_until(link: Link, topics: Topics, over: threading.Event, settings: dict[str, Any]) -> None:
    while not over.wait(settings["every_s"]):
        _bid(link, topics, BUSY)


def _bid(link: Link, topics: Topics, phase: int) -> None:
    now = repr(time.monotonic())
    bid = Bid(device=DEVICE, round=phase, level=1.0, reason=now, run=RUN)
    link.publish(topics.up_control(DEVICE), encode_message(bid))


def _upload(
    link: Link, topics: Topics, events: queue.SimpleQueue[LinkEvent], data: bytes, round: int
) -> None:
    """Upload as a device does, until everything has arrived."""
    upload = Outgoing(
        data, device=DEVICE, run=RUN, round=round, answers=None, chunk_bytes=MAX_CHUNK_BYTES
    )
    sending = Sending(link, topics, DEVICE)
    sending.add(upload, time.monotonic())
    while not upload.complete:
        match events.get(timeout=WAIT_S):
            case Writable(bulk=True):
                sending.flush()
            case Received(topic, payload, _):
                message = decode_received(parse_topic(topic), payload)
                if isinstance(message, Credit):
                    sending.credited(message, time.monotonic())


if __name__ == "__main__":
    main(*sys.argv[1:])
