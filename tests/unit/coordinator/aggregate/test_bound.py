"""The longest movement of honest training: no training exceeds it, and some training reaches it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.aggregate.bound import SERVED, reach_of, wire_factor
from edge_sdk.device.stores.residuals import ArrayStore, Residuals
from edge_sdk.protocol.encoding.codec import decode_blocks, encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.encoding.top_k import RESIDUAL_ROUNDS
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.train.local import LocalSteps

SIZE = 40
PLAN = ModelPlan(
    axes=(Axis("a", (8, 8, 8, 8)),),
    tensors=(Tensor("w", "float32", (Dim(32, 0), Dim(9))), Tensor("bias", "float32", (Dim(7),))),
)

rules = st.builds(
    LocalRule,
    learning_rate=st.floats(1e-3, 0.5),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1, 3.0]),
    clip_norm=st.floats(0.1, 30.0),
    sam_radius=st.sampled_from([0.0, 0.05]),
    proximal=st.sampled_from([0.0, 0.3]),
)


def train(rule: LocalRule, start: NDArray[Any], gradients: list[NDArray[Any]]) -> NDArray[Any]:
    """The movement that the devices' own steps make of these gradients."""
    weights = {"w": start.copy()}
    steps = LocalSteps(rule, {"w": start})
    drawn = iter(each for each in gradients for _ in range(2 if rule.sam_radius else 1))
    for _ in gradients:
        steps.step(weights, lambda _: (0.0, {"w": next(drawn).copy()}))
    moved: NDArray[Any] = weights["w"] - start
    return moved


@given(rules, st.integers(1, 25), st.floats(0, 100), st.integers(0, 2**32 - 1), st.floats(0.5, 1e6))
def test_no_training_moves_further(
    rule: LocalRule, steps: int, norm: float, seed: int, length: float
) -> None:
    random = np.random.default_rng(seed)
    start = random.normal(size=SIZE).astype(np.float32)
    start *= np.float32(norm / np.linalg.norm(start))
    aim = random.normal(size=SIZE)
    noise = random.choice([0.0, 0.1, 1.0])
    gradients = [
        (length * random.choice([1, 1, 1, -1]) * (aim + noise * random.normal(size=SIZE))).astype(
            np.float32
        )
        for _ in range(steps)
    ]
    reach = reach_of(rule, steps)
    assert reach is not None
    moved = float(np.linalg.norm(train(rule, start, gradients).astype(np.float64)))
    assert moved <= reach.limit(float(np.linalg.norm(start)))


@given(rules, st.integers(1, 12), st.floats(0, 100))
def test_bound_is_reached_by_gradients_along_the_weights(
    rule: LocalRule, steps: int, norm: float
) -> None:
    """Signs tried one step at a time, from the last, each as long as may be, in float64."""
    clip = rule.clip_norm or 0.0
    plain = LocalRule(
        learning_rate=rule.learning_rate,
        momentum=rule.momentum,
        weight_decay=rule.weight_decay,
        clip_norm=clip,
    )
    start = np.array([norm])

    def moved(signs: list[float]) -> float:
        return float(train(plain, start, [np.array([clip * sign]) for sign in signs])[0])

    # The system is linear, so each sign can be chosen by itself.
    free = moved([0.0] * steps)
    aim = math.copysign(1.0, free)
    signs = []
    for at in range(steps):
        lone = [0.0] * steps
        lone[at] = 1.0
        signs.append(aim * math.copysign(1.0, moved(lone) - free))
    reach = reach_of(plain, steps)
    assert reach is not None
    last = abs(moved(signs))
    if rule.weight_decay == 0 or rule.weight_decay * rule.learning_rate < 1e-2:
        # Longer training moves further, so the last step is the furthest.
        assert last == pytest.approx(reach.gradients + reach.decay * norm, rel=1e-9)
    assert last <= (reach.gradients + reach.decay * norm) * (1 + 1e-9)


