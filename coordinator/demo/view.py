"""What a person sees of the demo: a live table, a summary of one screen, and a plot."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.demo.run import AnyDemo, DemoRound
from coordinator.federation import DeviceRound

RECENT_ROUNDS = 8
FRAME_LINES = 7
"""Lines of the live view that are neither a round nor a device."""
ROUND_COLUMNS = 74
"""Columns a round takes without its devices."""


def watch(demo: AnyDemo, console: Console) -> None:
    """Run to the end, showing each round: live on a terminal, a line a round elsewhere."""
    with closing(demo.run()) as rounds:
        if not console.is_terminal:
            for done in rounds:
                line = _line(done, demo.config.rounds)
                console.print(line, soft_wrap=True, markup=False, highlight=False)
            return
        first = Text(f"waiting for the first round of {demo.config.devices} devices …")
        with Live(first, console=console, auto_refresh=False, transient=True) as live:
            for _ in rounds:
                live.update(_screen(demo, console.width, console.height), refresh=True)


def summarise(demo: AnyDemo, console: Console, *, plot: Path | None) -> None:
    """The outcome on one screen."""
    if not demo.rounds:
        return
    rounds = demo.rounds
    moved, full = sum(r.bytes_moved for r in rounds), sum(r.full_bytes for r in rounds)
    spent, full_s = sum(r.train_s for r in rounds), sum(r.full_train_s for r in rounds)
    best = max(rounds, key=lambda done: done.accuracy)
    plan = demo.plan
    lines = [
        f"{demo.config.rule} with {demo.config.mask} masks on {demo.config.backend}, "
        f"{len(rounds)} rounds, {demo.config.devices} devices, "
        f"{plan.parameters:,} parameters in {plan.block_count} blocks on {len(plan.axes)} axes",
        f"accuracy        [bold]{rounds[-1].accuracy:.1%}[/] on {demo.test_samples} unseen digits "
        f"(best {best.accuracy:.1%} in round {best.report.round})",
        f"bytes moved     {_mega(moved)} instead of {_mega(full)}: "
        f"[green]{_saved(moved, full)} saved[/]",
        _training_time(spent, full_s),
        f"coverage_min    {min(r.report.coverage_min for r in rounds)}: the fewest devices that "
        "trained any block in any round",
        f"model sha256    {demo.digest[:16]}…"
        + (" (same seed, same bits)" if demo.repeatable else ""),
    ]
    if plot is not None:
        lines.append(f"plot            {plot}")
    console.print(Panel("\n".join(lines), title="Tessera", title_align="left", expand=False))
    console.print(_totals(demo))


def save_plot(demo: AnyDemo, path: Path) -> None:
    """Accuracy by round, with the fewest devices that trained any block below it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rounds = [done.report.round for done in demo.rounds]
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained"
    )
    top.plot(rounds, [100 * done.accuracy for done in demo.rounds], marker="o", markersize=3)
    top.set_ylabel("test accuracy, %")
    top.set_title(
        f"{demo.config.rule} with {demo.config.mask} masks on digits: "
        f"{demo.config.devices} devices of different levels, seed {demo.config.seed}"
    )
    top.grid(alpha=0.3)
    bottom.step(rounds, [done.report.coverage_min for done in demo.rounds], where="mid")
    bottom.set_ylabel("coverage_min")
    bottom.set_xlabel("round")
    bottom.set_ylim(bottom=0)
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _screen(demo: AnyDemo, width: int, height: int) -> Group:
    """The newest rounds, and why each device did what it did; both fit the terminal."""
    last = demo.rounds[-1]
    devices = last.report.devices[: max(1, height - FRAME_LINES - 3)]
    room = height - FRAME_LINES - len(devices)
    wide = width >= ROUND_COLUMNS + 5 * len(last.report.devices)
    table = Table(title=f"Round {last.report.round} of {demo.config.rounds}", title_justify="left")
    for heading in ("round", "accuracy", "coverage_min", "seconds saved", "bytes saved"):
        table.add_column(heading, justify="right")
    if wide:
        table.add_column("devices")
    for done in demo.rounds[-max(1, min(RECENT_ROUNDS, room)) :]:
        table.add_row(
            str(done.report.round),
            f"{done.accuracy:.1%}",
            str(done.report.coverage_min),
            f"{done.full_train_s - done.train_s:.2f} of {done.full_train_s:.2f}",
            f"{_mega(done.full_bytes - done.bytes_moved)} of {_mega(done.full_bytes)}",
            *([Text(" ").join(_mark(d) for d in done.report.devices)] if wide else []),
        )
    now = Table(box=None, padding=(0, 2, 0, 0))
    now.add_column("device")
    now.add_column("this round")
    now.add_column("why")
    for device in devices:
        now.add_row(device.device, _mark(device), device.reason)
    return Group(table, now)


def _totals(demo: AnyDemo) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("device")
    for heading in ("level", "trained", "skipped", "MB moved", "seconds"):
        table.add_column(heading, justify="right")
    for device in demo.rounds[-1].report.devices:
        history = [
            entry
            for done in demo.rounds
            for entry in done.report.devices
            if entry.device == device.device
        ]
        trained = [entry for entry in history if entry.level is not None]
        levels = sorted({entry.level for entry in trained if entry.level is not None})
        table.add_row(
            device.device,
            ", ".join(f"{level:.0%}" for level in levels) or "–",
            str(len(trained)),
            str(len(history) - len(trained)),
            f"{sum(entry.bytes_down + entry.bytes_up for entry in history) / 1e6:.1f}",
            f"{sum(entry.train_s for entry in history):.2f}",
        )
    return table


def _training_time(spent_s: float, full_s: float) -> str:
    if full_s == 0:
        return f"training time   {spent_s:.1f} s (no device trained the full model to compare with)"
    return (
        f"training time   {spent_s:.1f} s instead of {full_s:.1f} s: "
        f"[green]{_saved(spent_s, full_s)} saved[/]"
        " (full: as long as full-model devices took in the same round)"
    )


def _saved(spent: float, full: float) -> str:
    return f"{max(0.0, 1 - spent / full):.0%}"


def _line(done: DemoRound, rounds: int) -> str:
    marks = " ".join(_mark(device).plain for device in done.report.devices)
    saved = _saved(done.bytes_moved, done.full_bytes)
    seconds = max(0.0, done.full_train_s - done.train_s)
    return (
        f"round {done.report.round:>3}/{rounds}  accuracy {done.accuracy:6.1%}  "
        f"coverage_min {done.report.coverage_min}  "
        f"saved {seconds:.2f} s, {saved} of bytes  [{marks}]"
    )


def _mark(device: DeviceRound) -> Text:
    if device.level is None:
        return Text("skip", style="yellow")
    return Text(f"{device.level:>4.0%}", style="green" if device.level == 1 else "cyan")


def _mega(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
