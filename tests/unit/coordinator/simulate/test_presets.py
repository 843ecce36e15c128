"""Levels of devices by name, and populations of them."""

from __future__ import annotations

from collections import Counter

import pytest

from coordinator.errors import ConfigError
from coordinator.simulate.fleet.population import DeviceKind, study_population
from coordinator.simulate.presets import LEVEL_PRESETS, preset_levels, study_policies
from edge_sdk.decide.decision import Policy
from edge_sdk.machine.board import find_board


def test_presets_of_ram_fed_are_two_one_or_both_of_four_regions() -> None:
    assert preset_levels("L", 10) == (0.5,) * 10
    assert preset_levels("S", 3) == (0.25,) * 3
    assert Counter(preset_levels("MIX", 10)) == {0.5: 5, 0.25: 5}


@pytest.mark.parametrize(
    ("name", "least", "levels"),
    [("low", 6, {1: 6, 0.75: 4}), ("medium", 4, {1: 4, 0.75: 6}), ("high", 3, {1: 3, 0.5: 6})],
)
def test_presets_of_every_parameter_matters_have_its_least_coverage(
    name: str, least: int, levels: dict[float, int]
) -> None:
    found = Counter(preset_levels(name, 10))
    assert levels.items() <= found.items()
    # The last quarter of the units is covered by those alone that train the whole model.
    assert found[1.0] == least
    assert Counter(preset_levels(name, 100)) == {each: 10 * n for each, n in found.items()}


def test_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="there is no preset 'mediun'; did you mean 'medium'"):
        preset_levels("mediun", 3)
    assert all(0 < level <= 1 for levels in LEVEL_PRESETS.values() for level in levels)


def test_study_policies_have_a_level_and_a_share_each() -> None:
    made = study_policies(Policy(schedule="ad-hoc"), (0.5, 0.25), (1.0, 0.125))
    assert [each.offered_levels() for each in made] == [(0.5,), (0.25,)]
    assert [each.participation for each in made] == [1.0, 0.125]
    assert {each.schedule for each in made} == {"ad-hoc"}
    assert [each.participation for each in study_policies(Policy(), shares=(1, 0.5))] == [1, 0.5]
    with pytest.raises(ConfigError, match="2 levels and 1 shares"):
        study_policies(Policy(), (0.5, 0.25), (1.0,))


def test_study_population_keeps_the_order_of_its_devices() -> None:
    policies = study_policies(Policy(), shares=(1.0, 1.0, 0.5, 1.0))
    kind = DeviceKind(board=find_board("raspberry_pi_5"), name="pi")
    population = study_population(kind, policies, warm_s=1e9)
    assert [each.policy for _, each in population.devices()] == list(policies)
    assert len({name for name, _ in population.devices()}) == 4
    assert population.warm_s == 1e9
