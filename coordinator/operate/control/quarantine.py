"""`tessera-coordinator quarantine`, `allow`, `quarantined`: devices whose bids are declined."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.operate.control.steering import ask_or, told
from edge_sdk.program.command import account

if TYPE_CHECKING:
    from coordinator.service.admission.requests import Requests
    from coordinator.service.service import Service
    from edge_sdk.program.control import ControlCommand


def quarantine_commands(requests: Requests[Service]) -> dict[str, ControlCommand]:
    """Return the commands of a run's control socket that are about quarantined devices."""

    def add(device: str, by: str, reason: str = "") -> Any:
        return requests.ask(lambda service: service.helm.quarantine(device, reason, by))

    def allow(device: str, by: str = "?") -> Any:
        return requests.ask(lambda service: service.helm.allow(device, by))

    return {
        "quarantine.list": lambda: requests.ask(lambda service: service.helm.quarantined()),
        "quarantine.add": add,
        "quarantine.allow": allow,
    }


def add_commands(commands: Any) -> None:
    """Add these commands to those of `tessera-coordinator`."""
    listing = commands.add_parser(
        "quarantined",
        help="list the devices whose bids a run declines, and why",
        description=(
            "Lists the devices that are quarantined: by an operator, or because their movements "
            "were rejected round after round (quarantine_after) or point away from the others' "
            "(agreement)."
        ),
        epilog="example: tessera-coordinator quarantined run",
    )
    quarantine = commands.add_parser(
        "quarantine",
        help="let a device take no part in a run",
        description=(
            "Quarantines a device: its bids are declined from now on, its movement in the open "
            "round is rejected, and so are late ones. What its earlier movements did to the model "
            "stays, and so does what memory holds of it: see forget. The device stays connected; "
            "tessera-coordinator revoke shuts it out of the broker. Works while the run is served "
            "and when it is stopped."
        ),
        epilog='example: tessera-coordinator quarantine run phone-7 --reason "wrong labels"',
    )
    allow = commands.add_parser(
        "allow",
        help="let a quarantined device take part again",
        description=(
            "Releases a device from quarantine: its next bids are answered. Works while the run "
            "is served and when it is stopped."
        ),
        epilog="example: tessera-coordinator allow run phone-7",
    )
    for parser, run in ((listing, _list), (quarantine, _quarantine), (allow, _allow)):
        parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
        if parser is not listing:
            parser.add_argument("device", metavar="DEVICE", help="the device's name")
        parser.add_argument("--json", action="store_true", help="as JSON, for scripts")
        parser.set_defaults(run=run)
    quarantine.add_argument("--reason", default="", metavar="WORDS", help="the device is told")


def _list(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder = arguments.folder
    found, _ = ask_or(folder, "quarantine.list", lambda: stopped.list_quarantined(folder))
    lines = []
    for each in found:
        times = f", {each['refusals']} refusals in a row; the last" if each["refusals"] else ""
        lines.append(f"{each['device']}  since round {each['since']}{times}: {each['reason']}")
    return told(arguments, found, *(lines or ["no device is quarantined"]))


def _quarantine(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder, device, why, by = arguments.folder, arguments.device, arguments.reason, account()
    found, _ = ask_or(
        folder,
        "quarantine.add",
        lambda: stopped.quarantine(folder, device, why, by),
        device=device,
        reason=why,
        by=by,
    )
    back = f"to undo it: tessera-coordinator allow {shlex.quote(str(folder))} {device}"
    return told(arguments, found, f"{device} is quarantined: {found['reason']}", back)


def _allow(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder, device, by = arguments.folder, arguments.device, account()
    found, _ = ask_or(
        folder,
        "quarantine.allow",
        lambda: stopped.allow(folder, device, by),
        device=device,
        by=by,
    )
    return told(arguments, found, f"{device} may take part again")
