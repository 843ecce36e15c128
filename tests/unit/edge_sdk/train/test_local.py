"""Local rules: closed forms, a plain loop over numbers, and torch's optimiser."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.train.local import Arrays, LocalSteps, axis_scales

RATE = 0.1
SGD = LocalRule(learning_rate=RATE)
Vector = NDArray[np.float64]


class Quadratic:
    """Loss `½ wᵀ A w + b·w` of a vector that is held as two tensors; counts its gradients."""

    def __init__(self, matrix: Vector, slope: Vector) -> None:
        self.matrix, self.slope = matrix, slope
        self.calls = 0

    def __call__(self, weights: Arrays) -> tuple[float, Arrays]:
        self.calls += 1
        w = join(weights)
        loss = 0.5 * w @ self.matrix @ w + self.slope @ w
        return float(loss), split(self.matrix @ w + self.slope)


def split(vector: Vector) -> Arrays:
    return {"one": vector[:2].copy(), "other": vector[2:].reshape(1, -1).copy()}


def join(weights: Arrays) -> Vector:
    return np.concatenate([weights["one"], weights["other"].ravel()])


def run(
    rule: LocalRule, start: Vector, loss: Quadratic, steps: int, correction: Vector | None = None
) -> Vector:
    added = None if correction is None else split(correction)
    weights, local = split(start), LocalSteps(rule, split(start), added)
    for _ in range(steps):
        local.step(weights, loss)
    return join(weights)


def flat(slope: Vector) -> Quadratic:
    """The same gradient everywhere."""
    return Quadratic(np.zeros((len(slope), len(slope))), slope)


START = np.array([1.0, -2.0, 3.0])
BOWL = Quadratic(2 * np.eye(3), np.zeros(3))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_plain_step_follows_the_gradient(steps: int) -> None:
    np.testing.assert_allclose(run(SGD, START, BOWL, steps), (1 - 2 * RATE) ** steps * START)


def test_weight_decay_shrinks_what_the_gradient_leaves() -> None:
    rule = replace(SGD, weight_decay=0.5)
    np.testing.assert_allclose(run(rule, START, BOWL, 3), (1 - RATE * 2.5) ** 3 * START)


def test_momentum_adds_up_a_steady_gradient() -> None:
    """Velocity after step t is (1 + m + … + m^(t−1)) g; it starts at 0 in every round."""
    slope = np.array([1.0, 2.0, -1.0])
    rule = replace(SGD, momentum=0.5)
    for _ in range(2):
        got = run(rule, START, flat(slope), 3)
        np.testing.assert_allclose(got, START - RATE * (1 + 1.5 + 1.75) * slope)


@pytest.mark.parametrize(("clip", "factor"), [(1.0, 1 / 13), (13.0, 1), (20.0, 1)])
def test_clipping_shortens_a_gradient_that_is_too_long(clip: float, factor: float) -> None:
    """The norm is that of all tensors together: (3, 4) and (12) make 13."""
    slope = np.array([3.0, 4.0, 12.0])
    got = run(replace(SGD, clip_norm=clip), START, flat(slope), 1)
    np.testing.assert_allclose(got, START - RATE * factor * slope)


def test_proximal_term_holds_on_to_the_start() -> None:
    """With gradient c, w − w₀ = −(c/ρ)(1 − (1 − γρ)^t)."""
    slope, rho = np.array([1.0, -2.0, 0.5]), 0.7
    got = run(replace(SGD, proximal=rho), START, flat(slope), 5)
    np.testing.assert_allclose(got, START - slope / rho * (1 - (1 - RATE * rho) ** 5))


def test_sam_takes_the_gradient_a_radius_uphill() -> None:
    """In a round bowl uphill is outward: the gradient is that of w (1 + δ/‖w‖)."""
    outward = 1 + 0.3 / np.sqrt(14)
    got = run(replace(SGD, sam_radius=0.3), START, BOWL, 1)
    np.testing.assert_allclose(got, START - RATE * 2 * outward * START)


def test_sam_takes_no_step_aside_where_the_gradient_is_zero() -> None:
    loss = Quadratic(np.eye(3), np.zeros(3))
    rule = replace(SGD, sam_radius=0.3)
    np.testing.assert_array_equal(run(rule, np.zeros(3), loss, 2), np.zeros(3))
    assert loss.calls == 2
    run(rule, START, loss, 2)
    assert loss.calls == 2 + 4


def test_step_returns_the_loss_before_it_and_leaves_the_start_alone() -> None:
    weights, start = split(START), split(START)
    local = LocalSteps(LocalRule(learning_rate=RATE, proximal=1, momentum=0.5), start)
    for _ in range(3):
        before = join(weights)
        assert local.step(weights, BOWL) == pytest.approx(before @ before)  # ½ · 2 ‖w‖²
    np.testing.assert_array_equal(join(start), START)


def by_hand(
    rule: LocalRule, start: list[float], loss: Quadratic, steps: int, correction: list[float]
) -> list[float]:
    """`LocalRule`'s three points, number by number; corrected before the second."""
    size = len(start)
    matrix, slope = loss.matrix.tolist(), loss.slope.tolist()

    def gradient(w: list[float]) -> list[float]:
        return [
            sum(matrix[i][j] * w[j] for j in range(size))
            + slope[i]
            + rule.proximal * (w[i] - start[i])
            for i in range(size)
        ]

    def norm(g: list[float]) -> float:
        return math.sqrt(sum(x * x for x in g))

    w, velocity = list(start), [0.0] * size
    for _ in range(steps):
        g = gradient(w)
        if rule.sam_radius and norm(g):
            length = norm(g)
            g = gradient([w[i] + rule.sam_radius * g[i] / length for i in range(size)])
        g = [g[i] + correction[i] for i in range(size)]
        if rule.clip_norm is not None and norm(g) > rule.clip_norm:
            length = norm(g)
            g = [rule.clip_norm * x / length for x in g]
        for i in range(size):
            velocity[i] = rule.momentum * velocity[i] + g[i] + rule.weight_decay * w[i]
        w = [w[i] - rule.learning_rate * velocity[i] for i in range(size)]
    return w


