"""BatchNorm statistics of one submodel, computed in a forward pass over some batches.

Statistics belong to a submodel: averages of other submodels' statistics can make good weights
useless. So they are never averaged. They are computed for the submodel that is used, from the
moments of every batch in training mode, merged in float64.

Law: `a.merged(b)` are the moments of all samples of both, in any order and grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import MessageError, TensorError, TrainingStopped
from edge_sdk.protocol.messages.survey import (
    SurveyFinding,
    norm_pairs,
    read_statistics,
    write_floats,
)
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan

Float64 = NDArray[np.float64]

MAX_MEAN = 1e15
"""Largest mean of a channel that a device may tell; its square is far below float32's limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Samples seen, and the mean and M2 of every BatchNorm's channels.

    M2 is the sum of squared deviations from the mean, per sample: a layer with `p` positions has
    `p · count` values in a channel, whose sum is `p · m2`. `means` has the names of running means,
    `m2s` those of running variances, in the same order.
    """

    count: int
    means: Mapping[str, Float64]
    m2s: Mapping[str, Float64]

    def __post_init__(self) -> None:
        if self.count < 1 or len(self.means) != len(self.m2s):
            raise TensorError(f"moments of {self.count} samples, {len(self.means)} layers")

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both (Chan, Golub & LeVeque 1979)."""
        if list(self.means) != list(other.means) or list(self.m2s) != list(other.m2s):
            raise TensorError("these moments are of different models")
        count = self.count + other.count
        means, m2s = {}, {}
        for mean, var in zip(self.means, self.m2s, strict=True):
            gap = other.means[mean] - self.means[mean]
            means[mean] = self.means[mean] + gap * (other.count / count)
            m2s[var] = self.m2s[var] + other.m2s[var] + gap**2 * (self.count * other.count / count)
        return Moments(count, means, m2s)

    def weighing(self, count: int) -> Moments:
        """Return the same means and variances, as if of so many samples."""
        scale = count / self.count
        return Moments(count, self.means, {name: m2 * scale for name, m2 in self.m2s.items()})

    def fill(self, buffers: Mapping[str, Array]) -> dict[str, Array]:
        """Return the buffers with means and variances (divided by n) in place of their own."""
        values = {**self.means, **{name: m2 / self.count for name, m2 in self.m2s.items()}}
        return {
            name: array if name not in values else values[name].astype(array.dtype)
            for name, array in buffers.items()
        }


def batches(inputs: Sequence[Array], rows: int, least: int) -> Iterator[list[Array]]:
    """Yield batches of up to `rows` samples, each of at least `least`.

    Samples that do not fill one batch are repeated; otherwise a shorter last batch is left out.
    """
    samples = len(inputs[0])
    if samples < least:
        again = np.arange(least) % samples
        yield [array[again] for array in inputs]
        return
    for at in range(0, samples, rows):
        if min(rows, samples - at) >= least:
            yield [array[at : at + rows] for array in inputs]


def moments_of(count: int, pairs: Mapping[str, Array]) -> Moments:
    """Return one batch's moments from means and variances, in turn, by name of their buffers."""
    names = list(pairs)
    return Moments(
        count,
        {name: np.asarray(pairs[name], dtype=np.float64) for name in names[::2]},
        {name: np.asarray(pairs[name], dtype=np.float64) * count for name in names[1::2]},
    )


class LevelRuntime(Protocol):
    """Runs submodels of a task: with onnxruntime (`Predictor`) or torch (`TracedModel`)."""

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""

    def predict(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
    ) -> Array:
        """Compute a submodel's outputs."""

    def moments(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
        batch_size: int = 64,
    ) -> Moments | None:
        """Compute a submodel's BatchNorm moments; None: the model has no BatchNorm."""


# -- on devices ----------------------------------------------------------------------------------


def survey_rows(have: int, samples: int) -> NDArray[np.int64]:
    """Choose the samples that a device with so many uses in a survey; the same ones every time."""
    return np.random.default_rng(0).permutation(have)[:samples]


def survey_moments(
    runtime: LevelRuntime,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    inputs: Sequence[Array],
    *,
    groups: Groups,
    rescale: float,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Moments | None:
    """Compute a submodel's moments over whole batches, or over all samples if they fill none.

    `should_stop` is polled before every batch. None: the model has no BatchNorm. Raises
    `TrainingStopped` when told to stop, and as the runtime does.
    """
    have, merged = len(inputs[0]), None
    for at in range(0, max(1, have - batch_size + 1), batch_size):
        if should_stop():
            raise TrainingStopped(at // batch_size)
        part = [array[at : at + batch_size] for array in inputs]
        found = runtime.moments(
            weights, buffers, part, groups=groups, rescale=rescale, batch_size=batch_size
        )
        if found is None:
            return None
        found = found.weighing(len(part[0]))  # a graph for larger batches repeats samples
        merged = found if merged is None else merged.merged(found)
    return merged


def write_moments(plan: ModelPlan, moments: Moments) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the means and M2s of a finding. Raises `TensorError` if a layer has no known name."""
    pairs = norm_pairs(plan)
    if {*moments.means, *moments.m2s} != {name for pair in pairs for name in pair}:
        raise TensorError("some BatchNorm keeps its statistics under unusual names")
    return (
        {mean: write_floats(moments.means[mean]) for mean, _ in pairs},
        {variance: write_floats(moments.m2s[variance]) for _, variance in pairs},
    )


def read_moments(plan: ModelPlan, groups: Groups, finding: SurveyFinding) -> Moments:
    """Read the moments of a device's finding. Raises only `MessageError`.

    They are those of every BatchNorm of the submodel: no mean beyond `MAX_MEAN`, no M2 below 0 or
    of such a deviation. Merged ones are then finite as float32, whoever sent them.
    """
    pairs = norm_pairs(plan)
    if list(finding.means) != [mean for mean, _ in pairs] or list(finding.m2s) != [
        variance for _, variance in pairs
    ]:
        raise MessageError("these are not the moments of this model's BatchNorm layers")
    means = read_statistics(plan, groups, finding.means)
    m2s = read_statistics(plan, groups, finding.m2s)
    for name, values in means.items():
        if np.abs(values).max(initial=0.0) > MAX_MEAN:
            raise MessageError(f"{name!r} has a mean beyond {MAX_MEAN:g}")
    for name, values in m2s.items():
        if (values < 0).any() or values.max(initial=0.0) > finding.samples * MAX_MEAN**2:
            raise MessageError(f"{name!r} has an M2 below 0, or an impossible one")
    try:
        return Moments(
            finding.samples,
            {name: values.astype(np.float64) for name, values in means.items()},
            {name: values.astype(np.float64) for name, values in m2s.items()},
        )
    except TensorError as error:
        raise MessageError(str(error)) from error
