"""A run whose coordinator and devices are threads of this process, where only bytes count.

The start and the memory of a process are not on the wire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.report.figures import FigureError
from coordinator.operate.config import read_config
from coordinator.operate.serve.serving import serve
from edge_sdk.device.config import load_config
from edge_sdk.device.service.service import DeviceService

RUN_S = 600.0
"""Time after which a run has failed."""
STOP_S = 20.0
POLL_S = 0.05


def run_in_threads(coordinator: Path, devices: Sequence[Path]) -> None:
    """Run these settings to the end. Raises `FigureError` when something failed."""
    stop = threading.Event()
    services = [DeviceService(load_config(path, environment={})) for path in devices]
    works: list[Callable[[], object]] = [
        lambda: serve(read_config(coordinator), stop, lambda _: None),
        *(service.run for service in services),
    ]
    threads = [_Work(work) for work in works]
    with ExitStack() as stack:
        stack.callback(_end, threads)
        for service in services:
            stack.callback(service.stop)
        stack.callback(stop.set)
        for thread in threads:
            thread.start()
        by = time.monotonic() + RUN_S
        while True:
            running = any(thread.is_alive() for thread in threads)  # checked first: none is missed
            failed = next((thread.failure for thread in threads if thread.failure), None)
            if failed is not None:
                raise FigureError(f"a run over the broker failed: {failed}") from failed
            if not running:
                return
            if time.monotonic() >= by:
                raise FigureError(f"a run over the broker did not end within {RUN_S:.0f} s")
            time.sleep(POLL_S)


class _Work(threading.Thread):
    """Does its work; `failure` is the exception it raised, or None."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.failure: Exception | None = None

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            self._work()
        except Exception as error:
            self.failure = error


def _end(threads: Sequence[_Work]) -> None:
    by = time.monotonic() + STOP_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, by - time.monotonic()))