off_or = st.floats(0.01, 0.9)
RULES = st.builds(
    LocalRule,
    learning_rate=st.floats(0.001, 0.1),
    momentum=st.just(0.0) | off_or,
    weight_decay=st.just(0.0) | off_or,
    clip_norm=st.none() | st.floats(0.1, 5),
    sam_radius=st.just(0.0) | off_or,
    proximal=st.just(0.0) | off_or,
)


@settings(max_examples=200)
@given(rule=RULES, seed=st.integers(0, 1000), steps=st.integers(1, 6), corrected=st.booleans())
def test_steps_equal_a_loop_over_numbers(
    rule: LocalRule, seed: int, steps: int, corrected: bool
) -> None:
    rng = np.random.default_rng(seed)
    matrix, slope, start = rng.normal(size=(5, 5)), rng.normal(size=5), rng.normal(size=5)
    loss = Quadratic(matrix + matrix.T, slope)
    correction = rng.normal(size=5) if corrected else np.zeros(5)
    got = run(rule, start, loss, steps, correction if corrected else None)
    expected = by_hand(rule, start.tolist(), loss, steps, correction.tolist())
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "rule",
    [
        SGD,
        replace(SGD, momentum=0.9),
        replace(SGD, weight_decay=0.1),
        replace(SGD, clip_norm=0.5),
        replace(SGD, momentum=0.9, weight_decay=0.1, clip_norm=0.5),
    ],
)
def test_steps_equal_torchs_sgd(rule: LocalRule) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    matrix, slope = rng.normal(size=(5, 5)), rng.normal(size=5)
    loss = Quadratic(matrix @ matrix.T, slope)
    start = rng.normal(size=5)
    w = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.SGD([w], rule.learning_rate, rule.momentum, 0, rule.weight_decay)
    for _ in range(6):
        optimizer.zero_grad()
        (0.5 * w @ torch.tensor(loss.matrix) @ w + torch.tensor(slope) @ w).backward()
        if rule.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([w], rule.clip_norm)
        optimizer.step()
    # torch adds 1e-6 to the norm it clips by
    tolerance = 1e-12 if rule.clip_norm is None else 1e-5
    np.testing.assert_allclose(run(rule, start, loss, 6), w.detach().numpy(), rtol=tolerance)


def test_steps_keep_float32() -> None:
    weights = {"w": np.ones(3, dtype=np.float32)}
    rule = LocalRule(
        learning_rate=0.1, momentum=0.5, weight_decay=0.1, clip_norm=0.5, sam_radius=0.1, proximal=1
    )
    local = LocalSteps(rule, {"w": weights["w"].copy()})
    for _ in range(2):
        local.step(weights, lambda w: (0.0, {"w": 2 * w["w"]}))
    assert weights["w"].dtype == np.float32


@pytest.mark.parametrize("rescale", [0.0, 0.5, 1.0])
def test_axis_scales_are_inverse_levels(rescale: float) -> None:
    plan = ModelPlan(
        axes=(Axis("wide", (5, 3, 2)), Axis("deep", (4,))),
        tensors=(Tensor("w", "float32", (Dim(10, 0), Dim(4, 1))),),
    )
    scales = axis_scales(plan, {"wide": (0, 2), "deep": (0,)}, rescale)
    assert scales == pytest.approx({"wide": (10 / 7) ** rescale, "deep": 1.0})


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_steps_move_an_array_without_dimensions(momentum: float) -> None:
    """numpy's operators return numbers for those, which do not change in place."""
    weights = {"w": np.array(2.0, dtype=np.float32)}
    local = LocalSteps(replace(SGD, momentum=momentum), {"w": np.array(2.0, dtype=np.float32)})
    for _ in range(3):
        local.step(weights, lambda _: (0.0, {"w": np.array(1.0, dtype=np.float32)}))
    velocities = 1 + (1 + momentum) + (1 + momentum + momentum**2)
    assert isinstance(weights["w"], np.ndarray)
    assert weights["w"] == pytest.approx(2 - RATE * velocities)


def test_velocity_does_not_change_with_a_gradient_that_is_reused() -> None:
    """A runtime may hand out the same memory for the gradients of every step."""
    memory = np.zeros(3)

    def gradient(_: Arrays) -> tuple[float, Arrays]:
        memory[...] = [1.0, 2.0, 3.0]
        return 0.0, {"w": memory}

    weights = {"w": np.zeros(3)}
    local = LocalSteps(replace(SGD, momentum=0.5), {"w": np.zeros(3)})
    for _ in range(3):
        local.step(weights, gradient)
    np.testing.assert_allclose(weights["w"], -RATE * (1 + 1.5 + 1.75) * np.array([1.0, 2.0, 3.0]))
