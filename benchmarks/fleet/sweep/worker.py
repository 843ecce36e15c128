"""A process of a sweep, which runs one case after the other.

    python -m benchmarks.fleet.sweep.worker

It reads a case from every line of its input and answers with lines of JSON:

    {"row": {…}}      a round that was evaluated; the last one has the state `finished` or `failed`
    {"tick": true}    any round

What is the same in several cases, such as data and compiled graphs, is made once. Ctrl-C is for the
process that started it; SIGTERM ends it in order.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.fleet.config import make_study
from benchmarks.fleet.study import Study, round_row
from benchmarks.fleet.sweep.rows import FAILED, FINISHED, GOING, SweepRow
from coordinator.run.tensorboard import TensorBoardSink
from coordinator.simulate.fleet.simulation import FleetRound
from edge_sdk.program.files import remove_folder
from edge_sdk.protocol.errors import TesseraError


def case_rows(
    settings: Mapping[str, Any],
    base: Path,
    data_dir: Path | None,
    tick: Callable[[FleetRound], object] = lambda _: None,
) -> Iterator[SweepRow]:
    """Run a case and yield a row for every evaluated round.

    The last row says how it ended: `finished`, with the accuracies of all levels in the test, or
    `failed`, with the error. `tick` is called with every round.
    """
    waiting: SweepRow | None = None
    try:
        study = Study(make_study(settings, base=base), data_dir)
        every = study.config.simulation.evaluate_every
        last: FleetRound | None = None
        for number, each in enumerate(study.run(), 1):
            last = each
            tick(each)
            if number % every == 0:
                if waiting is not None:
                    yield {**waiting, "state": GOING}
                waiting = _row(study, each)
        if last is None:
            raise TesseraError("no round was closed")
        if waiting is not None and waiting["round"] != last.report.round:
            yield {**waiting, "state": GOING}
        outcome = study.outcome()
        ending = _row(study, last)
        ending["accuracy"] = outcome.validation.get(1.0)
        tested = {f"test_{100 * level:g}": share for level, share in outcome.test.items()}
        checked = {f"accuracy_{100 * level:g}": it for level, it in outcome.validation.items()}
        yield {**ending, **checked, **tested, "state": FINISHED}
    except Exception as error:  # a case that fails is recorded, and the sweep goes on
        if not isinstance(error, TesseraError):
            logging.getLogger(__name__).exception("a case failed")
        if waiting is not None:
            yield {**waiting, "state": GOING}
        yield {"state": FAILED, "error": f"{type(error).__name__}: {error}"}


def _row(study: Study, each: FleetRound) -> SweepRow:
    return {**study.settings(), **round_row(each)}


def _work(order: Mapping[str, Any], say: Callable[[Mapping[str, Any]], object]) -> None:
    data, board = order["data"], order["tensorboard"]
    with ExitStack() as stack:
        sink = None
        if board is not None:
            remove_folder(Path(board))  # of an attempt that was stopped
            sink = stack.enter_context(TensorBoardSink(Path(board)))

        def tick(each: FleetRound) -> None:
            if sink is not None:
                sink.write(each.report, each.spent)
            say({"tick": True})

        for row in case_rows(
            order["settings"], Path(order["base"]), None if data is None else Path(data), tick
        ):
            say({"row": row})


def _end(*_: object) -> None:
    raise SystemExit(0)


def main() -> None:
    """Work until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    # Whatever a library prints is not an answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def say(said: Mapping[str, Any]) -> None:
            print(json.dumps(said), file=answers, flush=True)

        for line in sys.stdin:
            _work(json.loads(line), say)


if __name__ == "__main__":
    with suppress(SystemExit):
        main()
    os._exit(0)  # everything is closed; taking torch apart would take seconds
