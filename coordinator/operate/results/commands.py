"""`tessera-coordinator runs`, `compare` and `report`: what runs cost, and what came out."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from coordinator.errors import ConfigError
from coordinator.operate.results.model import add_commands as add_model_commands

PLOT_FORMATS = (".png", ".pdf", ".svg")
AGAINST = ("rounds", "hours", "joules", "bytes")


def add_commands(commands: Any) -> None:
    """Add the commands about results."""
    add_model_commands(commands)
    runs = commands.add_parser(
        "runs",
        help="list the runs below folders",
        description=(
            "Lists every run in the folders and below them: its task, its state (served, stopped "
            "or finished), rounds, accuracies, size and last change. Runs may be served meanwhile."
        ),
        epilog="example: tessera-coordinator runs /var/lib/tessera-coordinator --json",
    )
    runs.add_argument(
        "folders", type=Path, nargs="*", metavar="FOLDER", help="default: the current folder"
    )
    runs.add_argument("--json", action="store_true", help="as JSON, for scripts")
    runs.set_defaults(run=_runs)
    compare = commands.add_parser(
        "compare",
        help="compare runs: settings that differ, accuracies, and what they cost",
        description=(
            "Prints the settings that differ between runs, their best and last accuracy, their "
            "accuracies at equal rounds, hours, joules and bytes (as many as the cheapest run "
            "needed in all), and what they cost. Accuracies are those of the level to deploy. "
            "Hours are those that rounds took; joules are those that devices measure."
        ),
        epilog=(
            "example: tessera-coordinator compare run-a run-b --plot plot.png --against joules"
        ),
    )
    compare.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    compare.add_argument(
        "--plot", type=Path, metavar="FILE", help="also plot the accuracies (.png, .pdf or .svg)"
    )
    compare.add_argument(
        "--against",
        choices=AGAINST,
        default="rounds",
        help="horizontal axis of the plot (default %(default)s)",
    )
    compare.add_argument("--json", action="store_true", help="as JSON, for scripts")
    compare.set_defaults(run=_compare)
    report = commands.add_parser(
        "report",
        help="write a run as one HTML file to send to a colleague",
        description=(
            "Writes one HTML file that needs nothing else, neither a network nor scripts: curves, "
            "rounds, devices, the model's blocks, energy, settings and versions. It names devices "
            "and quotes their reasons; nothing of their data is in it. It prints well."
        ),
        epilog="example: tessera-coordinator report run --out run.html",
    )
    report.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    report.add_argument("--out", type=Path, metavar="FILE", required=True, help="file to write")
    report.add_argument("--force", action="store_true", help="replace an existing file")
    report.set_defaults(run=_report)


def _runs(arguments: argparse.Namespace) -> int:
    from coordinator.operate.control.showing import find_runs
    from coordinator.operate.results.comparison import lines_of, percent, summary
    from coordinator.operate.results.record import read_record, size_of
    from coordinator.run.errors import RunError

    found, bad = [], []
    tops = arguments.folders or [Path()]
    for folder in (run for top in tops for run in find_runs(top)):
        try:
            record = read_record(folder)
        except RunError as error:
            bad.append({"folder": str(folder), "state": "damaged", "error": str(error)})
            continue
        found.append({**summary(record), "size": size_of(folder), "error": None})
    if arguments.json:
        print(json.dumps([*found, *bad]))
        return 0
    if not found and not bad:
        print("there are no runs here; tessera-coordinator init writes settings for one")
        return 0
    rows = [["run", "task", "state", "rounds", "best", "last", "size", "last change"]]
    for each in found:
        best = None if each["best"] is None else each["best"]["accuracy"]
        rows.append(
            [
                each["folder"],
                each["task"],
                each["state"],
                str(each["rounds"]),
                percent(best),
                percent(each["accuracy"]),
                f"{each['size'] / 1e6:.1f} MB",
                f"{datetime.fromtimestamp(each['changed'], timezone.utc):%Y-%m-%d %H:%M}",
            ]
        )
    rows += [[each["folder"], "–", each["state"], *("–",) * 5] for each in bad]
    print(*lines_of(rows), sep="\n")
    for each in bad:
        print(each["error"])
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from coordinator.operate.results.comparison import (
        compare,
        lines_of,
        save_comparison,
        table,
        unknown_cost,
    )
    from coordinator.operate.results.record import read_record

    plot: Path | None = arguments.plot
    if plot is not None:
        if plot.suffix not in PLOT_FORMATS:
            raise ConfigError(f"--plot must end in one of {', '.join(PLOT_FORMATS)}")
        _check_place(plot, "--plot")
    records = [read_record(each) for each in arguments.folders]
    if arguments.json:
        print(json.dumps(compare(records)))
    else:
        print(*lines_of(table(records)), sep="\n")
    unknown = unknown_cost(records, arguments.against)
    if unknown is not None:
        left = "" if plot is None else "; the plot leaves them out"
        print(f"--against {arguments.against}: {unknown}{left}", file=sys.stderr)
    if plot is not None:
        save_comparison(records, plot, arguments.against)
        if not arguments.json:
            print(f"plot: {plot}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from coordinator.operate.results.page import render_page
    from coordinator.operate.results.record import read_record
    from edge_sdk.program.files import write_whole

    path: Path = arguments.out
    _check_place(path, "--out")
    if path.exists() and not arguments.force:
        raise ConfigError(f"{path} already exists: name another file, or add --force")
    data = render_page(read_record(arguments.folder)).encode()
    write_whole(path, data)
    print(f"{path}: {len(data):,} B")
    return 0


def _check_place(path: Path, option: str) -> None:
    """Raise `ConfigError` for a file that cannot be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: name a file in an existing folder")
