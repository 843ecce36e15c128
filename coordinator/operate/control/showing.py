"""`tessera-coordinator status` and `devices`: a run and its fleet, at a glance.

A run that is served answers through its control socket; one that is not is read from its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError
from edge_sdk.protocol.errors import TesseraError

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY_S = 1.0
"""Seconds between two looks."""
MAX_DEPTH, NEAR_DEPTH = 6, 3
"""Folders below one that is searched for runs, and below the current one for the only run."""
SHOWN_ROUNDS = 20
NOBODY = "no device has joined yet"
NONE_FITS = "no device fits the filters"

_Ask = Callable[[], Any]
_Draw = Callable[[Any], "RenderableType"]


def add_commands(commands: Any) -> None:
    """Add these commands to those of `tessera-coordinator`."""
    status = commands.add_parser(
        "status",
        help="show what a run does, what it waits for, and how good it is",
        description=(
            "Shows a run's state: its round, what it waits for, its devices, levels and skips, its "
            "accuracy, and what it cost so far. A run that is served answers itself, also while it "
            "commits a round; one that is stopped is read from its folder."
        ),
        epilog=(
            "examples: tessera-coordinator status run; tessera-coordinator status run --watch; "
            "tessera-coordinator status --all; tessera-coordinator status run --json"
        ),
    )
    status.add_argument(
        "folder", type=Path, nargs="?", metavar="RUN", help="the run's folder (default: run here)"
    )
    status.add_argument(
        "--all",
        action="store_true",
        help="a line for every run in RUN, or in this folder, and in the folders there",
    )
    _add_options(status)
    status.set_defaults(run=_status)
    devices = commands.add_parser(
        "devices",
        help="show the devices of a run: who is there, what they train or why they skip",
        description=(
            "Shows a run's devices: state, level or skip with its reason, battery, heat, last "
            "contact, traffic, time, energy, contribution, staleness and errors. With a device's "
            "name: everything that is known of it, and its last rounds. Works while the run is "
            "served and when it is stopped."
        ),
        epilog=(
            "examples: tessera-coordinator devices run --filter state=skipped; "
            "tessera-coordinator devices run --filter 'battery<0.3' --filter label.site=berlin "
            "--sort=-staleness; tessera-coordinator devices run phone-7; "
            "tessera-coordinator devices run --watch. Keys are those of --json."
        ),
    )
    devices.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    devices.add_argument("device", nargs="?", metavar="NAME", help="one device, in full")
    devices.add_argument(
        "--sort", metavar="KEY", help="order of the rows; --sort=-KEY puts the largest first"
    )
    devices.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="EXPR",
        help="rows to show: KEY=VALUE, also != < <= > >=; label.NAME is a label; repeatable",
    )
    _add_options(devices)
    devices.set_defaults(run=_devices)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="go on showing it until q or Ctrl-C")
    parser.add_argument(
        "--json", action="store_true", help="as JSON, for scripts; with --watch a line each second"
    )


def ask_overview(folder: Path, command: str, **arguments: Any) -> Any:
    """Return the answer of a run to one of the commands that only look, served or not.

    Raises `ConfigError` if there is no run, `ControlError` if it refuses.
    """
    from coordinator.run.folder import is_run
    from edge_sdk.program.control import NotServedError, ask_run

    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: name the folder in [run] of run.toml")
    try:
        return ask_run(folder, command, **arguments)
    except NotServedError:
        from coordinator.operate.control.overview import overview_commands
        from coordinator.service.overview.folder import overview_of

        return overview_commands(overview_of(folder))[command](**arguments)


def _status(arguments: argparse.Namespace) -> int:
    folder: Path | None = arguments.folder
    if arguments.all:
        top = folder or Path()
        return _present(
            arguments,
            lambda: list(_all_statuses(top)),
            lambda found: _tables().runs_table(
                found, top=top, width=shutil.get_terminal_size().columns
            ),
        )
    run = _default_run() if folder is None else folder
    return _present(
        arguments,
        lambda: ask_overview(run, "status"),
        lambda found: _tables().status_table(found),
    )


def _devices(arguments: argparse.Namespace) -> int:
    from coordinator.service.overview.choosing import choose_rows

    folder, device = arguments.folder, arguments.device
    if device is not None:
        if arguments.filter or arguments.sort:
            raise ConfigError("--filter and --sort are for all devices: leave out the name")
        return _present(
            arguments,
            lambda: ask_overview(folder, "device", device=device),
            lambda found: _tables().device_page(found, now=time.time(), rounds=SHOWN_ROUNDS),
        )
    choose_rows([], arguments.filter, arguments.sort)  # says what is wrong before it asks

    known = 0

    def rows() -> list[dict[str, Any]]:
        nonlocal known
        found: list[dict[str, Any]] = ask_overview(folder, "devices")
        known = len(found)
        return choose_rows(found, arguments.filter, arguments.sort)

    return _present(
        arguments,
        rows,
        lambda found: (
            _tables().devices_table(
                found, now=time.time(), width=shutil.get_terminal_size().columns
            )
            if found
            else (NONE_FITS if known else NOBODY)
        ),
    )


def _all_statuses(top: Path) -> Iterator[Any]:
    """Give the status of every run in a folder; one that cannot be read is named and left out."""
    for each in find_runs(top):
        if (found := _status_of(each)) is not None:
            yield found


def _status_of(folder: Path) -> Any:
    try:
        return ask_overview(folder, "status")
    except TesseraError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return None


def find_runs(top: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Find the runs in a folder and below it, sorted; links are not followed.

    Raises `ConfigError` if there is no such folder.
    """
    if not top.is_dir():
        raise ConfigError(f"{top} is not a folder: name one in which runs are")
    from coordinator.run.folder import is_run

    base = len(top.parts)
    for place, names, _ in os.walk(top):
        here = Path(place)
        if is_run(here):
            names.clear()  # a run holds no runs
            yield here
        elif len(here.parts) - base >= depth:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))


def _default_run() -> Path:
    found = list(find_runs(Path(), NEAR_DEPTH))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError("there is no run in this folder: name its folder")
    names = ", ".join(map(str, found[:5]))
    raise ConfigError(f"there are {len(found)} runs here: name one of {names}, or use --all")


def _tables() -> Any:
    """Return the module that draws; rich is not needed for JSON."""
    from coordinator.operate.control import tables

    return tables


def _present(arguments: argparse.Namespace, ask: _Ask, draw: _Draw) -> int:
    """Show an answer, once or until Ctrl-C; on a terminal also until `q`."""

    def say(answer: Any) -> None:
        if arguments.json:
            print(json.dumps(answer), flush=True)
        else:
            _tables().show(draw(answer))

    if not arguments.watch:
        say(ask())
        return 0
    with suppress(KeyboardInterrupt):
        if arguments.json or not sys.stdout.isatty():
            for answer in _looking(ask):
                say(answer)
            return 0
        from rich.live import Live

        from edge_sdk.device.advice.watching import open_keys

        with open_keys() as pressed, Live(screen=True, auto_refresh=False) as live:
            for answer in _looking(ask, pressed):
                live.update(draw(answer), refresh=True)
    return 0


def _looking(ask: _Ask, ends: Callable[[float], bool] | None = None) -> Iterator[Any]:
    """Ask about once a second; less often where an answer takes long.

    `ends` waits for so many seconds, and tells if that was the end; None: it never ends.
    """
    while True:
        began = time.monotonic()
        yield ask()
        wait_s = max(EVERY_S, 4 * (time.monotonic() - began))
        if ends is None:
            time.sleep(wait_s)
        elif ends(wait_s):
            return
