"""Devices that lead away from the others are quarantined, after some rounds, and nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.rounds.fleet import FleetRecord, new_fleet
from coordinator.rounds.reputation import Agreed, declines, quarantined
from tests.unit.coordinator.masks.fleet import chain

PLAN = chain((2, 2), (1, 2, 1))
LIMIT = -0.15
HONEST = [f"honest-{number}" for number in range(8)]


def after(rounds: list[dict[str, float]]) -> FleetRecord:
    fleet = new_fleet(PLAN)
    for number, found in enumerate(rounds, 1):
        fleet = fleet.compared(number, found, LIMIT)
    return fleet


def round_of(bad: float, honest: float = 0.3, spread: float = 0.05) -> dict[str, float]:
    steps = np.linspace(-spread, spread, len(HONEST))
    return {name: honest + step for name, step in zip(HONEST, steps, strict=True)} | {"bad": bad}


def test_mean_fades_with_every_round() -> None:
    record = Agreed().after(1.0).after(-0.5)
    assert record.mean == pytest.approx((0.9 * 1.0 - 0.5) / 1.9)
    assert Agreed().mean == 0


def test_one_that_leads_away_is_quarantined_in_its_third_round_with_the_reason() -> None:
    assert not quarantined(after([round_of(-0.5)] * 2).standings)
    standings = after([round_of(-0.5)] * 3).standings
    assert list(quarantined(standings)) == ["bad"]
    assert declines(standings, "bad") == (
        "quarantined since round 3: its movements point away from the others' (mean cosine -0.50)"
    )


def test_device_with_other_data_is_not_quarantined() -> None:
    assert not quarantined(after([round_of(0.02)] * 10).standings)  # far below, but not away
    assert not quarantined(after([round_of(-0.14)] * 10).standings)
    # Near the end all movements are noise: below the limit, but not below the others.
    noisy = round_of(-0.2, honest=-0.05, spread=0.3)
    assert not quarantined(after([noisy] * 10).standings)


def test_one_bad_round_among_good_ones_does_not_quarantine() -> None:
    rounds = [round_of(0.3)] * 4 + [round_of(-0.9)] + [round_of(0.3)] * 4
    assert not quarantined(after(rounds).standings)
    turned = [round_of(0.3)] * 4 + [round_of(-0.5)] * 6
    assert quarantined(after(turned).standings)


def test_few_devices_do_not_judge_one_another() -> None:
    few = dict.fromkeys(HONEST[:3], 0.3) | {"bad": -0.9}
    assert not quarantined(after([few] * 5).standings)


def test_released_device_begins_anew() -> None:
    fleet = after([round_of(-0.5)] * 3).released("bad")
    assert not quarantined(fleet.standings)
    assert "bad" not in fleet.agreements
    fleet = fleet.compared(4, round_of(-0.5), LIMIT)
    assert not quarantined(fleet.standings)
