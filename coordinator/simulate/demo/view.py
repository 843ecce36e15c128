"""The demo's output: a live table, a one-screen summary, a plot, and everything as data."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.rounds.report import RunTerms
from coordinator.simulate.demo.processes import ProcessDemo
from coordinator.simulate.demo.run import Demo, DemoRound
from coordinator.simulate.federation import DeviceRound

AnyDemo = Demo | ProcessDemo

SCHEMA = 4
RECENT_ROUNDS = 8
FRAME_LINES = 8
"""Lines of the live view that are neither a round nor a device."""
WIDE = 110
"""Columns from which on a device's reason has a place beside its numbers in the summary."""
ROUND_COLUMNS = 78
"""Columns of a round without its devices."""


LIVE_COLUMNS = {"battery": 7, "level": 5, "s": 5, "J": 5}
"""Numbers of a device in the live view, and their columns."""


def watch(demo: AnyDemo, console: Console) -> None:
    """Run to the end, showing each round: live on a terminal, otherwise one line per round."""
    with _devices_quiet(), closing(demo.run()) as rounds:
        if not console.is_terminal:
            console.print(_scenario(demo), soft_wrap=True, markup=False, highlight=False)
            for done in rounds:
                for line in (_line(done, demo.config.rounds), *_changes(demo)):
                    console.print(line, soft_wrap=True, markup=False, highlight=False)
            return
        first = Text(f"waiting for the first round of {demo.config.devices} devices …")
        with Live(first, console=console, auto_refresh=False, transient=True) as live:
            for _ in rounds:
                live.update(screen(demo, console.width, console.height), refresh=True)


@contextmanager
def _devices_quiet() -> Iterator[None]:
    """Mute device warnings, which would tear the live table; its last column shows them."""
    logger = logging.getLogger("edge_sdk")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def summarise(
    demo: AnyDemo, console: Console, *, plot: Path | None, full: AnyDemo | None = None
) -> None:
    """Print the result on one screen; `full`: the same run with every device training fully."""
    if not demo.rounds:
        return
    rounds = demo.rounds
    best = max(rounds, key=lambda done: done.accuracy)
    plan = demo.plan
    lines = [
        f"{demo.config.rule} with {demo.config.mask} masks on {demo.config.backend}, "
        f"{len(rounds)} rounds, {demo.config.devices} devices, "
        f"{plan.parameters:,} parameters in {plan.block_count} blocks on {len(plan.axes)} axes",
        f"accuracy        [bold]{rounds[-1].accuracy:.1%}[/] on {demo.test_samples} unseen digits "
        f"(best {best.accuracy:.1%} in round {best.report.round})",
        *_deployed(demo),
        f"coverage_min    {min(r.report.coverage_min for r in rounds)}: the fewest devices that "
        "trained any block in any round",
        f"all rounds      {_terms(demo)} (docs/algorithms.md)",
        f"model sha256    {demo.digest[:16]}…"
        + (" (same seed, same bits)" if demo.repeatable else ""),
    ]
    if plot is not None:
        lines.append(f"plot            {plot}")
    console.print(Panel("\n".join(lines), title="Tessera", title_align="left", expand=False))
    console.print(_scenario(demo), markup=False, highlight=False)
    console.print(_levels(demo))
    console.print(_comparison(demo, full))
    wide = console.width >= WIDE
    console.print(_totals(demo, wide=wide))
    if not wide:
        console.print(_reasons(demo))


