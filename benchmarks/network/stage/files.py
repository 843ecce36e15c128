"""Settings of the programs of a run, in one folder, as a user would write them.

run.toml, run/        the coordinator's settings, and its run, already compiled
data/own.npz          the devices' data, the same for all
<device>/device.toml  a device's settings, and beside them what it keeps
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.stage.tasks import BATCH_SIZE, PreparedTask
from coordinator.operate.serve.serving import broker_table
from coordinator.run.folder import About, create_run
from edge_sdk.transport.settings import BrokerSettings

TASK = "bench"
SOURCE = "task.py:make_task"
"""Named in the run, never loaded: the task is already compiled."""
WAIT_S = 600.0
"""Deadline of bids and movements. Long: nobody should be late on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run of `rounds` rounds that begins when all its `devices` are there."""

    devices: int
    rounds: int
    steps: int = 1
    up: str = "fp32"
    """Encoding of movements; `down` is that of the model."""
    down: str = "fp32"
    rule: str = "ram-fed"


def device_names(number: int) -> list[str]:
    """Return the names of this many devices."""
    return [f"device-{each:02}" for each in range(number)]


def run_folder(folder: Path) -> Path:
    """Return the folder of the coordinator's run."""
    return folder / "run"


def write_run(
    folder: Path, task: PreparedTask, settings: RunSettings, broker: BrokerSettings
) -> Path:
    """Write the coordinator's folder and settings; returns the settings' path."""
    run = {
        "steps": settings.steps,
        "learning_rate": 0.01,
        "widths": "own",  # every block of a submodel is new after every round
        "up": settings.up,
        "down": settings.down,
    }
    tables: dict[str, dict[str, Any]] = {
        "rule": {"name": settings.rule},
        "round": {"min_devices": settings.devices, "bid_s": WAIT_S, "train_deadline_s": WAIT_S},
    }
    return write_tables(folder, task, settings.rounds, broker, run, tables)


def write_tables(
    folder: Path,
    task: PreparedTask,
    rounds: int,
    broker: BrokerSettings,
    run: Mapping[str, Any],
    more: Mapping[str, Mapping[str, Any]],
) -> Path:
    """Write the coordinator's folder, and settings with these keys of `[run]` and these tables."""
    about = About(task=TASK, run=secrets.token_hex(8), source=SOURCE, batch_size=BATCH_SIZE)
    create_run(run_folder(folder), about, task.model)
    (folder / "data").mkdir()
    np.savez(folder / "data" / "own.npz", x=task.data.inputs[0], y=task.data.targets)
    tables = {
        "task": {"name": TASK, "source": SOURCE},
        "run": {"folder": "run", "rounds": rounds, "batch_size": BATCH_SIZE, **run},
        **more,
    }
    path = folder / "run.toml"
    text = "\n".join(f"[{name}]\n{_lines(values)}" for name, values in tables.items())
    # The broker is our own, and known: probing it would cause traffic outside any round.
    path.write_text(f"{text}\n{broker_table(broker)}probe = false\n")
    return path


def write_device(
    folder: Path,
    name: str,
    broker: BrokerSettings,
    *,
    level: float = 1.0,
    stay: bool = False,
    weigh: bool = False,
) -> Path:
    """Write a device's settings; `stay`: it does not end with the run.

    Not `weigh`: it trains its level, and the level itself is measured.
    """
    own = folder / name
    own.mkdir()
    values = {
        "task": TASK,
        "name": name,
        "data": "../data",
        "state_dir": "state",
        "level": level,
        "stay": stay,
        "weigh": weigh,
        "deliver": "off",
    }
    path = own / "device.toml"
    path.write_text(_lines(values) + broker_table(broker))
    return path


def _lines(values: Mapping[str, Any]) -> str:
    """Write keys and values as TOML, whose syntax here equals JSON's."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
