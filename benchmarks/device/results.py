"""`results.json`: costs of levels on one device, as data that others can read and check.

    TesseraError
    └── ResultsError     a file that is not such results; names the file, the key and what to do

Rules:
- `version` changes when a reader would have to. Unknown values are left out; they are never zero.
- Every number has a provenance: `measured` on that machine, `counted` (encoded bytes, the same on
  every machine), or `modelled` from a profile's numbers.
- Seconds are wall-clock seconds, bytes are bytes, joules are those of one round.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.report.figures import Figure, render_json
from edge_sdk import TesseraError
from edge_sdk.program.files import write_whole
from edge_sdk.program.plain import ProfileError, from_plain, to_plain

VERSION = 1
FILE = "results.json"
COMMAND = "device"
MAX_BYTES = 1 << 26

Provenance = Literal["measured", "counted", "modelled"]
BackendName = Literal[
    "onnx",
    "torch",
    "onnx-cuda",
    "onnx-tensorrt",
    "onnx-xnnpack",
    "onnx-nnapi",
    "onnx-coreml",
]
"""onnxruntime on the processor, torch, or onnxruntime with an execution provider."""
Key = tuple[str, float, str, int]


class ResultsError(TesseraError):
    """A file that is not results of `tessera-bench device`; says where, why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread:
    """Seconds measured repeatedly; modelled ones have one value for both."""

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
    """Energy of one round; in modelled results, of its training alone. None: unknown."""

    gross: float | None = None
    """Everything the device drew in that time."""
    net: float | None = None
    """Energy above idle."""
    provenance: Provenance
    source: str
    """Sensor and its reading rate, or the profile and its watts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBytes:
    """Payload of one round in an encoding; `down` None: the model does not use this encoding."""

    encoding: str
    up: int
    down: int | None = None
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialHeat:
    """Temperature of the processor, or else of the hottest place. None: no sensor."""

    start_c: float | None = None
    highest_c: float | None = None
    throttled: bool | None = None
    """True if the processor was slowed down at any moment of the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Prediction of the SDK's cost model for one round, made before measuring."""

    seconds: float
    """Seconds of its training."""
    grown_bytes: float
    joules: float | None = None
    """Joules of its training, above idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One family at one level, on one backend, with a number of threads."""

    family: str
    level: float
    backend: BackendName
    threads: int
    parameters: int
    macs: float
    """Multiply-accumulates of one training step of a whole batch."""
    step_s: TimeSpread
    round_s: TimeSpread
    """Time from the model's chunks on disk to the movement on disk; only the link is left out."""
    train_s: TimeSpread | None = None
    """Time of a round's training alone, as in `Predicted.seconds`. None: not timed."""
    peak_bytes: Amount
    """Peak resident memory of the process."""
    grown_bytes: Amount
    """Part of it above the memory before the first round."""
    joules: Joules | None = None
    bytes: tuple[RoundBytes, ...] = ()
    heat: TrialHeat = field(default_factory=TrialHeat)
    predicted: Predicted | None = None
    repeat_s: tuple[float, ...] = ()
    """Median seconds of a round in each repeat, each in a process of its own; `round_s` has the
    median of these."""
    busy: float | None = None
    """Largest share of the machine's processor time that other programs took meanwhile; None: not
    known."""

    @property
    def key(self) -> Key:
        """Key that identifies the case."""
        return self.family, self.level, self.backend, self.threads

    @property
    def spread(self) -> float | None:
        """Largest distance of a repeat from their median, as a share of it; None: one repeat."""
        if len(self.repeat_s) < 2:
            return None
        middle = self.round_s.median
        return max(abs(each - middle) for each in self.repeat_s) / middle

    @property
    def time_error(self) -> float | None:
        """|predicted ÷ measured − 1| of the training's seconds; None: one of them is missing."""
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
        """Key that identifies the case."""
        return self.family, self.level, self.backend, self.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPoint:
    """A training after this many rounds; all except the accuracy are sums. None: unknown."""

    round: int
    accuracy: float
    seconds: float
    bytes: float
    """Bytes up and down, in fp32."""
    joules: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Learning of a submodel that the device trains alone, at one level."""

    family: str
    level: float
    data: str
    """Name of the data set."""
    provenance: Provenance
    """Provenance of seconds; the accuracy always comes from real training."""
    joules_provenance: Provenance | None = None
    joules_source: str | None = None
    points: tuple[LearningPoint, ...] = ()
    failed: str | None = None
    """Reason for missing points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreClock:
    """Identical cores."""

    cores: int
    max_mhz: float | None = None
    governor: str | None = None
    pinned: bool | None = None
    """True: the lowest allowed clock equals the highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Conditions of the numbers. None: unknown."""

    model: str | None = None
    """Name that the device or its processor gives itself."""
    board: str | None = None
    """Profile whose watts are used where no sensor tells, or which is emulated."""
    system: str
    python: str
    cores: float | None = None
    """Cores usable at once."""
    clocks: tuple[CoreClock, ...] = ()
    memory_bytes: float | None = None
    power_mode: str | None = None
    load: float | None = None
    """Programs running or waiting before the run, mean of a minute."""
    cooling: str | None = None
    fed_by: Literal["mains", "battery"] | None = None
    power_sensor: str | None = None
    sensor_hz: float | None = None
    """Readings per second."""
    idle_w: Amount | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Parameters of a run; it is resumed only with the same."""

    families: tuple[str, ...]
    levels: tuple[float, ...]
    backends: tuple[str, ...]
    threads: tuple[int, ...]
    batch: int
    steps: int
    """Steps of a round."""
    rounds: int
    """Fewest rounds measured in each case."""
    burst_s: float
    """Shortest time measured."""
    data: str
    """Name of the data set of the curves."""
    samples: int | None = None
    """Samples in it, for training and testing; None: unknown."""
    learners: tuple[str, ...] = ()
    """Families that have curves."""
    learn_rounds: int = 0
    """Rounds of each curve."""
    quick: bool = False
    repeats: int = 1
    """Processes that measure each case, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run. Raises `ResultsError` for contradictions."""

    version: int = VERSION
    title: str
    """Name of the device, for people."""
    provenance: Literal["measured", "modelled"]
    started: str
    """ISO 8601, UTC."""
    seconds: float
    """Duration of the run so far."""
    complete: bool
    machine: Machine
    config: Config
    cases: tuple[Case, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        keys = Counter(case.key for case in self.cases)
        keys.update(each.key for each in self.left_out)
        for (family, level, backend, threads), times in keys.items():
            if times > 1:
                raise ResultsError(
                    f"{family} at {level:g} on {backend}, {threads} threads, is there twice"
                )
        for path, number in _leaves(self):
            least, most = _limits(path)
            if not (least <= number <= most and math.isfinite(number)):
                raise ResultsError(f"{path} = {number!r}: must be from {least:g} to {most:g}")
        for index, case in enumerate(self.cases):
            for name in ("step_s", "round_s", "train_s"):
                spread: TimeSpread | None = getattr(case, name)
                if spread is not None and spread.p90 < spread.median:
                    raise ResultsError(f"cases[{index}].{name}: its p90 is below its median")
            for name in ("step_s", "round_s", "train_s", "peak_bytes", "grown_bytes"):
                seen: TimeSpread | Amount | None = getattr(case, name)
                if seen is not None and seen.provenance != self.provenance:
                    raise ResultsError(
                        f"cases[{index}].{name} is {seen.provenance}, in results that are "
                        f"{self.provenance}"
                    )
            joules = case.joules  # may be modelled where all else is measured
            if joules and self.provenance == "modelled" != joules.provenance:
                raise ResultsError(
                    f"cases[{index}].joules are {joules.provenance}, in results that are modelled"
                )

    def case(self, key: Key) -> Case | None:
        """Return the case of this key; None: it was not measured."""
        return next((case for case in self.cases if case.key == key), None)


_LIMITS = {
    "level": (1e-6, 1.0),
    "levels": (1e-6, 1.0),
    "threads": (1.0, 4096.0),
    "batch": (1.0, 1e9),
    "steps": (1.0, 1e9),
    "median": (1e-12, 1e9),
    "accuracy": (0.0, 1.0),
    "start_c": (-100.0, 250.0),
    "highest_c": (-100.0, 250.0),
}
"""Limits by the last name of a path; all other numbers must just not be negative."""


def _limits(path: str) -> tuple[float, float]:
    name = path.rpartition(".")[2].partition("[")[0]
    return _LIMITS.get(name, (0.0, 1e18))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield (path, number) of every number in a dataclass."""
    if is_dataclass(value):
        for each in fields(value):
            inner = f"{path}.{each.name}" if path else each.name
            yield from _leaves(getattr(value, each.name), inner)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def write_results(path: Path, results: Results, figures: Sequence[Figure]) -> None:
    """Replace the file, completely or not at all. Raises `OSError`."""
    text = render_json(figures, {"command": COMMAND, "results": to_plain(results)})
    write_whole(path, text.encode())


def read_results(path: Path) -> Results:
    """Read the results in a file or in the folder of a run. Raises `ResultsError`, which names the
    file and the key.
    """
    path = path / FILE if path.is_dir() else path
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ResultsError(f"{path} has over {MAX_BYTES >> 20} MB, which no results have")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResultsError(f"{path} is not there") from error
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(
            f"{path} is not what `tessera-bench device` writes: give its {FILE} ({error})"
        ) from error
    try:
        return parse_results(content)
    except ResultsError as error:
        raise ResultsError(f"{path}: {error}") from error


def parse_results(content: Any) -> Results:
    """Parse the output of `write_results`. Raises `ResultsError`."""
    if not isinstance(content, dict) or content.get("command") != COMMAND:
        raise ResultsError("is not what `tessera-bench device` writes; give its results.json")
    results = content.get("results")
    # First: another version may have other keys, which cannot be judged here.
    if isinstance(results, dict) and results.get("version", VERSION) != VERSION:
        raise ResultsError(
            f"version is {results['version']!r:.20}, and this program reads version {VERSION}: "
            "use the tessera-fl that wrote it, or measure again"
        )
    try:
        return from_plain(Results, results, "results")
    except ProfileError as error:
        raise ResultsError(str(error)) from error