def save_plot(demo: AnyDemo, path: Path) -> None:
    """Plot every level's accuracy by round above the fewest devices that trained any block."""
    from matplotlib.figure import Figure

    rounds = [done.report.round for done in demo.rounds]
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, level in enumerate(demo.rounds[-1].report.levels):
        right = [100 * (done.report.levels[number].accuracy or 0.0) for done in demo.rounds]
        best = ", to deploy" if level.level == demo.rounds[-1].report.deploy else ""
        label = f"level {level.level:.0%}{best}"
        top.plot(rounds, right, marker="o", markersize=3, alpha=1 if best else 0.6, label=label)
    top.legend(loc="lower right")
    top.set_ylabel("test accuracy, %")
    top.set_title(
        f"{demo.config.rule} with {demo.config.mask} masks on digits: "
        f"{demo.config.devices} devices of fleet {demo.config.fleet.stem}, seed {demo.config.seed}"
    )
    top.grid(alpha=0.3)
    bottom.step(rounds, [done.report.coverage_min for done in demo.rounds], where="mid")
    bottom.set_ylabel("coverage_min")
    bottom.set_xlabel("round")
    bottom.set_ylim(bottom=0)
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def screen(demo: AnyDemo, width: int, height: int) -> Group:
    """Show the newest rounds and each device's reason, sized to fit the terminal."""
    last = demo.rounds[-1]
    devices = last.report.devices[: max(1, height - FRAME_LINES - 3)]
    why = _why(devices, width, most=height - FRAME_LINES - 1)
    room = height - FRAME_LINES - sum(each.plain.count("\n") + 1 for each in why)
    wide = width >= ROUND_COLUMNS + 5 * len(last.report.devices)
    table = Table(title=f"Round {last.report.round} of {demo.config.rounds}", title_justify="left")
    for heading in ("round", "accuracy", "coverage_min", "energy saved", "bytes saved"):
        table.add_column(heading, justify="right")
    if wide:
        table.add_column("devices")
    for done in demo.rounds[-max(1, min(RECENT_ROUNDS, room)) :]:
        table.add_row(
            str(done.report.round),
            f"{done.accuracy:.1%}",
            str(done.report.coverage_min),
            f"{(done.full_joules - done.joules) / 1e3:.1f} of {done.full_joules / 1e3:.1f} kJ",
            f"{_mega(done.full_bytes - done.bytes_moved)} of {_mega(done.full_bytes)}",
            *([Text(" ").join(_mark(d) for d in done.report.devices)] if wide else []),
        )
    now = Table(box=None, padding=(0, 1, 0, 0))
    now.add_column("device", no_wrap=True)
    for heading, size in LIVE_COLUMNS.items():
        now.add_column(heading, justify="right", no_wrap=True, min_width=size)
    now.add_column("why", no_wrap=True)
    for device, lived, reason in zip(devices, last.lived, why, strict=False):
        now.add_row(
            device.device,
            _percent(lived.percent),
            _mark(device),
            f"{lived.train_s:.0f}",
            "–" if lived.joules is None else f"{lived.joules:.0f}",
            reason,
        )
    return Group(table, now, Text(_scenario(demo), style="dim", no_wrap=True, overflow="ellipsis"))


def _why(devices: Sequence[DeviceRound], width: int, most: int) -> list[Text]:
    """Return the devices' reasons, on several lines if all of them fit into `most` lines."""
    names = max(len(each.device) for each in devices)
    left = max(20, width - names - 2 - sum(size + 1 for size in LIVE_COLUMNS.values()))
    whole = [Text("\n".join(textwrap.wrap(each.reason, left))) for each in devices]
    if sum(each.plain.count("\n") + 1 for each in whole) <= most:
        return whole
    return [_cut(each.reason) for each in devices]


def _scenario(demo: AnyDemo) -> str:
    """Explain the numbers of emulated devices."""
    fleet, start = demo.fleet, demo.fleet.starts
    return (
        f"emulated: {demo.config.devices} devices of fleet {demo.config.fleet.stem}. A step stands "
        f"for {fleet.work:g} of theirs; a round begins every {fleet.interval_s / 60:g} min from "
        f"{start // 60:02}:{start % 60:02} on and has {fleet.deadline_s:g} s. Seconds and joules "
        "are modelled (docs/devices.md)."
    )


def _deployed(demo: AnyDemo) -> list[str]:
    """Name the level to deploy."""
    report = demo.rounds[-1].report
    if report.deploy is None:
        return []
    return [f"deploy          [bold]level {report.deploy:.0%}[/], accuracy {report.best or 0:.1%}"]


def _terms(demo: AnyDemo) -> RunTerms:
    """Return the papers' terms over all rounds."""
    terms = RunTerms()
    for done in demo.rounds:
        terms = terms.after(done.report)
    return terms


