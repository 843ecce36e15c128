"""The state of a device for its owner: from the program that runs, and from its folder.

`read_standing` gives plain values (`tessera-device status --json`); `standing_lines` writes them
for a person. Text that came from the coordinator is cleaned before it is shown.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_sdk import __version__
from edge_sdk.decide.gates import check_gates
from edge_sdk.decide.observer import load_history, local_minute
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.answering import socket_folder
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import read_logbook
from edge_sdk.device.stores.movements import WAITING, device_path
from edge_sdk.device.weighing import HISTORY
from edge_sdk.machine.snapshot import Probe, Snapshot
from edge_sdk.program.control import NotServedError, ask_run
from edge_sdk.program.files import is_held

MB = 1e6
SKIPS = {
    **{"battery": "b", "energy": "b", "heat": "h", "memory": "m", "memory-pressure": "m"},
    **{"network": "n", "deadline": "t", "hours": "t", "schedule": "p", "paused": "p"},
}
"""Characters of the strip for skips; another one is `s`."""
LEGEND = "9-1 level b battery h heat m memory n net t time p pause s skip l late r refused"


def printable(text: Any, most: int = 300) -> str:
    """Return text without characters that a terminal would act on, on one line."""
    return " ".join(visible(str(text)[: 4 * most]).split())[:most]


def visible(text: str) -> str:
    """Return text with a space for each character that a terminal would act on."""
    return "".join(" " if unicodedata.category(each)[0] in "CZ" else each for each in text)


def read_standing(config: DeviceConfig, probe: Probe | None) -> dict[str, Any]:
    """Return what is known about a device. `probe` None: nothing about this machine.

    Raises `ControlError` if the program refuses to answer.
    """
    now, household = time.time(), Household(config.state_dir, config.name)
    told = _ask(config)
    known = {each["task"]: each for each in (told or {}).get("tasks", [])}
    folders = {
        each.task: device_path(each.state_dir, each.task, each.name) for each in config.by_task()
    }
    running = told is not None or any(is_held(each) for each in folders.values() if each.is_dir())
    snapshot = Snapshot() if probe is None else probe.snapshot()
    terms, allowance = household.pause.terms, config.policy.allowance(snapshot.battery)
    gates = check_gates(config.policy.limits, snapshot, local_minute(now))
    return {
        "device": config.name,
        "version": (told or {}).get("version", __version__),
        "state_dir": str(config.state_dir),
        "running": running,
        "answers": told is not None,
        "pid": (told or {}).get("pid"),
        "paused": None if terms is None else {"since": terms.since, "until": terms.until},
        "training": (told or {}).get("training"),
        "energy": {
            "spent_j": _spent_j(config, household, now),
            "budget_j": None if allowance is None else allowance.joules_per_day,
        },
        "snapshot": snapshot.to_dict(),
        "gates": []
        if probe is None
        else [{"name": each.name, "open": each.open, "reason": each.reason} for each in gates],
        "tasks": [
            _task(task, known.get(task) or read_logbook(folder), folder)
            for task, folder in folders.items()
        ],
        "time": now,
    }


def _ask(config: DeviceConfig) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = ask_run(socket_folder(config), "status")
    except (NotServedError, OSError, AttributeError):
        return None
    return found


def _spent_j(config: DeviceConfig, household: Household, now: float) -> float:
    if config.emulate is None:
        return household.account.today_j(now)
    folder = device_path(config.state_dir, config.task, config.name)
    return load_history(folder / HISTORY).spent_j


def _task(task: str, notes: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    found = dict.fromkeys(
        [
            *("task", "phase", "since", "run", "round", "step", "steps", "decision", "trained"),
            *("skipped", "verdicts", "rounds", "bytes", "error", "broker", "coordinator"),
            *("session", "started", "time", "ended"),
        ]
    )
    found |= {"trained": 0, "skipped": 0, "verdicts": [], "rounds": [], "phase": "never ran"}
    found |= {name: value for name, value in (notes or {}).items() if name in found}
    found |= {"task": task, "waiting": _waiting(folder)}
    return found


def _waiting(folder: Path) -> list[int]:
    """Return the rounds whose movement waits for its receipt, by the files."""
    files = folder.glob(f"runs/*/movements/*{WAITING}")
    return sorted(int(each.stem) for each in files if each.stem.isdecimal())


# -- for people ----------------------------------------------------------------------------------


def doing(standing: dict[str, Any], task: dict[str, Any]) -> str:
    """Say in a few words what the device does in a task."""
    phase = task["phase"]
    if not standing["running"]:
        return "not running" if task["time"] is not None else "never ran here"
    idle = phase in ("resting", "waiting for the coordinator", "never ran", "ended")
    if standing["paused"] is not None and idle:
        return "paused"
    if phase == "training" and task["steps"]:
        return f"training, step {task['step']} of {task['steps']}"
    return str(phase)


def standing_lines(standing: dict[str, Any]) -> Iterator[str]:
    """Write it for a person."""
    now = standing["time"]
    yield f"{standing['device']}  tessera-fl {standing['version']}  {_program(standing)}"
    if (paused := standing["paused"]) is not None:
        yield _row("paused", pause_words(paused, now))
    yield _row("energy", energy_words(standing["energy"]))
    for gate in standing["gates"]:
        if not gate["open"]:
            yield _row("gate closed", f"{gate['name']}: {gate['reason']}")
    if standing["gates"] and all(gate["open"] for gate in standing["gates"]):
        yield _row("gates", "all open")
    for task in standing["tasks"]:
        yield ""
        yield from _task_lines(standing, task, now)


def _program(standing: dict[str, Any]) -> str:
    if standing["answers"]:
        return f"runs (process {standing['pid']})"
    if standing["running"]:
        return "runs, but has no socket: this is from its folder"
    return "does not run; this is from its folder"


def _task_lines(standing: dict[str, Any], task: dict[str, Any], now: float) -> Iterator[str]:
    since = f", since {ago(task['since'], now)}" if standing["running"] and task["since"] else ""
    yield _row(f"task {task['task']}", doing(standing, task) + since)
    if task["time"] is None:
        return
    if not standing["running"]:
        yield _row("", _end(task, now))
    if (decision := task["decision"]) is not None:
        yield _row(
            "last answer",
            f"round {decision.get('round')}: {decision.get('reason')}"
            f" [{decision.get('code')}], {ago(decision.get('time'), now)} ago",
        )
    yield _row("rounds", f"{task['trained']} trained, {task['skipped']} skipped")
    if task["waiting"]:
        shown = ", ".join(map(str, task["waiting"]))
        yield _row("waits", f"for the receipt of round {shown}; kept on disk until then")
    for each in reversed(task["verdicts"]):
        why = f": {each['reason']}" if each.get("reason") else ""
        yield _row("verdict", f"round {each['round']} {each.get('outcome')}{why}")
    sizes = task["bytes"] or {}
    yield _row(
        "bytes",
        f"today {_mb(sizes.get('up_today'))} sent, {_mb(sizes.get('down_today'))} received; "
        f"in all {_mb(sizes.get('up'))}, {_mb(sizes.get('down'))}",
    )
    broker = task["broker"] or {}
    if broker.get("address"):
        words = "connected" if broker.get("connected") else broker.get("reason") or "not connected"
        words = str(words).removeprefix(f"{broker['address']}: ")  # most reasons name it
        state = words if standing["running"] else "not connected"
        yield _row("broker", f"{broker['address']}: {state}; session {task['session']}")
    if (error := task["error"]) is not None:
        when = f"{clock(error.get('time'))}, {ago(error.get('time'), now)} ago"
        yield _row("last error", f"{error.get('words')} ({when}; no round since)")


def _end(task: dict[str, Any], now: float) -> str:
    if (ended := task["ended"]) is not None:
        return f"ended {ago(ended.get('time'), now)} ago: {ended.get('words')}"
    return (
        f"ended without a word after {clock(task['time'])}, {ago(task['time'], now)} ago: it "
        "crashed, was killed, or lost its power"
    )


def _row(name: str, text: str) -> str:
    return f"  {printable(name, 40):<13} {printable(text)}"


def pause_words(paused: dict[str, Any], now: float) -> str:
    """Say since when and until when a device is paused."""
    since = f"since {clock(paused['since'])}" if paused["since"] is not None else "by its owner"
    if paused["until"] is None:
        return f"{since}, until tessera-device resume"
    return f"{since}, until {clock(paused['until'])} (in {ago(now, paused['until'])})"


def energy_words(energy: dict[str, Any]) -> str:
    """Say what was spent of today's budget."""
    if energy["budget_j"] is None:
        return f"{energy['spent_j']:.0f} J spent on battery today; no limit now"
    share = energy["spent_j"] / energy["budget_j"] if energy["budget_j"] else 1.0
    return f"{energy['spent_j']:.0f} J of {energy['budget_j']:.0f} J spent today ({share:.0%})"


