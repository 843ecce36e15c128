"""Fits measured seconds and bytes to the components of training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from edge_sdk.decide.costs.work import Work


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients ≥ 0 of some features of `Work`, which add up to a prediction."""

    features: Callable[[Work], Sequence[float]]
    coefficients: tuple[float, ...]

    def __call__(self, work: Work) -> float:
        """Predict."""
        pairs = zip(self.coefficients, self.features(work), strict=True)
        return sum(coefficient * value for coefficient, value in pairs)


def time_features(work: Work) -> tuple[float, ...]:
    """Features to which a step's seconds are fitted."""
    return work.macs, work.weight_bytes, work.samples, 1.0


def fixed_features(work: Work) -> tuple[float, ...]:
    """Features to which the seconds of a training besides its steps are fitted."""
    return work.weight_bytes, 1.0


def memory_features(work: Work) -> tuple[float, ...]:
    """Features to which a training's memory is fitted."""
    size = work.activation_bytes or work.macs
    return size, work.weight_bytes, work.samples, 1.0


def fit(features: Callable[[Work], Sequence[float]], measured: Sequence[tuple[Work, float]]) -> Fit:
    """Find the fit of least relative error; among equals, the one with fewer features.

    All measured values must be above 0. A single value gives a prediction in proportion to the
    first feature that is not 0.
    """
    rows = np.array([features(work) for work, _ in measured], dtype=np.float64)
    values = np.array([value for _, value in measured], dtype=np.float64)
    scale = rows.max(axis=0)
    useful = np.flatnonzero(scale > 0)
    relative = rows[:, useful] / scale[useful] / values[:, None]
    wanted = np.ones(len(values))
    best, best_error = np.zeros(len(useful)), math.inf
    # Four features have fifteen subsets, and the best non-negative fit is a plain one of some.
    for count in range(1, min(len(useful), len(values)) + 1):
        for chosen in combinations(range(len(useful)), count):
            part = relative[:, chosen]
            found, *_ = np.linalg.lstsq(part, wanted, rcond=None)
            error = float(np.square(part @ found - wanted).sum())
            if (found >= 0).all() and error < best_error - 1e-9:
                best, best_error = np.zeros(len(useful)), error
                best[list(chosen)] = found
    coefficients = np.zeros(len(scale))
    coefficients[useful] = best / scale[useful]
    return Fit(features, tuple(float(each) for each in coefficients))
