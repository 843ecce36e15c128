"""`tessera-bench load`: how many devices one coordinator and one broker hold."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from benchmarks.report.options import UsageError, add_common, check_writable
from benchmarks.report.progress import progress
from benchmarks.report.tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.network.load.held import HeldRow
    from benchmarks.network.load.recovery import RecoveryRow


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "load",
        help="devices held by one coordinator and one broker",
        description=(
            "Runs a coordinator and a Mosquitto as programs and lets 500 devices take part, 20 % "
            "of them in each round, each with both of its connections, a small model, and a "
            "folder of its own: CPU and memory of coordinator and broker, seconds of a round. Then "
            "restarts the broker under 100 devices: seconds until they are all back, and until a "
            "round is over. The devices share a few processes, with four threads and about 1 MB "
            "for each. Needs Linux and mosquitto; folders are made where temporary files are "
            "(TMPDIR) and deleted. Takes a few minutes; --quick, with 60 and 30 devices, under one."
        ),
        epilog="example: tessera-bench load --devices 200 --json load.json",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="that take part (500; with --quick, 60)"
    )
    add_common(parser, "fewer devices, fewer rounds")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks.network.stage.processes import MEASURABLE
    from benchmarks.report.figures import environment, print_figures, write_json
    from coordinator.service.admission.limits import MAX_DEVICES

    check_writable(arguments.json)
    number = arguments.devices
    if number is not None and not 1 <= number <= MAX_DEVICES:
        raise UsageError(f"--devices {number}: from 1 to {MAX_DEVICES}")
    if not MEASURABLE:
        raise UsageError("CPU and memory of programs are read from /proc, which is not here")

    from benchmarks.network.load import measure

    config = measure.QUICK if arguments.quick else measure.FULL
    if number is not None:
        config = config.with_devices(number)
    with progress("load", config.ticks) as part:
        rows = measure.measure_load(config, part)

    figures = list(measure.load_figures(rows))
    console = Console()
    held = rows.held
    console.print(
        f"{held.held} of {held.devices} devices held, all there after {held.joined_s:.1f} s; "
        f"{held.rounds} rounds of {held.round_s:.2f} s, the longest {held.longest_round_s:.2f} s",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_held_table(held))
    console.print(_recovery_table(rows.recovery))
    print_figures(figures, console)
    if arguments.json:
        data = {
            "command": "load",
            "environment": environment("onnxruntime", "numpy", "paho-mqtt", "tessera-fl"),
            "config": {**asdict(config), "quick": arguments.quick},
            "method": measure.METHOD,
            **asdict(rows),
        }
        write_json(arguments.json, figures, data)
    return 0


def _held_table(row: HeldRow) -> Table:
    table = make_table(
        f"{row.participants} of {row.devices} devices train in a round",
        *(
            "",
            "CPU s\na round",
            "CPU ms a round\nand device",
            "RSS\nMB",
            "kB more for\neach device",
        ),
    )
    table.columns[0].justify = "left"
    for name, taken in (("coordinator", row.coordinator), ("broker", row.broker)):
        table.add_row(
            name,
            f"{taken.cpu_s:.2f}",
            f"{taken.cpu_s * 1e3 / row.devices:.2f}",
            f"{taken.rss_mb:.1f}",
            f"{taken.kb_per_device:.1f}",
        )
    table.add_row(
        "devices",
        f"{row.devices_cpu_s:.2f}",
        f"{row.devices_cpu_s * 1e3 / row.devices:.2f}",
        f"{row.devices_mb:.1f}",
        "–",
    )
    return table


def _recovery_table(row: RecoveryRow) -> Table:
    table = make_table(
        "Seconds from the broker's return",
        *("devices", "away\ns", "half are\nthere", "all are\nthere", "a round\nis over"),
    )
    table.add_row(
        str(row.devices),
        f"{row.away_s:.0f}",
        f"{row.half_s:.2f}",
        f"{row.all_s:.2f}",
        f"{row.round_s:.2f}",
    )
    return table
