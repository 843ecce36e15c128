"""The costs of one task on this device: measured when needed, corrected by every round, kept.

    costs.json    beside the device's other state; see `edge_sdk.decide.costs.calibration`

For the thread that trains. A calibration takes a few seconds. It runs when a task is new, when the
machine has changed, and when predictions are off by more than a quarter: then between rounds, while
the device has nothing else to do. Corrections by rounds are written once a minute, when the device
has rested for that long, and at its end: a crash loses no more than those of a minute.

The first calibration is of the default ways to compute, so that a device soon has an answer to a
round. The fastest ways are looked for when it has nothing to do, and are taken once a calibration
in them has succeeded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from edge_sdk.decide.costs.calibration import (
    LIMIT_S,
    KeptCosts,
    Tunable,
    calibrate,
    load,
    save,
    this_machine,
    tune,
    why_calibrate,
)
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.costs.model import (
    MARGIN,
    Calibration,
    CostModel,
    Known,
    Learned,
    forward_bound,
    memory_bound,
    narrow_bytes,
)
from edge_sdk.decide.costs.work import batch_bytes, forward_work, work_at
from edge_sdk.machine.energy import EnergyMeter, Watts, probed_watts
from edge_sdk.machine.libraries import release_heap
from edge_sdk.machine.resident import resident_bytes
from edge_sdk.machine.snapshot import Probe
from edge_sdk.program.logs import fact
from edge_sdk.protocol.errors import TesseraError, TrainingError, TrainingStopped
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Backend, Job
from edge_sdk.train.tuning import Tuned

log = logging.getLogger(__name__)

KEEP_S = 60.0
"""Seconds between two writes of what rounds teach."""
REFUSED_S = 60.0
"""Least seconds until costs may be measured again on a device that was not allowed to."""
SENSORS_S = 60.0
"""Seconds after which it is found out again which sensors tell the power."""


class Costing:
    """The costs of one task, for `Observer`."""

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        path: Path | None,
        *,
        probe: Probe,
        levels: Sequence[float],
        known: Known | None = None,
        samples: int | None = None,
        memory_share: float = 1.0,
        providers: Sequence[str] = (),
        threads: int = 1,
        may_measure: Callable[[], bool] = lambda: True,
        tunes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], float] | None = None,
        keep_s: float = KEEP_S,
    ) -> None:
        """`path`: the file for measurements; None: they are lost with the process. `levels`: those
        that may be trained.

        `samples`: number that the device has. `memory_share`: share of available memory that a
        calibration may use. `may_measure`: True if the device may train now; a calibration waits
        until then. `tunes`: the backend computes in the ways that are fastest here, once `renew`
        has found them. `busy`: processor time of this program so far, in seconds; None: not known.
        `keep_s`: seconds between two writes. Raises what the backend raises.
        """
        self._backend = backend
        self._manifest = manifest
        self._path = path
        self._probe = probe
        self._levels = tuple(levels)
        self._known = Known() if known is None else known
        self._samples = samples
        self._memory_share = memory_share
        self._may_measure = may_measure
        tunable = isinstance(backend, Tunable) and backend.has_ways
        self._tunable = cast(Tunable, backend) if tunes and tunable else None
        self._clock = clock
        self._busy = busy
        self._keep_s = keep_s
        self._kept_at = -math.inf
        self._kept = True
        """False while rounds have taught more than the file says."""
        self._put_off: set[str] = set()
        """Work that was begun and stopped for something else: it is logged once, not every time."""
        self._held_bytes = 0
        """Bytes by which training has made this process larger."""
        self._refused_at = -math.inf
        self._failed_at: float | None = None
        """Bytes that were available for a calibration that failed."""
        self._watts: tuple[float, Watts] | None = None
        self._machine = this_machine(
            backend.plan,
            probe.snapshot(),
            providers=providers,
            threads=threads,
            graphs=None if self._tunable is None else manifest.hash,
        )
        kept = None if path is None else load(path)
        why = why_calibrate(kept, self._machine)
        self._model: CostModel | None = None
        self._looked = False
        """True if the fastest ways were looked for, now or by an earlier process."""
        self._gave_up = False
        """True if this process does not look for them any more."""
        self._found: dict[float, Tuned] = {}
        """The fastest ways at levels, which are not in use yet."""
        if self._tunable is not None and kept is not None and kept.tuned is not None:
            self._looked = self._machine.changed(kept.machine) is None
            self._tunable.tuned = kept.tuned if self._looked else ()
        if kept is None or why is not None:
            self._measure(why or "nothing was measured yet", Learned())
        else:
            self._model = self._made(kept)

    def predict(self, levels: tuple[float, ...], opened: RoundOpen) -> tuple[Cost, ...]:
        """See `Costs`. Before anything could be measured, a level takes forever."""
        if self._model is None and self._room() > 1.2 * (self._failed_at or 0.0):
            within_s = min(LIMIT_S, opened.bid_s / 2)
            self._measure("it was not possible before", Learned(), within_s)
        if self._model is None:
            return tuple(self._unmeasured(level, opened) for level in levels)
        return self._model.predict(
            levels, opened, samples=self._samples, held_bytes=self._held_bytes
        )

    @property
    def tuned(self) -> tuple[Tuned, ...]:
        """The fastest ways, by level, which are in use; empty: none, or none are known."""
        return () if self._tunable is None else self._tunable.tuned

    @property
    def seeks(self) -> bool:
        """True if the fastest ways are still to be looked for."""
        return self._tunable is not None and not self._looked and not self._gave_up

    @property
    def is_off(self) -> bool:
        """See `Costs`."""
        if self._model is None or self._clock() - self._refused_at < REFUSED_S:
            return False
        return self._model.learned.is_off or self.seeks

    def renew(self, should_stop: Callable[[], bool]) -> None:
        """See `Costs`."""
        if self._model is None or should_stop():
            return
        if (
            not self._may_measure()
        ):  # such as on a low battery, which must not be asked all the time
            self._refused_at = self._clock()
            return
        learned = self._model.learned
        if self.seeks:
            self._seek(lambda: should_stop() or not self._may_measure())
        elif learned.is_off:
            why = f"predictions are off by {learned.off:.0%}"
            self._measure(why, learned.recalibrated(), should_stop=should_stop)

    @property
    def is_kept(self) -> bool:
        """See `CostsOnDisk`."""
        return self._kept

    def keep(self, *, always: bool = False) -> None:
        """See `CostsOnDisk`."""
        if not self._kept:
            self._write(always=always)

    def forward(self, survey: Survey, number: int, samples: int) -> Cost:
        """See `Costs`. Before anything could be measured, only its memory is known."""
        level, groups = survey.levels[number], survey.groups[number]
        plan, manifest, batch = self._backend.plan, self._manifest, survey.batch_size
        if self._model is not None:
            return self._model.forward(level, groups, samples, batch)
        work = forward_work(plan, manifest, groups, batch)
        return Cost(
            level=level,
            seconds=0.0,
            joules=None,
            peak_bytes=forward_bound(work, batch_bytes(manifest.data, batch)),
            bytes_down=work.weight_bytes,
            bytes_up=0.0,
        )

    def metered(self, opened: RoundOpen | None, level: float, job: Job | None = None) -> Meter:
        """See `Costs`."""
        return Meter(self, opened, level, job)

    def _measure(
        self,
        why: str,
        learned: Learned,
        limit_s: float = LIMIT_S,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if not self._may_measure():
            return
        self._begin("measure", f"measuring the costs of levels: {why}")
        room = self._room()
        try:
            calibration = self._calibrated(room, limit_s, should_stop)
        except TrainingStopped:
            self._stop("measure", "not measured now")
        except TrainingError as error:
            log.warning("the costs of levels are unknown: %s", error, extra=fact("calibrating"))
            self._failed_at = room
        else:
            self._adopt(calibration, learned)

    def _begin(self, work: str, words: str) -> None:
        """Log that work begins which may be stopped."""
        level = logging.DEBUG if work in self._put_off else logging.INFO
        log.log(level, "%s", words, extra=fact("calibrating"))

    def _stop(self, work: str, words: str) -> None:
        """Log that work was stopped, which is tried again, unless the line before said so."""
        level = logging.DEBUG if work in self._put_off else logging.INFO
        self._put_off.add(work)
        why = "a round began, or other work came; tried again when the device rests"
        log.log(level, "%s: %s", words, why, extra=fact("calibrating"))

    def _calibrated(
        self, room: float, limit_s: float, should_stop: Callable[[], bool]
    ) -> Calibration:
        """Time steps in the ways that are in use. Raises as `calibrate`."""
        self._let_go()
        before = resident_bytes()
        try:
            return calibrate(
                self._backend,
                self._manifest,
                levels=self._levels,
                room_bytes=None if math.isinf(room) else room,
                held_bytes=self._held_bytes,
                watts=self.watts(),
                limit_s=limit_s,
                clock=self._clock,
                should_stop=should_stop,
            )
        finally:
            self._held_bytes += max(0, resident_bytes() - before)

    def _adopt(self, calibration: Calibration, learned: Learned) -> None:
        """Predict by a calibration, and keep it."""
        kept = KeptCosts(machine=self._machine, calibration=calibration, learned=learned)
        self._model = self._made(kept)
        if self._put_off:
            self._put_off.clear()
            log.info("the costs of levels are measured", extra=fact("calibrating"))
        self._write()

    def _seek(self, should_stop: Callable[[], bool]) -> None:
        """Look for the fastest ways; take them if a calibration in them succeeds.

        They only save time: with any failure, the defaults stay.
        """
        if self._tunable is None or self._model is None or should_stop():
            return
        self._begin("seek", "looking for the fastest ways to compute")
        self._gave_up = True
        try:
            found = self._tune(should_stop)
            if found is None:
                return
            self._tunable.tuned = found
            if not any(each.ways for each in found):  # costs were measured in the default ways
                self._looked = True
                self._write()
                return
            try:
                calibration = self._calibrated(self._room(), LIMIT_S, should_stop)
            except BaseException:
                self._tunable.tuned = ()
                raise
        except TrainingStopped:
            self._stop("seek", "not finished now")
            self._gave_up = False
        except (TesseraError, OSError, ValueError) as error:
            log.warning("values are computed in the default ways: %s", error, extra=fact("tuned"))
        else:
            self._looked = True
            self._adopt(calibration, self._model.learned.recalibrated())

    def _tune(self, should_stop: Callable[[], bool]) -> tuple[Tuned, ...] | None:
        """Return the fastest ways; None: there is no room to find them. What is found is kept when
        this is stopped. Memory that this leaves is no training's, so it does not count as held.
        """
        self._let_go()
        room = self._room()
        try:
            return tune(
                self._backend,
                self._manifest,
                levels=self._levels,
                room_bytes=None if math.isinf(room) else room,
                found=self._found,
                should_stop=should_stop,
            )
        finally:
            self._give_back()

    def _let_go(self) -> None:
        """Give back what earlier trainings left in memory, which is not held any more."""
        before = resident_bytes()
        self._give_back()
        self._held_bytes = max(0, self._held_bytes - max(0, before - resident_bytes()))

    def _give_back(self) -> None:
        """Give memory that is not in use back to the system."""
        if isinstance(self._backend, Tunable):
            self._backend.close()
        release_heap()

    def watts(self) -> Watts:
        """Return a reader of the device's power, whose sensors are looked for once a minute."""
        now = time.monotonic()
        if self._watts is None or now - self._watts[0] >= SENSORS_S:
            self._watts = now, probed_watts(self._probe)
        return self._watts[1]

    def _room(self) -> float:
        """Bytes that a calibration may use; infinite: unknown."""
        available = self._probe.snapshot().memory.available_bytes
        return math.inf if available is None else self._memory_share * available

    def _made(self, kept: KeptCosts) -> CostModel:
        return CostModel(
            self._backend.plan,
            self._manifest,
            kept.calibration,
            kept.learned,
            self._known,
            tuned=any(each.ways for each in self.tuned),
        )

    def _unmeasured(self, level: float, opened: RoundOpen) -> Cost:
        work = work_at(self._backend.plan, self._manifest, level, opened.batch_size)
        data = batch_bytes(self._manifest.data, opened.batch_size)
        beside = MARGIN * narrow_bytes(self._backend.plan, level, opened)
        return Cost(
            level=level,
            seconds=math.inf,
            joules=None,
            peak_bytes=beside
            + memory_bound(work, data, opened.local_rule, opened.up, variates=opened.variates),
            bytes_down=(2 if opened.variates else 1) * work.weight_bytes,
            bytes_up=work.weight_bytes,
        )

    def _trained(self, meter: Meter, *, complete: bool) -> None:
        """Correct the costs by a meter's readings of a completed training."""
        if self._model is None or meter.opened is None or not complete:
            return
        self._model = self._model.observed(
            meter.opened,
            meter.level,
            meter.seconds,
            samples=self._samples,
            energy=meter.measured.energy,
            job=meter.job,
            busy_s=meter.busy_s,
        )
        self._kept = self._path is None
        self.keep()

    def _write(self, *, always: bool = True) -> None:
        """Write the costs; not `always`: unless they were just written."""
        now = self._clock()
        if self._model is None or self._path is None:
            return
        if not always and now - self._kept_at < self._keep_s:
            return
        self._kept_at, self._kept = now, True
        kept = KeptCosts(
            machine=self._machine,
            calibration=self._model.calibration,
            learned=self._model.learned,
            tuned=self.tuned if self._looked else None,
        )
        try:
            save(self._path, kept)
        except OSError as error:
            log.warning("costs will be measured again at the next start: %s", error)


