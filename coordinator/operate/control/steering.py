"""`tessera-coordinator pause`, `resume`, `stop`, `rounds`, `set`, `audit`: a run is steered."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError
from edge_sdk.program.command import account

if TYPE_CHECKING:
    from coordinator.run.steering.orders import Steered
    from coordinator.service.admission.requests import Requests
    from coordinator.service.service import Service
    from edge_sdk.program.control import ControlCommand

MOST_LINES = 1000
"""Most lines of the audit in an answer."""


def steering_commands(requests: Requests[Service], folder: Path) -> dict[str, ControlCommand]:
    """Return the commands of a run's control socket that steer it."""
    from coordinator.run.steering.audit import read_audit

    def pause(by: str) -> Any:
        return requests.ask(lambda service: service.helm.pause(by))

    def resume(by: str) -> Any:
        return requests.ask(lambda service: service.helm.resume(by))

    def stop(by: str, when: str = "round") -> Any:
        return requests.ask(lambda service: service.helm.stop(when, by))

    def lengthen(rounds: int, by: str) -> Any:
        return requests.ask(lambda service: service.helm.lengthen(rounds, by))

    def change(name: str, value: Any, by: str) -> Any:
        return requests.ask(lambda service: service.helm.change(name, value, by))

    def audit(since: int = 0) -> Any:
        return list(read_audit(folder, since))[-MOST_LINES:]

    return {
        "pause": pause,
        "resume": resume,
        "stop": stop,
        "rounds.add": lengthen,
        "set": change,
        "audit": audit,
    }


def add_commands(commands: Any) -> None:
    """Add these commands to those of `tessera-coordinator`."""
    _add(
        commands,
        "pause",
        _pause,
        help="let no further round of a run open",
        description=(
            "Pauses a run: the open round goes on to its end and is committed, and no further one "
            "opens until resume. Devices stay connected. An asynchronous run lets devices finish "
            "what they train. A pause outlives a restart of the coordinator; a run that nobody "
            "serves is paused for its next start."
        ),
        epilog="example: tessera-coordinator pause run",
    )
    _add(
        commands,
        "resume",
        _resume,
        help="let rounds of a paused run open again",
        description=(
            "Ends a pause. Also calls off a stop after the open round that is not carried out yet."
        ),
        epilog="example: tessera-coordinator resume run",
    )
    stop = _add(
        commands,
        "stop",
        _stop,
        help="end the process that serves a run",
        description=(
            "Ends the process that serves a run, with exit code 0, once the open round is "
            "committed; with --now at once: the open round is kept, and the next start resumes it. "
            "Devices wait for the coordinator. The run must be served."
        ),
        epilog="example: tessera-coordinator stop run --now",
    )
    stop.add_argument("--now", action="store_true", help="do not wait for the open round")
    rounds = _add(
        commands,
        "rounds",
        _rounds,
        help="add rounds to a run",
        description=(
            "Makes a run longer: by rounds, or by updates if it is asynchronous. A run that has "
            "ended goes on once it is served again."
        ),
        epilog="example: tessera-coordinator rounds run +20",
    )
    rounds.add_argument("more", metavar="+N", help="rounds to add")
    change = _add(
        commands,
        "set",
        _set,
        help="change a setting of a run from the next round on",
        description=(
            "Changes a setting from the next round on, in an asynchronous run from the next time "
            "that a device is asked. The change is kept in the run's folder: it outlives a "
            "restart, although run.toml still says the old value. To go back, set the value that "
            "run.toml has, or edit that setting in run.toml and restart: the newest word counts. "
            "Without NAME and VALUE: lists the settings that can be changed."
        ),
        epilog=(
            "examples: tessera-coordinator set run; tessera-coordinator set run learning_rate "
            "0.05; tessera-coordinator set run quorum none"
        ),
    )
    change.add_argument("name", metavar="NAME", nargs="?", help="as in run.toml, without its table")
    change.add_argument("value", metavar="VALUE", nargs="?", help="a number, or none")
    audit = _add(
        commands,
        "audit",
        _audit,
        help="show who asked what of a run, and when",
        description=(
            "Prints a line for every command that changed a run: when, by whom, and what. Works "
            "while the run is served and when it is stopped."
        ),
        epilog="example: tessera-coordinator audit run --json",
    )
    audit.add_argument(
        "--since", type=int, default=0, metavar="N", help="leave out the first N lines"
    )


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], **words: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, **words)
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="as JSON, for scripts")
    parser.set_defaults(run=run)
    return parser


def ask_or(
    folder: Path, command: str, otherwise: Callable[[], Any], **arguments: Any
) -> tuple[Any, bool]:
    """Give an order to the process that serves a run, or to its folder; True: it is served."""
    from coordinator.run.folder import is_run, is_starting, starting_words
    from edge_sdk.program.control import NotServedError, ask_run

    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: name the folder in [run] of run.toml")
    try:
        return ask_run(folder, command, **arguments), True
    except NotServedError as error:
        if is_starting(folder):
            raise ConfigError(starting_words(folder)) from error
        return otherwise(), False


def told(arguments: argparse.Namespace, found: Any, *lines: str) -> int:
    """Print an answer, for scripts or for people."""
    for line in (json.dumps(found),) if arguments.json else lines:
        print(line)
    return 0


