"""The commands of `tessera-device` that join a task, and list the tasks of a broker."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from edge_sdk.join.code import JoinError


def add_commands(commands: Any, start: Callable[[Path], int]) -> None:
    """Add this command to those of `tessera-device`; `start` runs a configured device."""
    join = commands.add_parser(
        "join",
        help="join a task with the code that the coordinator printed",
        description=(
            "Asks the coordinator named in the code to let this device take part, and writes a "
            "folder with its configuration, device.toml, and its certificates. A code may be for "
            "several tasks; device.toml then lists them, the most important first. The key is "
            "made here and never sent. With --data, the device then starts; without it, the "
            "command says what to fill in and how to start."
        ),
        epilog=(
            "examples:\n"
            "  tessera-device join CODE --data ~/samples\n"
            "  tessera-device join CODE --name kitchen-pi --data samples.py:load\n"
            "  tessera-device join CODE --data weather.csv --label state\n"
            "  tessera-device join CODE --name second --no-start"
        ),
    )
    join.add_argument("code", nargs="+", metavar="CODE", help="from tessera-coordinator serve")
    join.add_argument("--name", help="name of this device (default: the host name)")
    join.add_argument(
        "--data", metavar="PLACE", help="its own data: a folder, a file, or file.py:function"
    )
    join.add_argument(
        "--label",
        metavar="COLUMN",
        help="column of the data that is the label (default: label, class, target or y)",
    )
    join.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="folder for its configuration, keys and state (default: the device's name)",
    )
    join.add_argument("--no-start", action="store_true", help="write the files, but do not start")
    join.set_defaults(run=partial(_join, start))

    tasks = commands.add_parser(
        "tasks",
        help="list the tasks that the broker has",
        description=(
            "Connects to the broker of a configuration and lists the tasks that coordinators "
            "announce there. If a device runs with the same certificate, it is disconnected for a "
            "moment."
        ),
        epilog="example: tessera-device tasks --config device.toml",
    )
    tasks.add_argument("--config", type=Path, metavar="FILE", help="the device's settings")
    tasks.add_argument("--json", action="store_true", help="as JSON, for scripts")
    tasks.set_defaults(run=_tasks)


def _join(start: Callable[[Path], int], arguments: argparse.Namespace) -> int:
    from edge_sdk.device.config import default_name
    from edge_sdk.join.code import parse_code
    from edge_sdk.join.joining import join_task
    from edge_sdk.program.settings.reader import read_toml

    code = parse_code("".join(arguments.code))
    name = arguments.name or default_name()
    folder: Path = arguments.dir or Path(name)
    data = None if arguments.data is None else _absolute(arguments.data)
    if data is not None and not arguments.no_start:
        _check_readable(data)
    path = join_task(code, name=name, folder=folder, data=data, label=arguments.label)
    tasks = ", ".join(map(repr, read_toml(path).get("tasks", [code.task])))
    print(f"{name} has joined {tasks}; its configuration: {path}", flush=True)
    command = f"tessera-device run --config {path}"
    if data is None:
        print(f"Set data in {path} to this device's own data, then start it with\n  {command}")
        return 0
    if arguments.no_start:
        print(f"Start it with\n  {command}")
        return 0
    print(f"Starting, as {command} does.", flush=True)
    return start(path)


def _tasks(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.config import load_config
    from edge_sdk.device.service.offers import list_tasks

    flags = {} if arguments.config is not None else {"task": "none"}
    config = load_config(arguments.config, flags=flags)
    # Where a certificate does not say who we are, a device that runs here stays connected.
    name = config.name if config.broker.certificate else f"{config.name}-tasks"
    tasks = list_tasks(config.broker, name)
    if arguments.json:
        print(json.dumps([asdict(task) for task in tasks]))
    elif not tasks:
        print(f"{config.broker.address} has no tasks: is a coordinator running?")
    else:
        width = max(len(task.name) for task in tasks)
        for task in tasks:
            state = "its coordinator is running" if task.online else "its coordinator is away"
            print(f"{task.name:{width}}  {state}")
    return 0


def _check_readable(source: str) -> None:
    """Raise `JoinError` before a code is spent on files that no task could read.

    Only the task says what else they must be, and the device hears of that from the broker.
    """
    from edge_sdk.data.errors import DataError
    from edge_sdk.data.function import split_reference
    from edge_sdk.data.readers.files import find_files

    if split_reference(source) is not None:
        return  # it may take long, and is called when the device starts
    try:
        find_files(Path(source))
    except DataError as error:
        raise JoinError(f"--data: {error}; nothing was sent") from error


def _absolute(source: str) -> str:
    """Return a place of data that is the same from any folder; modules stay as they are.

    Raises `JoinError` before a code is spent on data that is not there.
    """
    place, colon, function = source.rpartition(":")
    if colon and not place.endswith(".py"):
        return source
    path = Path(place if colon else source).expanduser().absolute()
    if not path.exists():
        raise JoinError(f"--data: {path} is not there; nothing was sent")
    return f"{path}:{function}" if colon else str(path)
