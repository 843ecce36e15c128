"""`tessera-coordinator quarantined` and `allow`: devices whose bids a run declines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.service.admission.requests import Requests
    from coordinator.service.service import Service
    from edge_sdk.program.control import ControlCommand


def quarantine_commands(requests: Requests[Service]) -> dict[str, ControlCommand]:
    """Return the commands of a run's control socket that are about quarantined devices."""
    return {
        "quarantine.list": lambda: requests.ask(_quarantined),
        "quarantine.allow": lambda device: requests.ask(lambda service: _release(service, device)),
    }


def _quarantined(service: Service) -> list[dict[str, Any]]:
    from coordinator.rounds.reputation import quarantined

    standings = quarantined(service.course.state.fleet.standings)
    return [
        {
            "device": name,
            "since": each.quarantined,
            "refusals": each.refusals,
            "reason": each.reason,
        }
        for name, each in standings.items()
    ]


def _release(service: Service, device: str) -> dict[str, Any]:
    found = {each["device"]: each for each in _quarantined(service)}
    if device not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"{device!r} is not quarantined; quarantined devices: {known}")
    service.release(device)
    return found[device]


def add_commands(commands: Any) -> None:
    """Add these commands to those of `tessera-coordinator`."""
    listing = commands.add_parser(
        "quarantined",
        help="list the devices whose bids a run declines, and why",
        description=(
            "Lists the devices that were quarantined because their movements were rejected round "
            "after round (quarantine_after) or point away from the others' (agreement). The run "
            "must be served."
        ),
        epilog="example: tessera-coordinator quarantined run",
    )
    listing.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    listing.add_argument("--json", action="store_true", help="as JSON, for scripts")
    listing.set_defaults(run=_list)
    allow = commands.add_parser(
        "allow",
        help="let a quarantined device take part again",
        description=(
            "Releases a device from quarantine: its next bids are answered. The run must be "
            "served; the release is saved with its next round."
        ),
        epilog="example: tessera-coordinator allow run phone-7",
    )
    allow.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    allow.add_argument("device", metavar="DEVICE", help="see quarantined")
    allow.set_defaults(run=_allow)


def _list(arguments: argparse.Namespace) -> int:
    from edge_sdk.program.control import ask_run

    found = ask_run(arguments.folder, "quarantine.list")
    if arguments.json:
        print(json.dumps(found))
        return 0
    if not found:
        print("no device is quarantined")
    for each in found:
        times = f", {each['refusals']} refusals in a row; the last" if each["refusals"] else ""
        print(f"{each['device']}  since round {each['since']}{times}: {each['reason']}")
    return 0


def _allow(arguments: argparse.Namespace) -> int:
    from edge_sdk.program.control import ask_run

    ask_run(arguments.folder, "quarantine.allow", device=arguments.device)
    print(f"{arguments.device} may take part again")
    return 0
