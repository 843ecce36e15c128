"""`results.json`: what levels cost on one device, as data that others can read and check.

    TesseraError
    └── ResultsError     a file that is not such results; names the file, the key and what to do

Rules:
- `version` changes when a reader would have to. What is unknown is left out; it is never zero.
- Every number says what it is: `measured` on that machine, `counted` (bytes that were encoded; no
  machine changes them), or `modelled` from a profile's numbers.
- Seconds are of the wall clock, bytes are bytes, joules are of one round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.figures import Figure, write_json
from edge_sdk import TesseraError
from edge_sdk.profile.plain import ProfileError, from_plain, to_plain

VERSION = 1
FILE = "results.json"
COMMAND = "device"

Provenance = Literal["measured", "counted", "modelled"]
BackendName = Literal["onnx", "torch"]
Key = tuple[str, float, str, int]


class ResultsError(TesseraError):
    """A file that is not results of `tessera-bench device`; says where, why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds that were measured again and again; modelled ones have one value for both."""

    median: float
    p90: float
    samples: int
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """One number."""

    value: float
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Joules:
    """Energy of one round's training. None: not known."""

    gross: float | None = None
    """All that the device drew meanwhile."""
    net: float | None = None
    """Above what it draws when idle."""
    provenance: Provenance
    source: str
    """Which sensor, how often it was read; or the profile and its watts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Payload of one round in an encoding; `down` None: the model does not travel like this."""

    encoding: str
    up: int
    down: int | None = None
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """How warm the processor was, or else the hottest place. None: no sensor tells."""

    start_c: float | None = None
    highest_c: float | None = None
    throttled: bool | None = None
    """Whether the processor was slowed down at any moment of the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the SDK's cost model said of one round before it was measured."""

    seconds: float
    """Of its training."""
    grown_bytes: float
    joules: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One family at one level, on one backend, with so many threads."""

    family: str
    level: float
    backend: BackendName
    threads: int
    parameters: int
    macs: float
    """Multiply-accumulates of one training step of a whole batch."""
    step_s: Spread
    round_s: Spread
    """From the model's chunks on disk to the movement on disk; only the link is left out."""
    train_s: Spread | None = None
    """Of a round, its training alone: what `Predicted.seconds` is of. None: nobody timed it."""
    peak_bytes: Amount
    """The most the process ever had resident."""
    grown_bytes: Amount
    """Of this, above what it had before its first round."""
    joules: Joules | None = None
    bytes: tuple[Bytes, ...] = ()
    heat: Heat = field(default_factory=Heat)
    predicted: Predicted | None = None

    @property
    def key(self) -> Key:
        """What tells it from other cases."""
        return self.family, self.level, self.backend, self.threads

    @property
    def time_error(self) -> float | None:
        """|predicted ÷ measured − 1| of the training's seconds; None: one of them is not there."""
        if self.predicted is None or self.train_s is None:
            return None
        return abs(self.predicted.seconds / self.train_s.median - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A case that was not measured, and why."""

    family: str
    level: float
    backend: BackendName
    threads: int
    why: str

    @property
    def key(self) -> Key:
        """What tells it from other cases."""
        return self.family, self.level, self.backend, self.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A training after so many rounds; all but the accuracy are sums. None: not known."""

    round: int
    accuracy: float
    seconds: float
    bytes: float
    """Up and down, in fp32."""
    joules: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How a submodel learns that the device trains alone, at one level."""

    family: str
    level: float
    data: str
    """Name of the data set."""
    provenance: Provenance
    """Of seconds and joules; the accuracy is always one of a real training."""
    joules_source: str | None = None
    points: tuple[Point, ...] = ()
    failed: str | None = None
    """Why there are no points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Cores that are alike."""

    cores: int
    max_mhz: float | None = None
    governor: str | None = None
    pinned: bool | None = None
    """True: the lowest allowed clock is the highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the numbers hold for. None: not known."""

    model: str | None = None
    """As the device or its processor calls itself."""
    board: str | None = None
    """The profile whose watts are used where no sensor tells, or which is emulated."""
    system: str
    python: str
    cores: float | None = None
    """Usable at once."""
    clocks: tuple[Clock, ...] = ()
    memory_bytes: float | None = None
    power_mode: str | None = None
    cooling: str | None = None
    fed_by: Literal["mains", "battery"] | None = None
    power_sensor: str | None = None
    sensor_hz: float | None = None
    """How often it was read; at least 10 where there is one."""
    idle_w: Amount | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What was asked for; a run is resumed only with the same."""

    families: tuple[str, ...]
    levels: tuple[float, ...]
    backends: tuple[str, ...]
    threads: tuple[int, ...]
    batch: int
    steps: int
    """Of a round."""
    rounds: int
    """Measured in each case, at least."""
    burst_s: float
    """Measured for at least so long."""
    data: str
    """Name of the data set of the curves."""
    learners: tuple[str, ...] = ()
    """Families that have curves."""
    learn_rounds: int = 0
    """Of each curve."""
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run. Raises `ResultsError` for what contradicts itself."""

    version: int = VERSION
    title: str
    """Of the device, for people."""
    provenance: Literal["measured", "modelled"]
    started: str
    """ISO 8601, UTC."""
    seconds: float
    """That the run took so far."""
    complete: bool
    machine: Machine
    config: Config
    cases: tuple[Case, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        keys = [case.key for case in self.cases] + [each.key for each in self.left_out]
        if twice := [key for key in keys if keys.count(key) > 1]:
            family, level, backend, threads = twice[0]
            raise ResultsError(f"{family} at {level:g} on {backend}, {threads} threads, is twice")
        for path, number, least, most in _numbers(self):
            if not (least <= number <= most and math.isfinite(number)):
                raise ResultsError(f"{path} = {number!r}: must be from {least:g} to {most:g}")
        if self.provenance == "modelled":
            for case in self.cases:
                said = {case.step_s.provenance, case.round_s.provenance, case.peak_bytes.provenance}
                if "measured" in said or (case.joules and case.joules.provenance == "measured"):
                    raise ResultsError(f"{case.key}: modelled results cannot have measured numbers")

    def case(self, key: Key) -> Case | None:
        """The case of this key; None: it was not measured."""
        return next((case for case in self.cases if case.key == key), None)


def _numbers(results: Results) -> Iterator[tuple[str, float, float, float]]:
    """(path, number, least, most) of what has to be in a range."""
    yield "config.batch", results.config.batch, 1, 1e9
    yield "config.steps", results.config.steps, 1, 1e9
    for index, case in enumerate(results.cases):
        where = f"cases[{index}]"
        yield f"{where}.level", case.level, 1e-6, 1
        yield f"{where}.threads", case.threads, 1, 4096
        for name, spread in (("step_s", case.step_s), ("round_s", case.round_s)):
            yield f"{where}.{name}.median", spread.median, 1e-12, 1e9
            yield f"{where}.{name}.p90", spread.p90, spread.median, 1e9
        yield f"{where}.peak_bytes.value", case.peak_bytes.value, 0, 1e15
        yield f"{where}.grown_bytes.value", case.grown_bytes.value, 0, 1e15
        if case.joules is not None:
            for name, joules in (("gross", case.joules.gross), ("net", case.joules.net)):
                if joules is not None:
                    yield f"{where}.joules.{name}", joules, 0, 1e12
        for size in case.bytes:
            yield f"{where}.bytes.up", size.up, 0, 1e15
            yield f"{where}.bytes.down", size.down or 0, 0, 1e15
        if case.predicted is not None:
            yield f"{where}.predicted.seconds", case.predicted.seconds, 0, 1e9
            yield f"{where}.predicted.grown_bytes", case.predicted.grown_bytes, 0, 1e15
    for index, curve in enumerate(results.curves):
        for point in curve.points:
            yield f"curves[{index}].points.accuracy", point.accuracy, 0, 1
            yield f"curves[{index}].points.seconds", point.seconds, 0, 1e12
            yield f"curves[{index}].points.joules", point.joules or 0, 0, 1e15


def write_results(path: Path, results: Results, figures: Sequence[Figure]) -> None:
    """Put the file in the place of an older one, whole or not at all. Raises `OSError`."""
    half = path.with_name(path.name + ".part")
    write_json(half, figures, {"command": COMMAND, "results": to_plain(results)})
    half.replace(path)


def read_results(path: Path) -> Results:
    """Raises `ResultsError`, which names the file and the key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResultsError(f"{path} is not there") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error
    try:
        return parse_results(content)
    except ResultsError as error:
        raise ResultsError(f"{path}: {error}") from error


def parse_results(content: Any) -> Results:
    """The results in what `write_results` writes. Raises `ResultsError`."""
    if not isinstance(content, dict) or content.get("command") != COMMAND:
        raise ResultsError("is not what `tessera-bench device` writes; give its results.json")
    results = content.get("results")
    # First: another version may have other keys, about which nothing true can be said here.
    if isinstance(results, dict) and results.get("version", VERSION) != VERSION:
        raise ResultsError(
            f"version is {results['version']!r:.20}, and this program reads version {VERSION}: "
            "use the tessera-fl that wrote it, or measure again"
        )
    try:
        return from_plain(Results, results, "results")
    except ProfileError as error:
        raise ResultsError(str(error)) from error
