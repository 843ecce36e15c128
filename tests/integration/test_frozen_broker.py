"""A real Mosquitto that stands still (SIGSTOP) burns no rounds.

The coordinator's deadlines run on a clock of the test's, so nothing depends on how long it takes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.operate.broker.embedded import find_mosquitto
from coordinator.rounds.synchronous import RoundPhase, RoundsState
from coordinator.run.folder import About, Run, create_run
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import ControlMessage, encode_message
from edge_sdk.transport.link import Link
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.interruptions.programs import Mosquitto
from tests.unit.coordinator.service.service_world import (
    CHUNK_BYTES,
    TASK,
    Clock,
    rounds_config,
    saved_model,
)
from tests.waiting import until

TOPICS, RUN = Topics(TASK), "0123456789abcdef"
BID_S, TRAIN_S = 100.0, 300.0
FROZEN_S = 1000
SILENT = 50
"""Looks in a row, a hundredth of a second apart, that find nothing of a frozen broker's."""


class Site:
    """A coordinator in this process over a real broker, and devices that only speak."""

    def __init__(self, folder: Path) -> None:
        self.broker = Mosquitto(folder / "broker", persistent=False)
        self.broker.start()
        about = About(task=TASK, run=RUN, source="t.py:f", batch_size=4)
        create_run(folder / "run", about, saved_model())
        self.clock = Clock()
        self.run = Run(folder / "run")
        opener = partial(open_link, BrokerSettings(port=self.broker.port, keepalive_s=600))
        machine = rounds_config(bid_s=BID_S, train_deadline_s=TRAIN_S, min_participants=2)
        config = ServiceConfig(
            machine=machine, down=Encoding(), keeping=Keeping(), chunk_bytes=CHUNK_BYTES
        )
        self.service = Service(
            self.run, config, open_link=opener, clock=self.clock, wall=self.clock
        )
        self.devices: dict[str, Link] = {}
        for name in ("one", "two"):
            self.devices[name] = opener(name=name, deliver=lambda _: None)
            here = encode_message(Presence(name=name, session=1, online=True))
            self.devices[name].publish(TOPICS.presence(name), here, retain=True)

    def close(self) -> None:
        for link in self.devices.values():
            link.kill()
        self.service.kill()
        self.run.close()
        self.broker.kill()

    @property
    def state(self) -> RoundsState:
        state = self.service.course.state
        assert isinstance(state, RoundsState)
        return state

    @property
    def where(self) -> tuple[int, int, RoundPhase]:
        """Round, void rounds and phase."""
        return self.state.round, self.state.void, self.state.phase

    def until(self, phase: RoundPhase) -> None:
        until(lambda: self.service.pump() >= 0 and self.state.phase is phase)

    def say(self, device: str, message: ControlMessage) -> None:
        self.devices[device].publish(TOPICS.up_control(device), encode_message(message))

    def freeze(self, seconds: int) -> None:
        """Let the broker stand still while the coordinator's time passes."""
        process = self.broker._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            silent = 0
            while silent < SILENT:  # what it sent before would count as an answer later
                silent = 0 if self.service.pump() else silent + 1
                time.sleep(0.01)
            passed = 0
            while passed < seconds or not self.service._stalls:
                self.clock.now += 1.0
                passed += 1
                self.service.pump()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        until(lambda: self.service.pump() >= 0 and not self.service._stalls)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if find_mosquitto() is None:
        pytest.skip("needs mosquitto")
    site = Site(tmp_path)
    yield site
    site.close()


def test_frozen_broker_burns_no_rounds(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.until(RoundPhase.BIDDING)
    site.freeze(FROZEN_S)
    assert site.where == (1, 0, RoundPhase.BIDDING)
    assert caplog.text.count("the broker does not answer") == 1
    site.clock.now += 0.9 * BID_S  # of which nothing was used up
    site.service.pump()
    for name in site.devices:
        bid = Bid(device=name, round=1, level=1.0, reason="test", samples=10, run=RUN)
        site.say(name, bid)
    site.until(RoundPhase.TRAINING)
    site.freeze(FROZEN_S)
    assert site.where == (1, 0, RoundPhase.TRAINING)
    assert caplog.text.count("the broker does not answer") == 2


def test_deadline_that_devices_miss_still_ends_a_round(site: Site) -> None:
    site.until(RoundPhase.BIDDING)
    site.clock.now += 2 * BID_S
    until(lambda: site.service.pump() >= 0 and site.state.void == 1)