def strip(rounds: list[dict[str, Any]], width: int) -> str:
    """Write the last rounds, a character each."""
    return "".join(_mark(each) for each in rounds[-width:])


def _mark(row: dict[str, Any]) -> str:
    level, outcome = row.get("level"), row.get("outcome")
    if outcome == "rejected":
        return "r"
    if outcome == "late":
        return "l"
    if isinstance(level, int | float):
        return "9" if level > 0.9 else str(max(1, math.ceil(level * 10 - 1e-9) - 1))
    return SKIPS.get(str(row.get("code")), "s")


def clock(time_s: float | None) -> str:
    """Return a time of day, with the day if it is not today's."""
    if time_s is None:
        return "?"
    at = datetime.fromtimestamp(time_s)
    today = datetime.now().date()
    return f"{at:%H:%M}" if at.date() == today else f"{at:%Y-%m-%d %H:%M}"


def ago(time_s: float | None, now: float) -> str:
    """Return the time between two moments in words."""
    if time_s is None:
        return "?"
    seconds = max(0, round(now - time_s))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7_200:
        return f"{seconds // 60} min"
    return f"{seconds // 3_600} h" if seconds < 172_800 else f"{seconds // 86_400} days"


def _mb(size: Any) -> str:
    return f"{size / MB:,.1f} MB" if isinstance(size, int | float) else "?"
