"""What rules become in special cases, each stated without the rule's own definition."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.robust import Robust, RobustName
from coordinator.aggregate.rules import RULES, Rule, make_rule
from coordinator.aggregate.rules.ra_fed import FedAvg, RaFed
from coordinator.aggregate.rules.ram_fed import FedVarp, RamFed
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.plan import ModelPlan
from tests.property.rules.histories import History, RoundOf, Turn, drive, histories, normal
from tests.property.rules.oracle import Word
from tests.property.strategies import law

few = settings(law, max_examples=40)

variants = st.builds(
    RamFed,
    damping=st.sampled_from([1.0, 0.8, 0.5]),
    correction=st.sampled_from(["coverage", "population"]),
    population=st.sampled_from(["holders", "all"]),
)
weightings = st.sampled_from(["uniform", "samples"])


def movements(history: History, rule: Rule, **options: Any) -> list[Float32]:
    """What the rule moves the model by, round after round."""
    return [step.theta for step in drive(history, rule, from_zero=True, **options)]


def named(name: str, **options: Any) -> Rule:
    rule = make_rule(name, **options)
    assert isinstance(rule, Rule)
    return rule


def assert_near(left: Sequence[Float32], right: Sequence[Float32]) -> None:
    """Equal but for what float32 loses in a sum of a few terms."""
    for a, b in zip(left, right, strict=True):
        assert np.abs(a - b).max() <= 4e-6 * max(1.0, float(np.abs(b).max()))


def assert_same_bits(left: Sequence[Float32], right: Sequence[Float32]) -> None:
    assert [a.tobytes() for a in left] == [b.tobytes() for b in right]


# -- histories of a kind -----------------------------------------------------------------------


def everybody_trains_everything(history: History) -> History:
    """The same devices and learning rates, without a skip, a loss or a smaller level."""
    rounds: list[RoundOf] = []
    for now in history.rounds:
        turns = {
            name: Turn(history.plan.all_groups(), seed=history.seed + place + 100 * len(rounds))
            for place, name in enumerate(sorted(now.devices))
        }
        rounds.append(replace(now, turns=turns))
    return replace(history, rounds=tuple(rounds))


def in_time(history: History) -> History:
    """The same without those whose movements come late, or never."""
    rounds = [
        replace(now, turns={name: turn for name, turn in now.turns.items() if turn.delay == 0})
        for now in history.rounds
    ]
    return replace(history, rounds=tuple(rounds))


def all_have_samples(history: History) -> History:
    """The same, in which nobody weighs nothing."""
    rounds = [
        replace(
            now,
            turns={
                name: replace(turn, samples=max(1, turn.samples))
                for name, turn in now.turns.items()
            },
        )
        for now in history.rounds
    ]
    return replace(history, rounds=tuple(rounds))


def dense(plan: ModelPlan, word: Word) -> NDArray[np.float64]:
    """A movement as a vector over the whole model, NaN where it says nothing."""
    flat = np.full(plan.parameters, np.nan)
    for block, values in word.blocks.items():
        flat[plan.block_offsets[block] : plan.block_offsets[block + 1]] = values
    return flat


def stacked(plan: ModelPlan, words: Sequence[Word]) -> NDArray[np.float64]:
    """One row for each movement."""
    return np.array([dense(plan, word) for word in words]).reshape(len(words), plan.parameters)


# -- ram-fed -----------------------------------------------------------------------------------


@few
@given(history=histories(), rule=variants)
def test_ram_fed_is_fedavg_if_everybody_trains_everything(history: History, rule: RamFed) -> None:
    history = everybody_trains_everything(history)
    assert_near(movements(history, rule), movements(history, FedAvg()))


@few
@given(history=histories(), rule=variants, weighting=weightings)
def test_ram_fed_is_ra_fed_while_memory_is_empty(
    history: History, rule: RamFed, weighting: Any
) -> None:
    rule = replace(rule, correction="coverage", weighting=weighting)
    first = replace(history, rounds=history.rounds[:1])
    assert_near(movements(first, rule), movements(first, RaFed(weighting=weighting)))


@few
@given(history=histories(), rule=variants, weighting=weightings)
def test_ram_fed_is_ra_fed_once_memory_is_stale(
    history: History, rule: RamFed, weighting: Any
) -> None:
    rule = replace(rule, correction="coverage", weighting=weighting)
    idle = [replace(now, turns={}) for now in history.rounds]
    spread = [one for now, pause in zip(history.rounds, idle, strict=True) for one in (now, pause)]
    history = in_time(replace(history, rounds=tuple(spread)))
    fresh_rounds = movements(history, rule, max_staleness=1)[::2]
    assert_near(fresh_rounds, movements(history, RaFed(weighting=weighting))[::2])


@few
@given(history=histories(), rule=variants, weighting=weightings)
def test_ram_fed_moves_by_what_all_agree_on_whoever_joins(
    history: History, rule: RamFed, weighting: Any
) -> None:
    """Devices move every parameter alike, in proportion to γ: the mean of that is that."""
    rule = replace(
        rule, damping=1.0, correction="coverage", population="holders", weighting=weighting
    )
    history, plan = all_have_samples(history), history.plan
    word = normal(history.seed, plan.parameters)

    def unison(plan: ModelPlan, turn: Turn, rate: float) -> Float32:
        return (word * rate).astype(np.float32)

    known = np.zeros(plan.parameters, dtype=bool)
    for step in drive(history, rule, max_staleness=50, from_zero=True, say=unison):
        fresh = stacked(plan, step.heard.fresh)
        known |= ~np.isnan(fresh).all(0)
        expected = np.where(known, word * step.heard.rate, 0)
        assert np.abs(step.theta - expected).max() <= 1e-6 * np.abs(word).max()
        known |= ~np.isnan(stacked(plan, step.late)).all(0)


@few
@given(history=histories(), damping=st.sampled_from([1.0, 0.8]))
def test_ram_fed_is_as_near_to_the_fresh_mean_as_memory_is_wide(
    history: History, damping: float
) -> None:
    """`v − mean D` is `ū − mean û`, both among the entries; of newcomers alone it is 0."""
    history, plan = in_time(history), history.plan
    rule = RamFed(damping=damping)
    entries: dict[str, NDArray[np.float64]] = {}
    nothing = np.full(plan.parameters, np.nan)
    for step in drive(history, rule, max_staleness=50, from_zero=True):
        heard, v = step.heard, step.theta.astype(np.float64)
        entries = {name: damping * values for name, values in entries.items()}
        held = heard.rate * np.array([*entries.values(), nothing])
        none_held = np.isnan(held).all(0)
        low = np.where(none_held, 0, np.where(np.isnan(held), np.inf, held).min(0))
        high = np.where(none_held, 0, np.where(np.isnan(held), -np.inf, held).max(0))
        fresh = np.vstack([stacked(plan, heard.fresh), nothing])
        covered = ~np.isnan(fresh).all(0)
        middle = np.nansum(fresh, axis=0) / np.maximum((~np.isnan(fresh)).sum(0), 1)
        slack = 1e-5 * (1 + np.abs(middle) + np.abs(low) + np.abs(high))
        assert (np.abs(v - middle) <= high - low + slack)[covered].all()
        assert ((low - slack <= v) & (v <= high + slack))[~covered].all()
        replaces = np.zeros(plan.parameters, dtype=bool)
        for word in heard.fresh:
            values, old = dense(plan, word), entries.get(word.device, nothing)
            replaces |= ~np.isnan(values) & ~np.isnan(old)
            entries[word.device] = np.where(np.isnan(values), old, values / word.rate)
        assert (np.abs(v - middle) <= slack)[covered & ~replaces].all()


@few
@given(history=histories())
def test_ram_fed_undamped_over_all_is_the_papers_formula(history: History) -> None:
    """`v = (1/N) Σ u_n + (1/Γ) Σ (D_n − u_n)`, `u` starting at 0, N being all there are."""
    rule = RamFed(damping=1.0, population="all")
    history, plan = in_time(history), history.plan
    history = replace(history, rounds=tuple(replace(now, rate=0.1) for now in history.rounds))
    u: dict[str, NDArray[np.float64]] = {}
    for step, now in zip(
        drive(history, rule, max_staleness=50, from_zero=True), history.rounds, strict=True
    ):
        u = {name: u.get(name, np.zeros(plan.parameters)) for name in now.devices}
        v = sum(u.values(), np.zeros(plan.parameters)) / max(1, len(now.devices))
        fresh = {word.device: dense(plan, word) for word in step.heard.fresh}
        gamma = sum((~np.isnan(d) for d in fresh.values()), np.zeros(plan.parameters))
        for name, d in fresh.items():
            v += np.where(np.isnan(d), 0, d - u[name]) / np.maximum(gamma, 1)
            u[name] = np.where(np.isnan(d), u[name], d)
        assert np.abs(step.theta - v).max() <= 1e-5 * max(1.0, np.abs(v).max())


@few
@given(history=histories(), weighting=weightings)
def test_adaptive_ram_fed_is_undamped_where_memory_comes_true(
    history: History, weighting: Any
) -> None:
    """Whoever returns says the same again, in proportion to γ, and so do all: trust is 1."""
    history, word = all_have_samples(history), normal(history.seed, history.plan.parameters)

    def unison(plan: ModelPlan, turn: Turn, rate: float) -> Float32:
        return (word * rate).astype(np.float32)

    adaptive, undamped = (
        list(drive(history, rule, from_zero=True, say=unison))
        for rule in (RamFed(weighting=weighting), RamFed(damping=1.0, weighting=weighting))
    )
    known = np.zeros(history.plan.parameters, dtype=bool)
    for one, other in zip(adaptive, undamped, strict=True):
        fresh = ~np.isnan(stacked(history.plan, one.heard.fresh)).all(0)
        if (known & fresh & (word != 0)).any():  # else there is nothing to compare
            assert_near([one.theta], [other.theta])
        known |= fresh | ~np.isnan(stacked(history.plan, one.late)).all(0)


@few
@given(history=histories(), weighting=weightings, name=st.sampled_from(["none", "median"]))
def test_adaptive_ram_fed_is_ra_fed_where_memory_is_contradicted(
    history: History, weighting: Any, name: RobustName
) -> None:
    """In the second round all say the opposite of what they said in the first."""
    history = in_time(history)
    rounds = [
        replace(now, turns={one: replace(turn, seed=number) for one, turn in now.turns.items()})
        for number, now in enumerate(history.rounds[:2])
    ]
    history, word = replace(history, rounds=tuple(rounds)), normal(3, history.plan.parameters)

    def opposed(plan: ModelPlan, turn: Turn, rate: float) -> Float32:
        return (word * (rate if turn.seed % 2 else -rate)).astype(np.float32)

    momentum = ServerOptimizer(name="momentum", beta1=0.5)
    told = {"say": opposed, "robust": Robust(name=name), "optimizer": momentum}
    left, right = (
        movements(history, rule, **told)
        for rule in (RamFed(weighting=weighting), RaFed(weighting=weighting))
    )
    assert all((a == b).all() for a, b in zip(left, right, strict=True))


@few
@given(history=histories())
def test_fedvarp_is_undamped_ram_fed_over_all_with_whole_models(history: History) -> None:
    whole = history.plan.all_groups()
    rounds = [
        replace(
            now,
            turns={
                name: turn if turn.groups == whole else replace(turn, groups=None)
                for name, turn in now.turns.items()
            },
        )
        for now in history.rounds
    ]
    only_whole = replace(history, rounds=tuple(rounds))
    paper = RamFed(damping=1.0, population="all")
    assert_same_bits(movements(history, FedVarp()), movements(only_whole, paper))


# -- the others --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ccfl-1", "ccfl-2", "ccfl-3", "strategy-1", "strategy-2"])
@settings(law, max_examples=15)
@given(history=histories(), weighting=weightings)
def test_skip_rule_is_fedavg_without_skips(name: str, history: History, weighting: Any) -> None:
    history = everybody_trains_everything(history)
    got = movements(history, named(name, weighting=weighting))
    assert_same_bits(got, movements(history, FedAvg(weighting=weighting)))


@few
@given(history=histories(), weighting=weightings, server_rate=st.sampled_from([1.0, 0.5, 1.7]))
def test_subdismo_is_ra_fed_on_the_server(
    history: History, weighting: Any, server_rate: float
) -> None:
    options = {"weighting": weighting, "server_rate": server_rate}
    assert_same_bits(
        movements(history, named("subdismo", **options)),
        movements(history, named("ra-fed", **options)),
    )


WEIGHTED = [name for name in RULES if name != "scaffold"]
"""Rules that take any weighting."""


@pytest.mark.parametrize("name", WEIGHTED)
@settings(law, max_examples=10)
@given(history=histories(), weighting=weightings, server_rate=st.sampled_from([0.25, 4.0]))
def test_server_rate_scales_the_movement(
    name: str, history: History, weighting: Any, server_rate: float
) -> None:
    """To the bit, for powers of two: nothing that a later round needs depends on it."""
    got = movements(history, named(name, weighting=weighting, server_rate=server_rate))
    plain = movements(history, named(name, weighting=weighting))
    assert_same_bits(got, [np.float32(server_rate) * movement for movement in plain])


@pytest.mark.parametrize("name", WEIGHTED)
@settings(law, max_examples=10)
@given(history=histories(), weighting=weightings)
def test_rule_gives_the_same_bits_with_any_number_of_threads(
    name: str, history: History, weighting: Any
) -> None:
    rule = named(name, weighting=weighting)
    one, two, three = (
        [step.theta for step in drive(history, rule, threads=threads)] for threads in (1, 2, 3)
    )
    assert_same_bits(one, two)
    assert_same_bits(one, three)


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].remembers != "nothing"])
@settings(law, max_examples=4)
@given(history=histories(), weighting=weightings)
def test_rule_gives_the_same_bits_with_memory_on_disk(
    name: str, history: History, weighting: Any
) -> None:
    rule = named(name, weighting=weighting)
    in_ram = [step.theta for step in drive(history, rule)]
    with tempfile.TemporaryDirectory() as folder:
        on_disk = [step.theta for step in drive(history, rule, folder=Path(folder) / "memory")]
    assert_same_bits(in_ram, on_disk)
