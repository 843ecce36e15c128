"""Ports that nobody else is given."""

from __future__ import annotations

import socket
from random import SystemRandom

from benchmarks.report.figures import FigureError
from coordinator.operate.broker.embedded import HOST

PORTS = range(20_000, 32_000)
"""Ports below those that systems give to outgoing connections: otherwise, while a server is away, a
program trying to reach it could be given its port, and the server could not restart."""
PORT_TRIES = 100


def free_port() -> int:
    """Return a port of this machine that nobody listens on. Raises `FigureError`."""
    chance = SystemRandom()
    for _ in range(PORT_TRIES):
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise FigureError(f"there is no free port from {PORTS.start} to {PORTS.stop - 1}")
