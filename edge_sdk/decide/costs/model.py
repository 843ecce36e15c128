"""The cost of a round at each level: from a calibration on the device, corrected by every round.

    seconds = steps · (a · MACs + b · weight bytes + c · samples + d) + (e · weight bytes + f)
              + bytes / bandwidth
    joules  = watts above idle · seconds of training
    bytes   = the encoded movement, and the packs of the model with their index

`a` to `f` are not negative, and fitted to a few timed steps: two levels × two batch sizes. MACs
alone are not enough: a narrow convolution pays for its input (`c`), a perceptron for its optimiser
(`b`), a small model for its calls (`d`). Where a task has no manifest of graphs, three forward
passes stand for a step.

Memory is a fit of the same kind: the growth of the process during calibration, fitted to samples,
weights and activations, plus arrays as large as the weights that exist before and after training;
times 1.2, plus 10 MB, and never below what a runtime takes for any graph. For a level above all
calibrated ones there is only `memory_bound`, which knows nothing but the graph and is up to six
times too high.

Under a local rule that trains several widths, steps take turns with them: the level and those below
it that the opening names, the widest first where they do not come out even. A second pass a step
makes it the level's own and one of the narrower ones. A narrower pass takes memory for its cut of
the weights and for its gradients; a second one also for the gradients of the first. A second pass
that distils runs graphs of its own, with activations of their own, beside those of the gradient
graphs, which stay open.

A forward pass, for a survey, takes its own graph's share of all this: no gradients, no velocity, no
movement. Its memory is bounded by that of training the same level, where that was measured.

Everything here is pure. Laws: predictions do not fall with the level or the steps, and a constant
ratio of observed to predicted seconds is learned completely, whatever widths were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from edge_sdk.decide.costs.cost import Cost, EnergySource
from edge_sdk.decide.costs.fit import Fit, fit, fixed_features, memory_features, time_features
from edge_sdk.decide.costs.work import (
    Work,
    batch_bytes,
    forward_work,
    largest_groups,
    narrower_levels,
    work_at,
    work_of,
)
from edge_sdk.machine.board import Board, Quantity
from edge_sdk.machine.energy import Energy
from edge_sdk.program.plain import ProfileError
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding, usable
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Job

T = TypeVar("T")

SMOOTHING = 0.3
"""Weight of the newest round."""
OFF = 0.25
"""A calibration is repeated when predictions, smoothed over rounds, are off by more than this."""
ROUNDS_TO_JUDGE = 4
"""Rounds since a calibration before which an error counts as chance."""
MARGIN = 1.2
MARGIN_BYTES = 10e6
"""Memory is predicted as `MARGIN` times what was measured, plus this."""
FLOOR_BYTES = 18e6
"""Memory the runtime takes for its first graph, however small: 12 to 18 MB were seen."""
ARRAYS_BESIDES = 3
"""Most arrays as large as the weights, before and after training, besides weights and gradients:
blocks that are decoded, parts of a movement and their message. With fp32 there are none.
"""
ARRAYS = ARRAYS_BESIDES + 2
"""And during training: weights, their velocity."""
FORWARD_ARRAYS = 2
"""Arrays as large as the weights before a forward pass: blocks received, weights assembled."""
HEADER_BYTES = 512
"""Least size of a movement before its statistics and its payload."""


# -- measurements --------------------------------------------------------------------------------


def memory_bound(
    work: Work,
    data_bytes: int,
    rule: LocalRule,
    encoding: Encoding,
    *,
    variates: bool = False,
) -> float:
    """Most bytes that a round takes on the onnx backend, when nothing was measured yet.

    `data_bytes` are those of a batch; `variates` is as in `RoundOpen`. At most half of all
    activations live at once, since those of the backward pass replace those of the forward pass; a
    convolution unfolds its input, which takes up to sixty times its bytes. Verified over all model
    families of the benchmarks.
    """
    arrays = ARRAYS + 1 + _more_arrays(rule, encoding, variates)  # plus the gradients
    grown = FLOOR_BYTES + arrays * work.weight_bytes + work.activation_bytes / 2 + 60 * data_bytes
    return MARGIN * grown + MARGIN_BYTES


def forward_bound(work: Work, data_bytes: int) -> float:
    """Most bytes that a forward pass takes: all activations, and none of training's arrays.

    The weights exist as received, assembled, and as the runtime's inputs.
    """
    arrays = (FORWARD_ARRAYS + 1) * work.weight_bytes
    grown = FLOOR_BYTES + arrays + work.activation_bytes + 60 * data_bytes
    return MARGIN * grown + MARGIN_BYTES


def narrow_bytes(plan: ModelPlan, level: float, opened: RoundOpen) -> int:
    """Bytes of the weights and gradients of the narrower submodels trained beside a level."""
    below = narrower_levels(opened, level)[:1]
    return sum(2 * plan.cost_at(each).bytes_fp32 for each in below)


def _more_arrays(rule: LocalRule, encoding: Encoding, variates: bool) -> int:
    """Arrays as large as the weights that a rule and an encoding need besides the usual ones."""
    second = 2 if rule.sam_radius > 0 or rule.proximal > 0 else 0
    kept = 4 if encoding.kind == "top-k" or variates else 0
    return second + kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One case of a calibration."""

    level: float
    samples: int
    macs: int
    weight_bytes: int
    activation_bytes: int
    step_s: float
    """Median time of its steps."""
    fixed_s: float
    """Time of its training besides the steps."""
    steps: int
    """Number of timed steps."""
    grown_bytes: float
    """Peak growth of the process since the calibration began."""

    @property
    def work(self) -> Work:
        """Components of its step."""
        return Work(
            samples=self.samples,
            macs=self.macs,
            weight_bytes=self.weight_bytes,
            activation_bytes=self.activation_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements on a device, for one task. Raises `ProfileError` for impossible values."""

    samples: tuple[Sample, ...]
    idle_w: float | None = None
    net_w: float | None = None
    """Power drawn while training, above idle; None: no sensor."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ProfileError("a calibration needs a timed step; calibrate again")
        if min(self.idle_w or 0.0, self.net_w or 0.0) < 0:
            raise ProfileError(f"impossible calibration: {self}")
        for sample in self.samples:
            numbers = (sample.step_s, sample.grown_bytes, sample.samples, sample.weight_bytes)
            others = (sample.fixed_s, sample.macs, sample.activation_bytes)
            if not min(numbers) > 0 or min(others) < 0:
                raise ProfileError(f"impossible step: {sample}")


# -- corrections by rounds -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Corrections learned from real rounds. None: nothing yet. Raises `ProfileError`."""

    rounds: int = 0
    """Rounds since the calibration."""
    ratio: float = 1.0
    """Observed over calibrated seconds of training, over all levels."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """The same by level, such as "0.5"."""
    off: float = 0.0
    """Smoothed error of predictions: 0.25 is a quarter too much or too little."""
    net_w: float | None = None
    busy: float | None = None
    """Processor time of training over calibrated seconds, smoothed; None: not known."""

    def __post_init__(self) -> None:
        above_0 = [self.ratio, *self.ratios.values(), 1.0 if self.busy is None else self.busy]
        if not min(above_0) > 0 or min(self.rounds, self.off, self.net_w or 0.0) < 0:
            raise ProfileError(f"impossible corrections: {self}")
        for level in self.ratios:
            if not _is_level(level):
                raise ProfileError(f"ratios.{level}: a level is a share in (0, 1]")

    @property
    def is_off(self) -> bool:
        """True if predictions are so wrong that a new calibration is due."""
        return self.rounds >= ROUNDS_TO_JUDGE and self.off > OFF

    def recalibrated(self) -> Learned:
        """Return what stays true after a new calibration: the watts."""
        return Learned(net_w=self.net_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Facts from owner and board profile, used where no sensor or round gave any. None: nothing."""

    net_w: float | None = None
    """Power drawn while training, above idle."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


def known_of(board: Board | None, bytes_per_s: float | None) -> Known:
    """Return a board profile's facts; the owner's link speed, for both directions, comes first.

    The profile's watts are those of all cores: with fewer threads a round takes less.
    """
    if board is None:
        return Known(up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)
    power, network = board.power, board.network
    net_w = None
    if power.train_w is not None and power.idle_w is not None:
        net_w = power.train_w.value - power.idle_w.value
    return Known(
        net_w=net_w,
        up_bytes_per_s=bytes_per_s or _bytes_per_s(network.up_mbit_s),
        down_bytes_per_s=bytes_per_s or _bytes_per_s(network.down_mbit_s),
    )


def _bytes_per_s(mbit_s: Quantity | None) -> float | None:
    return None if mbit_s is None else mbit_s.value * 1e6 / 8


# -- bytes ---------------------------------------------------------------------------------------


def bytes_up(plan: ModelPlan, level: float, encoding: Encoding) -> int:
    """Most bytes of a movement at this level. Raises `GroupError` for an invalid level."""
    groups = largest_groups(plan, level)
    packs = find_packs(plan)
    # Statistics go up with a movement; constants do not, but they are few and bound them.
    statistics = int(packs.part_sizes[packs.parts_of_submodel(plan, plan.choose(groups))].sum())
    names = sum(len(buffer.name) + 64 for buffer in plan.buffers if buffer.statistic)
    return encoded_size(plan, groups, encoding) + statistics + names + HEADER_BYTES


def bytes_down(plan: ModelPlan, level: float, encoding: Encoding) -> int:
    """Bytes of a level's packs, without the model's index. Raises `GroupError`."""
    packs = find_packs(plan)
    sizes = packs.sizes(plan, encoding)
    chosen = plan.choose(largest_groups(plan, level))
    return sum(sizes[number] for number in packs.of_submodel(plan, chosen))


@dataclass(frozen=True)
class CostModel:
    """Predicts the cost of one task's rounds on one device. A value: observing makes a new one."""

    plan: ModelPlan
    manifest: Manifest | None
    """None on the torch backend, which has none."""
    calibration: Calibration
    learned: Learned = field(default_factory=Learned)
    known: Known = field(default_factory=Known)
    tuned: bool = False
    """True if levels may compute in ways of their own, each in a session of its own."""
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Results that depend on plan, manifest and calibration alone, which rounds do not change."""

    def predict(
        self,
        levels: Iterable[float],
        opened: RoundOpen,
        *,
        samples: int | None = None,
        held_bytes: float = 0.0,
        model_encoding: Encoding | None = None,
    ) -> tuple[Cost, ...]:
        """Predict the round's cost at each of these levels, in their order.

        `samples`: number the device has, if fewer than a batch; None: enough. `held_bytes`: part of
        the program's memory by which earlier training made it grow; one graph for all levels uses
        that again, but arrays as large as the weights may not find room in it. `model_encoding`:
        that of the last model's index; None: fp32, the largest possible. Raises `GroupError` for an
        invalid level, `GraphError` when no gradient graph fits.
        """
        levels = tuple(levels)
        batch = _batch(opened, samples)
        # A correction known for some levels only must not make a larger one look cheaper.
        asked = sorted({*levels, *(float(each) for each in self.learned.ratios)})
        memory = self._memory(opened, batch)
        seconds, twice, peaks = {}, {}, {}
        longest = longest_twice = most = 0.0
        for level in asked:
            once_s, twice_s = self._train_s(level, opened, batch)
            longest = max(longest, once_s * self._ratio(level))
            longest_twice = max(longest, longest_twice, twice_s * self._ratio(level))
            most = max(most, memory(level))
            seconds[level], twice[level], peaks[level] = longest, longest_twice, most
        held = held_bytes if self._shares_memory else 0.0
        least = self._least_memory(opened, batch)
        second = self._second_memory(opened, batch)
        encoding = usable(opened.up)
        index = sum(blob.size for blob in (opened.model, opened.control) if blob is not None)
        down = model_encoding or Encoding()
        packs = 2 if opened.variates else 1  # the global variate is as large as the model
        return tuple(
            self._cost(
                level,
                seconds[level],
                twice[level] - seconds[level],
                max(peaks[level] - held, min(peaks[level], least(level))),
                second(level, held - peaks[level]) if twice[level] > seconds[level] else 0.0,
                bytes_down=index + packs * self._bytes_down(level, down),
                bytes_up=self._bytes_up(level, encoding),
            )
            for level in levels
        )

    def forward(self, level: float, groups: Groups, samples: int, batch: int) -> Cost:
        """Predict a forward pass of a level's groups over so many samples, in batches.

        Raises `GroupError` for invalid groups, `GraphError` when no graph fits.
        """
        work = forward_work(self.plan, self.manifest, groups, batch)
        data = 0 if self.manifest is None else batch_bytes(self.manifest.data, work.samples)
        runs = math.ceil(samples / work.samples)
        seconds = (runs * self._step(work) + self._fixed(work)) * self._ratio(level)
        peak = min(forward_bound(work, data), self._measured_bound(level, batch))
        down = self._bytes_down(level, Encoding())
        return self._cost(level, seconds, 0.0, peak, 0.0, bytes_down=down, bytes_up=0)

    def _measured_bound(self, level: float, batch: int) -> float:
        """Most bytes of a forward pass at a level whose training was measured; else infinite."""
        measured = self.calibration.samples
        try:
            work = self._work_at(level, batch)
        except GraphError:
            return math.inf
        if work.weight_bytes > max(each.weight_bytes for each in measured):
            return math.inf
        arrays = FORWARD_ARRAYS * work.weight_bytes
        return MARGIN * (max(FLOOR_BYTES, self._grown(work)) + arrays) + MARGIN_BYTES

    def observed(
        self,
        opened: RoundOpen,
        level: float,
        train_s: float,
        *,
        samples: int | None = None,
        energy: Energy | None = None,
        job: Job | None = None,
        busy_s: float | None = None,
    ) -> CostModel:
        """Return the model after a completed round.

        `energy`: a meter's reading of it. `job`: what was trained, for the widths of its steps;
        None: the level's own in every step. `busy_s`: processor time of this program meanwhile;
        None: not known. Where that is as usual, the device is as fast as ever: it waited for
        others, which no calibration can tell.
        """
        calibrated = self._trained_s(level, opened, _batch(opened, samples), job)
        if not (train_s > 0 and math.isfinite(train_s)):
            return self
        learned, new = self.learned, train_s / calibrated
        # One round beside another busy program is no reason to measure again; two are.
        missed = min(2 * OFF, abs(new / self._ratio(level) - 1))
        busy = learned.busy
        if busy_s is not None and busy_s > 0:
            if busy is not None:
                missed = min(missed, abs(busy_s / calibrated / busy - 1))
            busy = _smoothed(busy, busy_s / calibrated)
        ratio = new if not learned.rounds else _smoothed(learned.ratio, new)
        key = repr(float(level))
        watts = learned.net_w
        if energy is not None and energy.net_w is not None:
            watts = _smoothed(watts, energy.net_w)
        after = replace(
            learned,
            rounds=learned.rounds + 1,
            ratio=ratio,
            ratios={**learned.ratios, key: _smoothed(learned.ratios.get(key), new)},
            off=learned.off + SMOOTHING * (missed - learned.off),
            net_w=watts,
            busy=busy,
        )
        return replace(self, learned=after)

    # -- what rounds do not change ------------------------------------------------------------

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.memo:
            self.memo[key] = make()
        found: T = self.memo[key]
        return found

    def _fitted(
        self, features: Callable[[Work], Sequence[float]], measured: Callable[[Sample], float]
    ) -> Fit:
        samples = self.calibration.samples
        return self._once(
            features, lambda: fit(features, [(each.work, measured(each)) for each in samples])
        )

    def _work_at(self, level: float, batch: int) -> Work:
        make = partial(work_at, self.plan, self.manifest, level, batch)
        return self._once(("work", level, batch), make)

    def _bytes_down(self, level: float, encoding: Encoding) -> int:
        return self._once(("down", level, encoding), lambda: bytes_down(self.plan, level, encoding))

    def _bytes_up(self, level: float, encoding: Encoding) -> int:
        return self._once(("up", level, encoding), lambda: bytes_up(self.plan, level, encoding))

    # -- seconds ------------------------------------------------------------------------------

    def _train_s(self, level: float, opened: RoundOpen, batch: int) -> tuple[float, float]:
        """Seconds with one pass a step and with two, as calibrated, without the corrections.

        Both are equal where the rule asks for one.
        """
        work = self._work_at(level, batch)
        own_s, fixed_s = self._step(work), self._fixed(work)
        narrower = [
            self._step(self._work_at(each, batch)) for each in narrower_levels(opened, level)
        ]
        steps, times = opened.steps, _sam(opened.local_rule)
        once_s = twice_s = _most_dealt([own_s, *narrower], steps)
        if narrower and opened.local_rule.widths == "sandwich":
            twice_s = steps * own_s + _most_dealt(narrower, steps)
        return times * once_s + fixed_s, times * twice_s + fixed_s

    def _trained_s(self, level: float, opened: RoundOpen, batch: int, job: Job | None) -> float:
        """Seconds of the widths that a training's steps really drew, without the corrections."""
        own = self._work_at(level, batch)
        runs = opened.steps * _sam(opened.local_rule)
        if job is None or not job.is_nested:
            return runs * self._step(own) + self._fixed(own)
        works = (work_of(self.plan, self.manifest, groups, batch) for groups in job.widths)
        steps_s = [self._step(own), *map(self._step, works)]
        drawn = islice(job.drawn(), opened.steps)
        passes_s = sum(steps_s[width] for widths in drawn for width in widths)
        return _sam(opened.local_rule) * passes_s + self._fixed(own)

    @property
    def _step(self) -> Fit:
        return self._fitted(time_features, lambda sample: sample.step_s)

    @property
    def _fixed(self) -> Fit:
        return self._fitted(fixed_features, lambda sample: max(sample.fixed_s, 1e-9))

    def _ratio(self, level: float) -> float:
        return self.learned.ratios.get(repr(float(level)), self.learned.ratio)

    # -- memory and energy --------------------------------------------------------------------

    @property
    def _shares_memory(self) -> bool:
        """True if all levels run in one session, so that each can reuse the others' memory."""
        if self.manifest is None or self.tuned:
            return not self.tuned
        graphs = [entry for entry in self.manifest.graphs if entry.kind == "gradient"]
        return all(
            entry.kept is None and entry.batch is None and not entry.default_slots
            for entry in graphs
        )

    @property
    def _grown(self) -> Fit:
        return self._fitted(memory_features, lambda sample: sample.grown_bytes)

    def _memory(self, opened: RoundOpen, batch: int) -> Callable[[float], float]:
        rule, encoding = opened.local_rule, opened.up
        largest = max(each.weight_bytes for each in self.calibration.samples)
        grown = self._grown
        # A calibration has no velocity.
        arrays = ARRAYS_BESIDES + (rule.momentum > 0)
        arrays += _more_arrays(rule, encoding, opened.variates)

        def predicted(level: float) -> float:
            work = self._work_at(level, batch)
            beside = MARGIN * self._beside(level, opened, batch, grown)
            if self.manifest is not None and work.weight_bytes > largest:
                # A larger batch is more of the same; an untried level is not.
                data_bytes = batch_bytes(self.manifest.data, batch)
                return beside + memory_bound(
                    work, data_bytes, rule, encoding, variates=opened.variates
                )
            training = max(FLOOR_BYTES, grown(work))
            return beside + MARGIN * (training + arrays * work.weight_bytes) + MARGIN_BYTES

        return predicted

    def _beside(
        self, level: float, opened: RoundOpen, batch: int, grown: Callable[[Work], float]
    ) -> float:
        """Bytes that passes of narrower widths take beside the level's own."""
        taken: float = narrow_bytes(self.plan, level, opened)
        if not self._shares_memory:  # each width keeps its own session, with its own activations
            for each in narrower_levels(opened, level):
                taken += max(0.0, grown(self._work_at(each, batch)))
        return taken

    def _second_memory(self, opened: RoundOpen, batch: int) -> Callable[[float, float], float]:
        """Memory of a second pass: the gradients of the first, and graphs that distil.

        The second number is what is held beyond a first pass: graphs use that again.
        """
        grown = self._grown

        def predicted(level: float, spare: float) -> float:
            gradients, graphs = MARGIN * self.plan.cost_at(level).bytes_fp32, 0.0
            if opened.local_rule.distillation and self.manifest is not None:
                own = () if self._shares_memory else narrower_levels(opened, level)
                works = [self._work_at(each, batch) for each in (level, *own)]
                graphs = MARGIN * sum(max(0.0, grown(work)) for work in works)
            return gradients + max(0.0, graphs - max(0.0, spare))

        return predicted

    def _least_memory(self, opened: RoundOpen, batch: int) -> Callable[[float], float]:
        """Memory a round takes however much is held: its arrays may not find room in that."""
        arrays = ARRAYS + _more_arrays(opened.local_rule, opened.up, opened.variates)

        def predicted(level: float) -> float:
            work = self._work_at(level, batch)
            beside = narrow_bytes(self.plan, level, opened)
            return MARGIN * (arrays * work.weight_bytes + beside) + MARGIN_BYTES / 2

        return predicted

    def watts(self) -> tuple[float | None, EnergySource]:
        """Return the power of training above idle, and its source; None: unknown."""
        # A sensor too slow to see the difference would say that training is free.
        least = 0.05 * (self.calibration.idle_w or 0.0)
        for watts in (self.learned.net_w, self.calibration.net_w):
            if watts is not None and watts > least:
                return watts, "measured"
        return self.known.net_w, "unknown" if self.known.net_w is None else "profile"

    def _cost(
        self,
        level: float,
        train_s: float,
        second_s: float,
        peak_bytes: float,
        second_bytes: float,
        *,
        bytes_down: int,
        bytes_up: int,
    ) -> Cost:
        down, up = self.known.down_bytes_per_s, self.known.up_bytes_per_s
        seconds = train_s
        if up is not None and down is not None:
            seconds += bytes_down / down + bytes_up / up
        watts, source = self.watts()
        return Cost(
            level=level,
            seconds=seconds,
            joules=None if watts is None else watts * train_s,
            peak_bytes=peak_bytes,
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            energy_from=source,
            second_s=second_s,
            second_j=None if watts is None else watts * second_s,
            second_bytes=second_bytes,
            transfers_counted=up is not None and down is not None,
        )


def _is_level(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _batch(opened: RoundOpen, samples: int | None) -> int:
    return opened.batch_size if samples is None else max(1, min(opened.batch_size, samples))


def _sam(rule: LocalRule) -> int:
    """Times a step computes its gradient."""
    return 2 if rule.sam_radius > 0 else 1


def _most_dealt(each_s: Sequence[float], steps: int) -> float:
    """Most seconds of steps whose widths are dealt like cards (`Job.drawn`)."""
    whole, rest = divmod(steps, len(each_s))
    return whole * sum(each_s) + sum(sorted(each_s, reverse=True)[:rest])


def _smoothed(before: float | None, new: float) -> float:
    return new if before is None else before + SMOOTHING * (new - before)
