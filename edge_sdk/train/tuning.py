"""Finds the fastest ways to compute a graph's values on this machine (`GraphEntry.places`).

The runtime's own profile tells how long each node takes, and a node's name tells its place. So one
session for each way's name is enough: it takes that way wherever there is one. The fastest way of
every place is taken together with the others only if a whole step then is faster than the default.
A way that the runtime cannot load or run is left alone.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_sdk.protocol.errors import TrainingStopped
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.codec import NO_WAYS
from edge_sdk.protocol.task.graphs import PLACE, GraphEntry, Ways

log = logging.getLogger(__name__)

GAIN = 0.97
"""A way is taken if its time is at most this share of the default's."""
MOST_RUNS = 8
"""Runs of a session that are timed, besides the first."""

_PLACE = re.compile(rf"\b{PLACE}([0-9]+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest ways at one level. `kept`: its atoms per axis."""

    level: float
    kept: tuple[int, ...]
    ways: dict[str, str] = field(default_factory=dict)
    """Ways that are no defaults, by place."""
    places: int = 0
    """Number of places."""
    default_s: float
    """Seconds of a run of the graph in the default ways."""
    step_s: float
    """The same in these ways."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {way}" for way, count in Counter(self.ways.values()).items())
        told = f"{kinds} of {self.places}" if kinds else f"the default for all {self.places}"
        return f"{told}: {self.step_s / self.default_s:.2f} of the default's time"


def ways_at(tuned: Sequence[Tuned], kept: Sequence[int]) -> Ways:
    """Return the ways for these atoms per axis: those of the nearest level that was measured."""

    def distance(each: Tuned) -> float:
        pairs = zip(each.kept, kept, strict=True)
        return sum(abs(math.log(max(1, a) / max(1, b))) for a, b in pairs)

    fitting = [each for each in tuned if len(each.kept) == len(kept)]
    return min(fitting, key=distance).ways if fitting else NO_WAYS


OpenSession = Callable[[Ways, str | None], Any]
"""Opens a session in these ways, profiled to files of a prefix unless that is None."""


def fastest(
    entry: GraphEntry,
    kept: Sequence[int],
    batch: int,
    open_session: OpenSession,
    feeds: Mapping[str, Array],
    refusals: tuple[type[Exception], ...],
    *,
    level: float,
    limit_s: float,
    should_stop: Callable[[], bool],
) -> Tuned | None:
    """Return the fastest ways; None if there is too little time to tell.

    `refusals`: errors of a runtime that cannot load or run something.
    """
    names = dict.fromkeys(way.name for place in entry.places for way in place.options[1:])
    share_s = limit_s / (2 + 3 * len(names))
    ends = time.perf_counter() + limit_s
    measured = _profile(entry, open_session, NO_WAYS, feeds, share_s)
    if measured is None:
        return None
    seconds: dict[tuple[int, str], float] = {}

    def note(ways: Ways, found: Mapping[int, float]) -> None:
        for number, option in enumerate(entry.options(ways, kept, batch)):
            if number in found:
                seconds.setdefault((number, option.name), found[number])

    note(NO_WAYS, measured)
    for name in names:
        if should_stop():
            raise TrainingStopped(0)
        everywhere: Ways = {
            place.name: name
            for place in entry.places
            if place.option(name, kept, batch) is not place.options[0]
        }
        if not everywhere or time.perf_counter() > ends:
            continue
        try:
            found = _profile(entry, open_session, everywhere, feeds, share_s)
        except refusals as error:
            log.debug("%s is not computed by %r: %s", entry, name, error)
            continue
        if found is not None:
            note(everywhere, found)
    chosen: dict[str, dict[str, str]] = defaultdict(dict)
    for number, place in enumerate(entry.places):
        usual = place.options[0].name
        if (number, usual) not in seconds:
            continue  # no node of it was timed
        best = min(
            (option.name for option in place.options if (number, option.name) in seconds),
            key=lambda name: seconds[number, name],
        )
        if best != usual and seconds[number, best] <= GAIN * seconds[number, usual]:
            chosen[best][place.name] = best
    # Not every node's time is told by its place: the runtime moves and joins some. So each kind of
    # way must show its gain in a whole step.
    ways: dict[str, str] = {}
    (default_s,) = _least(open_session, [NO_WAYS], feeds, share_s)
    step_s = default_s
    for more in chosen.values():
        if should_stop():
            raise TrainingStopped(0)
        before_s, after_s = _least(open_session, [ways, ways | more], feeds, share_s)
        if after_s < before_s:
            ways, step_s = ways | more, step_s * after_s / before_s
    return Tuned(
        level=level,
        kept=tuple(kept),
        ways=ways,
        places=len(entry.places),
        default_s=default_s,
        step_s=step_s,
    )


def _profile(
    entry: GraphEntry,
    open_session: OpenSession,
    ways: Ways,
    feeds: Mapping[str, Array],
    share_s: float,
) -> dict[int, float] | None:
    """Return the seconds of each place, by its number; None: there is no time for it."""
    with TemporaryDirectory(prefix="tessera-", ignore_cleanup_errors=True) as folder:
        session = open_session(ways, str(Path(folder) / "times"))
        names = [port.name for port in entry.outputs]
        started = time.perf_counter()
        session.run(names, dict(feeds))
        first_s = time.perf_counter() - started
        runs = min(MOST_RUNS, int(share_s / max(first_s, 1e-6)))
        for _ in range(runs):
            session.run(names, dict(feeds))
        path = session.end_profiling()
        if runs < 1:
            return None
        return _read(Path(path).read_bytes())


def _read(profile: bytes) -> dict[int, float]:
    """Return the least of each node's times but the first, added up by place."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in json.loads(profile):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["name"]].append(event["dur"] / 1e6)
    found: dict[int, float] = defaultdict(float)
    for name, each in times.items():
        if place := _PLACE.search(name):
            found[int(place[1])] += min(each[1:] or each)
    return dict(found)


def _least(
    open_session: OpenSession, each: Sequence[Ways], feeds: Mapping[str, Array], share_s: float
) -> list[float]:
    """Return the seconds of a run in each of these ways, which take turns; the least of a few."""
    sessions = [open_session(ways, None) for ways in each]
    least = [math.inf] * len(sessions)
    ends = time.perf_counter() + share_s
    for turn in range(1 + MOST_RUNS):
        for number, session in enumerate(sessions):
            started = time.perf_counter()
            session.run(None, dict(feeds))
            if turn:
                least[number] = min(least[number], time.perf_counter() - started)
        if turn and time.perf_counter() > ends:
            break
    return least
