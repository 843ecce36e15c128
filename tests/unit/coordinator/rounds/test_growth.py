"""A model that grows: early rounds train at most a level, which rises to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregate.rules import RULES
from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.events import Broadcast, Joined
from coordinator.rounds.state import OpenRound, stages
from coordinator.rounds.synchronous import (
    Committed,
    RoundPhase,
    RoundsConfig,
    opening_of,
    resume,
    start,
)
from coordinator.run.steering.settings import with_settings
from edge_sdk.protocol.messages.round import RoundOpen
from tests.unit.coordinator.rounds.driven import said
from tests.unit.coordinator.rounds.test_rounds import CONFIG, Coordinator, bid

GROWING = replace(CONFIG, masks=make_masks("nested"), levels=(1.0, 0.5), rounds=4, grow=0.5)


def largest_of(config: RoundsConfig) -> list[float]:
    return [config.largest(number) for number in range(1, config.rounds + 1)]


def test_largest_level_rises_and_small_levels_get_more_rounds() -> None:
    config = replace(GROWING, levels=(1.0, 0.5, 0.25), rounds=100, grow=0.9)
    largest = largest_of(config)
    # 1 / 0.25² : 1 / 0.5² is 4 : 1, of 90 rounds.
    assert largest == [0.25] * 72 + [0.5] * 18 + [1.0] * 10
    assert config.growth() == "25% until round 72, 50% until round 90"
    assert replace(config, grow=0.0).growth() == replace(config, rounds=1).growth() == ""


def test_growth_in_words_leaves_out_what_is_over() -> None:
    config = replace(GROWING, levels=(1.0, 0.5, 0.25), rounds=100, grow=0.9)
    assert config.growth(80, 0.5) == "50% until round 90"
    assert config.growth(20, 0.5) == "50% until round 90"  # the model never shrinks
    assert config.growth(20, 1.0) == config.growth(90) == ""


def test_added_rounds_train_the_whole_model() -> None:
    config = replace(GROWING, levels=(1.0, 0.5, 0.25), rounds=100, grow=0.9)
    longer = with_settings(config, {"rounds": 5000})
    assert largest_of(longer) == largest_of(config) + [1.0] * 4900
    assert longer.growth() == config.growth()
    assert with_settings(longer, {"rounds": 9000}).growth() == config.growth()
    patient = replace(longer, patience=5)
    assert not patient.is_over(94, (0.5, 20))
    assert patient.is_over(95, (0.5, 20))


@given(
    levels=st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.5, 0.75, 0.9]), unique=True),
    grow=st.floats(0, 0.99),
    rounds=st.integers(1, 300),
)
def test_growth_never_shrinks_and_ends_with_the_whole_model(
    levels: list[float], grow: float, rounds: int
) -> None:
    falling = (1.0, *sorted(levels, reverse=True))
    shares = stages(falling, grow)
    assert sum(share for _, share in shares) == pytest.approx(1 if levels else 1 - grow)
    config = replace(GROWING, levels=falling, rounds=rounds, grow=grow)
    largest = largest_of(config)
    assert largest == sorted(largest)
    assert largest[-1] == 1
    # A share counts whole rounds; the last round of a stage may be cut by the next one.
    whole = largest.count(1.0)
    assert abs(whole - (1 - grow if levels else 1) * rounds) <= 1


def test_round_says_how_large_it_is_and_larger_offers_get_that() -> None:
    coordinator = Coordinator("a", config=GROWING)
    opened = said(RoundOpen, coordinator.tell(Joined("b")))
    assert opened.largest == 0.5
    coordinator.tell(bid("a", 1.0), bid("b", 0.5))
    half = {"a": (0,), "b": (0,)}
    assert {name: dict(groups) for name, groups in coordinator.groups.items()} == {
        "a": half,
        "b": half,
    }
    assert coordinator.state.bids["a"].level == 0.5


def test_grown_model_is_trained_whole() -> None:
    coordinator = Coordinator("a", "b", config=replace(GROWING, rounds=2))
    for round in (1, 2):
        coordinator.tell(bid("a", 1.0, round), bid("b", 1.0, round))
        groups = dict(coordinator.groups["a"])
        assert groups == ({"a": (0,), "b": (0,)} if round == 1 else CONFIG.plan.all_groups())
        coordinator.count("a", "b")
        coordinator.tell(Committed(round))
    assert coordinator.state.phase is RoundPhase.FINISHED


def test_void_round_does_not_let_the_model_grow() -> None:
    coordinator = Coordinator("a", "b", config=replace(GROWING, rounds=2, min_participants=1))
    coordinator.tell(bid("a", None), bid("b", None))
    opened = said(RoundOpen, coordinator.run_out())
    assert (opened.round, opened.largest) == (2, 0.5)


def test_model_never_shrinks_when_a_run_becomes_longer() -> None:
    coordinator = Coordinator("a", "b", config=replace(GROWING, rounds=2))
    for round in (1, 2):
        coordinator.tell(bid("a", 1.0, round), bid("b", 1.0, round))
        coordinator.count("a", "b")
        if round == 1:
            coordinator.tell(Committed(round))
    longer = replace(coordinator.config, rounds=100)
    assert longer.largest(3) == 0.5
    coordinator.config = longer
    opened = [
        each.message for each in coordinator.tell(Committed(2)) if isinstance(each, Broadcast)
    ][-1]
    assert isinstance(opened, RoundOpen)
    assert (opened.round, opened.largest) == (3, 1.0)
    coordinator.tell(bid("a", 1.0, 3), bid("b", 0.5, 3))
    assert dict(coordinator.groups["a"]) == CONFIG.plan.all_groups()


def test_resumed_round_is_as_large_as_it_was() -> None:
    coordinator = Coordinator("a", "b", config=GROWING)
    coordinator.tell(bid("a", 1.0), bid("b", None))
    was = coordinator.state
    opened = OpenRound(1, was.selected, dict(was.bids), dict(was.assigned))
    state = resume(GROWING, start(GROWING), opened, 0.0)
    assert state.bids["a"].level == 0.5
    assert opening_of(GROWING, state).largest == 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"masks": make_masks("random")}, "levels that lie within one another"),
        ({"rule": RULES["fedavg"](), "masks": make_masks("random")}, "whole models only"),
        ({"rule": RamFed(warmup_rounds=1)}, "a warm-up with the whole model"),
    ],
)
def test_growth_is_refused_where_levels_have_no_order(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"grow .*{reason}.*set grow = 0"):
        replace(GROWING, **changes)
