"""Engines of one machine: this process alone, or several that share memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager

from coordinator.errors import ConfigError
from coordinator.simulate.fleet.engines.engine import Submit, TrainingEngine, TrainingKit
from coordinator.simulate.fleet.hands import Cohort, CohortResult, Hands, Tools, begin, work
from coordinator.simulate.fleet.shared import SharedData


def local_engine(processes: int) -> TrainingEngine:
    """Return an engine of so many processes; one is this process. Raises `ConfigError`."""
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, not {processes}")
    return AloneEngine() if processes == 1 else ProcessEngine(processes)


class AloneEngine:
    """Trains a cohort in this process as soon as it comes."""

    trays = False

    @contextmanager
    def started(self, kit: TrainingKit) -> Iterator[Submit]:
        """See `TrainingEngine`."""
        from edge_sdk.train.onnx import OnnxBackend

        backend = OnnxBackend(kit.plan, kit.manifest, kit.files)
        hands = Hands(kit.plan, backend, kit.dealt, kit.seed)

        def done(cohort: Cohort) -> Future[CohortResult]:
            future: Future[CohortResult] = Future()
            future.set_result(CohortResult(hands.work(cohort)))
            return future

        yield done


class ProcessEngine:
    """Trains cohorts in processes that it starts."""

    trays = True

    def __init__(self, processes: int) -> None:
        self._processes = processes

    @contextmanager
    def started(self, kit: TrainingKit) -> Iterator[Submit]:
        """See `TrainingEngine`."""
        shared = SharedData(kit.dealt)
        tools = Tools(kit.plan.encoded, kit.manifest, dict(kit.files), shared.places, kit.seed)
        try:
            pool = ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=begin,
                initargs=(tools,),
            )
            try:
                yield lambda cohort: pool.submit(work, cohort)
            finally:
                pool.shutdown(cancel_futures=True)
        finally:
            shared.close()
