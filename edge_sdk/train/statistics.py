"""BatchNorm statistics of one submodel, computed in a forward pass over some batches.

Statistics belong to a submodel: averages of other submodels' statistics can make good weights
useless. So they are never averaged. They are computed for the submodel that is used, from the
moments of every batch in training mode, merged in float64.

Law: `a.merged(b)` are the moments of all samples of both, in any order and grouping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import TensorError
from edge_sdk.protocol.plan.layout import Array

Float64 = NDArray[np.float64]


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
