"""What the coordinator of many devices is told, and how many files all of them have open."""

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
"""Of the devices are picked in a round."""
ENDLESS = 1_000_000
"""Rounds of a run that is stopped when enough was seen."""


def participants_of(devices: int) -> int:
    """How many of so many devices are picked in a round."""
    return math.ceil(SHARE * devices)


def write_run(folder: Path, task: PreparedTask, devices: int, broker: BrokerSettings) -> Path:
    """A run that begins when so many devices are there and has no end; its settings' path.

    How long bids and movements are waited for, and all else, is what it is by default.
    """
    about = About(task=TASK, run=secrets.token_hex(8), source=SOURCE, batch_size=BATCH_SIZE)
    create_run(run_folder(folder), about, task.model)
    (folder / "data").mkdir()
    np.savez(folder / "data" / "own.npz", x=task.data.inputs[0], y=task.data.targets)
    tables: dict[str, dict[str, Any]] = {
        "task": {"name": TASK, "source": SOURCE},
        "run": {"folder": "run", "rounds": ENDLESS, "steps": 1, "batch_size": BATCH_SIZE},
        "round": {"min_devices": devices, "participants": participants_of(devices)},
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
    """Let this process, and those it starts meanwhile, have so many files open at a time.

    Raises `FigureError` where that is not allowed.
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
