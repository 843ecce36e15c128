"""Devices that train nothing, in a process of their own: they upload movements round after round.

    python -m benchmarks.network.closing.devices_process SETTINGS

SETTINGS is a JSON file: the broker's settings, the task's name, its plan's file, the devices, one
more device that only asks, the run's folder, and the number of rounds.

All the while, two kinds of messages ask the coordinator something, each at a steady pace: a device
offers movements of a run that is not there, which its loop answers with a receipt; and an
operator's command asks for the devices in quarantine, which its loop answers through the control
socket. When a round opens, a line of JSON says when (seconds of the monotonic clock), and of every
question since the last line when it was asked and how long it waited. One that has no answer when
the round opens has waited until then; one that could not be asked in time because the one before
still waited counts from when it was due.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.ingest.senders_process import STEP, SendingDevice
from edge_sdk.program.control import ControlError, ask_run
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Bid, Receipt, RoundOpen
from edge_sdk.protocol.messages.transfer import UPLOAD_BYTES, Offer
from edge_sdk.protocol.messages.wire import ControlMessage, encode_message
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.link import LinkEvent
from edge_sdk.transport.settings import BrokerSettings

PACE_S = 0.02
"""Seconds from one question to the next. The coordinator lets 100 messages a second in."""
COMMAND = "quarantine.list"
OTHER_RUN = "0" * 16

AskedWait = tuple[float, float]
"""Time at which something was asked, and the seconds until its answer."""

Events = queue.SimpleQueue[tuple[SendingDevice, LinkEvent]]


class RoundsDevice(SendingDevice):
    """A device that uploads the same blocks in every round that opens."""

    payload: bytes | None = None
    plan: ModelPlan
    opened_s = 0.0
    """Time of the newest opening."""

    def _hear(self, message: ControlMessage) -> None:
        if isinstance(message, RoundOpen):
            self.opened_s, self.assignment = time.monotonic(), None
        waited = self.assignment is None or self.notice is None
        super()._hear(message)
        if isinstance(message, Receipt):
            self._sending.receipted(message)
        if waited and self.assignment is not None and self.notice is not None:
            if self.payload is None:
                self.payload = _payload(self.plan, self.assignment.groups, self.name)
            self.send(self.make_upload(self.plan, self.payload))


class AskingDevice(SendingDevice):
    """A device that skips every round, and offers movements of another run."""

    def __init__(self, name: str, task: str, broker: BrokerSettings, events: Events) -> None:
        self._asked: dict[int, float] = {}
        self._number = 0
        self.waits: list[AskedWait] = []
        super().__init__(name, task, broker, events)

    def ask(self, now: float) -> None:
        """Offer one."""
        self._number += 1
        self._asked[self._number] = now
        offer = Offer(
            device=self.name,
            run=OTHER_RUN,
            upload=self._number.to_bytes(UPLOAD_BYTES, "big"),
            round=self._number,
            answers=None,
            size=1,
            chunk_bytes=1024,
            sha256=bytes(32),
        )
        self._link.publish(self._topics.up_control(self.name), encode_message(offer))

    def take_waits(self, now: float) -> list[AskedWait]:
        """Return what was asked; what has no answer has waited until now."""
        waits, self.waits = self.waits + [(at, now - at) for at in self._asked.values()], []
        self._asked.clear()
        return waits

    def _hear(self, message: ControlMessage) -> None:
        match message:
            case RoundOpen():
                bid = Bid(
                    device=self.name,
                    round=message.round,
                    level=None,
                    reason="it only asks",
                    run=message.run,
                )
                self._link.publish(self._topics.up_control(self.name), encode_message(bid))
            case Receipt(round=number) if number in self._asked:
                at = self._asked.pop(number)
                self.waits.append((at, time.monotonic() - at))


class AskingOperator(threading.Thread):
    """Asks over the control socket, at a steady pace, for as long as the process lives."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._lock = threading.Lock()
        self._waits: list[AskedWait] = []

    def run(self) -> None:
        """See `threading.Thread`."""
        due = time.monotonic()
        while True:
            with suppress(ControlError):
                ask_run(self._run, COMMAND)
            now = time.monotonic()
            with self._lock:
                while due <= now:
                    self._waits.append((due, now - due))
                    due += PACE_S
            time.sleep(max(0.0, due - time.monotonic()))

    def take_waits(self) -> list[AskedWait]:
        """Return what was asked and answered."""
        with self._lock:
            waits, self._waits = self._waits, []
        return waits


def main(path: str) -> None:
    """Take part in every round, and tell of each."""
    settings: dict[str, Any] = json.loads(Path(path).read_text())
    plan = decode_plan(Path(settings["plan"]).read_bytes())
    broker, task = BrokerSettings(**settings["broker"]), settings["task"]
    events: Events = queue.SimpleQueue()
    RoundsDevice.plan = plan
    asking = AskingDevice(settings["asking"], task, broker, events)
    operator = AskingOperator(Path(settings["run"]))
    operator.start()
    devices = [RoundsDevice(name, task, broker, events) for name in settings["devices"]]
    try:
        due = time.monotonic()
        for _ in range(1 + settings["rounds"]):
            before = max(each.opened_s for each in devices)
            while not all(each.opened_s > before for each in devices):
                if (now := time.monotonic()) >= due:
                    asking.ask(now)
                    due += PACE_S
                _next(events, devices, max(0.0, due - time.monotonic()))
            opened_s = min(each.opened_s for each in devices)
            told = {
                "opened_s": opened_s,
                "device_waits": asking.take_waits(opened_s),
                "operator_waits": operator.take_waits(),
            }
            print(json.dumps(told), flush=True)
        sys.stdin.readline()
    finally:
        for each in (*devices, asking):
            each.close()


def _next(events: Events, devices: Sequence[SendingDevice], wait_s: float) -> None:
    """Process an event, and whatever is due."""
    with suppress(queue.Empty):
        device, event = events.get(timeout=wait_s)
        device.handle(event)
    for each in devices:
        each.tick()


def _payload(plan: ModelPlan, groups: Any, device: str) -> bytes:
    """Return the blocks of a small movement of these groups."""
    draws = stream(0, device, "closing", "movement")
    flat = STEP * draws.standard_normal(plan.parameters, dtype=np.float32)
    return encode_blocks(plan, groups, plan.select(flat, groups), Encoding(), draws)


if __name__ == "__main__":
    main(*sys.argv[1:])