def _pause(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder, by = arguments.folder, account()
    found, served = ask_or(folder, "pause", lambda: stopped.pause(folder, by), by=by)
    paused = found["paused"]
    if not found["changed"]:
        said = f"{folder}: was paused already, by {paused['by']} ({_when(paused['time'])})"
    elif not served:
        said = f"{folder}: paused; nobody serves it now, and no round opens at its next start"
    elif found["waits_for"] and found["waits_for"].startswith("paused"):
        said = f"{folder}: paused"
    else:
        said = f"{folder}: paused; the open round goes on to its end"
    return told(arguments, found, said, f"to go on: tessera-coordinator resume {_path(folder)}")


def _resume(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder, by = arguments.folder, account()
    found, served = ask_or(folder, "resume", lambda: stopped.resume(folder, by), by=by)
    if not found["changed"]:
        return told(arguments, found, f"{folder}: was not paused")
    more = "" if served else "; nobody serves it now"
    return told(arguments, found, f"{folder}: goes on{more}")


def _stop(arguments: argparse.Namespace) -> int:
    def refuse() -> Any:
        raise ConfigError(f"{folder} is not being served: there is nothing to stop")

    folder, when = arguments.folder, "now" if arguments.now else "round"
    found, _ = ask_or(folder, "stop", refuse, when=when, by=account())
    how = "now" if found["stopping"] == "now" else "once the open round is committed"
    return told(
        arguments,
        found,
        f"{folder}: stops {how}; devices wait for the coordinator",
        "to go on: start tessera-coordinator serve again",
    )


def _rounds(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder, by, text = arguments.folder, account(), arguments.more
    try:
        more = int(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: give a whole number of rounds to add, such as +20") from error
    if more > 0 and not text.strip().startswith("+"):
        raise ConfigError(
            f"{text}: is that to be added, or the number in all? Rounds can only be added: "
            f"tessera-coordinator rounds {_path(folder)} +{more}"
        )
    if more < 1:
        raise ConfigError(f"{text}: rounds can only be added; to end earlier, use stop")
    found, served = ask_or(
        folder, "rounds.add", lambda: stopped.lengthen(folder, more, by), rounds=more, by=by
    )
    lines = [f"{folder}: {found['value']} {found['name']} in all"]
    if found["note"]:
        lines.append(found["note"])
    elif not served:
        lines.append("nobody serves it now: serve it to go on")
        lines.append("(serve --runs starts a run that was complete by itself)")
    return told(arguments, found, *lines)


def _set(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering import stopped

    folder, by, name, value = arguments.folder, account(), arguments.name, arguments.value
    if name is None:
        return _list_settings(arguments)
    if value is None:
        raise ConfigError(f"set {name}: give a value, such as set {_path(folder)} {name} 0.05")
    found, served = ask_or(
        folder,
        "set",
        lambda: stopped.change(folder, name, value, by),
        name=name,
        value=value,
        by=by,
    )
    new, was, file = found["value"], found["was"], found["file"]
    if not found["changed"]:
        return told(arguments, found, f"{folder}: {name} is {shown(new)} already")
    lines = [f"{folder}: {name} = {shown(new)} from the next round on (was {shown(was)})"]
    if new == file:
        lines.append("run.toml says the same")
    else:
        back = back_command(folder, name, file)
        lines.append(f"run.toml still says {shown(file)}; to go back: {back}")
    if not served:
        lines.append("nobody serves it now")
    return told(arguments, found, *lines)


def _list_settings(arguments: argparse.Namespace) -> int:
    from coordinator.run.folder import is_run
    from coordinator.run.steering.orders import read_steered

    folder = arguments.folder
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: name the folder in [run] of run.toml")
    steered = read_steered(folder)
    if not steered.file:
        raise ConfigError(f"{folder} was not served by this version yet: serve it once")
    rows = [
        {
            "name": name,
            "value": steered.value(name),
            "file": steered.file[name],
            "by": steered.changes[name].by if name in steered.changes else None,
            "time": steered.changes[name].time if name in steered.changes else None,
        }
        for name in steered.file
        if name not in ("rounds", "updates")  # `rounds` adds to them
    ]
    lines = [
        f"{row['name']:<18} {shown(row['value']):<10}"
        + ("" if row["by"] is None else f" run.toml: {shown(row['file'])}; by {row['by']}")
        for row in rows
    ]
    return told(arguments, rows, *(line.rstrip() for line in lines))


def _audit(arguments: argparse.Namespace) -> int:
    from coordinator.run.steering.audit import order_words, read_audit

    rows = list(read_audit(arguments.folder, arguments.since))
    lines = [
        f"{_when(row['time'])}  {row['by']:<12}  {order_words(row['what'], row['details'])}"
        for row in rows
    ]
    return told(arguments, rows, *(lines or ["nobody has steered this run yet"]))


def change_report(folder: Path, steered: Steered) -> list[str]:
    """Say at a start what operators changed of a run, and how to go back."""
    lines = [
        f"set        {name} = {shown(each.value)} by {each.by}, {_when(each.time)}; run.toml says "
        f"{shown(steered.file.get(name))}. To go back: "
        f"{back_command(folder, name, steered.file.get(name))}"
        for name, each in steered.changes.items()
    ]
    if (paused := steered.paused) is not None:
        lines.append(
            f"paused     by {paused.by}, {_when(paused.time)}; to go on: tessera-coordinator "
            f"resume {_path(folder)}"
        )
    if (stop := steered.stopping) is not None:
        lines.append(f"stops      as {stop.by} asked, {_when(stop.time)}, before a crash")
    return lines


def back_command(folder: Path, name: str, value: object) -> str:
    """Return the command that undoes a change, or words where there is none."""
    if name in ("rounds", "updates"):
        return f"edit {name} in run.toml"
    return f"tessera-coordinator set {_path(folder)} {name} {shown(value)}"


def shown(value: object) -> str:
    """Return a value as it is typed."""
    return "none" if value is None else f"{value}"


def _when(time: float) -> str:
    return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _path(folder: Path) -> str:
    return shlex.quote(str(folder))
