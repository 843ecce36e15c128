"""`tessera-bench load`: the number of devices one coordinator and one broker can hold."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.network.load.held import HeldRow
    from benchmarks.network.load.recovery import RecoveryRow


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "load",
        _measure,
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
        example="load --devices 200 --json load.json",
        quick="fewer devices, fewer rounds",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of devices (500; with --quick, 60)"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.network.stage.processes import MEASURABLE
    from coordinator.service.admission.limits import MAX_DEVICES

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

    held = rows.held
    summary = (
        f"{held.held} of {held.devices} devices held, all there after {held.joined_s:.1f} s; "
        f"{held.rounds} rounds of {held.round_s:.2f} s, the longest {held.longest_round_s:.2f} s"
    )
    return Measured(
        figures=list(measure.load_figures(rows)),
        shown=[summary, _held_table(held), _recovery_table(rows.recovery)],
        packages=("onnxruntime", "numpy", "paho-mqtt"),
        config=asdict(config),
        data={"method": measure.METHOD, **asdict(rows)},
    )


def _held_table(row: HeldRow) -> Table:
    taken = (
        *(
            (name, each.cpu_s, each.rss_mb, f"{each.kb_per_device:.1f}")
            for name, each in (("coordinator", row.coordinator), ("broker", row.broker))
        ),
        ("devices", row.devices_cpu_s, row.devices_mb, "–"),
    )
    return table_of(
        f"{row.participants} of {row.devices} devices train in a round",
        taken,
        ("", lambda each: each[0]),
        ("CPU s\na round", lambda each: f"{each[1]:.2f}"),
        ("CPU ms a round\nand device", lambda each: f"{each[1] * 1e3 / row.devices:.2f}"),
        ("RSS\nMB", lambda each: f"{each[2]:.1f}"),
        ("kB more for\neach device", lambda each: each[3]),
        texts=1,
    )


def _recovery_table(row: RecoveryRow) -> Table:
    return table_of(
        "Seconds from the broker's return",
        [row],
        ("devices", lambda row: str(row.devices)),
        ("away\ns", lambda row: f"{row.away_s:.0f}"),
        ("half are\nthere", lambda row: f"{row.half_s:.2f}"),
        ("all are\nthere", lambda row: f"{row.all_s:.2f}"),
        ("a round\nis over", lambda row: f"{row.round_s:.2f}"),
    )
