"""The largest memory of a program over some time."""

from __future__ import annotations

import threading
from contextlib import suppress

from benchmarks.network.stage.processes import anonymous_bytes
from benchmarks.report.figures import FigureError
from edge_sdk.program.processes import ChildProcess

SAMPLE_S = 0.01


class Peak:
    """Records a program's peak anonymous memory for the duration of the context."""

    def __init__(self, program: ChildProcess) -> None:
        self.most_bytes = 0
        self._pid = program.pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        with suppress(FigureError):  # it has ended; whoever waits for it will notice
            over = False
            while not over:
                self.most_bytes = max(self.most_bytes, anonymous_bytes(self._pid))
                over = self._over.wait(SAMPLE_S)
