"""Rounds worked out by hand, one number a device."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.aggregate.rules import Rule, make_rule
from coordinator.aggregate.rules.ccfl import Ccfl1, Ccfl2, Ccfl3, Strategy2
from coordinator.aggregate.rules.ra_fed import RaFed
from coordinator.aggregate.rules.ram_fed import FedVarp, RamFed
from tests.unit.coordinator.aggregate.rules.closings import memory_for, move, say


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-5, abs=1e-6)


def test_ra_fed_keeps_what_nobody_trained() -> None:
    assert move(RaFed(), 1, {}) == 0
    assert move(RaFed(server_rate=0.5), 1, {"a": 1.0, "b": 5.0}) == near(1.5)


@pytest.mark.parametrize(
    ("options", "second"),
    [
        # Round 1: a says 2, b says 4. Round 2: a says 6, and a newcomer says 9.
        # ū = 3; û of a = 2, of the newcomer ū: 3 + ((6 − 2) + (9 − 3)) / 2.
        ({"damping": 1.0}, 8.0),
        # ū = 1.5 and û = 1, as all is half of what it was: 1.5 + ((6 − 1) + (9 − 1.5)) / 2.
        ({"damping": 0.5}, 7.75),
        # Over all three, absent as 0: 6/3 + ((6 − 2) + 9) / 2.
        ({"damping": 1.0, "population": "all"}, 8.5),
        # Divided by all three: 3 + ((6 − 2) + (9 − 3)) / 3.
        ({"damping": 1.0, "correction": "population"}, 3 + 10 / 3),
        ({"damping": 1.0, "correction": "population", "population": "all"}, 2 + 13 / 3),
    ],
)
def test_ram_fed_corrects_memory_by_what_is_fresh(options: dict[str, Any], second: float) -> None:
    rule = RamFed(**options)
    memory = memory_for(rule)
    move(rule, 1, {"a": 2.0, "b": 4.0}, memory=memory, registered=2)
    got = move(rule, 2, {"a": 6.0, "new": 9.0}, memory=memory, registered=3)
    assert got == near(second)


def test_ram_fed_over_all_oversteps_when_a_device_joins_and_over_holders_does_not() -> None:
    for population, expected in (("all", 2.8), ("holders", 2.0)):
        rule = RamFed(damping=1.0, population=population)  # type: ignore[arg-type]
        memory = memory_for(rule)
        move(rule, 1, {"a": 2.0, "b": 2.0}, memory=memory, registered=2)
        got = move(rule, 2, {"new": 2.0}, memory=memory, registered=5)
        assert got == near(expected)


def test_ram_fed_scales_memory_to_the_present_learning_rate() -> None:
    rule = RamFed(damping=0.5)
    memory = memory_for(rule)
    move(rule, 1, {"a": 2.0}, memory=memory, rate=0.1)
    assert move(rule, 2, {}, memory=memory, rate=0.2) == near(2.0 * 0.5 * 2)
    assert move(rule, 3, {}, memory=memory, rate=0.05) == near(2.0 * 0.25 / 2)


def test_ram_fed_takes_a_late_movement_where_it_is_the_newest() -> None:
    rule = RamFed(damping=1.0)
    memory = memory_for(rule)
    move(rule, 1, {}, memory=memory)
    move(rule, 2, {"a": 4.0}, memory=memory)
    memory.write([say("a", 100.0, made=1), say("b", 8.0, made=1)])
    assert move(rule, 3, {}, memory=memory) == near(6.0)


def test_ram_fed_forgets_what_is_older_than_max_staleness() -> None:
    rule = RamFed(damping=1.0)
    memory = memory_for(rule, max_staleness=2)
    move(rule, 1, {"a": 4.0}, memory=memory)
    assert [move(rule, round, {}, memory=memory) for round in (2, 3, 4)] == [near(4), near(4), 0]


def test_ram_fed_weighs_a_device_as_it_was_when_it_spoke() -> None:
    rule = RamFed(damping=1.0, weighting="samples")
    memory = memory_for(rule)
    memory.advance(1)
    memory.write([say("a", 2.0, made=1, samples=1), say("b", 6.0, made=1, samples=3)])
    # ū = (2 + 18) / 4 = 5; of b now, whatever it weighs: 5 + (7 − 6).
    memory.advance(2)
    assert move(rule, 2, {"b": 7.0}, memory=memory) == near(6.0)
    # b weighs 1 now: ū = (2 + 7) / 2.
    assert move(rule, 3, {}, memory=memory) == near(4.5)


def test_fedvarp_is_published_undamped_and_over_all() -> None:
    rule = FedVarp()
    memory = memory_for(rule)
    move(rule, 1, {"a": 2.0, "b": 4.0}, memory=memory, registered=4)
    assert move(rule, 2, {}, memory=memory, registered=4) == near(6 / 4)


def test_ccfl_2_counts_whoever_speaks_and_all_selected_if_nobody_trained() -> None:
    rule = Ccfl2(horizon=3)
    memory = memory_for(rule)
    move(rule, 1, {"a": 2.0, "b": 4.0}, memory=memory)
    # c has no history: neither a term nor counted.
    assert move(rule, 2, {"a": 8.0}, memory=memory, silent=("b", "c")) == near(6.0)
    assert move(rule, 3, {}, memory=memory, silent=("a", "b", "c")) == near(4.0)
    assert move(rule, 4, {}, memory=memory, silent=("a", "b", "c")) == near(4.0)
    # b's word is four rounds old.
    assert move(rule, 5, {}, memory=memory, silent=("a", "b", "c")) == near(8 / 3)
    assert move(rule, 6, {}, memory=memory, silent=("a", "b", "c")) == 0


def test_ccfl_2_as_printed_divides_by_all_selected_and_never_forgets() -> None:
    rule = Ccfl2(horizon="none", absent="zero")
    assert rule.ageless
    memory = memory_for(rule)
    # c was never trained: its movement is 0, and it counts.
    assert move(rule, 1, {"a": 2.0, "b": 4.0}, memory=memory, silent=("c",)) == near(2.0)
    assert move(rule, 2, {"a": 9.0}, memory=memory, silent=("b", "c")) == near(13 / 3)
    assert move(rule, 40, {}, memory=memory, silent=("a", "b", "c")) == near(13 / 3)
    # Figure 10: all train in one round, and say the same again in the next two.
    assert move(rule, 41, {"a": 6.0}, memory=memory) == near(6.0)
    assert move(rule, 42, {}, memory=memory, silent=("a",)) == near(6.0)
    assert move(rule, 43, {}, memory=memory, silent=("a",)) == near(6.0)


def test_ccfl_2_does_not_hear_devices_that_were_not_selected() -> None:
    rule = Ccfl2()
    memory = memory_for(rule)
    move(rule, 1, {"a": 2.0, "b": 4.0}, memory=memory)
    assert move(rule, 2, {}, memory=memory, silent=("b",)) == near(4.0)


def test_ccfl_1_takes_replays_at_the_present_learning_rate() -> None:
    rule = Ccfl1(horizon=2)
    assert rule.replay_within == 2
    old = say("b", 4.0, made=3, rate=0.1)
    assert move(rule, 5, {"a": 2.0}, replayed=(old,), rate=0.05) == near(2.0)
    assert move(rule, 5, {}, replayed=(old,), silent=("c",)) == near(2.0)
    assert move(rule, 6, {"a": 2.0}, replayed=(old,)) == near(2.0)
    assert move(rule, 6, {}, replayed=(old,)) == 0


def test_ccfl_3_remembers_only_those_who_keep_no_copy() -> None:
    rule = Ccfl3()
    memory = memory_for(rule)
    memory.advance(1)
    replay = say("b", 4.0, made=1, keeps_copy=True)
    move(rule, 1, {"a": 2.0}, memory=memory)
    got = move(rule, 2, {}, memory=memory, replayed=(replay,), silent=("a", "c"))
    assert got == near((2.0 + 4.0) / 3)
    assert memory.recall("b") == []


def test_strategy_2_counts_the_last_model_of_whoever_skips() -> None:
    rule = Strategy2()
    memory = memory_for(rule)
    assert move(rule, 1, {"a": 2.0, "b": 4.0}, memory=memory, theta=10.0) == near(3.0)
    # b's model is 14, the global one 13: b says 1.
    got = move(rule, 2, {"a": 5.0}, memory=memory, silent=("b", "c"), theta=13.0, rate=0.3)
    assert got == near(3.0)
    # a's is 18 now, b's still 14, the global one 16.
    got = move(rule, 3, {}, memory=memory, silent=("a", "b"), theta=16.0)
    assert got == near(0.0)


@pytest.mark.parametrize("name", ["ra-fed", "fedavg", "ccfl-1"])
def test_samples_weigh_the_mean(name: str) -> None:
    rule = make_rule(name, weighting="samples")
    uniform = make_rule(name)
    assert isinstance(rule, Rule)
    assert isinstance(uniform, Rule)
    samples = {"a": 1, "b": 3, "c": 0}
    assert move(rule, 1, {"a": 2.0, "b": 6.0, "c": 9.0}, samples=samples) == near(5.0)
    assert move(uniform, 1, {"a": 2.0, "b": 6.0, "c": 10.0}, samples=samples) == near(6.0)
    assert move(rule, 1, {"c": 9.0}, samples=samples) == 0


def test_ram_fed_hears_nothing_from_a_device_without_samples() -> None:
    rule = RamFed(damping=1.0, weighting="samples")
    memory = memory_for(rule)
    assert move(rule, 1, {"c": 9.0}, memory=memory, samples={"c": 0}) == 0
    assert move(rule, 2, {"a": 2.0}, memory=memory, samples={"a": 4}) == near(2.0)
    assert move(rule, 3, {}, memory=memory) == near(2.0)