def _levels(demo: AnyDemo) -> Table:
    """Show every level as a model: its size, its accuracy, and those who taught it."""
    report = demo.rounds[-1].report
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("level", "parameters", "accuracy", "devices", "data share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for each in report.levels:
        table.add_row(
            f"{each.level:.0%}",
            f"{each.parameters:,}",
            "–" if each.accuracy is None else f"{each.accuracy:.1%}",
            str(each.devices),
            "–" if each.data_share is None else f"{each.data_share:.0%}",
            "[green]deploy[/]" if each.level == report.deploy else "",
        )
    table.caption = "devices and data: those that ever trained a level's least-covered block"
    table.caption_justify = "left"
    return table


def _comparison(demo: AnyDemo, full: AnyDemo | None) -> Table:
    """Compare the costs with those of every device training the whole model."""
    rounds = demo.rounds
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    theirs = "all train everything" if full is not None else "all train everything (modelled)"
    for heading in ("as they decided", theirs, "saved"):
        table.add_column(heading, justify="right")
    accuracy = "not run" if full is None else f"{full.rounds[-1].accuracy:.1%}"
    table.add_row("accuracy", f"{rounds[-1].accuracy:.1%}", accuracy, "")
    other = rounds if full is None else full.rounds
    modelled = full is None
    for name, unit, ours, all_full in (
        (
            "energy of training",
            "{:.1f} kJ",
            sum(done.joules for done in rounds) / 1e3,
            sum(done.full_joules if modelled else done.joules for done in other) / 1e3,
        ),
        (
            "time of training, all devices",
            "{:.2f} h",
            sum(done.train_s for done in rounds) / 3600,
            sum(done.full_train_s if modelled else done.train_s for done in other) / 3600,
        ),
        (
            "bytes moved",
            "{:.1f} MB",
            sum(done.bytes_moved for done in rounds) / 1e6,
            sum(done.full_bytes if modelled else done.bytes_moved for done in other) / 1e6,
        ),
    ):
        table.add_row(
            name, unit.format(ours), unit.format(all_full), f"[green]{_saved(ours, all_full)}[/]"
        )
    if full is not None:
        late, full_late = (_too_late(each) for each in (demo, full))
        table.add_row("too late for the round", f"{late} times", f"{full_late} times", "")
        slow, full_slow = (
            sum(done.slowest_s for done in each.rounds) / len(each.rounds) for each in (demo, full)
        )
        saved = f"[green]{_saved(slow, full_slow)}[/]"
        table.add_row(
            "slowest device of a round, mean", f"{slow:.0f} s", f"{full_slow:.0f} s", saved
        )
    return table


def _too_late(demo: AnyDemo) -> int:
    """Count how often a device would have missed the deadline without emulation."""
    return sum(
        each.train_s + (each.transfer_s or 0.0) > demo.fleet.deadline_s
        for done in demo.rounds
        for each in done.lived
    )


def _reasons(demo: AnyDemo) -> Table:
    """Show each device's last reason, whole."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("device", no_wrap=True)
    table.add_column("last reason")
    last = {each.device: each.reason for each in demo.rounds[-1].report.devices}
    for name in sorted(last):
        table.add_row(name, Text(last[name]))
    return table


def _totals(demo: AnyDemo, *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("device", no_wrap=True)
    for heading in ("levels", "trained", "skipped", "MB", "seconds", "kJ", "battery"):
        table.add_column(heading, justify="right", no_wrap=True)
    if wide:
        table.add_column("last reason")
    for name in sorted({entry.device for entry in demo.rounds[-1].report.devices}):
        history = [
            (entry, lived)
            for done in demo.rounds
            for entry, lived in zip(done.report.devices, done.lived, strict=True)
            if entry.device == name
        ]
        trained = [entry for entry, _ in history if entry.level is not None]
        levels = sorted({entry.level for entry in trained if entry.level is not None})
        joules = [lived.joules for _, lived in history if lived.joules is not None]
        first, last = history[0][1].percent, history[-1][1].percent
        table.add_row(
            name,
            _range(levels),
            str(len(trained)),
            str(len(history) - len(trained)),
            f"{sum(entry.bytes_down + entry.bytes_up for entry, _ in history) / 1e6:.1f}",
            f"{sum(lived.train_s for _, lived in history):.0f}",
            f"{sum(joules) / 1e3:.1f}" if joules else "–",
            "mains" if first is None else f"{_percent(first)} → {_percent(last)}",
            *([_cut(history[-1][0].reason)] if wide else []),
        )
    return table


def _range(levels: list[float]) -> str:
    """Name ascending levels, or the first and the last of many."""
    if len(levels) > 2:
        return f"{levels[0]:.0%} – {levels[-1]:.0%}"
    return ", ".join(f"{level:.0%}" for level in levels) or "–"


def _cut(reason: str) -> Text:
    """Shorten a reason so that it stays on one line beside the other columns."""
    return Text(reason, no_wrap=True, overflow="ellipsis")


def _percent(percent: float | None) -> str:
    return "mains" if percent is None else f"{percent:.0f} %"


def _changes(demo: AnyDemo) -> list[str]:
    """Return a line for each device whose level changed since the last round, with its reason."""
    levels = {}
    if len(demo.rounds) > 1:
        levels = {each.device: each.level for each in demo.rounds[-2].report.devices}
    last, lines = demo.rounds[-1], []
    for device, lived in zip(last.report.devices, last.lived, strict=True):
        if device.device not in levels or levels[device.device] != device.level:
            lines.append(f"    {device.device:<16} {_percent(lived.percent):>6}  {device.reason}")
        levels[device.device] = device.level  # an asynchronous device may appear twice
    return lines


def _saved(spent: float, full: float) -> str:
    return f"{max(0.0, 1 - spent / full):.0%}" if full else "–"


def _line(done: DemoRound, rounds: int) -> str:
    marks = " ".join(_mark(device).plain for device in done.report.devices)
    return (
        f"round {done.report.round:>3}/{rounds}  accuracy {done.accuracy:6.1%}  "
        f"coverage_min {done.report.coverage_min}  "
        f"saved {_saved(done.joules, done.full_joules)} of energy, "
        f"{_saved(done.bytes_moved, done.full_bytes)} of bytes  [{marks}]"
    )


def _mark(device: DeviceRound) -> Text:
    if device.level is None:
        return Text("skip", style="yellow")
    return Text(f"{device.level:>4.0%}", style="green" if device.level == 1 else "cyan")


def _mega(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


# -- as data --------------------------------------------------------------------------------------


def as_json(demo: AnyDemo) -> dict[str, Any]:
    """Return the whole run as plain data. `rounds` depends only on config and versions."""
    config, plan, rounds = demo.config, demo.plan, demo.rounds
    widths = {} if config.widths == "own" else {"widths": config.widths}
    return {
        "schema": SCHEMA,
        "seed": config.seed,
        "rule": config.rule,
        "rule_options": dict(config.rule_options),
        "mask": config.mask,
        "mask_options": dict(config.mask_options),
        "robust": config.robust,
        "robust_options": dict(config.robust_options),
        "local": {**widths, **config.local},
        "grow": config.grow,
        "preset": config.preset,
        "encoding_up": str(config.up),
        "encoding_down": str(config.down),
        "backend": config.backend,
        "fleet": config.fleet.stem,
        "work": demo.fleet.work,
        "weigh": config.weigh,
        "plan_hash": plan.hash,
        "parameters": plan.parameters,
        "terms": asdict(_terms(demo)),
        "rounds": [_round_json(done) for done in rounds],
        "model_sha256": demo.digest,
        "bytes": sum(done.bytes_moved for done in rounds),
        "bytes_full_training": sum(done.full_bytes for done in rounds),
        "joules": sum(done.joules for done in rounds),
        "train_s": sum(done.train_s for done in rounds),
        "slowest_s": sum(done.slowest_s for done in rounds),
        "timings": {
            "torch": version("torch"),
            "wall_s": [round(done.report.seconds, 6) for done in rounds],
        },
    }


def _round_json(done: DemoRound) -> dict[str, Any]:
    return {
        "round": done.report.round,
        "accuracy": done.accuracy,
        "levels": [asdict(level) for level in done.report.levels],
        "deploy": done.report.deploy,
        "coverage_min": done.report.coverage_min,
        "coverage_mean": done.report.coverage_mean,
        "trained_coverage_min": done.report.trained_coverage_min,
        "trained_blocks": done.report.trained_blocks,
        "trained_regions": done.report.trained_regions,
        "outdated": done.report.outdated,
        "thin_share": done.report.thin_share,
        "oldest_uncovered": done.report.oldest_uncovered,
        "gap_bound": done.report.gap_bound,
        "oldest_memory": done.report.oldest_memory,
        "memory_trust": done.report.memory_trust,
        "memory_trust_alone": done.report.memory_trust_alone,
        "memory_ratio": done.report.memory_ratio,
        "compression_noise": done.report.compression_noise,
        "skip_share": done.report.skip_share,
        "longest_skip": done.report.longest_skip,
        "devices": [
            {
                "device": device.device,
                "skip": device.level is None,
                "level": device.level,
                "reason": device.reason,
                "loss": device.loss,
                "parameters": device.parameters,
                "bytes_down": device.bytes_down,
                "bytes_up": device.bytes_up,
                "reduction_noise": device.reduction_noise,
                "replayed": device.replayed,
                "battery_percent": lived.percent,
                "train_s": lived.train_s,
                "joules": lived.joules,
            }
            for device, lived in zip(done.report.devices, done.lived, strict=True)
        ],
    }
