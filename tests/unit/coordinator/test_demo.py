"""How the demo deals out its data."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.demo.digits import dirichlet_shares, load_digits, make_members


@pytest.mark.parametrize("devices", [1, 2, 8, 60])
def test_shares_give_every_row_to_exactly_one_device(devices: int) -> None:
    labels = np.random.default_rng(1).integers(0, 4, size=90)
    shares = dirichlet_shares(labels, devices, np.random.default_rng(2))
    assert len(shares) == devices
    assert all(len(share) for share in shares)
    assert sorted(np.concatenate(shares)) == list(range(90))


def test_shares_are_uneven_in_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    shares = dirichlet_shares(labels, 8, np.random.default_rng(0))
    counts = np.array([[np.sum(labels[share] == c) for c in range(10)] for share in shares])
    assert counts.max() > 3 * counts.mean()


def test_members_are_the_same_for_the_same_seed() -> None:
    one, two, other = (make_members(load_digits(seed).train, 8, seed) for seed in (1, 1, 2))
    assert [m.name for m in one] == [f"device-{n}" for n in range(1, 9)]
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a.data.inputs[0], b.data.inputs[0])
        assert np.array_equal(a.data.targets, b.data.targets)
    assert any(len(a.data) != len(b.data) for a, b in zip(one, other, strict=True))


def test_digits_test_set_is_not_trained_on() -> None:
    digits = load_digits(0)
    assert len(digits.train) + len(digits.test) == 1797
    images = np.concatenate([digits.train.inputs[0], digits.test.inputs[0]])
    assert images.shape[1:] == (1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
