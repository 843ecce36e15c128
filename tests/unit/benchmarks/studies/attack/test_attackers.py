"""Attackers do what they say, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.studies.attack.attackers import (
    ATTACKS,
    BOOST,
    CLAIMED,
    COHORT_LIMIT,
    CONSTANT,
    HUGE,
    NEAR,
    NOISE,
    PATIENCE,
    POISONED,
    SCALE,
    ClaimedData,
)
from benchmarks.studies.attack.settings import (
    ATTACKERS,
    DEVICES,
    SETTINGS,
    choose_attackers,
    device_levels,
)
from coordinator.aggregate.arrivals import MAX_VALUE
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.protocol.errors import NonFiniteError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.backend import Job, Metrics, Trained

MOVED = {
    "weight": np.arange(-40, 40, dtype=np.float32).reshape(4, 20),
    "bias": np.ones(4, np.float32),
}


class Fixed:
    """A backend whose training always gives the same movement."""

    plan: ModelPlan  # never asked for
    data = None

    def __init__(self, movement: dict[str, Array] | None = None) -> None:
        self.movement = movement

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        if self.movement is None:
            raise NonFiniteError("the loss is nan")
        return Trained(self.movement, {}, Metrics(2, 8, 1.0, 0.9, 0.8))


def job() -> Job:
    return Job(
        groups={},
        weights={name: np.zeros_like(array) for name, array in MOVED.items()},
        buffers={},
        rule=LocalRule(learning_rate=0.1),
        mask_stream=np.random.default_rng(0),
    )


def sent(attack: str, movement: dict[str, Array] | None = MOVED, device: str = "a") -> Trained:
    return ATTACKS[attack].backend(Fixed(movement), 7, device).train(job(), [])


@pytest.mark.parametrize(
    ("attack", "factor"),
    [
        ("sign-flip", -1),
        ("scaling", SCALE),
        ("claimed-samples", -1),
        ("backdoor-boosted", BOOST),
    ],
)
def test_movement_is_multiplied_and_training_is_reported_as_it_was(
    attack: str, factor: float
) -> None:
    trained = sent(attack)
    for name, array in MOVED.items():
        np.testing.assert_array_equal(trained.movement[name], factor * array)
        assert trained.movement[name].dtype == np.float32
    assert trained.metrics == Metrics(2, 8, 1.0, 0.9, 0.8)


def test_adaptive_attack_reverses_and_stays_below_the_limits_of_screening() -> None:
    movement = {name: array / 100 for name, array in MOVED.items()}
    length = float(np.sqrt(sum(np.square(array).sum() for array in movement.values())))
    rule = LocalRule(learning_rate=0.1, clip_norm=20.0)
    backend = ATTACKS["adaptive"].backend(Fixed(movement), 7, "a")
    trained = backend.train(replace(job(), rule=rule), [])
    bound = 2 * 0.1 * 20.0  # two steps of plain SGD
    factor = min(NEAR * COHORT_LIMIT, bound / length)
    np.testing.assert_allclose(trained.movement["weight"], -factor * movement["weight"], rtol=1e-5)
    assert factor * length <= bound
    free = ATTACKS["adaptive"].backend(Fixed(movement), 7, "a").train(job(), [])
    np.testing.assert_allclose(
        free.movement["bias"], -NEAR * COHORT_LIMIT * movement["bias"], rtol=1e-5
    )


def test_turncoat_is_honest_first() -> None:
    backend = ATTACKS["turncoat"].backend(Fixed(MOVED), 7, "a")
    for _ in range(PATIENCE):
        assert backend.train(job(), []).movement is MOVED
    np.testing.assert_array_equal(backend.train(job(), []).movement["bias"], -MOVED["bias"])


def test_noise_has_ten_times_the_rms_of_each_tensor_and_is_drawn_anew() -> None:
    wide = {"weight": np.full((100, 200), 0.25, np.float32), "bias": np.zeros(4, np.float32)}
    backend = ATTACKS["noise"].backend(Fixed(wide), 7, "a")
    first, second = (backend.train(job(), []).movement for _ in range(2))
    assert first["weight"].std() == pytest.approx(NOISE * 0.25, rel=0.03)
    assert first["weight"].mean() == pytest.approx(0, abs=0.1)
    assert not first["bias"].any()
    assert not np.array_equal(first["weight"], second["weight"])
    again = sent("noise", wide).movement
    np.testing.assert_array_equal(again["weight"], first["weight"])
    assert not np.array_equal(sent("noise", wide, device="b").movement["weight"], first["weight"])


@pytest.mark.parametrize(("attack", "value"), [("huge", HUGE), ("constant", CONSTANT)])
def test_fabricated_movement_needs_no_training_and_fits_the_model(
    attack: str, value: float
) -> None:
    trained = sent(attack, None)  # its training would fail
    assert {name: array.shape for name, array in trained.movement.items()} == {
        name: array.shape for name, array in MOVED.items()
    }
    assert all((array == np.float32(value)).all() for array in trained.movement.values())
    assert abs(value) < MAX_VALUE


@pytest.mark.parametrize("attack", ["none", "label-flip", "backdoor"])
def test_attack_on_data_leaves_the_movement_as_it_is(attack: str) -> None:
    backend = Fixed(MOVED)
    assert ATTACKS[attack].backend(backend, 7, "a") is backend


def samples(count: int = 40) -> ArrayData:
    draws = np.random.default_rng(1)
    images = draws.random((count, 1, 8, 8), dtype=np.float32) / 2
    return ArrayData((images,), draws.integers(0, 10, count))


def test_flipped_labels_swap_first_and_last() -> None:
    honest = samples()
    data = ATTACKS["label-flip"].data(SETTINGS["digits"], honest, np.random.default_rng(0))
    np.testing.assert_array_equal(data.targets, 9 - honest.targets)
    assert data.inputs[0] is honest.inputs[0]


def test_backdoor_marks_half_of_the_samples_and_calls_them_the_goal() -> None:
    honest, setting = samples(), replace(SETTINGS["digits"], goal=3)
    before = honest.inputs[0].copy()
    data = ATTACKS["backdoor"].data(setting, honest, np.random.default_rng(0))
    np.testing.assert_array_equal(honest.inputs[0], before)
    changed = (data.inputs[0] != before).any(axis=(1, 2, 3))
    assert changed.sum() == round(POISONED * len(honest))
    assert (data.targets[changed] == 3).all()
    np.testing.assert_array_equal(data.targets[~changed], honest.targets[~changed])
    (rows,) = np.nonzero(changed)
    for image, old in zip(data.inputs[0][rows], before[rows], strict=True):
        assert (image[0, -2:, -2:] == 1).all()
        image[0, -2:, -2:] = old[0, -2:, -2:]
        np.testing.assert_array_equal(image, old)


def test_claimed_data_lies_about_its_number_alone() -> None:
    honest = samples()
    data = ATTACKS["claimed-samples"].data(SETTINGS["digits"], honest, np.random.default_rng(0))
    assert isinstance(data, ClaimedData)
    assert len(data) == CLAIMED
    lied, true = (list(each.batches(3, 16, np.random.default_rng(5))) for each in (data, honest))
    for one, other in zip(lied, true, strict=True):
        np.testing.assert_array_equal(one.inputs[0], other.inputs[0])
        np.testing.assert_array_equal(one.targets, other.targets)


def test_attackers_are_a_fifth_and_spread_over_the_levels() -> None:
    levels = device_levels()
    assert len(levels) == DEVICES
    counts = [levels.count(level) for level in (1.0, 0.5, 0.25)]
    assert max(counts) - min(counts) <= 1
    chosen = choose_attackers(levels, ATTACKERS)
    assert len(set(chosen)) == ATTACKERS == DEVICES // 5
    held = [levels[number] for number in chosen]
    assert sorted(held.count(level) for level in (1.0, 0.5, 0.25)) == [1, 1, 2]
    assert [levels[number] for number in choose_attackers(levels, 1)] == [1.0]
