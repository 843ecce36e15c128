"""Every synchronous rule against its naive definition, over random histories of rounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregate.robust.sums import PIECE
from coordinator.aggregate.rules import RULES, Rule, make_rule
from coordinator.aggregate.rules.ram_fed import RamFed
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.property.rules.histories import History, RoundOf, Turn, assert_follows, histories
from tests.property.rules.oracle import BLOCK_RULES, Oracle
from tests.property.strategies import Choice, law

often = settings(law, max_examples=80)

shared = {
    "weighting": st.sampled_from(["uniform", "samples", "level"]),
    "server_rate": st.sampled_from([1.0, 1.0, 0.3, 2.5]),
}
memory = {
    "damping": st.sampled_from([1.0, 0.8, 0.5]),
    "correction": st.sampled_from(["coverage", "population"]),
    "population": st.sampled_from(["holders", "all"]),
}
past = {
    "horizon": st.sampled_from([1, 2, 3, 4, 5, "none"]),
    "absent": st.sampled_from(["left-out", "zero"]),
}


def follow(name: str, history: History, options: dict[str, Any], max_staleness: int) -> None:
    rule = make_rule(name, **options)
    assert isinstance(rule, Rule)
    assert_follows(history, rule, Oracle(rule=name, max_staleness=max_staleness, **options))


def test_oracle_knows_every_rule() -> None:
    assert BLOCK_RULES.keys() == RULES.keys()


@pytest.mark.parametrize("name", ["ra-fed", "strategy-1", "subdismo", "fedavg"])
@settings(law, max_examples=25)
@given(history=histories(), options=st.fixed_dictionaries(shared))
def test_mean_rule_follows_its_definition(
    name: str, history: History, options: dict[str, Any]
) -> None:
    follow(name, history, options, max_staleness=3)


@settings(law, max_examples=250)
@given(
    history=histories(),
    options=st.fixed_dictionaries(shared | memory),
    max_staleness=st.integers(1, 4),
)
def test_ram_fed_follows_its_definition(
    history: History, options: dict[str, Any], max_staleness: int
) -> None:
    follow("ram-fed", history, options, max_staleness)


OPTIONS = {
    "fedvarp": shared | memory,
    **dict.fromkeys(("ccfl-1", "ccfl-2", "ccfl-3"), shared | past),
    "strategy-2": shared,
}


@pytest.mark.parametrize("name", OPTIONS)
@often
@given(history=histories(), data=st.data(), max_staleness=st.integers(1, 4))
def test_rule_with_a_past_follows_its_definition(
    name: str, history: History, data: st.DataObject, max_staleness: int
) -> None:
    follow(name, history, data.draw(st.fixed_dictionaries(OPTIONS[name])), max_staleness)


def long_history() -> History:
    """Three rounds with a model that no thread works on in one piece, of blocks of all sizes."""
    axes = (Axis("a", (40, 3, 257)), Axis("b", (100, 200)))
    tensors = (
        Tensor("small", "float32", (Dim(300, 0),)),
        Tensor("wide", "float32", (Dim(300, 0), Dim(600, 1, inner=2))),
        Tensor("whole", "float32", (Dim(3 * PIECE),)),
    )
    plan = ModelPlan(axes, tensors)
    some: list[Choice | None] = [
        plan.all_groups(),
        {"a": (0, 2), "b": (1,)},
        {"a": (1,), "b": (0, 1)},
        None,
    ]
    rounds = [
        RoundOf(
            rate=rate,
            devices=frozenset("xyz"),
            turns={
                name: Turn(some[(place + number) % 4], seed=10 * number + place, samples=1 + number)
                for place, name in enumerate("xyz")
            },
        )
        for number, rate in enumerate([0.1, 0.2, 0.05])
    ]
    return History(plan, tuple(rounds), seed=5)


@pytest.mark.parametrize("name", RULES)
def test_rule_follows_its_definition_across_pieces(name: str) -> None:
    options = {"weighting": "samples", "server_rate": 0.5}
    rule = make_rule(name, **options)
    assert isinstance(rule, Rule)
    stated: dict[str, Any] = {"damping": rule.damping, **options}
    if isinstance(rule, RamFed):
        stated["population"] = rule.population
    assert_follows(long_history(), rule, Oracle(rule=name, **stated), threads=3)
