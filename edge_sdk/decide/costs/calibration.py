"""Calibrates a device: a few timed training steps, kept on disk.

    <state_dir>/<task>/<device>/costs.json     `KeptCosts`: machine, calibration, what rounds
                                               taught, the fastest ways to compute

A calibration holds for one machine (`MachineKey`): it is repeated when versions, plan, provider,
number of threads or power mode change. An unreadable file is logged and treated as missing.

The steps are real ones of the device's backend, on random weights and random data of the task's
shape: they need none of the owner's data, and nothing is sent.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from math import prod, sqrt
from pathlib import Path
from statistics import median
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.costs.model import Calibration, Learned, Sample, memory_bound
from edge_sdk.decide.costs.work import Work, batch_bytes, largest_groups, work_at
from edge_sdk.machine.energy import EnergyMeter, Watts, idle_watts
from edge_sdk.machine.resident import forget_peak, peak_resident_bytes, resident_bytes
from edge_sdk.machine.snapshot import Snapshot
from edge_sdk.program.files import write_whole
from edge_sdk.program.logs import fact
from edge_sdk.program.plain import ProfileError, from_plain, to_plain
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import GraphError, NonFiniteError, TrainingError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array, Raw, arrays_in_one
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Tensor
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Backend, Job
from edge_sdk.train.tuning import PROFILE_BYTES, Tuned

log = logging.getLogger(__name__)

Runtime = Literal["onnxruntime", "torch"]

FILE_VERSION = 1
FILE_NAME = "costs.json"
LIMIT_S = 5.0
"""Time for all timed steps. A board with slow steps takes fewer of them."""
TUNING_S = 20.0
"""Time to find the fastest ways at all levels. A board with slow steps tries fewer, or none."""
TUNING_BATCH = 16
"""Batch size to find them with: what is fastest depends little on it, and some need blocks of so
many samples."""
MOST_STEPS = 15
"""Steps timed in each case, besides the first."""
BATCH = 32
"""Batch size for calibration, with a quarter of it, while the rounds' batch is unknown."""
RULE = LocalRule(learning_rate=1e-6)
"""A rate so low that random weights stay as they are. Without momentum: a calibration must not take
more memory than the rounds do."""


# -- validity of a calibration -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKey:
    """Everything that times depend on and that may differ at the next start."""

    tessera: str
    runtime: str
    """Name and version, such as `onnxruntime 1.23.0`."""
    plan_hash: str
    providers: str
    threads: int
    system: str
    cores: float | None = None
    power_mode: str | None = None
    graphs: str | None = None
    """Hash of the manifest, if the ways to compute its values are chosen here; else None."""

    def changed(self, before: MachineKey) -> str | None:
        """Describe the first difference from before; None: there is none."""
        for each in fields(self):
            now, then = getattr(self, each.name), getattr(before, each.name)
            if now != then:
                return f"{each.name} was {then}, is {now}"
        return None


