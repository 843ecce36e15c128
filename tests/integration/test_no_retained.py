"""A real Mosquitto without retained messages is refused in words, by coordinator and device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from coordinator.operate.broker.embedded import find_mosquitto
from coordinator.operate.serve.serving import try_broker
from coordinator.run.folder import About, Run, create_run
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.ending import EXIT_DENIED, ending_of
from edge_sdk.device.service.service import DeviceService
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings, DeniedError, LinkError
from tests.interruptions.programs import Mosquitto
from tests.unit.coordinator.service.service_world import (
    CHUNK_BYTES,
    TASK,
    rounds_config,
    saved_model,
)

WORDS = "keeps no retained messages.*turn retained messages on"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerSettings]:
    if find_mosquitto() is None:
        pytest.skip("needs mosquitto")
    mosquitto = Mosquitto(tmp_path_factory.mktemp("broker") / "own", persistent=False)
    with (mosquitto.folder / "mosquitto.conf").open("a") as file:
        file.write("retain_available false\n")
    mosquitto.start()
    yield BrokerSettings(port=mosquitto.port, chunk_bytes=4096)
    mosquitto.kill()


def test_coordinator_that_probes_the_broker_refuses_it(broker: BrokerSettings) -> None:
    with pytest.raises(LinkError, match=WORDS) as raised:
        try_broker(broker, threading.Event())
    assert "TLS" not in str(raised.value)


def test_coordinator_that_does_not_probe_stops(broker: BrokerSettings, tmp_path: Path) -> None:
    about = About(task=TASK, run="0123456789abcdef", source="t.py:f", batch_size=4)
    create_run(tmp_path / "run", about, saved_model())
    config = ServiceConfig(
        machine=rounds_config(), down=Encoding(), keeping=Keeping(), chunk_bytes=CHUNK_BYTES
    )
    with Run(tmp_path / "run") as run:
        service = Service(run, config, open_link=partial(open_link, broker))
        try:
            with pytest.raises(DeniedError, match=WORDS):
                service.serve(threading.Event())
        finally:
            service.close()


def test_device_stops(broker: BrokerSettings, tmp_path: Path) -> None:
    config = DeviceConfig(task=TASK, name="pi", broker=broker, state_dir=tmp_path / "state")
    data = np.zeros((4, 3), np.float32), np.zeros(4, np.int64)
    with pytest.raises(DeniedError, match=WORDS) as raised:
        DeviceService(config, data).run()
    assert ending_of(raised.value).code == EXIT_DENIED
