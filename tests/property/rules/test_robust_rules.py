"""Every synchronous rule with every robust choice, against its naive definition."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from coordinator.aggregate.robust import Robust, RobustName
from coordinator.aggregate.rules import RULES, Rule, make_rule
from coordinator.aggregate.rules.ccfl import Ccfl
from coordinator.aggregate.rules.ram_fed import RamFed
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.plan import ModelPlan
from tests.property.rules.histories import (
    History,
    Turn,
    assert_follows,
    normal,
    random_history,
)
from tests.property.rules.oracle import Oracle
from tests.property.rules.robust_oracle import NaiveRobust, TieError
from tests.property.strategies import law, plans, seeds

NAMES = [name for name in get_args(RobustName) if name not in ("none", "root")]


def unequal(plan: ModelPlan, turn: Turn, rate: float) -> Float32:
    """Movements of very different lengths, some of them 0."""
    length = rate * (1, 1, 0.01, 100, 3, 0)[turn.seed % 6]
    return np.multiply(normal(turn.seed, plan.parameters), length, dtype=np.float32)


def follow(
    history: History, rule: Rule, oracle: Oracle, robust: Robust, *, threads: int = 1
) -> None:
    naive = NaiveRobust(
        history.plan, robust.name, robust.norm or 1.0, robust.factor, robust.hostile
    )
    oracle.average, oracle.left_out = naive.mean, lambda: naive.out
    loose = 1e-4 if robust.name == "geometric-median" else 1e-5
    clip, name = naive.clip, robust.name
    assert name == naive.name
    assert_follows(
        history,
        rule,
        oracle,
        threads=threads,
        robust=robust,
        clip=clip,
        rounding=loose,
        say=unequal,
    )


@pytest.mark.parametrize("rule", RULES)
@settings(law, max_examples=8)
@given(
    plan=plans(),
    seed=seeds,
    name=st.sampled_from(NAMES),
    weighting=st.sampled_from(["uniform", "samples", "level"]),
    more=st.fixed_dictionaries(
        {
            "damping": st.sampled_from([1.0, 0.8]),
            "correction": st.sampled_from(["coverage", "population"]),
            "population": st.sampled_from(["holders", "all"]),
        }
    ),
    factor=st.sampled_from([1.0, 2.0, 0.5]),
)
def test_rule_with_a_robust_choice_follows_its_definition(
    rule: str,
    plan: ModelPlan,
    seed: int,
    name: RobustName,
    weighting: str,
    more: dict[str, Any],
    factor: float,
) -> None:
    options: dict[str, Any] = {"weighting": weighting, "server_rate": 0.5}
    if issubclass(RULES[rule], RamFed):
        options |= more
    if issubclass(RULES[rule], Ccfl):
        options["absent"] = ["left-out", "zero"][seed % 2]
    made = make_rule(rule, **options)
    assert isinstance(made, Rule)
    robust = Robust(name=name, norm=0.3, factor=factor)
    oracle = Oracle(rule=rule, max_staleness=3, **options)
    try:
        follow(random_history(plan, 7, 4, seed), made, oracle, robust, threads=1 + seed % 2)
    except TieError:
        reject()
