"""Settings for the coordinator of many devices, and the limit of open files."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.network.stage.files import write_tables
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.report.figures import FigureError
from edge_sdk.transport.settings import BrokerSettings

SHARE = 0.2
"""Share of the devices picked in a round."""
ENDLESS = 1_000_000
"""Rounds of a run that is stopped once enough was observed."""


def participants_of(devices: int) -> int:
    """Return the number of devices picked in a round."""
    return math.ceil(SHARE * devices)


def write_run(folder: Path, task: PreparedTask, devices: int, broker: BrokerSettings) -> Path:
    """Write an endless run that begins with this many devices; returns its settings' path.

    Bid and movement deadlines, and everything else, have their defaults.
    """
    # All devices answer every round: that is the load.
    picked = {"participants": participants_of(devices), "select": "after"}
    tables = {"round": {"min_devices": devices, **picked}}
    return write_tables(folder, task, ENDLESS, broker, {"steps": 1}, tables)


@contextmanager
def open_files(number: int) -> Iterator[None]:
    """Allow this process, and those it starts meanwhile, this many open files.

    Raises `FigureError` if that is not allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number:
        raise FigureError(
            f"{number} open files are needed, and {hard} are allowed: raise the limit "
            "(ulimit -Hn), or ask for fewer devices"
        )
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
