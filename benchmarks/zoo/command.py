"""`tessera-bench zoo`: which stock models trace, narrow, compile and train."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import names

RECORD = Path("tessera-zoo.jsonl")
LIMIT_S = 300.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "zoo",
        _measure,
        help="stock models: which trace, narrow, compile and train right",
        description=(
            "Takes the smallest model of each of torchvision's families, sixty of timm's and five "
            "of transformers', with random weights and without fetching anything, and says of "
            "each: does it trace, how much is left of it at half of every width (beside "
            "torch-pruning), does it compile, is a training step right at every level, how long "
            "that took to compute, and why not. A step is right if onnxruntime in float32 is at "
            "most twice as far from torch in float64 as torch in float32 is, and 1e-6. Every model "
            "has a process of its own. Outcomes are added to --record, and a run goes on from "
            "there; --again tries again what older code found. Needs `pip install "
            "'tessera-fl[zoo]'`; --quick does not."
        ),
        example="zoo --models torchvision,bert --limit-s 120",
        quick="six small models of our own, in the manner of stock ones; under a minute",
    )
    parser.add_argument(
        "--models",
        type=names,
        metavar="A,B",
        help="models or sources: own, torchvision, timm, transformers (default: all but own)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help="seconds of computing that a model may take (default %(default)g)",
    )
    parser.add_argument(
        "--limit-min", type=float, metavar="MIN", help="start no further model after so many"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help=f"file of outcomes, to go on from and to add to (default {RECORD}; quick: none)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="also try again models that did not pass, or that older code tried",
    )
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="a page, such as docs/models.md, to update"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.device.report.page import read_page, update_page
    from benchmarks.report.progress import progress
    from benchmarks.zoo import page
    from benchmarks.zoo.names import QUICK, STOCK, find_models
    from benchmarks.zoo.outcome import read_outcomes, write_outcomes
    from benchmarks.zoo.run import try_model
    from coordinator.task.graphs.cache import translator_version

    usual = QUICK if arguments.quick else STOCK
    wanted = find_models(arguments.models) if arguments.models else usual
    if arguments.update:
        read_page(arguments.update, page.BEGIN)
    record = arguments.record or (None if arguments.quick else RECORD)
    found = read_outcomes(record) if record else {}
    code = translator_version()
    todo = [
        key
        for key in wanted
        if key not in found
        or (arguments.again and not (found[key].passed and found[key].code == code))
    ]
    began = time.monotonic()
    with progress("zoo", len(todo)) as begin:
        for key in todo:
            minutes = (time.monotonic() - began) / 60
            if arguments.limit_min is not None and minutes > arguments.limit_min:
                break
            tick = begin(key)
            found[key] = try_model(key, arguments.limit_s, found.get(key))
            if record:
                write_outcomes(record, found.values())
            tick()
    outcomes = {key: found[key] for key in wanted if key in found}
    table = page.render_table(outcomes)
    if arguments.update:
        update_page(arguments.update, table, page.BEGIN)
    return Measured(
        figures=page.zoo_figures(outcomes),
        shown=[table],
        packages=(
            *("torch", "onnxruntime", "onnx", "torchvision", "timm", "transformers"),
            "torch-pruning",
        ),
        config={"models": list(wanted), "limit_s": arguments.limit_s, "code": code},
        data={"models": [each.plain() for each in outcomes.values()]},
    )
