"""Progress of work that takes a while: what is being done, and that it still is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

EVERY_S = 10.0


class ServeProgress:
    """Says what is being done, and every few seconds that it still is. A context manager."""

    def __init__(self, title: str, say: Callable[[str], None], *, every_s: float = EVERY_S) -> None:
        """`title`: the first column of its lines. `say` may be called from another thread."""
        self._title, self._say, self._every_s = title, say, every_s
        self._words = ""
        self._since = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._remind, name="progress", daemon=True)

    def __enter__(self) -> ServeProgress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def now(self, words: str) -> None:
        """Say what is being done from now on."""
        self._words = words
        self._say(f"{self._title:10} {words}")

    def _remind(self) -> None:
        while not self._done.wait(self._every_s):
            if self._words:
                elapsed = time.monotonic() - self._since
                self._say(f"{'':10} … still {self._words} ({elapsed:.0f} s)")
