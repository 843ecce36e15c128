"""A folder of run files, runs already compiled, and the settings of their devices."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.stage.files import SOURCE
from benchmarks.network.stage.tasks import BATCH_SIZE, PreparedTask
from coordinator.operate.config import PROCESS_FILE
from coordinator.operate.serve.serving import broker_table
from coordinator.run.folder import About, create_run
from edge_sdk.transport.settings import BrokerSettings

ENDLESS = 10_000
"""Rounds of a run that is stopped once enough was observed."""


def task_names(number: int) -> list[str]:
    """Return the tasks of this many runs."""
    return [f"task-{each:02}" for each in range(number)]


def run_of(runs: Path, task: str) -> Path:
    """Return the folder of a task's run."""
    return runs / f"run-{task}"


def write_runs(
    runs: Path, task: PreparedTask, number: int, devices: int, broker: BrokerSettings
) -> None:
    """Write a new folder of this many runs, each waiting for this many devices."""
    runs.mkdir()
    # The broker is our own, and known: probing it would take time.
    shared = f"{broker_table(broker)}probe = false\n\n[join]\nenabled = false\n"
    (runs / PROCESS_FILE).write_text(f"{shared}\n[http]\nenabled = false\n")
    for name in task_names(number):
        about = About(task=name, run=secrets.token_hex(8), source=SOURCE, batch_size=BATCH_SIZE)
        create_run(run_of(runs, name), about, task.model)
        tables: dict[str, dict[str, Any]] = {
            "task": {"name": name, "source": SOURCE},
            "run": {
                "folder": run_of(runs, name).name,
                "rounds": ENDLESS,
                "batch_size": BATCH_SIZE,
                "steps": 1,
            },
            "round": {"min_devices": devices},
        }
        lines = (f"[{table}]\n{_lines(values)}" for table, values in tables.items())
        (runs / f"{name}.toml").write_text("\n".join(lines))


def write_devices(
    folder: Path, task: PreparedTask, number: int, devices: int, broker: BrokerSettings
) -> list[Path]:
    """Write the settings of this many devices for each run; returns their paths."""
    folder.mkdir()
    np.savez(folder / "own.npz", x=task.data.inputs[0], y=task.data.targets)
    paths = []
    for each in task_names(number):
        for place in range(devices):
            own = folder / f"{each}-{place}"
            own.mkdir()
            values = {
                "task": each,
                "name": own.name,
                "data": "../own.npz",
                "state_dir": "state",
                "weigh": False,
                "deliver": "off",
            }
            (own / "device.toml").write_text(_lines(values) + broker_table(broker))
            paths.append(own / "device.toml")
    return paths


def _lines(values: Mapping[str, Any]) -> str:
    """Write keys and values as TOML, whose syntax here equals JSON's."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
