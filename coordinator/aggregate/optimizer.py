"""Server optimisers: the movement that a rule computes is taken as a gradient (FedOpt).

Reddi et al., *Adaptive Federated Optimization* (ICLR 2021), per block `i`: a block that nobody had
a say about in a round keeps its moments and its weights. As in the paper there is no correction for
the start: the second moment begins at `τ²`.

A step reads and writes the moments a piece at a time, so those of a large model need not be in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.robust.sums import PIECE, over_shards, spread
from coordinator.errors import ConfigError
from edge_sdk.program.settings import Example, Within, check_fields
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.plan import ModelPlan

OptimizerName = Literal["none", "momentum", "adam", "yogi"]
Put = Callable[[int, int, Float32], None]
"""Takes new values of a moment (its number) from a parameter on. Safe from several threads."""

ADAPTIVE_RATE = 0.01
"""Rate of `adam` and `yogi` where none is set: that of Flower's FedYogi, with the same betas and
tau. The paper (Reddi et al. 2021) searches one for every task."""


class KeptVectors(Protocol):
    """Vectors as long as the model that a server keeps from round to round."""

    @property
    def name(self) -> str:
        """Optimiser or rule that they belong to; at most 16 ASCII characters."""

    @property
    def starts(self) -> tuple[float, ...]:
        """Value of each before the first round."""


class ServerMoments(Protocol):
    """The place where an optimiser's moments, or a rule's vectors, are kept between rounds."""

    @property
    def current(self) -> Sequence[Float32]:
        """The vectors after the last round, not to be changed."""

    def updated(self, round: int) -> AbstractContextManager[tuple[Sequence[Float32], Put]]:
        """Give the moments before a round, not to be changed, and room for all those after it.

        They are kept when the context ends.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """An optimiser on the server and its options. Raises `ConfigError`."""

    name: OptimizerName = "none"
    """`none` moves the model as the rule says; `momentum`, `adam` and `yogi` take the rule's
    movement as a gradient (FedAvgM, FedAdam, FedYogi)."""
    rate: Annotated[float | None, Within(above=0), Example(ADAPTIVE_RATE)] = None
    """Server learning rate η of the optimiser; without it, 1 for `momentum` and 0.01 for `adam` and
    `yogi`."""
    beta1: Annotated[float, Within(least=0, below=1)] = 0.9
    """Share of the first moment that stays from round to round."""
    beta2: Annotated[float, Within(least=0, below=1)] = 0.99
    """Share of the second moment that stays (`adam`, `yogi`)."""
    tau: Annotated[float, Within(above=0)] = 1e-3
    """Smallest divisor: the larger, the less the steps adapt (`adam`, `yogi`)."""

    def __post_init__(self) -> None:
        check_fields(self)
        defaults = {each.name: each.default for each in fields(self)}
        given = {name for name, value in defaults.items() if getattr(self, name) != value}
        used = {"none": set[str](), "momentum": {"rate", "beta1"}}.get(self.name, set(defaults))
        if useless := sorted(given - used - {"name"}):
            raise ConfigError(f"{useless[0]} does nothing with the server optimiser {self.name!r}")

    @property
    def starts(self) -> tuple[float, ...]:
        """Value of each moment before the first round."""
        return {"none": (), "momentum": (0.0,)}.get(self.name, (0.0, self.tau**2))

    def step(
        self,
        plan: ModelPlan,
        movement: Float32,
        moved: NDArray[np.bool_],
        moments: ServerMoments,
        *,
        round: int,
        threads: int = 1,
    ) -> None:
        """Replace a rule's movement, in place, by the optimiser's; `moved` marks blocks.

        The result does not depend on the number of threads.
        """
        with moments.updated(round) as (old, put):

            def work(start: int, end: int) -> None:
                for low in range(start, end, PIECE):
                    high = min(low + PIECE, end)
                    part, marks = movement[low:high], spread(plan, moved, low, high)
                    before = [moment[low:high] for moment in old]
                    after, step = self._next(part, before)
                    for number, values in enumerate(after):
                        put(number, low, np.where(marks, values, before[number]))
                    part[:] = np.where(marks, step, 0)

            over_shards(plan.parameters, threads, work)

    def _next(
        self, movement: Float32, before: Sequence[Float32]
    ) -> tuple[tuple[Float32, ...], Float32]:
        """Compute the moments after a movement, and the step."""
        if self.name == "momentum":
            first = self.beta1 * before[0] + movement
            return (first,), (1.0 if self.rate is None else self.rate) * first
        first, second = before
        first = self.beta1 * first + (1 - self.beta1) * movement
        square = movement * movement
        if self.name == "adam":
            second = self.beta2 * second + (1 - self.beta2) * square
        else:
            change = (1 - self.beta2) * square * np.sign(second - square)
            second = np.subtract(second, change, dtype=np.float32)
        rate = ADAPTIVE_RATE if self.rate is None else self.rate
        step: Float32 = rate * first / (np.sqrt(second) + self.tau)
        return (first, second), step


class RamMoments:
    """Moments that live as long as the process."""

    def __init__(self, vectors: KeptVectors, plan: ModelPlan) -> None:
        self._moments = [np.full(plan.parameters, each, np.float32) for each in vectors.starts]

    @property
    def current(self) -> Sequence[Float32]:
        """See `ServerMoments`."""
        return self._moments

    @contextmanager
    def updated(self, round: int) -> Iterator[tuple[Sequence[Float32], Put]]:  # noqa: ARG002
        """See `ServerMoments`. Each piece is read before it is replaced."""
        yield self._moments, self._put

    def _put(self, moment: int, start: int, values: Float32) -> None:
        self._moments[moment][start : start + len(values)] = values
