"""Settings for the coordinator of many devices, and the limit of open files."""

from __future__ import annotations

import json
import math
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.stage.files import SOURCE, TASK, run_folder
from benchmarks.network.stage.tasks import BATCH_SIZE, PreparedTask
from benchmarks.report.figures import FigureError
from coordinator.operate.serving import broker_table
from coordinator.run.folder import About, create_run
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
    about = About(task=TASK, run=secrets.token_hex(8), source=SOURCE, batch_size=BATCH_SIZE)
    create_run(run_folder(folder), about, task.model)
    (folder / "data").mkdir()
    np.savez(folder / "data" / "own.npz", x=task.data.inputs[0], y=task.data.targets)
    tables: dict[str, dict[str, Any]] = {
        "task": {"name": TASK, "source": SOURCE},
        "run": {"folder": "run", "rounds": ENDLESS, "steps": 1, "batch_size": BATCH_SIZE},
        # All devices answer every round: that is the load.
        "round": {
            "min_devices": devices,
            "participants": participants_of(devices),
            "select": "after",
        },
    }
    lines = [
        line
        for name, values in tables.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(it)}" for key, it in values.items()))
    ]
    path = folder / "run.toml"
    path.write_text("\n".join([*lines, broker_table(broker) + "probe = false\n"]))
    return path


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
