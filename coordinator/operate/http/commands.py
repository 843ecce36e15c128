"""`tessera-coordinator page`: gives a link to the page of a run that is served."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
    """Add this command to those of `tessera-coordinator`."""
    page = commands.add_parser(
        "page",
        help="give a link to the page of a run",
        description=(
            "Prints a link to the page of a run that is served. The link signs in once, within 24 "
            "hours, and then the browser stays signed in for session_hours of [http]. For a run on "
            "another machine, forward its port first: ssh -L 8080:localhost:8080 machine."
        ),
        epilog="example: tessera-coordinator page run --role read",
    )
    page.add_argument(
        "folder", type=Path, metavar="RUN", help="the run's folder, or a folder of run files"
    )
    page.add_argument(
        "--role",
        choices=("read", "operate"),
        default="operate",
        help="read: look only; operate: change the run, too (default %(default)s)",
    )
    page.add_argument("--json", action="store_true", help="as JSON, for scripts")
    page.set_defaults(run=_page)


def _page(arguments: argparse.Namespace) -> int:
    from coordinator.errors import ConfigError
    from coordinator.operate.config import process_folder
    from coordinator.run.folder import is_starting, starting_words
    from edge_sdk.program.control import NotServedError, ask_run

    folder = process_folder(arguments.folder) or arguments.folder
    try:
        found = ask_run(folder, "page", role=arguments.role)
    except NotServedError as error:
        if is_starting(folder):
            raise ConfigError(starting_words(folder)) from error
        raise
    print(json.dumps(found) if arguments.json else found["link"])
    return 0
