"""`tessera-device status`, `pause` and `resume`: the owner and a device, running or not."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_sdk.device.config import DeviceConfig
    from edge_sdk.machine.snapshot import Probe

SETTLE_S = 1.5
"""Seconds given to slow sensors."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def add_owner_commands(commands: Any) -> None:
    """Add the commands."""
    status = commands.add_parser(
        "status",
        help="show what this device does now, and why",
        description=(
            "Prints what the device does in each of its tasks, its last answer with the reason, "
            "today's energy against its budget, bytes, rounds, verdicts, what waits for its "
            "receipt, and the last error. Asks the program that runs, through a socket in the "
            "device's folder; without one, it tells what the folder knows. Makes no connection. "
            "--watch shows it live, with battery, heat, watts, memory and the levels of the last "
            "rounds; q or Ctrl-C ends it."
        ),
        epilog="example: tessera-device status --config device.toml --watch",
    )
    _add_config(status)
    shown = status.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="as JSON, for scripts")
    shown.add_argument("--watch", action="store_true", help="live, until q or Ctrl-C")
    status.set_defaults(run=_status)
    pause = commands.add_parser(
        "pause",
        help="train nothing until resume, or for some time",
        description=(
            "Stops the training in progress and withdraws it; later rounds are skipped with the "
            "reason 'paused by its owner'. Movements that are finished are still uploaded, and "
            "nothing is lost. The pause survives restarts, and can be set while the device does "
            "not run."
        ),
        epilog="example: tessera-device pause --config device.toml --for 2h",
    )
    _add_config(pause)
    pause.add_argument(
        "--for",
        dest="for_s",
        type=_duration,
        metavar="TIME",
        help="such as 90m, 2h or 1d; without it, until resume",
    )
    pause.add_argument("--json", action="store_true", help="as JSON, for scripts")
    pause.set_defaults(run=_pause)
    resume = commands.add_parser(
        "resume",
        help="end a pause",
        description="Ends a pause: the device answers the next round as usual.",
        epilog="example: tessera-device resume --config device.toml",
    )
    _add_config(resume)
    resume.add_argument("--json", action="store_true", help="as JSON, for scripts")
    resume.set_defaults(run=_resume)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the device's settings")


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text.strip())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write a time such as 90m, 2h or 1d")
    return float(found[1]) * UNITS[found[2]]


def _status(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.advice.standing import read_standing, standing_lines
    from edge_sdk.device.advice.watching import watch
    from edge_sdk.device.config import load_config

    config = load_config(arguments.config)
    probe = _probe(config)
    if arguments.watch:
        watch(lambda: read_standing(config, probe))
        return 0
    settle = getattr(probe, "settle", None)
    if probe is not None and settle is not None:
        probe.snapshot()  # asks the slow sensors
        settle(SETTLE_S)
    standing = read_standing(config, probe)
    if arguments.json:
        print(json.dumps(standing, indent=2))
    else:
        print("\n".join(standing_lines(standing)))
    return 0


def _probe(config: DeviceConfig) -> Probe | None:
    from edge_sdk.device.weighing import make_probe

    # A device that pretends to be another has that one's battery, which is not here.
    return None if config.emulate is not None or not config.weigh else make_probe(config)


def _pause(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.advice.standing import pause_words
    from edge_sdk.device.config import load_config
    from edge_sdk.device.stores.household import Household

    config = load_config(arguments.config)
    told = _ask(config, "pause", seconds=arguments.for_s)
    if told is None:  # the file is what counts
        terms = Household(config.state_dir, config.name).pause.begin(arguments.for_s)
        told = {"since": terms.since, "until": terms.until}
    if arguments.json:
        print(json.dumps({"device": config.name, "paused": told}))
        return 0
    print(f"{config.name} is paused {pause_words(told, time.time())}.")
    print("Training in progress stops; movements that are finished are still uploaded.")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.config import load_config
    from edge_sdk.device.stores.household import Household

    config = load_config(arguments.config)
    told = _ask(config, "resume")
    if told is None:
        told = {"lifted": Household(config.state_dir, config.name).pause.lift()}
    if arguments.json:
        print(json.dumps({"device": config.name, "paused": None, **told}))
    elif told["lifted"]:
        print(f"{config.name} is no longer paused: it answers the next round.")
    else:
        print(f"{config.name} was not paused.")
    return 0


def _ask(config: DeviceConfig, command: str, **arguments: Any) -> dict[str, Any] | None:
    """Ask the program that runs; None: there is none, or it has no socket."""
    from edge_sdk.device.service.answering import socket_folder
    from edge_sdk.program.control import ControlError, NotServedError, ask_run

    try:
        answer = ask_run(socket_folder(config), command, **arguments)
    except (NotServedError, OSError, AttributeError):
        return None
    if not isinstance(answer, dict):
        raise ControlError(f"{command}: {answer!r:.80} is no answer")
    return answer
