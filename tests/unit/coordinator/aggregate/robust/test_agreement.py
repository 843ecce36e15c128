"""Agreement of movements with one another, against the definition written as a loop."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.robust.agreement import agreements
from edge_sdk.protocol.plan.blocks import Blocks
from tests.unit.coordinator.masks.fleet import chain

PLAN = chain((4, 6, 4), (2, 3, 2, 3))


def movement(device: str, ids: list[int], values: np.ndarray, rate: float = 0.1) -> Contribution:
    parts = [values[PLAN.block_offsets[n] : PLAN.block_offsets[n + 1]] for n in ids]
    flat = np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
    return Contribution(device, 1, Blocks(np.array(ids, np.int64), flat), rate, 1.0, 1)


def naive(parts: list[Contribution], device: str) -> float | None:
    """The cosine with the mean of the others, over blocks that two others hold."""
    held: dict[str, dict[int, np.ndarray]] = {}
    for part in parts:
        ends = np.cumsum(PLAN.block_sizes[part.blocks.ids])[:-1]
        pieces = np.split(part.blocks.values.astype(np.float64) / part.learning_rate, ends)
        held[part.device] = dict(zip(part.blocks.ids.tolist(), pieces, strict=True))
    one, other = [0.0], [0.0]
    for block, values in held[device].items():
        others = [each[block] for name, each in held.items() if name != device and block in each]
        if len(others) >= 2:
            one += values.tolist()
            other += np.mean(others, axis=0).tolist()
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.dot(one, other)) / length if length else None


@pytest.mark.parametrize("seed", range(8))
def test_agreement_is_the_cosine_with_the_mean_of_the_others(seed: int) -> None:
    draws = np.random.default_rng(seed)
    parts = []
    for number in range(int(draws.integers(2, 8))):
        ids = np.flatnonzero(draws.random(PLAN.block_count) < 0.6).tolist()
        values = draws.standard_normal(PLAN.parameters)
        rate = float(draws.choice([0.1, 0.02]))
        parts.append(movement(f"d{number}", ids, values, rate))
    found = agreements(PLAN, parts)
    for part in parts:
        expected = naive(parts, part.device)
        if expected is None:
            assert part.device not in found
        else:
            assert found[part.device] == pytest.approx(expected, abs=1e-4)
    assert agreements(PLAN, parts, threads=3) == found


def test_reversed_movement_disagrees_and_others_do_not() -> None:
    draws = np.random.default_rng(0)
    common, everything = draws.standard_normal(PLAN.parameters), list(range(PLAN.block_count))
    parts = [
        movement(name, everything, sign * (common + 0.3 * draws.standard_normal(PLAN.parameters)))
        for name, sign in (("a", 1), ("b", 1), ("c", 1), ("d", -1), ("e", 1))
    ]
    found = agreements(PLAN, parts)
    assert found["d"] < -0.8
    assert all(found[name] > 0.5 for name in "abce")


def test_movement_that_nobody_shares_or_that_is_zero_has_no_agreement() -> None:
    ones = np.ones(PLAN.parameters)
    parts = [movement("a", [0], ones), movement("b", [0], ones), movement("c", [1], ones)]
    assert agreements(PLAN, parts) == {}
    parts = [movement(name, [0], ones) for name in "abc"] + [movement("z", [0], 0 * ones)]
    assert set(agreements(PLAN, parts)) == {"a", "b", "c"}
