"""The live view of a device in the terminal: `tessera-device status --watch`.

Everything is lines of text with a style, made for a width and a height; rich draws them where it is
installed, and a plain terminal gets the same text. `q` or Ctrl-C ends it.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from edge_sdk.device.advice.seeing import charging_words, core_words, heat_words
from edge_sdk.device.advice.standing import (
    LEGEND,
    ago,
    doing,
    energy_words,
    pause_words,
    strip,
    visible,
)

EVERY_S = 1.0
BAR = 20
HOME, CLEAR, REST = "\x1b[H", "\x1b[2J", "\x1b[K"
"""What a terminal understands: to its upper left corner, empty all of it, or the rest of a line."""

Style = Literal["", "bold", "dim", "green", "yellow", "red"]


class ViewLine(NamedTuple):
    """A line of the view."""

    text: str
    style: Style = ""


def view_lines(standing: dict[str, Any], width: int, height: int) -> list[ViewLine]:
    """Return the view for a terminal of this size; no line is longer than it is wide."""
    now = standing["time"]
    head = [
        ViewLine(
            f"{standing['device']}  {_state(standing)}  "
            f"{time.strftime('%H:%M:%S', time.localtime(now))}",
            "bold",
        ),
        *_machine(standing),
    ]
    foot = [ViewLine(LEGEND, "dim"), ViewLine("q or Ctrl-C ends", "dim")]
    tasks, room = standing["tasks"], max(1, height - 1 - len(head) - len(foot))
    each = max(1, room // max(1, len(tasks)))
    body = [
        line for task in tasks for line in list(_task(standing, task, now, width))[: max(1, each)]
    ]
    lines = [*head, *body[:room], *foot][: max(1, height - 1)]
    return [ViewLine(_cut(visible(line.text), width), line.style) for line in lines]


def watch(read: Callable[[], dict[str, Any]], *, every_s: float = EVERY_S) -> None:
    """Show what `read` returns, again and again, until `q` or Ctrl-C."""
    colours = "NO_COLOR" not in os.environ
    with suppress(KeyboardInterrupt), open_keys() as pressed, _screen(colours) as show:
        while True:
            size = shutil.get_terminal_size((80, 24))
            show(view_lines(read(), size.columns, size.lines))
            if pressed(every_s):
                return


# -- lines ---------------------------------------------------------------------------------------


def _state(standing: dict[str, Any]) -> str:
    if standing["paused"] is not None:
        return f"PAUSED {pause_words(standing['paused'], standing['time'])}"
    return "runs" if standing["running"] else "does not run"


def _machine(standing: dict[str, Any]) -> Iterator[ViewLine]:
    seen: dict[str, dict[str, Any]] = standing["snapshot"]
    battery, heat, memory = (seen.get(name, {}) for name in ("battery", "heat", "memory"))
    cpu, power, gpu = (seen.get(name, {}) for name in ("cpu", "power", "gpu"))
    watts = power.get("total_watts", battery.get("watts"))
    drawn = "" if watts is None else f"  {watts:.1f} W"
    if battery.get("present") is False:
        yield ViewLine(f"{'battery':<8} none: on mains{drawn}")
    else:
        charging = charging_words(battery)
        yield _bar("battery", battery.get("percent"), 100, f"{charging}{drawn}", low=30)
    words = heat_words(heat, most=3) or "not known"
    slowed = bool(heat.get("throttling"))
    yield ViewLine(f"{'heat':<8} {words}{'  SLOWED DOWN' if slowed else ''}", _red(slowed))
    total, free = memory.get("total_bytes"), memory.get("available_bytes")
    used = None if total is None or free is None else total - free
    told = "" if total is None or used is None else f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"
    yield _bar("memory", used, total, told, high=0.9)
    busy = cpu.get("busy")
    clock = "" if cpu.get("mhz") is None else f"{cpu['mhz']:.0f} MHz"
    yield _bar("cpu", busy, 1, f"{core_words(cpu)} {clock}".strip())
    if gpu.get("busy") is not None:
        yield _bar("gpu", gpu["busy"], 1, "")
    energy = standing["energy"]
    yield _bar("energy", energy["spent_j"], energy["budget_j"], energy_words(energy), high=0.9)
    closed = [gate for gate in standing["gates"] if not gate["open"]]
    for gate in closed:
        yield ViewLine(f"{'gate':<8} {gate['name']} closed: {gate['reason']}", "yellow")


def _task(
    standing: dict[str, Any], task: dict[str, Any], now: float, width: int
) -> Iterator[ViewLine]:
    words = doing(standing, task)
    since = f", {ago(task['since'], now)}" if standing["running"] and task["since"] else ""
    trains = task["phase"] == "training" and standing["running"]
    done = f"  {_drawn(task['step'], task['steps'])}" if trains and task["steps"] else ""
    shown = f"round {task['round']}: " if task["round"] and standing["running"] else ""
    yield ViewLine(f"{task['task']}  {shown}{words}{since}{done}", "green" if trains else "bold")
    yield ViewLine(f"  rounds {strip(task['rounds'], max(1, width - 10))}")
    if (decision := task["decision"]) is not None:
        yield ViewLine(f"  answer {decision.get('reason')}")
    sizes = task["bytes"] or {}
    sent, came = (f"{sizes.get(name) or 0:,}" for name in ("up_today", "down_today"))
    waits = f"; {len(task['waiting'])} movement(s) wait for a receipt" if task["waiting"] else ""
    yield ViewLine(
        f"  {task['trained']} trained, {task['skipped']} skipped; today {sent} bytes up, "
        f"{came} down{waits}"
    )
    for each in task["verdicts"][-1:]:
        why = f": {each['reason']}" if each.get("reason") else ""
        yield ViewLine(f"  round {each['round']} {each.get('outcome')}{why}")
    if (error := task["error"]) is not None:
        yield ViewLine(
            f"  {error.get('words')} ({ago(error.get('time'), now)} ago; no round since)", "yellow"
        )


def _bar(
    name: str,
    value: float | None,
    whole: float | None,
    words: str,
    *,
    low: float | None = None,
    high: float | None = None,
) -> ViewLine:
    """Return a bar; `low` is a value, and `high` a share, that is worth a colour."""
    if value is None or not whole:
        return ViewLine(f"{name:<8} {words or 'not known'}")
    share = value / whole
    poor = (low is not None and value < low) or (high is not None and share > high)
    return ViewLine(f"{name:<8} {_drawn(value, whole)} {share:>4.0%}  {words}", _red(poor))


def _drawn(value: float, whole: float) -> str:
    filled = round(BAR * min(1.0, max(0.0, value / whole)))
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


def _cut(text: str, width: int) -> str:
    """Return as much of a text as fits; some characters take two columns."""
    taken = 0
    for number, each in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(each) in "WF" else 1
        if taken > width:
            return text[:number]
    return text


def _red(poor: bool) -> Style:
    return "red" if poor else ""


# -- the terminal --------------------------------------------------------------------------------


@contextmanager
def _screen(colours: bool) -> Iterator[Callable[[list[ViewLine]], None]]:
    """Give a function that shows lines; the terminal is as before afterwards."""
    if not sys.stdout.isatty():
        yield _print
        return
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ModuleNotFoundError:
        sys.stdout.write(CLEAR)
        yield _draw
        sys.stdout.write("\n")
        return
    console = Console(no_color=not colours, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(lines: list[ViewLine]) -> None:
            text = Text("\n", no_wrap=True).join(Text(line.text, line.style) for line in lines)
            live.update(text, refresh=True)

        yield show


def _print(lines: list[ViewLine]) -> None:
    """Write for a file or a pipe."""
    print("\n".join(line.text for line in lines), end="\n\n", flush=True)


def _draw(lines: list[ViewLine]) -> None:
    """Write over what a terminal shows."""
    text = "".join(f"{line.text}{REST}\n" for line in lines)
    sys.stdout.write(f"{HOME}{text}\x1b[J")
    sys.stdout.flush()


@contextmanager
def open_keys() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits, and tells if `q` was pressed meanwhile."""
    try:
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ImportError, OSError, ValueError, termios.error):  # no terminal, or Windows

        def wait(wait_s: float) -> bool:
            time.sleep(wait_s)
            return False

        yield wait
        return

    def pressed(wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left)[0]:
                keys = os.read(keyboard, 64)
                if not keys or keys.lower().startswith(b"q"):
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