def this_machine(
    plan: ModelPlan,
    snapshot: Snapshot,
    *,
    runtime: Runtime = "onnxruntime",
    providers: Sequence[str] = (),
    threads: int = 1,
    graphs: str | None = None,
) -> MachineKey:
    """Describe the machine that this program runs on; `snapshot` is of the same machine."""
    from edge_sdk import __version__

    return MachineKey(
        tessera=__version__,
        runtime=f"{runtime} {_version(runtime)}",
        plan_hash=plan.hash,
        providers=", ".join(providers),
        threads=threads,
        system=f"{platform.system()} {platform.machine()}",
        cores=snapshot.cpu.cores,
        power_mode=snapshot.power.mode,
        graphs=graphs,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a different build, such as onnxruntime-gpu
        module = sys.modules.get(package)
        return str(getattr(module, "__version__", "of unknown version"))


# -- the file ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCosts:
    """Contents of the file."""

    machine: MachineKey
    calibration: Calibration
    learned: Learned = field(default_factory=Learned)
    tuned: tuple[Tuned, ...] | None = None
    """The fastest ways; empty: there are none, None: nobody has looked."""
    version: int = FILE_VERSION


def why_calibrate(kept: KeptCosts | None, machine: MachineKey) -> str | None:
    """Explain why costs must be measured on this machine now; None: the kept ones hold."""
    if kept is None:
        return "nothing was measured yet"
    if kept.learned.is_off:
        return f"predictions are off by {kept.learned.off:.0%}"
    return machine.changed(kept.machine)


def load(path: Path) -> KeptCosts | None:
    """Load the file; None: it is missing or unreadable, which is logged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = from_plain(KeptCosts, content, "")
        if kept.version != FILE_VERSION:
            raise ProfileError(f"version {kept.version} is unknown")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, ProfileError) as error:
        log.warning("%s cannot be used, measuring costs again: %s", path, error)
        return None
    return kept


def save(path: Path, kept: KeptCosts) -> None:
    """Replace the file, completely or not at all. Raises `OSError`."""
    text = json.dumps(to_plain(kept), indent=1, allow_nan=False)
    write_whole(path, text.encode("utf-8"))


# -- measuring -----------------------------------------------------------------------------------


def calibrate(
    backend: Backend,
    manifest: Manifest | None,
    *,
    levels: Sequence[float],
    batch: int = BATCH,
    room_bytes: float | None = None,
    held_bytes: float = 0.0,
    watts: Watts | None = None,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.perf_counter,
    should_stop: Callable[[], bool] = lambda: False,
) -> Calibration:
    """Time training steps: the smallest and the largest level, a batch and a quarter of it.

    `room_bytes`: memory that may be used; levels that might not fit are left out. None: enough.
    `held_bytes`: memory that earlier trainings left in this process. `watts`: a sensor; it adds a
    second of rest. Blocks for about `limit_s`, longer only where a first step takes longer.

    Raises `TrainingError` when not even the smallest level can be tried, `TrainingStopped` when
    told to stop, and what the backend raises.
    """
    data = backend.data
    if data is None:
        raise TrainingError("the task does not describe its data, so none can be made up")
    cases = _cases(backend.plan, manifest, data, sorted(set(levels)), batch, room_bytes)
    idle_w = None if watts is None else idle_watts(watts)
    start_bytes = resident_bytes()
    forget_peak()
    samples: list[Sample] = []
    ends = clock() + limit_s
    with EnergyMeter(watts or (lambda: None), idle_w=idle_w) as meter:
        for number, (level, size, work) in enumerate(cases):
            left_s = ends - clock()
            if samples and _too_slow(samples[-1], work, left_s):
                break
            share_s = left_s * _share([case[2] for case in cases[number:]])
            times, total_s = _time_steps(backend, data, level, size, share_s, clock, should_stop)
            grown = max(1.0, peak_resident_bytes() - start_bytes + held_bytes)
            samples.append(_sample(level, work, times, total_s, grown))
    return Calibration(
        samples=tuple(samples),
        idle_w=idle_w,
        net_w=None if meter.energy is None else meter.energy.net_w,
    )


@runtime_checkable
class Tunable(Backend, Protocol):
    """A backend that can compute values in several ways; see `OnnxBackend`."""

    tuned: tuple[Tuned, ...]
    """Those in use, which it forgets if the runtime fails in them."""

    @property
    def has_ways(self) -> bool:
        """True if there is a choice for this task on this machine."""

    def close(self) -> None:
        """Let go of the memory of what is open; a training opens it again."""

    def tune(
        self,
        job: Job,
        batch: Batch,
        *,
        level: float,
        limit_s: float,
        should_stop: Callable[[], bool],
    ) -> Tuned | None:
        """Measure in which ways a job's step takes the least time here."""


def tune(
    backend: Backend,
    manifest: Manifest | None,
    *,
    levels: Sequence[float],
    batch: int = TUNING_BATCH,
    room_bytes: float | None = None,
    limit_s: float = TUNING_S,
    found: dict[float, Tuned] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Tuned, ...] | None:
    """Find the fastest ways at each level, the smallest first; backends without choices have none.

    Levels for which there is no room or time go without; they take the ways of the nearest. None:
    there is no room for any. `found`: ways at levels that are known; those that are found are added
    one by one, so that they last when this is stopped. See `calibrate`.
    """
    data = backend.data
    if data is None or manifest is None or not isinstance(backend, Tunable):
        return ()
    if not backend.has_ways:
        return ()
    found = {} if found is None else found
    ends = time.perf_counter() + limit_s
    order = sorted({*levels} - {*found})
    tried = bool(found)
    for number, level in enumerate(order):
        left_s = ends - time.perf_counter()
        sizes = _batch_sizes(backend.plan, manifest, level, batch)
        if not sizes:
            continue
        size = batch if batch in sizes else sizes[-1]
        work = work_at(backend.plan, manifest, level, size)
        # Two sessions take turns, and the runtime notes the times of one.
        needed = 2 * memory_bound(work, batch_bytes(data, size), RULE, Encoding()) + PROFILE_BYTES
        if room_bytes is not None and needed > room_bytes:
            continue
        tried = True
        if left_s <= 0:
            break
        tuned = _tune_level(backend, data, level, size, left_s / (len(order) - number), should_stop)
        if tuned is not None:
            log.info("ways to compute at level %g: %s", level, tuned, extra=fact("tuned"))
            found[level] = tuned
    return tuple(found[level] for level in sorted(found)) if tried else None


def _tune_level(
    backend: Tunable,
    data: DataSpec,
    level: float,
    size: int,
    limit_s: float,
    should_stop: Callable[[], bool],
) -> Tuned | None:
    random = stream(0, "calibration", size)
    inputs = tuple(_array(spec, size, random) for spec in data.inputs)
    batch = Batch(inputs, _array(data.targets, size, random))
    for constant in (0, 1):
        job = _job(backend.plan, level, constant)
        try:
            return backend.tune(job, batch, level=level, limit_s=limit_s, should_stop=should_stop)
        except NonFiniteError as error:  # see `_time_steps`
            log.debug("level %g, constants %d: %s", level, constant, error)
    return None


def _sample(
    level: float, work: Work, times: Sequence[float], total_s: float, grown_bytes: float
) -> Sample:
    usual = times[1:] or times
    step_s = max(median(usual), 1e-9)
    return Sample(
        level=level,
        samples=work.samples,
        macs=work.macs,
        weight_bytes=work.weight_bytes,
        activation_bytes=work.activation_bytes,
        step_s=step_s,
        fixed_s=max(0.0, total_s - len(times) * step_s),
        steps=len(usual),
        grown_bytes=grown_bytes,
    )


def _cases(
    plan: ModelPlan,
    manifest: Manifest | None,
    data: DataSpec,
    levels: Sequence[float],
    batch: int,
    room_bytes: float | None,
) -> list[tuple[float, int, Work]]:
    """Return (level, batch, work) of the cases to time, least work first; no two are alike."""
    found: dict[float, list[tuple[float, int, Work]]] = {}
    for level in levels:
        for size in _batch_sizes(plan, manifest, level, batch):
            work = work_at(plan, manifest, level, size)
            needed = memory_bound(work, batch_bytes(data, size), RULE, Encoding())
            if room_bytes is None or needed <= room_bytes:
                found.setdefault(level, []).append((level, size, work))
    if not found:
        raise TrainingError(
            f"level {min(levels):g} cannot be calibrated: it may need more than the "
            f"{(room_bytes or 0) / 1e6:.0f} MB that are free"
        )
    chosen = {case[2]: case for level in (min(found), max(found)) for case in found[level]}
    return sorted(chosen.values(), key=lambda case: (case[2].macs, case[2].weight_bytes))


def _batch_sizes(
    plan: ModelPlan, manifest: Manifest | None, level: float, batch: int
) -> tuple[int, ...]:
    """Return a quarter of a batch and a whole one, or the sizes that graphs were made for."""
    wanted = (max(1, batch // 4), batch)
    if manifest is None:
        return wanted
    kept = tuple(axis.atoms_at(level) for axis in plan.axes)
    largest = manifest.largest_batch("gradient", kept)
    if largest is None:
        return wanted
    sizes = []
    for size in (*wanted, largest):
        try:
            entry = manifest.pick("gradient", kept, min(size, largest) if largest else size)
        except GraphError:
            continue
        sizes.append(size if entry.batch is None else entry.batch)
    return tuple(dict.fromkeys(sizes))


def _too_slow(last: Sample, work: Work, left_s: float) -> bool:
    """True if the least that can be timed, three steps, would take longer than there is time."""
    more = max(1.0, work.macs / max(1, last.macs))
    return 3 * last.step_s * more > left_s


def _share(works: Sequence[Work]) -> float:
    """Share of the remaining time for the first of these.

    Smaller where steps are short, but not in proportion: each kind needs a few.
    """
    roots = [sqrt(work.macs + 1) for work in works]
    return roots[0] / sum(roots)


def _time_steps(
    backend: Backend,
    data: DataSpec,
    level: float,
    size: int,
    share_s: float,
    clock: Callable[[], float],
    should_stop: Callable[[], bool],
) -> tuple[list[float], float]:
    """Return seconds of each step, and of the whole training; the graph is opened before.

    The first of several steps makes the momentum and fills the caches; it differs from the others.
    """
    random = stream(0, "calibration", size)
    inputs = tuple(_array(spec, 2 * size, random) for spec in data.inputs)
    made = ArrayData(inputs, _array(data.targets, 2 * size, random))
    stamps: list[float] = []

    def batches(most: int) -> Iterator[Batch]:
        """Yield batches until time is up, noting when each, and the end, was asked for."""
        stamps.clear()
        until = clock() + share_s
        source = made.batches(most, size, random)
        stamps.append(clock())
        for batch in source:
            yield batch
            stamps.append(clock())
            last_s = stamps[-1] - stamps[-2]
            if len(stamps) > 2 and stamps[-1] + last_s > until:
                return

    for constant in (0, 1):
        job = _job(backend.plan, level, constant)
        try:
            backend.train(job, batches(1), should_stop=should_stop)  # opens the graph
            started = clock()
            backend.train(job, batches(1 + MOST_STEPS), should_stop=should_stop)
            total_s = clock() - started
            return [after - before for before, after in pairwise(stamps)], total_s
        except NonFiniteError as error:
            # Nothing says which constants a model needs, such as those of an attention mask.
            failure = error
    raise failure


def _job(plan: ModelPlan, level: float, constant: int) -> Job:
    """Make a job for the largest submodel of a level; `constant` fills what is not trained."""
    random = stream(0, "calibration", "weights")
    groups = largest_groups(plan, level)
    kept = plan.kept_atoms(plan.choose(groups))
    shapes = {each.name: (_shape(each, kept), np.dtype(np.float32)) for each in plan.tensors}
    weights, _ = arrays_in_one(shapes)
    for array in weights.values():
        _fill(array, random)
    return Job(
        groups=groups,
        weights=weights,
        buffers={
            each.name: np.full(
                _shape(each, kept), 1 if each.statistic else constant, dtype=each.dtype
            )
            for each in plan.buffers
        },
        rule=RULE,
        mask_stream=random,
        owned=True,
        subtract_start=_leave,
    )


def _leave(_: Mapping[str, Array], __: Raw | None) -> None:
    """Subtract nothing: nobody wants the movement."""


def _shape(tensor: Tensor, kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim.at(kept) for dim in tensor.dims)


def _fill(weights: Array, random: np.random.Generator) -> None:
    random.standard_normal(dtype=np.float32, out=weights)
    weights *= np.float32(1 / sqrt(max(1, prod(weights.shape[1:]))))


def _array(spec: ArraySpec, size: int, random: np.random.Generator) -> Array:
    shape, dtype = (size, *spec.shape), np.dtype(spec.dtype)
    if dtype.kind == "f":
        highest = 1 if spec.highest is None else spec.highest
        values: Array = random.uniform(0, highest, shape).astype(dtype)
        return values
    highest = 1 if spec.highest is None else spec.highest
    return random.integers(highest + 1, size=shape).astype(dtype)
