"""`tessera-coordinator codes`: make, list and revoke join codes, while a run is served or not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add this command to those of `tessera-coordinator`."""
    codes = commands.add_parser(
        "codes",
        help="create, list and revoke codes with which devices join",
        description=(
            "Codes let devices join a run: tessera-device join CODE. A code is for one device, or "
            "for as many as you say, and expires. Works while the run is served and while it is "
            "not; devices can join only while it is. Where one process serves many runs, name the "
            "folder of its run files: a code may then be for several tasks, and lets a device into "
            "these and no others."
        ),
        epilog=(
            "examples: tessera-coordinator codes create run --devices 20 --hours 72; "
            "tessera-coordinator codes list run; tessera-coordinator codes revoke run 1f3a9c04; "
            "tessera-coordinator codes create runs --task digits --task weather"
        ),
    )
    actions = codes.add_subparsers(required=True, metavar="action")
    create = _add(actions, "create", "make a code and print the line to paste on a device")
    create.add_argument("--devices", type=int, default=1, help="devices it lets in (default 1)")
    create.add_argument("--hours", type=float, default=24.0, help="hours it is valid (default 24)")
    create.add_argument(
        "--task",
        action="append",
        metavar="NAME",
        help="task it is for; repeatable, the most important first (default: that of the run)",
    )
    create.add_argument("--qr", action="store_true", help="also draw it as a QR code (needs segno)")
    create.set_defaults(run=_create)
    listing = _add(actions, "list", "list codes, and who joined with them")
    listing.add_argument("--json", action="store_true", help="as JSON, for scripts")
    listing.set_defaults(run=_list)
    revoke = _add(actions, "revoke", "let nobody in with a code any more; who has joined stays")
    revoke.add_argument("id", metavar="ID", help="see codes list")
    revoke.set_defaults(run=_revoke)


def _add(actions: Any, name: str, words: str) -> Any:
    action = actions.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
    action.add_argument(
        "folder", type=Path, metavar="RUN", help="the run's folder, or a folder of run files"
    )
    return action


def _create(arguments: argparse.Namespace) -> int:
    tasks = {"tasks": arguments.task} if arguments.task else {}
    entry = _ask(
        arguments.folder,
        "codes.create",
        devices=arguments.devices,
        hours=arguments.hours,
        **tasks,
    )
    line = f"tessera-device join {entry['code']}"
    into = ", ".join(entry["tasks"])
    print(f"Code {entry['id']} for {into}, {_devices(entry)}, until {_time(entry['until'])}:")
    print(f"\n  {line}\n")
    if arguments.qr:
        from coordinator.operate.joining.qr import draw_qr

        print(draw_qr(line))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    entries = _ask(arguments.folder, "codes.list")
    if arguments.json:
        print(json.dumps(entries))
        return 0
    if not entries:
        print("no codes yet: tessera-coordinator codes create")
    for entry in entries:
        joined = entry["joined"]
        names = f": {', '.join(joined)}" if joined else ""
        print(
            f"{entry['id']}  {entry['state']:7}  until {_time(entry['until'])}  "
            f"{', '.join(entry['tasks'])}  {len(joined)} of {_devices(entry)}{names}"
        )
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    entry = _ask(arguments.folder, "codes.revoke", id=arguments.id)
    joined = entry["joined"]
    print(f"code {entry['id']} is revoked; nobody can join with it any more")
    if joined:
        print(f"Devices that joined with it stay: {', '.join(joined)}")
        print("To shut one out: tessera-coordinator revoke NAME")
    return 0


def _ask(folder: Path, command: str, **arguments: Any) -> Any:
    """Ask the process that serves the run, or open its code book if there is none."""
    from coordinator.errors import ConfigError
    from coordinator.operate.config import process_folder
    from coordinator.operate.joining.codes import CodeBook
    from coordinator.operate.joining.opening import book_commands
    from coordinator.run.folder import is_run, is_starting, starting_words
    from edge_sdk.program.control import NotServedError, ask_run

    if not is_run(folder):
        process = process_folder(folder)
        if process is None:
            raise ConfigError(
                f"{folder} is neither a run's folder (that in [run] of run.toml) nor a folder of "
                "run files that was served with --runs"
            )
        folder = process
    try:
        return ask_run(folder, command, **arguments)
    except NotServedError as error:
        if is_starting(folder):
            raise ConfigError(starting_words(folder)) from error
        with CodeBook(folder) as book:
            return book_commands(book)[command](**arguments)


def _devices(entry: dict[str, Any]) -> str:
    return f"{entry['devices']} device{'s' * (entry['devices'] != 1)}"


def _time(text: str) -> str:
    from datetime import datetime

    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC"
