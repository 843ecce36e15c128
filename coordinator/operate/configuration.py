"""docs/configuration.md and the files in examples/, from the settings classes.

    python -m coordinator.operate.configuration

writes them; a test fails when they are not what would be written.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.operate import config as coordinator
from edge_sdk.decide.emulation.fleet import Fleet
from edge_sdk.device import config as device
from edge_sdk.machine.board import Board
from edge_sdk.program.settings.reference import render_tables

ROOT = Path(__file__).resolve().parents[2]

PAGE = """\
# Configuration

Every key, its type, its default and its meaning. This page is generated from the classes that
read the files: `python -m coordinator.operate.configuration`.

A setting is taken from the file, then from the variable, then from the flag; later ones win.
Paths in a file are relative to its folder, those in variables and flags to the current one.
Variables spell lists with commas (`TESSERA_LEVELS=1,0.5`) and tables as JSON. A key or a
`TESSERA_…` variable that is not known is an error that suggests the nearest known one.

## The coordinator's file

For `tessera-coordinator serve --config run.toml`; `tessera-coordinator init` writes one to start
from.

{run}

## The file of a process with many runs

`coordinator.toml` in the folder of `tessera-coordinator serve --runs`
([deploy.md](deploy.md#many-runs)); without it, the defaults hold. `{mark}` in the names of
certificates and keys stands for the name of a run's task. The run files beside it have the keys
above, without the tables that are here; variables do not change them.

{process}

## The device's file

For `tessera-device run --config device.toml`; `tessera-device init` writes one to start from.

{device}

## Fleets

Files in `devices/fleets`, and your own for `tessera-coordinator demo --fleet`
([devices.md](devices.md#fleets)). No variables.

{fleet}

## Profiles of devices

Files in `devices` ([devices.md](devices.md)), named by `board` above. No variables. A number is a
table with where it comes from.

{board}
"""


def pages() -> dict[Path, str]:
    """The text of every generated file."""
    page = PAGE.format(
        run=render_tables(coordinator.ServeConfig, variables=True),
        process=render_tables(coordinator.ProcessConfig, variables=True),
        mark=coordinator.TASK_MARK,
        device=render_tables(device.DeviceConfig, variables=True),
        fleet=render_tables(Fleet, variables=False),
        board=render_tables(Board, variables=False),
    )
    own = {
        "task": "digits",
        "name": "kitchen-pi",
        "data": device.DIGITS,
        "state_dir": "state",
        "level": 0.5,
        "participation": 0.75,
        "evaluate_every": 5,
    }
    return {
        ROOT / "docs/configuration.md": page,
        ROOT / "examples/coordinator/run.toml": coordinator.render_default(),
        ROOT / "examples/runs/coordinator.toml": coordinator.render_process_default(),
        ROOT / "examples/device/device.toml": device.render_default(own),
        ROOT / "examples/device" / device.DIGITS: device.digits_table(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
