"""Runs cells one after the other, in this process or in several, and beside other work.

Every finished run is handed over at once, so that Ctrl-C loses only what is under way.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from benchmarks.studies.papers.cell import CellOutcome, PaperCell
from benchmarks.studies.papers.tables import find_table

NICE = 10
"""Processes that run cells yield to others by this much."""
CellWork = tuple[str, PaperCell, int]
"""Name of the table, the cell and the seed."""


def run_one(work: CellWork, data: Path | None) -> CellOutcome:
    """Run a cell with a seed."""
    name, cell, seed = work
    started = time.process_time()
    with _quiet("edge_sdk.device", "coordinator"):  # who cannot train says so in every round
        ran = find_table(name).run(cell, seed, data)
    return CellOutcome(
        table=name,
        place=cell.place,
        seed=seed,
        settings=cell.settings,
        values=ran.values,
        curve=ran.curve,
        more=ran.more,
        seconds=round(time.process_time() - started, 2),
    )


def run_all(
    works: Sequence[CellWork],
    data: Path | None,
    jobs: int,
    begin: Callable[[CellWork], object] = lambda _: None,
    *,
    ends_s: float = float("inf"),
) -> Iterator[CellOutcome]:
    """Yield every run as it finishes; `begin` is told what starts.

    No run is begun after `ends_s` of the monotonic clock. With more than one job, a cell's own
    threads are one.
    """
    if jobs == 1:
        for work in works:
            if time.monotonic() >= ends_s:
                return
            begin(work)
            yield run_one(work, data)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are started now
    waiting = list(works)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_settle) as pool:
        running: set[Future[CellOutcome]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < jobs and time.monotonic() < ends_s:
                    begin(waiting[0])
                    running.add(pool.submit(run_one, waiting.pop(0), data))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    yield each.result()
        except BaseException:
            # Runs that are under way are given up, or Ctrl-C would take minutes.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Let loggers tell errors alone for a while."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _settle() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