class Meter:
    """Measures one training, or a forward pass (`opened` None). See `Metered`."""

    def __init__(
        self, costing: Costing, opened: RoundOpen | None, level: float, job: Job | None
    ) -> None:
        self._costing = costing
        self.opened = opened
        self.level = level
        self.job = job
        self.seconds = 0.0
        self.busy_s: float | None = None
        model = costing._model
        idle_w = None if model is None else model.calibration.idle_w
        self.measured = EnergyMeter(costing.watts(), idle_w=idle_w)

    def __enter__(self) -> Meter:
        self._started = self._costing._clock()
        self._busy_before_s = self._busy_s()
        self._before_bytes = resident_bytes()
        self.measured.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.measured.__exit__(*error)
        self.seconds = self._costing._clock() - self._started
        before_s, now_s = self._busy_before_s, self._busy_s()
        self.busy_s = None if before_s is None or now_s is None else now_s - before_s
        self._costing._held_bytes += max(0, resident_bytes() - self._before_bytes)
        self._costing._trained(self, complete=error[0] is None)

    def _busy_s(self) -> float | None:
        busy = self._costing._busy
        return None if busy is None else busy()

    @property
    def joules(self) -> float | None:
        """Energy from a sensor, else seconds times the known watts; None: neither."""
        if self.measured.energy is not None and self.measured.energy.net_j is not None:
            return self.measured.energy.net_j
        model = self._costing._model
        watts = None if model is None else model.watts()[0]
        return None if watts is None else watts * self.seconds
