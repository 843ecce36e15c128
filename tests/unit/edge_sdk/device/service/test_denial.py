"""A broker that refuses the device itself: said at once, and not tried for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.cli import main
from edge_sdk.device.service.ending import EXIT_DENIED, BrokerError
from edge_sdk.device.service.service import DENIALS, LATER_DENIALS, DeviceService
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.transport.link import (
    Connected,
    Deliver,
    Disconnected,
    Link,
    LinkEvent,
    Refused,
    Will,
)
from edge_sdk.transport.settings import DeniedError
from tests.memory_broker import MemoryBroker
from tests.unit.edge_sdk.scripted import TASK, make_config, make_data

REASON = "b:1: our certificate was revoked"


def run(
    folder: Path,
    events: list[LinkEvent],
    *,
    clock: Callable[[], float] = lambda: 0.0,
    **changes: Any,
) -> None:
    """A device whose link says these things; who bears them all is ended by the last."""

    def opener(*, name: str, deliver: Deliver, will: Will | None = None) -> Link:
        for event in (*events, Refused(Topics(TASK).task, "the end")):
            deliver(event)
        return MemoryBroker().open_link(name=name, deliver=lambda _: None, will=will)

    config = make_config(folder, **changes)
    DeviceService(config, make_data(), open_link=opener, clock=clock).run()


def denied(times: int) -> list[LinkEvent]:
    return [Disconnected(REASON, number) for number in range(1, times + 1)]


def test_device_that_never_got_in_stops_after_a_few_denials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(DeniedError, match="3 times: b:1: our"):
        run(tmp_path, denied(DENIALS))
    assert caplog.text.count(REASON) == DENIALS


def test_device_that_got_in_before_is_patient(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="the end"):
        run(tmp_path, [Connected(first=True), *denied(LATER_DENIALS - 1)])
    with pytest.raises(DeniedError):
        run(tmp_path, [Connected(first=True), *denied(LATER_DENIALS)])


def test_broker_that_is_away_is_no_denial(tmp_path: Path) -> None:
    away: list[LinkEvent] = [Disconnected(f"nothing listens there ({n})") for n in range(50)]
    with pytest.raises(BrokerError, match="the end"):
        run(tmp_path, [*denied(DENIALS - 1), *away, *denied(DENIALS - 1)])


def test_broker_that_is_away_for_too_long_ends_the_device_with_the_last_reason(
    tmp_path: Path,
) -> None:
    away: list[LinkEvent] = [Disconnected(f"nothing listens there ({n})") for n in range(50)]
    with pytest.raises(BrokerError, match=r"no connection within 30 s: nothing listens there \(1"):
        run(tmp_path, away, clock=count().__next__, connect_s=30.0)


def test_denial_has_an_exit_code_that_help_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert f"{EXIT_DENIED}    the broker refuses this device's name" in capsys.readouterr().out