def test_bound_without_decay_is_the_formula() -> None:
    rule = LocalRule(learning_rate=0.1, momentum=0.5, clip_norm=20.0)
    reach = reach_of(rule, 10)
    assert reach is not None
    assert reach.decay == 0
    assert reach.gradients == pytest.approx(
        0.1 * 20 * sum((1 - 0.5**t) / 0.5 for t in range(1, 11))
    )
    assert reach.gradients < 10 * 0.1 * 20 / (1 - 0.5)
    assert reach_of(LocalRule(learning_rate=0.1), 10) is None


def test_bound_of_very_many_steps_takes_no_time() -> None:
    rule = LocalRule(learning_rate=0.1, momentum=0.5, clip_norm=1.0)
    some, more = reach_of(rule, 20_000), reach_of(rule, 10**9)
    assert some is not None
    assert more is not None
    assert some.gradients == pytest.approx(0.1 * (20_000 - 1) / 0.5, rel=1e-6)
    assert more.gradients == pytest.approx(0.1 * 10**9 / 0.5, rel=1e-6)
    assert some.decay == 0


def test_training_that_diverges_has_no_bound() -> None:
    rule = LocalRule(learning_rate=0.5, weight_decay=30.0, clip_norm=1.0)
    reach = reach_of(rule, 5000)
    assert reach is not None
    assert reach.limit(1.0) == math.inf


def norm_of(values: NDArray[Any]) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8", "top-k:0.1"])
@given(seed=st.integers(0, 2**32 - 1), peaks=st.booleans())
def test_encoded_movement_is_no_longer_than_the_factor_says(
    kind: str, seed: int, peaks: bool
) -> None:
    random, encoding = np.random.default_rng(seed), Encoding.parse(kind)
    groups = PLAN.full_groups()
    ids = PLAN.block_ids(PLAN.choose(groups))
    values = random.normal(size=PLAN.parameters)
    if peaks:
        values **= 9
    blocks = Blocks(ids, values.astype(np.float32))
    sent = decode_blocks(PLAN, encode_blocks(PLAN, groups, blocks, encoding, random))[1]
    factor = wire_factor(encoding, PLAN.block_sizes[ids])
    assert norm_of(sent.values) <= 1.001 * factor * norm_of(blocks.values)


@pytest.mark.parametrize("alike", [True, False], ids=["always the same groups", "changing groups"])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_residuals_of_top_k_do_not_make_it_longer(alike: bool, seed: int) -> None:
    """Movements of length 1 that all point the same way leave as much behind as they can."""
    random, encoding = np.random.default_rng(seed), Encoding.parse("top-k:0.1")
    residuals = Residuals(PLAN, ArrayStore(), forget_after=RESIDUAL_ROUNDS)
    flat = np.ones(PLAN.parameters, dtype=np.float32)
    longest = 0.0
    for round in range(1, 30):
        groups = {"a": (0, 1, 2, 3) if alike else (int(random.integers(4)),)}
        ids = PLAN.block_ids(PLAN.choose(groups))
        sizes = PLAN.block_sizes[ids]
        values = flat[: int(sizes.sum())] + 1e-3 * random.normal(size=int(sizes.sum()))
        values /= norm_of(values)
        movement = Blocks(ids, values.astype(np.float32))
        corrected = residuals.corrected(round, movement)
        sent = decode_blocks(PLAN, encode_blocks(PLAN, groups, corrected, encoding, random))[1]
        residuals.keep(round, movement, sent)
        residuals.settle(round, used=True)
        assert norm_of(sent.values) <= wire_factor(encoding, sizes)
        longest = max(longest, norm_of(sent.values))
    assert longest > 1.2, "residuals added nothing: this shows nothing"


def test_model_that_travels_in_int8_is_not_much_longer() -> None:
    random = np.random.default_rng(0)
    groups = PLAN.full_groups()
    ids = PLAN.block_ids(PLAN.choose(groups))
    blocks = Blocks(ids, (random.normal(size=PLAN.parameters) ** 3).astype(np.float32))
    message = encode_blocks(PLAN, groups, blocks, Encoding.parse("int8"), random)
    assert norm_of(decode_blocks(PLAN, message)[1].values) <= SERVED * norm_of(blocks.values)
