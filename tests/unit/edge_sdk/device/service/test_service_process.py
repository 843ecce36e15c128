"""The device as a process on a real broker, killed where it hurts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest

from coordinator.operate.broker.embedded import available, embedded_broker
from edge_sdk.program.processes import Children
from edge_sdk.protocol.messages.movement import decode_movement
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.transfer import Offer, Presence
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.edge_sdk.scripted import DEVICE, TASK, Coordinator, MqttStage, make_data

pytestmark = pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")

ROOT = Path(__file__).resolve().parents[5]


@contextmanager
def device(folder: Path, settings: BrokerSettings) -> Iterator[Popen[bytes]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TESSERA_TASK": TASK,
        "TESSERA_NAME": DEVICE,
        "TESSERA_DATA": str(folder / "data"),
        "TESSERA_STATE_DIR": str(folder / "state"),
        "TESSERA_BROKER_PORT": str(settings.port),
        "TESSERA_BROKER_USERNAME": settings.username or "",
        "TESSERA_BROKER_PASSWORD": settings.password or "",
    }
    command = [sys.executable, "-m", "edge_sdk.cli", "run", "--log-level", "warning"]
    with Children() as children:
        yield children.start(DEVICE, command, folder / "device.log", environment).process


def test_killed_device_sends_what_it_kept_and_finishes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = make_data()
    np.savez(tmp_path / "data" / "own.npz", x=data.inputs[0], y=data.targets)
    with embedded_broker(tmp_path / "broker", kind="mosquitto") as settings:
        stage = MqttStage(settings)
        coordinator = Coordinator(stage)
        coordinator.answers_offers = False
        coordinator.announce()
        coordinator.open(1)
        with device(tmp_path, settings) as program:
            stage.until(lambda: coordinator.last(Bid))
            coordinator.assign(1)
            offer = stage.until(lambda: coordinator.last(Offer))
            program.kill()
            # The will speaks for it.
            stage.until(lambda: coordinator.last(Presence, lambda each: not each.online))
        (kept,) = tmp_path.rglob("1.movement")
        assert decode_movement(kept.read_bytes()).round == 1
        coordinator.answers_offers = True
        with device(tmp_path, settings) as program:
            stage.until(lambda: coordinator.movements)
            assert coordinator.movements[0][0] == offer
            coordinator.receipt(1)
            coordinator.finish(1)
            stage.until(lambda: program.poll() is not None)
            assert program.returncode == 0
        assert not kept.exists()
        last = coordinator.last(Presence, lambda each: each.session >> 16 == 2)
        coordinator.close()
    assert last is not None
