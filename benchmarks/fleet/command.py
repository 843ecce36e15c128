"""`tessera-bench fleet`: simulated fleets, and how fast they are simulated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.fleet.reality import RealityRow
    from benchmarks.fleet.speed import SpeedRow
    from benchmarks.fleet.systems import HeldFleet, SystemsRow
    from benchmarks.fleet.training import TrainingRow

SHOWN = 12
"""Rounds of a study that are printed."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "fleet",
        _run,
        help="simulate a fleet; without one, measure how fast fleets are simulated",
        description=(
            "With --population, simulates a fleet in virtual time and tells hours, joules, bytes "
            "and money (docs/fleets.md). Without it, measures the simulator: a federation on one "
            "thread and a fleet of 1,000 devices in two processes, each beside a bare torch loop "
            "that takes the same steps; device-rounds per second without training; the memory of "
            "100,000 devices. Takes some minutes; --quick under 50 seconds."
        ),
        example="fleet --population night.toml --rounds 100 --participants 50",
        quick="fewer turns, more noise; a study has at most 10 rounds",
    )
    parser.add_argument(
        "--population",
        metavar="FILE",
        help="population (.toml) to simulate, or the name of a fleet such as phones",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of a fleet given by its name"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=50,
        metavar="N",
        help="rounds, or updates of an asynchronous rule (default 50)",
    )
    parser.add_argument(
        "--participants", type=int, metavar="N", help="movements wanted per round (default: all)"
    )
    parser.add_argument(
        "--over-selection",
        type=float,
        default=1.0,
        metavar="F",
        help="factor by which more devices are drawn than are wanted (default 1)",
    )
    parser.add_argument(
        "--quorum",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the wanted movements that closes a round (default 1)",
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for movements (default 600)",
    )
    parser.add_argument("--rule", default="ra-fed", help="server rule (default ra-fed)")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model by name (default: cnn; with --train, the usual one of the data)",
    )
    parser.add_argument("--train", action="store_true", help="really train")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="with --train, a directory with a known data set (default: handwritten digits)",
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that train (default 1)"
    )
    parser.add_argument(
        "--engine",
        choices=("processes", "ray"),
        default="processes",
        help="where --train trains: here, or on a Ray cluster (extra ray; default processes)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDR",
        help="with --engine ray, HOST:PORT of a cluster's head node, or auto (default: start one "
        "here, of so many --processes)",
    )
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write every round for TensorBoard too (extra tensorboard)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the demo's fleet as programs over a broker and simulated, and compare",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default 0)")


def _run(arguments: argparse.Namespace) -> Measured:
    if arguments.check:
        return _check(arguments)
    return _measure(arguments) if arguments.population is None else _study(arguments)


