"""What `status` and `devices` print: tables for people, good at 80 columns.

Text that came from devices is printed as it is, never as markup, and without characters that could
steer the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.service.overview.rows import printable

WIDE = 132
"""Columns from which on a device takes one line."""
STYLES = {
    "running": "green",
    "training": "green",
    "kept": "green",
    "finished": "green",
    "skipped": "yellow",
    "waiting": "yellow",
    "paused": "yellow",
    "stopping": "yellow",
    "quarantined": "red",
    "barred": "red",
    "offline": "dim",
    "stopped": "dim",
    "failed": "red",
}

Shown = Mapping[str, Any]
Pairs = Iterable[tuple[str, RenderableType | str | None]]


def status_table(status: Shown) -> RenderableType:
    """Return the state of a run, for people."""
    lines: list[tuple[str, RenderableType | str | None]] = [
        ("run", f"{status['task']}  {status['run']}"),
        ("folder", status["folder"]),
        ("state", _state(status["state"], _detail(status))),
        ("paused", _pause_kept(status)),
        ("round", _progress(status)),
        ("waits for", _waits_for(status)),
        ("deadline", None if status["deadline_s"] is None else f"in {_span(status['deadline_s'])}"),
        ("broker", "connected" if status["broker_connected"] else _no_broker(status)),
        ("devices", _fleet(status)),
        ("levels", _counts(status["levels"], lambda level: f"{float(level):.0%}")),
        ("skips", _counts(status["skips"], str)),
        ("accuracy", _accuracy(status)),
        ("delivery", _delivery(status)),
        ("in all", _totals(status["totals"])),
    ]
    if status["started"] is not None:
        lines.append(("served", f"for {_span(status['time'] - status['started'])}"))
    parts: list[RenderableType] = [_pairs(lines)]
    if status["level_reports"]:
        parts += [Text(), _levels(status)]
    return Group(*parts)


def runs_table(found: Iterable[Shown], *, top: Path, width: int) -> RenderableType:
    """Return a line for every run; its folder is the one below `top`.

    Task and folder are never cut short; what a run waits for is shown where there is room.
    """
    wide = width >= WIDE
    names = [("run", "left"), ("folder", "left"), ("state", "left"), ("rounds", "right")]
    names += [("accuracy", "right"), ("devices", "right")]
    table = _table(*names, *((("waits for", "left"),) if wide else ()))
    table.expand = wide
    for column in table.columns[:2]:
        column.no_wrap, column.overflow = False, "fold"
    for status in found:
        present, known = status["devices"]["present"], status["devices"]["known"]
        cells: list[RenderableType] = [
            Text(_plain(status["task"])),
            Text(_plain(_below(status["folder"], top))),
            _state(status["state"]),
            _of(status["committed"], status["rounds"]),
            _percent(status["accuracy"], 2),
            f"{present}/{known}",
        ]
        if wide:
            cells.append(Text(_plain(_waits_for(status) or "")))
        table.add_row(*cells)
    return table


def devices_table(rows: Iterable[Shown], *, now: float, width: int) -> RenderableType:
    """Return the devices: one line each, or two where the terminal is narrow."""
    wide = width >= WIDE
    names = [("device", "left"), ("state", "left"), ("level", "right"), ("battery", "right")]
    names += [("heat", "right"), ("seen", "right")]
    if wide:
        names += [("up", "right"), ("down", "right"), ("time", "right"), ("energy", "right")]
        names += [("share", "right"), ("stale", "right"), ("t/s/l/r", "right")]
    table = _table(*names, ("why", "left"))
    table.columns[-1].ratio = 1
    table.columns[-1].overflow = "fold"
    for row in rows:
        cells: list[RenderableType] = [
            Text(_plain(row["device"]), overflow="ellipsis"),
            _state(row["state"]),
            _percent(row["level"]),
            _battery(row),
            _degrees(row["temperature_c"]),
            _ago(row["last_seen"], now),
        ]
        if wide:
            cells += [
                _size(row["bytes_up"]),
                _size(row["bytes_down"]),
                _spent(row["train_s"]),
                _energy(row["joules"]),
                _percent(row["contribution"]),
                _number(row["staleness"]),
                "/".join(f"{row[name]}" for name in ("trained", "skipped", "late", "rejected")),
            ]
        why = Text(_plain(_why(row)))
        if not wide:
            why.append(f"\n{_facts(row)}", style="dim")
        if row["last_error"]:
            why.append(f"\n{_plain(row['last_error'])}", style="red")
        table.add_row(*cells, why)
    return table


def device_page(device: Shown, *, now: float, rounds: int) -> RenderableType:
    """Return everything that is known of one device, and its last rounds."""
    held = device["quarantined"]
    memory = None
    if device["memory_mb"] is not None:
        memory = f"{_number(device['memory_free_mb'])} of {device['memory_mb']:.0f} MB free"
    budget = device["energy_budget_j"]
    today = None
    if device["energy_today_j"] is not None:
        today = _energy(device["energy_today_j"])
        today += f" of {_energy(budget)}" if budget is not None else " (no limit)"
    lines: list[tuple[str, RenderableType | str | None]] = [
        ("device", device["device"]),
        ("state", _state(device["state"], _why(device))),
        ("last seen", _ago(device["last_seen"], now) or "never"),
        ("last error", device["last_error"]),
        ("quarantine", held and f"since round {held['round']}: {held['reason']}"),
        ("battery", _battery(device)),
        ("heat", _degrees(device["temperature_c"])),
        ("memory", memory),
        ("energy today", today),
        ("trained", f"{_rounds(device['trained'])}, {_spent(device['train_s'])}"),
        ("joules", _energy(device["joules"])),
        ("skipped", f"{device['skipped']}"),
        ("late", f"{device['late']}"),
        ("rejected", f"{device['rejected']}"),
        ("sent", _size(device["bytes_up"])),
        ("fetched", _size(device["bytes_down"])),
        ("contribution", f"{device['contribution']:.1%} of all movements that counted"),
        ("staleness", _stale(device["staleness"])),
        ("samples", _number(device["samples"])),
        ("labels", ", ".join(f"{k}={v}" for k, v in sorted(device["labels"].items()))),
        ("profile", device["profile"]),
        ("version", device["version"]),
    ]
    parts: list[RenderableType] = [_pairs(lines)]
    shown = device["rounds"][-rounds:]
    if shown:
        table = _table(
            ("round", "right"),
            ("level", "right"),
            ("outcome", "left"),
            ("loss", "right"),
            ("time", "right"),
            ("energy", "right"),
            ("up", "right"),
            ("why", "left"),
        )
        table.columns[-1].ratio = 1
        for each in shown:
            table.add_row(
                f"{each['round']}",
                _percent(each["level"]),
                each["outcome"],
                "" if each["loss"] is None else f"{each['loss']:.3g}",
                _spent(each["train_s"]) if each["train_s"] else "",
                _energy(each["joules"]),
                _size(each["bytes_up"]),
                Text(_plain(each["reason"])),
            )
        parts += [Text(), table]
    return Group(*parts)


def show(*what: RenderableType) -> None:
    """Print to standard output."""
    console = Console()
    for each in what:
        console.print(each, markup=False, highlight=False)


# -- cells ---------------------------------------------------------------------------------------


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    for name, side in columns:
        justify: Any = side
        table.add_column(name, justify=justify, no_wrap=name != "why", header_style="bold")
    return table


def _pairs(lines: Pairs) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in lines:
        if value is not None and value != "":
            table.add_row(name, Text(_plain(value)) if isinstance(value, str) else value)
    return table


def _levels(status: Shown) -> Table:
    table = _table(
        ("level", "right"), ("parameters", "right"), ("accuracy", "right"), ("devices", "right")
    )
    table.expand = False
    for each in status["level_reports"]:
        mark = " (deploy)" if each["level"] == status["deploy"] else ""
        table.add_row(
            f"{each['level']:.0%}{mark}",
            f"{each['parameters']:,}",
            _percent(each["accuracy"], 2),
            f"{each['devices']}",
        )
    return table


def _below(folder: str | None, top: Path) -> str:
    """Return the name of a folder below another."""
    if folder is None:
        return ""
    path, above = Path(folder), top.absolute()
    return str(path.relative_to(above)) if path.is_relative_to(above) else folder


def _plain(text: str) -> str:
    return printable(str(text))


def _state(state: str, detail: str = "") -> Text:
    text = Text(state, style=STYLES.get(state, ""))
    if detail:
        text.append(f": {_plain(detail)}", style="none")
    return text


def _detail(status: Shown) -> str:
    if status["state"] == "paused":
        return f"by {status['paused']['by']}"
    if status["state"] == "stopping":
        return "after this round" if status["stopping"] == "round" else "now"
    return status["phase"] if status["phase"] and status["state"] == "running" else ""


def _pause_kept(status: Shown) -> str | None:
    """Say who paused a run whose state is another: it is not served, or will stop."""
    paused = status["paused"]
    if paused is None or status["state"] == "paused":
        return None
    since = datetime.fromtimestamp(paused["time"], timezone.utc)
    words = f"by {paused['by']} since {since:%Y-%m-%d %H:%M} UTC"
    served = status["started"] is not None and status["state"] != "stopped"
    return words if served else f"{words}: the next start waits for resume"


def _why(row: Shown) -> str:
    if row["quarantined"] is not None:
        return f"since round {row['quarantined']['round']}: {row['quarantined']['reason']}"
    if row["state"] == "offline" and row["reason"]:
        return f"last answered: {row['reason']}"
    return row["reason"] or ""


def _facts(row: Shown) -> str:
    parts = [
        f"↑{_size(row['bytes_up'])} ↓{_size(row['bytes_down'])}",
        _spent(row["train_s"]),
        _energy(row["joules"]),
        f"{row['contribution']:.0%} of movements",
        "" if row["staleness"] is None else f"{_rounds(row['staleness'])} stale",
        f"{row['trained']} trained, {row['skipped']} skipped",
        f"{row['late']} late" if row["late"] else "",
        f"{row['rejected']} refused" if row["rejected"] else "",
    ]
    return " · ".join(each for each in parts if each)


def _progress(status: Shown) -> str:
    number, committed, most = status["round"], status["committed"], status["rounds"]
    if status["asynchronous"]:
        return f"{_of(number, most)} ({committed} updates)"
    words = f"{number} ({_of(committed, most)} committed"
    if number > committed + 1 or (most is not None and number > most):
        words += "; void and undone rounds do not count"
    return f"{words})"


def _waits_for(status: Shown) -> str | None:
    words: str | None = status["waits_for"]
    paused = status["state"] == "paused" and words is not None and words.startswith("paused ")
    return f"`resume` ({words})" if paused else words


def _rounds(number: int) -> str:
    return f"{number} round{'s' * (number != 1)}"


def _of(number: int, most: int | None) -> str:
    return f"{number}" if most is None else f"{number} of {most}"


def _no_broker(status: Shown) -> str | None:
    return None if status["state"] in ("starting", "stopped", "finished") else "not connected"


def _fleet(status: Shown) -> str:
    found = status["devices"]
    parts = [f"{found['present']} of {found['known']} here"]
    parts += [
        f"{found[name]} {name}" for name in ("training", "quarantined", "paused") if found[name]
    ]
    return ", ".join(parts)


def _counts(found: Mapping[str, int], words: Any) -> str:
    return ", ".join(f"{number} × {words(name)}" for name, number in found.items())


def _accuracy(status: Shown) -> str | None:
    if status["accuracy"] is None and status["best"] is None:
        return None
    best = status["best"]
    words = f"{_percent(status['accuracy'], 2)} (level 100%)"
    if status["accuracy"] is None:
        words = "not measured"
    if best is not None:
        words += f"; best {best['accuracy']:.2%} (level {best['level']:.0%}, round {best['round']})"
    return words


def _delivery(status: Shown) -> str | None:
    found = status["delivery"]
    if found is None:
        return None
    has = "no model yet" if found["promoted"] is None else f"the model of round {found['promoted']}"
    words = f"devices have {has}"
    if found["round"] is not None:
        since = _span(max(0.0, status["time"] - found["since"]))
        words += (
            f"; that of round {found['round']} is on trial for {since}, "
            f"{found['answers']} of {found['members']} answers"
        )
    return words if found["advice"] is None else f"{words}; {found['advice']}"


def _totals(totals: Shown) -> str:
    parts = [
        _spent(totals["seconds"]),
        _energy(totals["joules"]),
        f"{_size(totals['bytes_up'])} up",
        f"{_size(totals['bytes_down'])} down",
        f"{totals['trained']} trained",
        f"{totals['skipped']} skipped",
        f"{totals['late']} late" if totals["late"] else "",
        f"{totals['rejected']} refused" if totals["rejected"] else "",
    ]
    return ", ".join(each for each in parts if each)


def _battery(row: Shown) -> str:
    if row["battery"] is None:
        return ""
    return f"{row['battery']:.0%}{' +' if row['charging'] else ''}"


def _percent(share: float | None, digits: int = 0) -> str:
    return "" if share is None else f"{share:.{digits}%}"


def _degrees(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}°C"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _stale(value: int | None) -> str:
    return "none of its movements counted yet" if value is None else _rounds(value)


def _energy(joules: float | None) -> str:
    if joules is None:
        return ""
    return f"{joules:.0f} J" if joules < 3600 else f"{joules / 3600:.1f} Wh"


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def _spent(seconds: float) -> str:
    if 0 < seconds < 0.01:
        return "under 0.01 s"
    if 0 < seconds < 10:
        return f"{seconds:.{2 if seconds < 1 else 1}f} s"
    return _span(seconds)


def _ago(then: float | None, now: float | None = None) -> str:
    return "" if then is None else _span(max(0.0, (time.time() if now is None else now) - then))
