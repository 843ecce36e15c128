"""Rules by name, and what their options refuse."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.aggregate.rules import ASYNC_RULES, RULES, make_rule
from coordinator.errors import ConfigError
from edge_sdk.protocol.errors import StateError
from tests.unit.coordinator.aggregate.rules.closings import move


@pytest.mark.parametrize("name", [*RULES, *ASYNC_RULES])
def test_every_rule_is_made_by_name(name: str) -> None:
    made = make_rule(name)
    assert type(made) is {**RULES, **ASYNC_RULES}[name]
    assert made == make_rule(name)


def test_unknown_rule_is_refused_with_the_nearest_or_all_known_ones() -> None:
    with pytest.raises(ConfigError, match="there is no rule 'fed-avg'; did you mean 'fedavg'"):
        make_rule("fed-avg")
    with pytest.raises(ConfigError, match="there is no rule 'best'") as refusal:
        make_rule("best")
    known = str(refusal.value).partition("known are ")[2].split(", ")
    assert sorted(known) == sorted((*RULES, *ASYNC_RULES))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ram-fed", {"dampin": 1.0}, "did you mean 'damping'"),
        ("ra-fed", {"horizon": 3}, "horizon is not a known key"),
        ("ra-fed", {"weighting": "size"}, "weighting = 'size': must be one of"),
        ("ra-fed", {"server_rate": 0.0}, "server_rate must be above 0"),
        ("ra-fed", {"server_rate": float("nan")}, "server_rate = nan: must be a finite number"),
        ("subdismo", {"server_rate": float("inf")}, "server_rate = inf: must be a finite number"),
        ("ram-fed", {"damping": 0.0}, r"damping is in \(0, 1\]"),
        ("ram-fed", {"damping": 1.1}, r"damping is in \(0, 1\]"),
        ("ram-fed", {"correction": "none"}, "correction = 'none': must be one of"),
        ("ram-fed", {"population": "some"}, "population = 'some': must be one of"),
        ("ram-fed", {"warmup_rounds": -1}, "warmup_rounds must not be negative"),
        ("ram-fed", {"weighting": "size"}, "weighting = 'size': must be one of"),
        ("ccfl-2", {"horizon": 0}, "horizon must be at least 1 round"),
        ("ccfl-2", {"horizon": "never"}, 'horizon = .never.: must be a whole number .* or "none"'),
        ("ccfl-2", {"absent": "0"}, "absent = '0': must be one of left-out, zero"),
        ("ccfl-1", {"server_rate": -1.0}, "server_rate must be above 0"),
        ("fed-raa", {"alpha": 0.0}, r"alpha is in \(0, 1\]"),
        ("fed-raa", {"alpha": 1.5}, r"alpha is in \(0, 1\]"),
        ("fedasync", {"staleness": "linear"}, "staleness = 'linear': must be one of"),
        ("fedasync", {"a": -0.1}, "a must not be negative"),
        ("fed-raa", {"b": float("nan")}, "b = nan: must be a finite number"),
    ],
)
def test_option_out_of_range_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_rule(name, **options)


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].remembers != "nothing"])
def test_rule_that_remembers_is_refused_without_a_memory(name: str) -> None:
    with pytest.raises(StateError, match="needs a memory"):
        move(RULES[name](), 1, {"a": 1.0})


def test_rules_ask_of_rounds_what_they_need() -> None:
    assert {name for name in RULES if RULES[name].whole_models} == {"fedavg", "fedvarp"}
    assert {name for name in RULES if RULES[name]().replay_within} == {"ccfl-1", "ccfl-3"}
    assert {name for name in RULES if RULES[name].sums} == {"ram-fed", "fedvarp"}
    assert RULES["strategy-2"].remembers == "models"
    assert make_rule("ram-fed", warmup_rounds=2).warmup_rounds == 2  # type: ignore[union-attr]
    assert not ASYNC_RULES["fedasync"].fragments
