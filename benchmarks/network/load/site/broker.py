"""A Mosquitto that can stop and restart on the same port; it keeps nothing."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.network.load.site.presences import Presences
from benchmarks.network.stage.ports import free_port
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.transport.settings import BrokerSettings


class RestartedBroker:
    """A broker for the duration of a context, from `start` on and with pauses."""

    settings: BrokerSettings
    pid: int
    presences: Presences
    """Presences since the last start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._password = secrets.token_urlsafe(24)
        self._running = ExitStack()

    def __enter__(self) -> RestartedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it. Raises `BrokerError`."""
        before = set(psutil.Process().children())
        broker = embedded_broker(
            self._folder, kind="mosquitto", port=self._port, password=self._password
        )
        self.settings = self._running.enter_context(broker)
        (started,) = set(psutil.Process().children()) - before
        self.pid = started.pid
        self.presences = self._running.enter_context(Presences(self.settings))

    def stop(self) -> None:
        """Stop it, and with it all connections."""
        self._running.close()
