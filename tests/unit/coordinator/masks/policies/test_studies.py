"""Policies for studies: regions that nobody trains, given Γ*, S* and τ, levels of places."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from coordinator.errors import ConfigError
from coordinator.masks import Masks, make_masks
from tests.unit.coordinator.masks.fleet import chain, situation_of

SINGLE = chain((5, 5, 5, 5))
"""One hidden layer in four regions, as in RAM-Fed."""


def rounds_of(
    name: str, offers: list[float], rounds: int, plan: Any = SINGLE, **options: Any
) -> list[Masks]:
    policy = make_masks(name, **options)
    return [
        policy(situation_of(plan, offers, round=round, seed=3)) for round in range(1, rounds + 1)
    ]


def coverage_of(masks: Masks) -> list[int]:
    """Devices that train each of the four regions."""
    seen = Counter(group for groups in masks.values() for group in groups["h0"])
    return [seen[group] for group in range(4)]


@pytest.mark.parametrize(
    ("level", "coverage", "regions"),
    [
        (0.25, 1, None),
        (0.25, 2, None),
        (0.25, None, 1),
        (0.25, 10, 1),
        (0.25, 1, 2),
        (0.25, 3, 3),
        (0.5, 1, None),
        (0.5, 4, None),
        (0.5, 2, 3),
        (1.0, 3, None),
    ],
)
def test_scheduled_has_the_coverage_and_the_regions_that_it_is_told(
    level: float, coverage: int | None, regions: int | None
) -> None:
    for masks in rounds_of(
        "scheduled", [level] * 10, 9, **_given(coverage=coverage, regions=regions)
    ):
        trained = [each for each in coverage_of(masks) if each]
        assert len(trained) == (regions or 4)
        assert min(trained) == (10 if regions == 1 else coverage)
        assert all(len(groups["h0"]) <= max(1, round(4 * level)) for groups in masks.values())


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.parametrize("level", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("coverage", [None, 1, 2])
@pytest.mark.parametrize("staleness", [None, 4, 8, 11, "none"])
def test_scheduled_has_the_staleness_that_it_is_told(
    level: float, coverage: int | None, staleness: Any
) -> None:
    """Every device's wait for any region, counted by hand over 60 rounds after a warm-up."""
    found = rounds_of(
        "scheduled", [level] * 10, 60, **_given(coverage=coverage, staleness=staleness)
    )
    oldest = 0
    last = {(device, region): 0 for device in found[0] for region in range(4)}
    for number, masks in enumerate(found, 1):
        for device, groups in masks.items():
            for region in range(4):
                oldest = max(oldest, number - last[device, region])
                if region in groups["h0"]:
                    last[device, region] = number
    if staleness == "none":
        assert oldest == 60  # some region of some device is never trained
    else:
        assert oldest <= (staleness or 4)
        if level == 0.25:
            assert oldest == 1 + 3 * (((staleness or 4) - 1) // 3)


def test_scheduled_takes_larger_levels_first_and_evens_out_the_rest() -> None:
    (masks,) = rounds_of("scheduled", [0.25, 0.5] * 5, 1)
    assert sorted(coverage_of(masks)) == [3, 4, 4, 4]
    assert list(masks) == sorted(masks)


def test_scheduled_says_how_long_a_block_waits() -> None:
    policy = make_masks("scheduled", regions=1, staleness=8)
    assert policy.longest_gap(SINGLE, [0.25] * 4) == 6  # three other regions, two rounds each
    assert make_masks("scheduled").longest_gap(SINGLE, [0.25] * 4) == 0
    assert make_masks("scheduled", regions=1, staleness="none").longest_gap(SINGLE, [0.25]) is None


def test_periodic_trains_the_same_regions_everywhere_in_every_nth_round() -> None:
    found = rounds_of("periodic", [0.5, 0.25] * 5, 40, every=10)
    for number, masks in enumerate(found, 1):
        groups = {each["h0"] for each in masks.values()}
        if number % 10 == 0:
            assert groups == {(2, 3), (3,)}
        else:
            assert len(groups) > 2
    uncovered = np.array([min(coverage_of(masks)) == 0 for masks in found])
    assert uncovered[9::10].all()
    assert uncovered.mean() < 0.3


def test_places_deals_out_its_levels_anew_in_every_round() -> None:
    levels = [1.0] * 4 + [0.75] * 6
    found = rounds_of("places", [1.0] * 10, 12, levels=levels, masks="static")
    for masks in found:
        sizes = Counter(len(groups["h0"]) for groups in masks.values())
        assert sizes == {4: 4, 3: 6}
        assert min(coverage_of(masks)) == 4  # the paper's Γ of medium reduction, greedy
    whole = [{name for name, groups in masks.items() if len(groups["h0"]) == 4} for masks in found]
    assert len({frozenset(each) for each in whole}) > 6


def test_places_never_gives_more_than_a_device_offers() -> None:
    (masks,) = rounds_of("places", [0.25, 1.0, 0.5], 1, levels=[0.5], masks="random")
    assert [len(groups["h0"]) for groups in masks.values()] == [1, 2, 2]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("periodic", {"every": 0}, "every must be at least 1"),
        ("scheduled", {"coverage": 0}, "coverage = 0: must be at least 1"),
        ("scheduled", {"regions": -1}, "regions = -1: must be at least 1"),
        ("scheduled", {"staleness": 0}, "staleness must be at least 1"),
        ("scheduled", {"staleness": "never"}, 'must be a whole number of rounds, or "none"'),
        ("places", {"levels": []}, "levels = .*: must be shares"),
        ("places", {"levels": [0.5, 2]}, "levels"),
        ("places", {"masks": "nested"}, "masks = 'nested': must be one of"),
    ],
)
def test_option_that_makes_no_sense_is_refused(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_masks(name, **options)


def test_staleness_that_no_schedule_has_is_refused_when_the_plan_is_known() -> None:
    policy = make_masks("scheduled", staleness=3)
    with pytest.raises(ConfigError, match="takes 4 rounds for all"):
        policy(situation_of(SINGLE, [0.25]))
    with pytest.raises(ConfigError, match="takes 4 rounds for all"):
        policy.longest_gap(SINGLE, [0.25])
