"""`tessera-coordinator forget`: deletes what a run keeps of a device."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError
from edge_sdk.program.command import account, confirm

if TYPE_CHECKING:
    from coordinator.service.admission.requests import Requests
    from coordinator.service.service import Service
    from edge_sdk.program.control import ControlCommand


def forget_commands(requests: Requests[Service]) -> dict[str, ControlCommand]:
    """Return the command of a run's control socket that forgets a device."""

    def forget(device: str, by: str) -> dict[str, Any]:
        return asdict(requests.ask(lambda service: service.forget(device, by)))

    return {"forget": forget}


def add_command(commands: Any) -> None:
    """Add this command to those of `tessera-coordinator`."""
    forget = commands.add_parser(
        "forget",
        help="delete what a run keeps of a device",
        description=(
            "Deletes a device's movements: its entries in the rule's memory, and what it sent for "
            "rounds that are not committed. Works while the run is served and when it is stopped. "
            "What its earlier movements did to the model stays there: rollback undoes rounds. The "
            "device may go on; tessera-coordinator revoke shuts it out."
        ),
        epilog="example: tessera-coordinator forget run phone-7",
    )
    forget.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    forget.add_argument("device", metavar="DEVICE", help="the device's name")
    forget.add_argument("--json", action="store_true", help="as JSON, for scripts")
    forget.add_argument("--yes", action="store_true", help="do not ask")
    forget.set_defaults(run=_forget)


def _forget(arguments: argparse.Namespace) -> int:
    from coordinator.run.folder import is_run
    from coordinator.run.forgetting import forget_in_folder
    from edge_sdk.program.control import NotServedError, ask_run

    folder, device = arguments.folder, arguments.device
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: name the folder in [run] of run.toml")
    confirm(
        f"{folder}: all that memory and open rounds hold of {device!r} will be deleted for good.",
        yes=arguments.yes,
    )
    try:
        found = ask_run(folder, "forget", device=device, by=account())
    except NotServedError:
        found = asdict(forget_in_folder(folder, device, account()))
    if arguments.json:
        print(json.dumps(found))
        return 0
    kept = f"{found['blocks']} blocks in memory, {found['movements']} movements of open rounds"
    print(f"{folder}: forgot {device}: {kept}")
    print("What its earlier movements did to the model stays there; see rollback")
    return 0
