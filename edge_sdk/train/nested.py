"""Steps that train several widths of one submodel (`LocalRule.widths`), on any backend.

Weights are stored once, at the assigned width. A narrower pass takes its part of them by index, and
its gradients are added into the same part of the assigned submodel's; everything after the
gradient (SAM, the proximal term, clipping, weight decay, momentum) acts on the whole as usual.

With distillation, the outputs of the assigned width at the same weights and batch are among the
targets of the narrower one; no gradient goes through them.

Each width has its own graph, rescale factors, dropout masks and buffers. The buffers of narrower
ones start from the assigned ones' parts and end with the training: batch statistics of a narrower
submodel say nothing about the assigned one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.backend import Job, Objective
from edge_sdk.train.local import Arrays


class WidthObjective(Objective, Protocol):
    """The objective of one width, which can teach a narrower one and learn from a wider one."""

    outputs: Any
    """Outputs of the last call, where the job distils."""
    teacher: Any
    """Outputs of a wider submodel on the same batch, for the next call; None: it has none."""


class NestedObjective:
    """Loss and gradients of a step's widths, as an `Objective` of the assigned submodel."""

    def __init__(
        self,
        plan: ModelPlan,
        job: Job,
        own: WidthObjective,
        make: Callable[[Job], WidthObjective],
        zeros: Callable[[Any], Any],
    ) -> None:
        """`own` is the assigned submodel's objective, `make` makes those of narrower ones; `zeros`
        returns an array of zeros like another. Raises `GroupError` for a width that is not within
        the job's groups.
        """
        self._places = [plan.places_within(job.groups, width) for width in job.widths]
        self._own = own
        self._narrower = [
            make(
                replace(
                    job,
                    groups=width,
                    weights={},
                    spare=None,
                    buffers={name: array[at[name]] for name, array in job.buffers.items()},
                )
            )
            for width, at in zip(job.widths, self._places, strict=True)
        ]
        self._zeros = zeros
        self._distils = job.distils
        self._draws = job.drawn()
        self._drawn: tuple[int, ...] = (0,)

    def batch(self, batch: Batch) -> bool:
        """See `Objective`."""
        self._drawn = next(self._draws)
        for width in self._drawn:
            (self._own if width == 0 else self._narrower[width - 1]).batch(batch)
        return self._drawn[0] == 0

    def __call__(self, weights: Arrays) -> tuple[float, Arrays]:
        """Return the loss of the widest submodel of this step, and the sum of all gradients."""
        first, *others = self._drawn
        if first == 0:
            loss, grads = self._own(weights)
        else:
            # Not kept from step to step: SAM makes weights of the gradients it is given.
            grads = {name: self._zeros(array) for name, array in weights.items()}
            loss = self._add(first, weights, grads)
        for width in others:
            self._add(width, weights, grads)
        return loss, grads

    def _add(self, width: int, weights: Arrays, grads: Arrays) -> float:
        """Add the gradients of a narrower width to its part of `grads`; return its loss."""
        at = self._places[width - 1]
        part = {name: array[at[name]] for name, array in weights.items()}
        objective = self._narrower[width - 1]
        if self._distils:
            objective.teacher = self._own.outputs
        loss, narrow = objective(part)
        for name, grad in narrow.items():
            grads[name][at[name]] += grad
        return loss
