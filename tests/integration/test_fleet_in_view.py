"""A run over Mosquitto that is watched: devices skip, leave, and may not take part."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from coordinator.cli import main
from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.operate.control.overview import overview_commands
from coordinator.run.folder import About, Run, create_run
from coordinator.service.admission.demands import Demands
from coordinator.service.overview.facts import keep_facts
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from edge_sdk.data.arrays import ArrayData
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.service import DeviceService
from edge_sdk.machine.probe import PushedProbe
from edge_sdk.program.control import ControlSocket
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.transport.link import Connected, LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.coordinator.service.service_world import TASK, rounds_config, saved_model
from tests.waiting import until

pytestmark = pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")

COMMAND = Path(sys.executable).parent / "tessera-coordinator"
ABOUT = About(task=TASK, run="0123456789abcdef", source="t.py:f", batch_size=4)
FULL = {"battery": {"present": True, "percent": 90.0, "charging": True}}
LOW = {"battery": {"present": True, "percent": 12.0, "charging": False}}

Rows = dict[str, dict[str, Any]]


class Watched:
    """What `tessera-coordinator … --watch --json` prints, line by line."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [str(COMMAND), *command, "--watch", "--json"], stdout=subprocess.PIPE, text=True
        )

    def until(self, holds: Callable[[Any], object]) -> Any:
        """Read until a line holds; return it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if holds(answer := json.loads(line)):
                return answer
        raise AssertionError("it ended")

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def by_name(rows: list[dict[str, Any]]) -> Rows:
    return {row["device"]: row for row in rows}


def has(**states: str) -> Callable[[list[dict[str, Any]]], bool]:
    def holds(rows: list[dict[str, Any]]) -> bool:
        known = by_name(rows)
        return all(name in known and known[name]["state"] == each for name, each in states.items())

    return holds


def value(rows: list[dict[str, Any]], name: str, key: str) -> Any:
    return by_name(rows).get(name, {}).get(key)


@contextmanager
def device(
    name: str, site: str, folder: Path, broker: BrokerSettings, probe: PushedProbe
) -> Iterator[DeviceService]:
    """A device at work in a thread, with a battery of the test's."""
    random = np.random.default_rng(len(name))
    inputs = random.normal(size=(12, 4)).astype(np.float32)
    config = DeviceConfig(
        task=TASK, name=name, state_dir=folder / name, broker=broker, labels={"site": site}
    )
    service = DeviceService(
        config, ArrayData((inputs,), random.integers(0, 3, size=12)), probe=probe
    )
    thread = Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()


def test_fleet_is_seen_while_devices_skip_leave_and_are_barred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, topics, overheard = str(tmp_path / "run"), Topics(TASK), list[LinkEvent]()
    create_run(tmp_path / "run", ABOUT, saved_model())
    ok, low = PushedProbe(), PushedProbe()
    ok.push(FULL)
    low.push(FULL)
    stop = Event()
    with ExitStack() as stack:
        settings = stack.enter_context(embedded_broker(tmp_path / "broker", kind="mosquitto"))
        run = stack.enter_context(Run(tmp_path / "run"))
        config = ServiceConfig(
            machine=rounds_config(rounds=100_000, min_devices=2, away_s=0.1, bid_s=600.0),
            down=Encoding(),
            keeping=Keeping(keep_last=1, keep_every=100_000),
            chunk_bytes=1024,
            demands=Demands(labels={"site": "berlin"}),
            view_s=1.0,
        )
        service = Service(run, config, open_link=partial(open_link, settings))
        control = ControlSocket(run.folder, overview_commands(service.overview))
        control.start()
        stack.callback(control.close)
        viewer = open_link(settings, name="viewer", deliver=overheard.append)
        stack.callback(viewer.close)
        until(lambda: any(isinstance(each, Connected) for each in overheard))
        viewer.subscribe(topics.view_status)
        loop = Thread(target=service.serve, args=(stop,))
        loop.start()
        stack.callback(loop.join)
        stack.callback(stop.set)
        devices = stack.enter_context(Watched("devices", run_folder))
        status = stack.enter_context(Watched("status", run_folder))
        stack.enter_context(device("one", "berlin", tmp_path, settings, ok))
        first = status.until(lambda answer: answer["devices"]["present"] == 1)
        assert (first["state"], first["round"]) == ("waiting", 0)
        stack.enter_context(device("barred", "oslo", tmp_path, settings, ok))
        # Until its condition has come, it is barred because it has told nothing.
        why = "site = 'berlin', and it has 'oslo'"
        rows = by_name(
            devices.until(
                lambda answer: why in str(by_name(answer).get("barred", {}).get("reason"))
            )
        )
        assert rows["barred"]["state"] == "barred"
        waiting = status.until(lambda answer: "barred" in (answer["waits_for"] or ""))
        assert waiting["waits_for"].startswith("devices: 1 of 2 are here")

        leaving = ExitStack()
        leaving.enter_context(device("low", "berlin", tmp_path, settings, low))
        status.until(lambda answer: answer["committed"] >= 2)
        low.push(LOW)
        rows = by_name(devices.until(lambda found: value(found, "low", "code") == "battery"))
        assert "battery 12 % < 30 % and not charging" in rows["low"]["reason"]
        skipped = status.until(lambda answer: answer["skips"].get("battery") == 1)
        assert skipped["state"] == "running"
        rows = by_name(devices.until(lambda found: value(found, "low", "battery") == 0.12))
        assert (rows["low"]["charging"], rows["one"]["battery"]) == (False, 0.9)
        leaving.close()
        rows = by_name(devices.until(has(low="offline", barred="barred")))
        assert rows["one"]["trained"] > 0
        assert (rows["barred"]["trained"], rows["barred"]["skipped"]) == (0, 0)

        assert main(["devices", run_folder, "--filter", "label.site=berlin", "--json"]) == 0
        assert set(by_name(json.loads(capsys.readouterr().out))) == {"one", "low"}
        told = [json.loads(e.payload) for e in overheard if isinstance(e, Received) and e.payload]
        assert told[-1]["task"] == TASK
        stop.set()
        loop.join()
        service.close()
        keep_facts(run.folder, service.overview.facts)
        until(lambda: isinstance(overheard[-1], Received) and not overheard[-1].payload)
    assert main(["status", run_folder, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert (after["state"], after["broker_connected"]) == ("stopped", False)
    assert after["committed"] == service.overview.status()["committed"] > 0