def _check(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.fleet import reality

    config = reality.RealityConfig(rounds=3) if arguments.quick else reality.RealityConfig()
    with progress("fleet", config.ticks) as part:
        rows = reality.measure_reality(config, part)
    return Measured(
        figures=reality.reality_figures(rows),
        shown=[_check_table(rows)],
        packages=("torch", "onnxruntime", "numpy"),
        config=asdict(config),
        data={"rows": [asdict(row) for row in rows]},
    )


def _study(arguments: argparse.Namespace) -> Measured:
    from contextlib import ExitStack

    from benchmarks.fleet.config import make_study
    from benchmarks.fleet.study import Study, round_row
    from benchmarks.report.figures import Figure
    from coordinator.run.tensorboard import TensorBoardSink

    config = make_study(study_settings(arguments))
    study = Study(config, None if arguments.data is None else arguments.data.absolute().parent)
    rows = []
    with ExitStack() as stack:
        board = None
        if arguments.tensorboard is not None:
            board = stack.enter_context(TensorBoardSink(arguments.tensorboard))
        tick = stack.enter_context(progress("fleet", config.reports))("simulating")
        for each in study.run():
            rows.append(round_row(each))
            if board is not None:
                board.write(each.report, each.spent)
            tick()
    last = rows[-1]
    figures = [
        Figure("fleet.study.hours", last["time_s"] / 3600, "h"),
        Figure("fleet.study.joules", last["joules"], "J"),
        Figure("fleet.study.gigabytes", (last["bytes_down"] + last["bytes_up"]) / 1e9, "GB"),
        Figure("fleet.study.money", last["money"], "units"),
    ]
    if last["accuracy"] is not None:
        figures.append(Figure("fleet.study.accuracy", last["accuracy"], "×", better="higher"))
    return Measured(
        figures=figures,
        shown=[_study_table(rows)],
        packages=("torch", "onnxruntime", "numpy"),
        config=study.settings(),
        data={"rounds": rows},
    )


def _check_data(folder: Path) -> None:
    """Raise `UsageError` if a folder is no data set with a usual model."""
    from benchmarks.fleet.config import USUAL_MODELS

    if folder.absolute().name in USUAL_MODELS and folder.is_dir():
        return
    known = [name for name in USUAL_MODELS if (folder / name).is_dir()]
    advice = (
        f"did you mean {folder / known[0]}?"
        if known
        else (
            f"give a folder called {', '.join(name for name in USUAL_MODELS if name != 'digits')}"
        )
    )
    raise UsageError(f"--data {folder} is not a data set: {advice}")


def study_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a study by their keys."""
    from coordinator.aggregate.rules import ASYNC_RULES

    rounds = min(10, arguments.rounds) if arguments.quick else arguments.rounds
    if arguments.data is not None:
        _check_data(arguments.data)
    settings = {
        "data.name": "digits" if arguments.data is None else arguments.data.absolute().name,
        "fleet.population": arguments.population,
        "fleet.devices": arguments.devices,
        "model.name": arguments.model,
        "rule.name": arguments.rule,
        "run.steps": 20,
        "run.learning_rate": 0.05,
        "run.momentum": 0.5,
        "run.seed": arguments.seed,
        "round.train_deadline_s": arguments.deadline_s,
        "simulation.train": arguments.train,
        "simulation.processes": arguments.processes,
        "simulation.engine": arguments.engine,
        "simulation.ray_address": arguments.ray_address,
    }
    if arguments.engine == "ray" and not arguments.train:
        raise UsageError("--engine ray: there is nothing to train without --train")
    if arguments.rule in ASYNC_RULES:
        if arguments.participants or arguments.over_selection != 1 or arguments.quorum != 1:
            raise UsageError(
                "--participants, --over-selection and --quorum are for rounds, and "
                f"{arguments.rule} has none"
            )
        return {**settings, "run.updates": rounds}
    if arguments.rule == "scaffold":
        settings["run.momentum"] = 0.0
    return {
        **settings,
        "run.rounds": rounds,
        "run.widths": "own",
        "round.participants": arguments.participants,
        "round.over_selection": arguments.over_selection,
        "round.quorum": arguments.quorum,
    }


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.fleet import speed, systems, training

    paces, fleets, jobs = speed.SpeedConfig(), systems.SystemsConfig(), training.TrainingConfig()
    if arguments.quick:
        paces = speed.SpeedConfig(turns=3)
        jobs = training.TrainingConfig(turns=3, overhead_turns=3)
    with progress("fleet", paces.ticks + fleets.ticks + jobs.ticks) as part:
        rates, held = systems.measure_systems(fleets, part)
        rows = speed.measure_speed(paces, part)
        trained = training.measure_training(jobs, part)
    figures = [
        *speed.speed_figures(rows),
        *systems.systems_figures(rates, held),
        *training.training_figures(trained),
    ]
    return Measured(
        figures=figures,
        shown=[_speed_table(rows), _systems_table(rates, held), _training_table(trained)],
        packages=("torch", "onnxruntime", "numpy"),
        config={"speed": asdict(paces), "systems": asdict(fleets), "training": asdict(jobs)},
        data={
            "method": speed.METHOD,
            "rows": [asdict(row) for row in rows],
            "systems": [asdict(row) for row in rates],
            "held": asdict(held),
            "training": [asdict(row) for row in trained],
        },
    )


def _study_table(rows: Sequence[dict[str, Any]]) -> Table:
    step = max(1, -(-len(rows) // SHOWN))
    shown = [*rows[step - 1 : -1 : step], rows[-1]]
    return table_of(
        "A simulated fleet; what was spent counts from the beginning",
        shown,
        ("round", lambda row: f"{row['round']}"),
        ("hours", lambda row: f"{row['time_s'] / 3600:.2f}"),
        ("trained", lambda row: f"{row['trained']} of {row['asked']}"),
        ("accuracy", lambda row: "–" if row["accuracy"] is None else f"{row['accuracy']:.1%}"),
        ("kJ", lambda row: f"{row['joules'] / 1e3:,.1f}"),
        ("GB", lambda row: f"{(row['bytes_down'] + row['bytes_up']) / 1e9:,.2f}"),
        ("money", lambda row: f"{row['money']:,.2f}"),
        ("stopped", lambda row: f"{row['stopped']}"),
        ("dropped", lambda row: f"{row['dropped']}"),
    )


def _check_table(rows: Sequence[RealityRow]) -> Table:
    def both(pair: tuple[float, float], shape: str, unit: float = 1.0) -> str:
        return f"{pair[0] / unit:{shape}} | {pair[1] / unit:{shape}}"

    return table_of(
        "A fleet as programs over a broker | simulated; seconds and joules of the boards",
        rows,
        ("round", lambda row: f"{row.round}"),
        ("equal decisions", lambda row: f"{row.alike} of {row.devices}"),
        ("MB up", lambda row: both(row.bytes_up, ".2f", 1e6)),
        ("MB down", lambda row: both(row.bytes_down, ".2f", 1e6)),
        ("training, s", lambda row: both(row.train_s, ".0f")),
        ("joules", lambda row: both(row.joules, ".0f")),
        ("here, s", lambda row: both(row.wall_s, ".1f")),
    )


def _speed_table(rows: Sequence[SpeedRow]) -> Table:
    return table_of(
        "Device-steps per CPU second of a federation, one thread",
        rows,
        ("level", lambda row: f"{row.level:.0%}"),
        ("federation", lambda row: f"{row.steps_per_s:,.0f}"),
        ("bare torch", lambda row: f"{row.bare_steps_per_s:,.0f}"),
        ("ratio", lambda row: f"{row.ratio:.3f}"),
    )


def _systems_table(rows: Sequence[SystemsRow], held: HeldFleet) -> Table:
    return table_of(
        f"Device-rounds per second without training; {held.devices:,} devices took "
        f"{held.kb_per_device:.2f} kB each and {held.start_s:.1f} s to the end of a round",
        rows,
        ("model", lambda row: row.model),
        ("weights", lambda row: f"{row.parameters:,}"),
        ("per second", lambda row: f"{row.per_s:,.0f}"),
        ("per CPU second", lambda row: f"{row.per_cpu_s:,.0f}"),
    )


def _training_table(rows: Sequence[TrainingRow]) -> Table:
    return table_of(
        "Device-steps per second of a fleet in two processes; bare torch has one thread",
        rows,
        ("model", lambda row: row.model),
        ("fleet", lambda row: f"{row.steps_per_s:,.0f}"),
        ("bare torch", lambda row: f"{row.bare_steps_per_s:,.0f}"),
        ("ratio", lambda row: f"{row.ratio:.2f}"),
        ("per CPU second", lambda row: f"{row.cpu_ratio:.2f}"),
        ("overhead, ms", lambda row: f"{row.overhead_ms:.2f}"),
        ("minutes of 100 rounds", lambda row: f"{row.minutes:.1f}"),
    )
