"""`tessera-bench learn`: thirty emulated phones learn; accuracy against joules and bytes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, names
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of
from benchmarks.studies.learn.config import DEVICES, QUICK, LearnConfig
from edge_sdk.program.command import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.studies.learn.run import StudyRun
    from benchmarks.studies.learn.setting import Setting
    from benchmarks.studies.learn.study import RuleComparison, SeedSpread, Summary


def add_parser(commands: Any) -> None:
    """Add the command."""
    full = LearnConfig()
    parser = add_command(
        commands,
        "learn",
        _measure,
        help="thirty emulated phones learn: accuracy against joules and bytes, rule by rule",
        description=(
            "A fleet of emulated phones of eight kinds (devices/fleets/phones.toml), in various "
            "states of battery, charger, load and network, learns one model. Every round each "
            "phone decides by itself how much of the model it can afford: all, a part, nothing. "
            "For each rule and seed, accuracy is set against the joules and bytes spent until "
            "then. Training is real; seconds and joules are modelled from the phones' profiles. "
            "With the data of UCI HAR each of its 30 people is a phone that learns from the motion "
            "sensors what its owner does: walking, sitting, lying … Without --data, the digits of "
            f"scikit-learn are dealt unevenly to {DEVICES} phones. A run of one rule and one seed "
            "takes about 40 s; Ctrl-C keeps the runs that are done."
        ),
        example="learn --data ~/data/uci_har --rule ram-fed,fedavg --json learn.json",
        quick=(
            f"only {' and '.join(QUICK.rules)}, {QUICK.rounds} rounds, one seed, "
            "unless told otherwise"
        ),
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=(
            "a directory with UCI HAR (uci_har.npz), MNIST or Fashion-MNIST (idx), CIFAR-10 "
            "(binary) or AG News (CSV) (default: the digits that ship with scikit-learn)"
        ),
    )
    parser.add_argument(
        "--rule",
        type=names,
        metavar="A,B",
        help=f"server rules (default {','.join(full.rules)}; docs/algorithms.md)",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"rounds of every run (default {full.rounds})"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help=f"runs of every rule (default {full.seeds})"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("tessera-learn.png"),
        metavar="FILE",
        help="accuracy against joules and bytes: .png, .svg or .pdf (default %(default)s)",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    import logging

    from rich.console import Console

    from benchmarks.data import load_data
    from benchmarks.report.drawing import check_plot
    from benchmarks.studies.learn.setting import make_setting
    from benchmarks.studies.learn.study import run_study

    config = _config(arguments)
    check_plot(arguments.plot)
    # What a phone gives up is counted; its warnings would tear the progress bar.
    logging.getLogger("edge_sdk").addHandler(logging.NullHandler())

    setting = make_setting(load_data(arguments.data))
    Console().print(_scenario(setting, config), highlight=False, soft_wrap=True)
    runs: list[StudyRun] = []
    try:
        with progress("learn", len(config.cases) * config.rounds) as part:
            for run in run_study(setting, config, part):
                runs.append(run)  # noqa: PERF402 - one by one, so that none is lost
    except KeyboardInterrupt:
        if not runs:
            raise
    return _conclude(arguments.plot, config, setting, runs)


def _config(arguments: argparse.Namespace) -> LearnConfig:
    from coordinator.aggregate.rules import RULES

    base = QUICK if arguments.quick else LearnConfig()
    rules = arguments.rule or base.rules
    if unknown := [name for name in rules if name not in RULES]:
        raise UsageError(f"unknown rule {unknown[0]!r}; choose from {', '.join(RULES)}")
    return LearnConfig(
        rules=rules,
        rounds=base.rounds if arguments.rounds is None else arguments.rounds,
        seeds=base.seeds if arguments.seeds is None else arguments.seeds,
    )


def _scenario(setting: Setting, config: LearnConfig) -> str:
    """Describe the scenario and the meaning of its numbers."""
    from benchmarks.studies.learn.setting import FLEET

    data, fleet = setting.data, setting.fleet
    said = data.name.replace("_", "-") == data.format  # by the folder's name already
    name = data.name if said else f"{data.name} ({data.format})"
    dealt = "one person's each" if data.owners is not None else "dealt unevenly"
    return (
        f"{name}: {len(data.train):,} samples to train, {dealt}, "
        f"{len(data.test):,} to test; model {setting.model}.\n"
        f"{setting.devices} emulated phones of fleet {FLEET}; a step stands for {fleet.work:,.0f} "
        f"of theirs; a round every {fleet.interval_s / 60:g} min from {fleet.starts // 60:02}:"
        f"{fleet.starts % 60:02} on, with {fleet.deadline_s:g} s to train.\n"
        f"Seconds and joules are modelled (docs/devices.md). Rules: {', '.join(config.rules)}; "
        f"seeds: {config.seeds}; rounds: {config.rounds}."
    )


def _conclude(plot: Path, config: LearnConfig, setting: Setting, runs: list[StudyRun]) -> Measured:
    from dataclasses import asdict

    from benchmarks.studies.learn.plot import FEW, save_plot
    from benchmarks.studies.learn.setting import FLEET
    from benchmarks.studies.learn.study import METHOD, compare_runs, learn_figures

    comparison, interrupted = compare_runs(runs), len(runs) < len(config.cases)
    seeds = max(each.seeds for each in comparison.summaries)
    title = (
        f"{setting.data.name}, {setting.model}: {setting.devices} emulated phones, "
        f"{config.rounds} rounds; "
        + ("one seed" if seeds == 1 else f"mean and range of {seeds} seeds")
    )
    save_plot(runs, plot, title)
    few = f"rounds: {config.rounds}, too short to rank rules; give --rounds {FEW} or more"
    kept = f"interrupted: {len(runs)} of {len(config.cases)} runs are done and kept"
    return Measured(
        figures=learn_figures(comparison),
        shown=[
            *_tables(comparison, setting.fleet.work),
            *([few] if config.rounds < FEW else []),
        ],
        closing=[f"plot: {plot}", *([kept] if interrupted else [])],
        packages=("onnxruntime", "numpy", "torch"),
        config=asdict(config),
        data={
            "method": METHOD,
            "data": {
                "name": setting.data.name,
                "format": setting.data.format,
                "train": len(setting.data.train),
                "test": len(setting.data.test),
                "model": setting.model,
            },
            "fleet": {
                "name": FLEET,
                "devices": setting.devices,
                "work": setting.fleet.work,
                "interval_s": setting.fleet.interval_s,
                "deadline_s": setting.fleet.deadline_s,
            },
            "comparison": asdict(comparison),
            "runs": [asdict(run) for run in runs],
        },
        code=EXIT_INTERRUPTED if interrupted else 0,
    )


def _tables(comparison: RuleComparison, work: float) -> list[Table | str]:
    totals = table_of(
        "In all (joules and hours modelled)",
        comparison.summaries,
        ("rule", lambda each: each.rule),
        ("seeds", lambda each: str(each.seeds)),
        ("accuracy %", lambda each: _range(each.accuracy, 100)),
        ("kJ", lambda each: f"{each.joules.mean / 1e3:.1f}"),
        ("MB", lambda each: f"{each.bytes.mean / 1e6:.1f}"),
        ("phone\nhours", lambda each: f"{each.train_s.mean / 3600:.2f}"),
        ("trained\n%", lambda each: f"{100 * each.trained:.0f}"),
        ("level\n%", lambda each: f"{100 * each.level:.0f}"),
        texts=1,
    )
    right = f"until\n{comparison.common_accuracy:.0%} right"
    joules, size = comparison.common_joules / 1e3, comparison.common_bytes / 1e6
    fair = table_of(
        "Side by side",
        comparison.summaries,
        ("rule", lambda each: each.rule),
        (f"kJ {right}", lambda each: _until(each)[0]),
        (f"MB {right}", lambda each: _until(each)[1]),
        (f"accuracy %\nat {joules:.1f} kJ", lambda each: _range(each.accuracy_at_joules, 100)),
        (f"accuracy %\nat {size:.1f} MB", lambda each: _range(each.accuracy_at_bytes, 100)),
        texts=1,
    )
    legend = (
        "phone hours: spent in training, all phones together, who do "
        f"{work:,.0f} steps where one is trained here; trained: share of phones that trained in a "
        "round; level: how much of the model those trained, on average\n"
        "until: spent when that accuracy was first reached on the way, which later rounds may "
        "lose again; it is what all runs reached\n"
        "at: how good with as much spent as the thriftiest run spent in all"
    )
    return [totals, fair, legend]


def _until(summary: Summary) -> tuple[str, str]:
    """Return kJ and MB; dashes where a model was as good before training."""
    joules, size = summary.joules_to_common, summary.bytes_to_common
    if not size.least:
        return "–", "–"
    return _range(joules, 1e-3, 0), _range(size, 1e-6, 0)


def _range(spread: SeedSpread, factor: float, digits: int = 1) -> str:
    """Format the mean, and the smallest and largest values if they differ."""
    middle, least, greatest = (
        f"{factor * each:.{digits}f}" for each in (spread.mean, spread.least, spread.greatest)
    )
    return middle if least == greatest else f"{middle} ({least}–{greatest})"
