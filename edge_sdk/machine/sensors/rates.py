"""Rates of counters that only grow."""

from __future__ import annotations

from collections.abc import Callable, Hashable

MIN_S = 0.5
"""Shortest time between two readings; over less, the previous rates are returned."""


class Rates:
    """Growth per second of some counters between two readings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key: Hashable = None
        self._before: tuple[float, tuple[float, ...]] | None = None
        self._rates: tuple[float, ...] | None = None

    def since(self, key: Hashable, *counters: float) -> tuple[float, ...] | None:
        """Return rates since the previous reading; None: there was none.

        `key` identifies what is counted: a new key restarts, as does a counter that went back.
        """
        now = self._clock()
        if self._before is None or key != self._key:
            self._key, self._before, self._rates = key, (now, counters), None
            return None
        then, earlier = self._before
        if now - then >= MIN_S:
            steps = [new - old for new, old in zip(counters, earlier, strict=True)]
            went_back = any(step < 0 for step in steps)
            self._rates = None if went_back else tuple(step / (now - then) for step in steps)
            self._before = (now, counters)
        return self._rates
