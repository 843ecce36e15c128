"""CCFL's budgets, and how they go with classes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.errors import ConfigError
from coordinator.simulate.budgets import (
    SkewedDevices,
    beta_budgets,
    even_skew,
    high_skew,
    moderate_skew,
    split_budgets,
)
from edge_sdk import stream

LABELS = np.tile(np.arange(10), 200)


def test_beta_budgets_are_the_groups_that_the_paper_describes() -> None:
    assert beta_budgets(8, 4) == (1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125)
    assert Counter(beta_budgets(100, 4)) == {1: 25, 0.5: 25, 0.25: 25, 0.125: 25}
    assert beta_budgets(9, 3) == (1,) * 3 + (0.5,) * 3 + (0.25,) * 3
    assert beta_budgets(5, 1) == (1,) * 5
    # The paper: about ⌈N/β⌉ devices have p = 1.
    assert Counter(beta_budgets(10, 4))[1.0] == 3


def test_split_budgets_have_r_and_w() -> None:
    assert split_budgets(8, rare=0.25, rounds=16) == (1,) * 6 + (1 / 16,) * 2
    assert split_budgets(3, rare=1, rounds=4) == (0.25,) * 3
    assert split_budgets(3, rare=0, rounds=4) == (1,) * 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: beta_budgets(0, 4),
        lambda: beta_budgets(4, 0),
        lambda: split_budgets(4, rare=1.1, rounds=2),
        lambda: split_budgets(4, rare=0.5, rounds=0),
        lambda: high_skew(LABELS, 4, stream(0, "skew")),
        lambda: high_skew(LABELS, 2000, stream(0, "skew")),
        lambda: moderate_skew(LABELS, 100, stream(0, "skew"), skewed=1.0),
        lambda: moderate_skew(LABELS % 2, 100, stream(0, "skew")),
    ],
)
def test_impossible_budgets_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ConfigError):
        wrong()


def classes_of(found: SkewedDevices) -> list[set[int]]:
    return [set(LABELS[rows].tolist()) for rows in found.parts]


def check_parts(found: SkewedDevices, devices: int) -> None:
    assert len(found.parts) == len(found.shares) == devices
    rows: NDArray[np.int64] = np.concatenate(found.parts)
    assert sorted(rows.tolist()) == list(range(len(LABELS)))
    assert all((np.diff(part) > 0).all() for part in found.parts)
    assert all(len(each) == 2 for each in classes_of(found))


def budgets_of_classes(found: SkewedDevices) -> dict[int, set[float]]:
    seen: dict[int, set[float]] = {}
    for classes, share in zip(classes_of(found), found.shares, strict=True):
        for each in classes:
            seen.setdefault(each, set()).add(share)
    return seen


def test_even_skew_gives_every_class_to_rich_and_poor_devices() -> None:
    found = even_skew(LABELS, 100, stream(1, "skew"))
    check_parts(found, 100)
    assert Counter(found.shares) == {1: 25, 0.5: 25, 0.25: 25, 0.125: 25}
    assert found.shares != beta_budgets(100, 4)
    holders = Counter(each for classes in classes_of(found) for each in classes)
    assert set(holders.values()) == {20}
    assert all(len(each) == 4 for each in budgets_of_classes(found).values())


def test_high_skew_gives_all_devices_of_a_class_one_budget() -> None:
    found = high_skew(LABELS, 100, stream(1, "skew"))
    check_parts(found, 100)
    assert all(len(each) == 1 for each in budgets_of_classes(found).values())
    pairs = Counter(frozenset(each) for each in classes_of(found))
    assert sorted(pairs.values()) == [20] * 5
    assert Counter(found.shares) == {1: 40, 0.5: 20, 0.25: 20, 0.125: 20}
    other = high_skew(LABELS, 100, stream(2, "skew"))
    assert budgets_of_classes(found) != budgets_of_classes(other)


def test_moderate_skew_gives_two_classes_to_a_tenth_that_always_trains() -> None:
    found = moderate_skew(LABELS, 100, stream(1, "skew"))
    check_parts(found, 100)
    seen = budgets_of_classes(found)
    alone = {each for each, shares in seen.items() if shares == {1.0}}
    assert len(alone) == 2
    assert all(each == alone for each in classes_of(found)[:10])
    assert not any(each & alone for each in classes_of(found)[10:])
    assert found.shares[:10] == (1.0,) * 10
    assert Counter(found.shares[10:]) == Counter(beta_budgets(90, 4))


@pytest.mark.parametrize("skew", [even_skew, high_skew, moderate_skew])
def test_the_same_stream_gives_the_same_devices(skew: object) -> None:
    assert callable(skew)
    one, same, other = (skew(LABELS, 30, stream(seed, "skew")) for seed in (1, 1, 2))
    assert one.shares == same.shares
    assert all(np.array_equal(a, b) for a, b in zip(one.parts, same.parts, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))
