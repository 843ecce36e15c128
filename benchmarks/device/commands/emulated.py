"""`tessera-bench device --emulate`: reports modelled from profiles, and the table of them all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.data import Dataset, load_data
from benchmarks.device.commands.device import ALL, make_config, open_kit, show
from benchmarks.device.kit import kit_digits, read_task
from benchmarks.device.measure import device_figures
from benchmarks.device.modelled import board_threads, model_results
from benchmarks.device.report.folder import begun, keep_report, now
from benchmarks.device.report.page import CONFIG, profiles_table, read_page, update_page
from benchmarks.device.results import Config, Results
from benchmarks.device.trial.fresh import ProcessFailed
from benchmarks.device.trial.learning import learn
from benchmarks.device.trial.machine import named_board
from benchmarks.device.trial.process import Asked
from benchmarks.report.figures import write_json
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from edge_sdk.machine.board import Board, find_board, shipped_boards
from edge_sdk.program.plain import to_plain

if TYPE_CHECKING:
    from rich.console import Console


def emulate(arguments: argparse.Namespace, console: Console) -> int:
    """Model reports from profiles; only the accuracies come from training here."""

    every = arguments.emulate == ALL
    if arguments.update is not None and not every:
        raise UsageError("--update needs --emulate all, which makes the table")
    if every and arguments.title:
        raise UsageError("--title is for one device, not for all")
    if arguments.board is not None:
        raise UsageError("--board is for measuring: --emulate already names the profile")
    if "torch" in (arguments.backends or ()):
        raise UsageError("--backends torch: only onnx is modelled")
    if every and arguments.families is not None:
        raise UsageError("--families is for one device: the table of all has its own models")
    if arguments.resume:
        raise UsageError("--resume is for measuring: modelled results start from scratch")
    if arguments.root != Path("/"):
        raise UsageError("--root is for measuring: no sensor is read for --emulate")
    if arguments.update is not None:
        read_page(arguments.update)
    names = shipped_boards() if every else ()
    boards = [find_board(name) for name in names] or [named_board(arguments.emulate)]
    folder, _ = begun(arguments.out, resume=False)
    arguments.backends = arguments.backends or ("onnx",)
    own_data = None if arguments.data is None else load_data(arguments.data)
    with open_kit(arguments, None) as kit:
        data = kit_digits(kit) if own_data is None else own_data
        config = make_config(arguments, kit, data, (1,))
        if every and not set(CONFIG.families) <= set(config.families):
            raise UsageError(
                f"the table of all needs {' and '.join(CONFIG.families)}: make a kit with them"
            )
        tasks = {family: read_task(kit, family) for family in config.families}
        accuracies = _learn(kit, data, config)
    started = now()
    all_results = []
    for board in boards:
        own = replace(config, threads=arguments.threads or board_threads(board))
        results = model_results(board, tasks, own, started, accuracies=accuracies)
        if not results.cases:
            raise UsageError(f"{board.name}: {results.left_out[0].why}")
        results = replace(results, title=arguments.title or results.title)
        own_folder = folder / board.name if every else folder
        own_folder.mkdir(parents=True, exist_ok=True)
        keep_report(own_folder, results)
        all_results.append(results)
    if every:
        from rich.markdown import Markdown

        table = profiles_table(boards, tasks)
        console.print(Markdown(table))
        if arguments.update:
            update_page(arguments.update, table)
        if arguments.json:
            _write_all(arguments.json, boards, all_results)
        console.print(f"{folder} has a report for each, with plots", soft_wrap=True)
    else:
        show(arguments, folder, all_results[0], console)
    return 0


def _write_all(path: Path, boards: Sequence[Board], all_results: Sequence[Results]) -> None:
    figures = [
        replace(figure, name=f"{board.name}.{figure.name}")
        for board, results in zip(boards, all_results, strict=True)
        for figure in device_figures(results)
    ]
    rows = [to_plain(results) for results in all_results]
    write_json(path, figures, {"command": "device-all", "boards": rows})


def _learn(kit: Path, data: Dataset, config: Config) -> dict[tuple[str, float], list[float]]:
    """Measure the learning of each level, by real training on this machine."""
    pairs = list(product(config.learners, config.levels))
    found = {}
    with progress("learn", len(pairs)) as part:
        for family, level in pairs:
            tick = part(f"{family} {level:.0%}")
            ask = Asked(
                folder=str(kit / family),
                backend="onnx",
                threads=1,
                levels=(level,),
                batch=config.batch,
                steps=config.steps,
                rounds=config.learn_rounds,
            )
            try:
                found[family, level] = learn(kit, family, data, ask)
            except ProcessFailed as error:
                raise UsageError(f"{family} at {level:.0%} does not train here: {error}") from error
            tick()
    return found
