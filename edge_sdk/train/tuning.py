"""Finds the fastest ways to compute a graph's values on this machine (`GraphEntry.places`).

The runtime's own profile tells how long each node takes, and a node's name tells its place. So one
session for each way's name is enough: it takes that way wherever there is one. The fastest way of
every place is taken together with the others only if a whole step then is faster than the default.
A way that the runtime cannot load or run, or that computes something else here, is left alone.

The runtime holds the times of a session in memory until they are written, so a session's runs are
as few as `MOST_EVENTS` allow.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edge_sdk.protocol.errors import NonFiniteError, TrainingStopped
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.codec import NO_WAYS
from edge_sdk.protocol.task.graphs import PLACE, GraphEntry, Ways

log = logging.getLogger(__name__)

GAIN = 0.97
"""A way is taken if its time is at most this share of the default's."""
MOST_RUNS = 8
"""Runs of a session that are timed, besides the first."""
MOST_EVENTS = 6_000
"""Times of nodes that a session may note; a graph with more in two runs is not tuned."""
EVENT_BYTES = 4_096
"""Most bytes of memory for one of them: about 2,600 in onnxruntime 1.23 and 700 in its file."""
PROFILE_BYTES = MOST_EVENTS * EVENT_BYTES
"""Most bytes of memory for the times of a session."""
TOLERANCE = 1e-3
"""Largest accepted difference of a way from the default, relative to the largest gradient. Ten
times what the coordinator's check of graphs accepts: here weights and data are random."""

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
    nodes: Callable[[Ways], int | None],
    level: float,
    limit_s: float,
    should_stop: Callable[[], bool],
) -> Tuned | None:
    """Return the fastest ways; None if there is too little time to tell.

    `refusals`: errors of a runtime that cannot load or run something. `nodes`: number of nodes of
    the graph in some ways; None: unknown, so it is not tuned. Raises `NonFiniteError` if the
    default's outputs are not finite, so that no way can be compared with it.
    """
    names = dict.fromkeys(way.name for place in entry.places for way in place.options[1:])
    share_s = limit_s / (2 + 3 * len(names))
    ends = time.perf_counter() + limit_s
    usual = _profile(entry, open_session, NO_WAYS, feeds, share_s, nodes)
    if usual is None:
        return None
    if not all(np.isfinite(array).all() for array in usual.outputs.values()):
        raise NonFiniteError(f"{entry}: an output is not finite")
    seconds: dict[tuple[int, str], float] = {}

    def note(ways: Ways, found: Mapping[int, float]) -> None:
        for number, option in enumerate(entry.options(ways, kept, batch)):
            if number in found:
                seconds.setdefault((number, option.name), found[number])

    note(NO_WAYS, usual.seconds)
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
            found = _profile(entry, open_session, everywhere, feeds, share_s, nodes)
        except refusals as error:
            log.debug("%s is not computed by %r: %s", entry, name, error)
            continue
        if found is None:
            continue
        if not (off := difference(found.outputs, usual.outputs)) <= TOLERANCE:
            log.warning("%s: %r computes something else here: %.1e off", entry, name, off)
            continue
        note(everywhere, found.seconds)
    del usual
    # Not every node's time is told by its place: the runtime moves and joins some. So each kind of
    # way must show its gain in a whole step.
    ways: dict[str, str] = {}
    (default_s,) = _least(open_session, [NO_WAYS], feeds, share_s)
    step_s = default_s
    for more in _gaining(entry, seconds).values():
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


def difference(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """Largest difference of outputs: gradients relative to the largest gradient, others to
    themselves; infinite if a number is not finite.
    """
    sizes = {name: float(np.abs(array).max(initial=0)) for name, array in wanted.items()}
    largest = max((size for name, size in sizes.items() if name.startswith("g:")), default=0.0)
    worst = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in wanted.items():
            scale = max(largest if name.startswith("g:") else sizes[name], 1e-6)
            off = float(np.abs(got[name] - array).max(initial=0)) / scale
            worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def _gaining(
    entry: GraphEntry, seconds: Mapping[tuple[int, str], float]
) -> dict[str, dict[str, str]]:
    """Return the ways of places that are faster than their defaults, by the ways' names."""
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
    return chosen


@dataclass(frozen=True, slots=True)
class _Profile:
    """A session's times and numbers."""

    seconds: dict[int, float]
    """Seconds of each place, by its number."""
    outputs: dict[str, Array]


def _profile(
    entry: GraphEntry,
    open_session: OpenSession,
    ways: Ways,
    feeds: Mapping[str, Array],
    share_s: float,
    nodes: Callable[[Ways], int | None],
) -> _Profile | None:
    """Run the graph a few times; None: there is no time, or no memory, for that."""
    count = nodes(ways)
    most = 0 if count is None else min(MOST_RUNS, MOST_EVENTS // max(1, count) - 1)
    if most < 1:
        log.debug("%s is not tuned: it would note too many times (%s nodes)", entry, count)
        return None
    with TemporaryDirectory(prefix="tessera-", ignore_cleanup_errors=True) as folder:
        session = open_session(ways, str(Path(folder) / "times"))
        names = [port.name for port in entry.outputs]
        started = time.perf_counter()
        outputs = dict(zip(names, session.run(names, dict(feeds)), strict=True))
        first_s = time.perf_counter() - started
        runs = min(most, int(share_s / max(first_s, 1e-6)))
        for _ in range(runs):
            session.run(names, dict(feeds))
        path = session.end_profiling()
        del session  # it holds all that it wrote
        if runs < 1:
            return None
        with open(path, "rb") as lines:
            return _Profile(_read(lines), outputs)


def _read(lines: Iterable[bytes]) -> dict[int, float]:
    """Return the least of each node's times but the first, added up by place.

    The runtime writes one event a line, between a line that opens the list and one that ends it.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if b"_kernel_time" not in line:
            continue
        event = json.loads(line.rstrip().rstrip(b","))
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
