"""`tessera-bench levels`: fleets of mixed levels, beside what one would do instead."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, listed_choices, names

if TYPE_CHECKING:
    from benchmarks.studies.levels.study import Wanted

ONE_SIZE = ("all-full", "all-smallest", "all-median", "only-strong")
QUICK = (*ONE_SIZE, *(f"{name}-momentum" for name in ONE_SIZE), "growing")
CORE = (*QUICK, "dropout-momentum", "dropout", "sandwich", "coverage", "nested")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "levels",
        _measure,
        help="fleets of mixed levels: accuracy of every level, beside what one would do instead",
        description=(
            "Trains one model with devices that can afford different levels of it, in several "
            "ways, and beside them what one would do without levels: everybody trains the "
            "smallest, everybody who can the median, only the strong train everything. All get the "
            "same modelled energy; everybody at full level gets the same rounds. Every way has its "
            "learning rate from a grid, on validation data. Finished runs are added to --record, "
            "and a study goes on from there: stop it with Ctrl-C whenever you like. Parts can run "
            "side by side, with a record each."
        ),
        example="levels --data ~/data --settings har-depthwise-bn --fleets thirds --limit-min 30",
        quick="digits, a fleet of thirds, few ways and one learning rate",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with uci_har/, cifar10/, fashion_mnist/, ag_news/ (docs/benchmark.md)",
    )
    for name, what in (
        ("settings", "data and models"),
        ("fleets", "fleets"),
        ("ways", "ways to train"),
    ):
        parser.add_argument(
            f"--{name}", type=names, metavar="A,B", help=f"{what}; `list` lists all of them"
        )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="seeds of each way (default %(default)s)"
    )
    parser.add_argument(
        "--rates", type=int, metavar="N", help="learning rates to try, at most (default: all)"
    )
    parser.add_argument(
        "--record",
        type=Path,
        action="append",
        metavar="FILE",
        help=(
            "file of finished runs, to go on from and to add to (default tessera-levels.jsonl); "
            "further ones are only read"
        ),
    )
    parser.add_argument(
        "--limit-min",
        type=float,
        metavar="MIN",
        help="start no further run after so many minutes; 0 only shows what is recorded",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="accuracy by level: .png, .svg or .pdf"
    )
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="a page, such as docs/levels.md, to update"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.device.report.page import update_page
    from benchmarks.report.drawing import check_plot
    from benchmarks.report.progress import progress
    from benchmarks.studies.levels import page
    from benchmarks.studies.levels.record import append_outcome, merge_records
    from benchmarks.studies.levels.settings import SETTINGS, data_of
    from benchmarks.studies.levels.study import study_figures
    from benchmarks.studies.levels.trial import run_case

    if listed := listed_choices(arguments, _choices()):
        return Measured(figures=[], shown=listed)
    wanted = _wanted(arguments)
    check_plot(arguments.plot)
    limit_s = float("inf") if arguments.limit_min is None else 60 * arguments.limit_min
    for name in wanted.settings if limit_s else ():
        data_of(SETTINGS[name], arguments.data)
    records = [] if arguments.quick else arguments.record or [Path("tessera-levels.jsonl")]
    done = merge_records([*records[1:], *records[:1]])
    ends = time.monotonic() + limit_s
    with progress("levels", wanted.count()) as begin:
        while time.monotonic() < ends and (case := wanted.next_case(done)) is not None:
            tick = begin(str(case))
            done[case] = run_case(case, arguments.data)
            if records:
                append_outcome(records[0], done[case])
            tick()
    outcomes = list(done.values())
    if arguments.plot and outcomes:
        page.save_levels_plot(outcomes, arguments.plot)
    if arguments.update:
        update_page(arguments.update, page.render_tables(outcomes), page.BEGIN)
    return Measured(
        figures=study_figures(outcomes),
        shown=[page.render_tables(outcomes)],
        packages=("torch", "numpy"),
        config={
            "settings": wanted.settings,
            "fleets": wanted.fleets,
            "ways": wanted.ways,
            "seeds": wanted.seeds,
        },
        data={"runs": [each.plain() for each in outcomes]},
    )


def _choices() -> dict[str, dict[str, Any]]:
    from benchmarks.studies.levels.fleets import FLEETS, WAYS
    from benchmarks.studies.levels.settings import SETTINGS

    return {"settings": SETTINGS, "fleets": FLEETS, "ways": WAYS}


def _wanted(arguments: argparse.Namespace) -> Wanted:
    from benchmarks.studies.levels.fleets import FLEETS
    from benchmarks.studies.levels.settings import SETTINGS
    from benchmarks.studies.levels.study import Wanted

    defaults: dict[str, tuple[str, ...]] = {
        "settings": tuple(name for name, each in SETTINGS.items() if each.folder),
        "fleets": tuple(FLEETS),
        "ways": CORE,
    }
    if arguments.quick:
        defaults = {"settings": ("digits-mlp",), "fleets": ("thirds",), "ways": QUICK}
    chosen = {}
    for what, names_known in _choices().items():
        given = getattr(arguments, what)
        if given and (unknown := [name for name in given if name not in names_known]):
            raise UsageError(f"unknown {unknown[0]!r}; --{what} are {', '.join(names_known)}")
        chosen[what] = given or defaults[what]
    if arguments.seeds < 1 or (arguments.rates is not None and arguments.rates < 1):
        raise UsageError("--seeds and --rates are at least 1")
    needs = arguments.limit_min != 0 and any(SETTINGS[name].folder for name in chosen["settings"])
    if needs and arguments.data is None:
        raise UsageError(
            "these settings need real data: give --data DIR, or try --quick, which needs none"
        )
    rates = 1 if arguments.quick else arguments.rates
    return Wanted(**chosen, seeds=arguments.seeds, rates=rates)
