"""The files of a device that was enrolled or has joined: `device.toml` and its `[broker]` table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

DEVICE_FILE, CA_FILE = "device.toml", "ca.pem"

DEVICE = """\
# {name}: {state}
#   tessera-device run --config device.toml
# Paths are relative to this file. `tessera-device init` writes a file with every key explained.
# {secret} Keep it secret; there is no other copy.

name = {quoted}

{task}

{data}

# State that must survive a restart.
state_dir = "state"

"""

DATA = "This device's own data, which never leaves it: a file or folder of arrays, tables, images"
DATA_MORE = 'or sound (docs/data.md), or a function that returns arrays, as "file.py:function".'


def render_device(
    name: str,
    tasks: Sequence[str],
    data: str | None,
    table: str,
    *,
    label: str | None = None,
    has_keys: bool = True,
) -> str:
    """Return the text of a `device.toml`; without `tasks` or `data`, they are left to the owner.

    `tasks`: the most important first.
    `table` is the `[broker]` table. `label`: column of the data that is the target; None: the usual
    names are tried. `has_keys`: the device's identity lies in files beside it.
    """
    missing = not tasks or data is None
    return (
        DEVICE.format(
            name=name,
            quoted=quote(name),
            state="ready to run once you have completed the lines marked FILL IN:"
            if missing
            else "ready to run:",
            secret="The .key file is this device's identity."
            if has_keys
            else "The password below is for this machine.",
            task=render_tasks(tasks),
            data=f"# {'' if data else 'FILL IN: '}{DATA}\n# {DATA_MORE}\n"
            f"data = {quote(data or 'data')}",
        )
        + ("" if label is None else f"[format]\nlabel = {quote(label)}\n\n")
        + table
    )


def render_tasks(tasks: Sequence[str]) -> str:
    """Return the lines of a `device.toml` that name the tasks, the most important first."""
    if len(tasks) > 1:
        listed = ", ".join(map(quote, tasks))
        return (
            "# Tasks to train, as the coordinator has them; the most important first.\n"
            f"tasks = [{listed}]"
        )
    task = f"task = {quote(tasks[0])}" if tasks else '# FILL IN:\n# task = "…"'
    return f"# Name of the task to train, as the coordinator has it.\n{task}"


def render_broker(values: Mapping[str, str | int | bool | None]) -> str:
    """Return a `[broker]` table with these keys; those that are None are left out."""
    lines = (f"{key} = {quote(value)}" for key, value in values.items() if value is not None)
    return "\n".join(["[broker]", *lines]) + "\n"


def certificate_files(name: str, bulk_name: str, bulk_key: str, prefix: str = "") -> dict[str, str]:
    """Return the keys of a `[broker]` table that name a participant's files."""
    return {
        "ca": f"{prefix}{CA_FILE}",
        "certificate": f"{prefix}{name}.pem",
        "key": f"{prefix}{name}.key",
        "bulk_certificate": f"{prefix}{bulk_name}.pem",
        "bulk_key": f"{prefix}{bulk_key}.key",
    }


def quote(value: str | int | bool) -> str:
    """Return a value as TOML spells it."""
    # JSON strings are TOML strings, as long as nothing beyond the first 65,536 characters is
    # escaped.
    return json.dumps(value, ensure_ascii=False)
