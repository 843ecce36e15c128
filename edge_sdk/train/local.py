"""The local rules, shared by all backends (`LocalRule` defines them).

Written with operators that numpy arrays and torch tensors share, so the onnx backend runs them on
numpy, the torch backend on tensors of any device, and both take the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.plan import Groups, ModelPlan

Arrays = dict[str, Any]
"""Arrays by tensor name; numpy's or torch's."""

Gradient = Callable[[Arrays], tuple[float, Arrays]]
"""Returns (loss, gradients) of one batch at given weights. Gradients may be overwritten."""

PIECE = 2**20
"""Values squared at a time by torch."""
DOT = 2**13
"""Values squared at a time by numpy: few enough for its BLAS to stay on this thread, so that the
sum does not depend on the number of threads."""
PART = 2**16
"""Values from which something else is made at a time: it stays in a core's own cache."""


def axis_scales(plan: ModelPlan, groups: Groups, rescale: float) -> dict[str, float]:
    """Return the factor for the inputs that consume each axis: `(1 / level)^rescale`.

    It is 1 for an axis of depth: nothing sums over blocks.
    """
    levels = plan.levels(groups)
    return {
        axis.name: 1.0 if axis.depth else (1 / levels[axis.name]) ** rescale for axis in plan.axes
    }


class LocalSteps:
    """Takes steps in place, and keeps the state that lasts from step to step within a round."""

    def __init__(
        self,
        rule: LocalRule,
        start: Mapping[str, Any],
        correction: Mapping[str, Any] | None = None,
    ) -> None:
        """`start`: the weights at the beginning of the round; neither modified nor updated.

        `correction` is added to every step's gradient, before it is clipped; None: nothing is.
        """
        self._rule = rule
        self._start = start
        self._correction = correction
        self._velocity: Arrays | None = None

    def step(self, weights: Arrays, gradient: Gradient) -> float:
        """Take one step on one batch; changes `weights` in place and returns the loss before it."""
        rule = self._rule
        loss, grads = self._objective(weights, gradient)
        if rule.sam_radius > 0:
            norm = _norm(grads)
            if norm > 0:
                _scale(grads, rule.sam_radius / norm)
                for name in grads:
                    grads[name] += weights[name]
                _, grads = self._objective(grads, gradient)
        if self._correction is not None:
            for name in grads:
                grads[name] += self._correction[name]
        if rule.clip_norm is not None:
            norm = _norm(grads)
            if norm > rule.clip_norm:
                _scale(grads, rule.clip_norm / norm)
        if rule.weight_decay > 0:
            for name in grads:
                for part in _parts(grads[name]):
                    grad = grads[name][part]
                    grad += weights[name][part] * rule.weight_decay
        _scale(grads, rule.learning_rate)
        if rule.momentum > 0:
            grads = self._with_momentum(grads)
        for name in weights:
            weights[name] -= grads[name]
        return loss

    def _objective(self, weights: Arrays, gradient: Gradient) -> tuple[float, Arrays]:
        loss, grads = gradient(weights)
        if self._rule.proximal > 0:
            for name in grads:
                for part in _parts(grads[name]):
                    moved = weights[name][part] - self._start[name][part]
                    grad = grads[name][part]
                    grad += moved * self._rule.proximal
        return loss, grads

    def _with_momentum(self, grads: Arrays) -> Arrays:
        # The velocity is stored times the learning rate, which is constant in a round: then every
        # operation is in place, and none makes an array as large as a weight.
        if self._velocity is None:
            # A copy: keeping a gradient would pin a place among the runtime's activations.
            self._velocity = {name: grad * 1 for name, grad in grads.items()}
        else:
            for name in grads:
                self._velocity[name] *= self._rule.momentum
                self._velocity[name] += grads[name]
        return self._velocity


def _parts(array: Any) -> Iterator[Any]:
    """Yield indices of parts of an array, so small that what is made of them takes no memory."""
    size = math.prod(array.shape)
    if size <= PART:
        yield ...
        return
    rows = max(1, PART * len(array) // size)
    for start in range(0, len(array), rows):
        yield slice(start, start + rows)


def _scale(grads: Arrays, factor: float) -> None:
    for name in grads:
        grads[name] *= factor


def _norm(grads: Mapping[str, Any]) -> float:
    return math.sqrt(sum(map(_square, grads.values())))


def _square(grad: Any) -> float:
    """Return the squared norm, in pieces: clipping must not take memory for a copy of a tensor."""
    flat, total = grad.reshape(-1), 0.0
    if isinstance(flat, np.ndarray):
        for start in range(0, len(flat), DOT):
            few = flat[start : start + DOT]
            total += float(few.dot(few))
        return total
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        total += float((piece * piece).sum())
    return total
