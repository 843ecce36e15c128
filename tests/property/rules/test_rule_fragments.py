"""fed-raa, fedasync and fedbuff against their definitions, over random arrivals in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import AsyncRule, make_rule
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.aggregate.rules.fed_raa import FedAsync, FedRaa
from coordinator.masks import fragments_of
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor, split_atoms
from tests.property.rules.histories import Turn, arrive, by_block, normal
from tests.property.rules.oracle import Values, mixed, staleness
from tests.property.strategies import Choice, elements_by_block, holds, law, plans, seeds

often = settings(law, max_examples=80)

options = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.6, 1.0, 0.05]),
        "staleness": st.sampled_from(["constant", "hinge", "polynomial"]),
        "a": st.sampled_from([0.5, 2.0, 0.0]),
        "b": st.sampled_from([1.0, 0.0, 2.5, 4.0]),
    }
)


@dataclass(frozen=True, slots=True)
class Errand:
    """One device takes a fragment after `taken` updates and is back as the update after `back`."""

    taken: int
    back: int
    fragment: int
    seed: int


@st.composite
def tied_plans(draw: st.DrawFn) -> tuple[ModelPlan, int]:
    """A plan with equally many groups on every axis, and how many."""
    plan = draw(plans(min_axes=1))
    count = min(draw(st.sampled_from([2, 3, 1])), *(axis.atoms for axis in plan.axes))
    if any(axis.depth and axis.atoms % count for axis in plan.axes):
        count = 1  # groups of blocks are equal
    axes = [replace(axis, groups=split_atoms(axis.atoms, count)) for axis in plan.axes]
    return replace(plan, axes=tuple(axes), buffers=()), count


@st.composite
def errands(draw: st.DrawFn, fragments: int) -> list[Errand]:
    """One arrival for every update of a run, each from some version before."""
    return [
        Errand(
            taken=draw(st.integers(0, back)),
            back=back,
            fragment=draw(st.integers(0, fragments - 1)),
            seed=draw(seeds),
        )
        for back in range(draw(st.sampled_from([6, 8, 3, 1])))
    ]


def tied_fragments(plan: ModelPlan, count: int) -> list[Choice]:
    return [{axis.name: (number,) for axis in plan.axes} for number in range(count)]


def run(
    plan: ModelPlan, rule: AsyncRule, run_errands: list[Errand], seed: int, parts: Sequence[Choice]
) -> list[GlobalModel]:
    """The model after every update, as the coordinator makes it: reserve, then mix.

    Ages count changes of the model.
    """
    model = GlobalModel(plan, plan.unflatten(normal(seed, plan.parameters)), {})
    after, versions = [], []
    for now in range(len(run_errands)):
        versions.append(model.version)
        for number, errand in enumerate(run_errands):
            if errand.taken == now:
                model.reserve(f"device{number}", number + 1, parts[errand.fragment])
        errand = run_errands[now]
        words = normal(errand.seed, plan.parameters)
        turn = Turn(parts[errand.fragment], errand.seed)
        arrival = arrive(plan, f"device{now}", now + 1, 0.1, turn, words)
        model.mix(rule, arrival, model.version - versions[errand.taken])
        if now == len(run_errands) - 1:
            model.settle(rule)
        after.append(GlobalModel(plan, model.weights, {}))
    return after


def assert_follows(
    plan: ModelPlan, rule: FedRaa, run_errands: list[Errand], seed: int, parts: Sequence[Choice]
) -> None:
    """Each update moves what its fragment owns and nothing else, from the version it started at."""
    start = by_block(plan, normal(seed, plan.parameters))
    versions: list[list[Values]] = [start]
    for errand, model in zip(run_errands, run(plan, rule, run_errands, seed, parts), strict=True):
        alpha = rule.alpha * staleness(rule.staleness, errand.back - errand.taken, rule.a, rule.b)
        words = by_block(plan, normal(errand.seed, plan.parameters))
        now = list(versions[-1])
        for block in range(plan.block_count):
            if holds(parts[errand.fragment], plan.signature(block)):
                base = versions[errand.taken][block]
                now[block] = mixed(now[block], base, words[block], alpha)
        versions.append(now)
        error = np.abs(model.theta - np.concatenate(now)).max()
        assert error <= 1e-5 * (1 + np.abs(np.concatenate(now)).max())


@often
@given(data=st.data(), plan=tied_plans(), options=options, seed=seeds)
def test_fed_raa_mixes_each_arrival_into_its_fragment(
    data: st.DataObject, plan: tuple[ModelPlan, int], options: dict[str, Any], seed: int
) -> None:
    parts = tied_fragments(*plan)
    assert_follows(plan[0], FedRaa(**options), data.draw(errands(plan[1])), seed, parts)


@settings(law, max_examples=40)
@given(data=st.data(), plan=plans(min_axes=1), options=options, seed=seeds)
def test_fed_raa_mixes_parameters_of_all_fragments_at_every_arrival(
    data: st.DataObject, plan: ModelPlan, options: dict[str, Any], seed: int
) -> None:
    """Fragments that alternate: what is not split is in all of them."""
    plan, parts = replace(plan, buffers=()), fragments_of(plan)
    assert_follows(plan, FedRaa(**options), data.draw(errands(len(parts))), seed, parts)


@often
@given(run_errands=errands(1), plan=plans(), options=options, seed=seeds)
def test_fedasync_mixes_each_arrival_into_the_whole_model(
    run_errands: list[Errand], plan: ModelPlan, options: dict[str, Any], seed: int
) -> None:
    rule = make_rule("fedasync", **options)
    assert isinstance(rule, FedAsync)
    assert_follows(replace(plan, buffers=()), rule, run_errands, seed, [plan.all_groups()])


@often
@given(run_errands=errands(1), plan=plans(), options=options, seed=seeds)
def test_fed_raa_with_one_fragment_is_fedasync(
    run_errands: list[Errand], plan: ModelPlan, options: dict[str, Any], seed: int
) -> None:
    axes = tuple(replace(axis, groups=(axis.atoms,)) for axis in plan.axes)
    plan = replace(plan, axes=axes, buffers=())
    one = run(plan, FedRaa(**options), run_errands, seed, tied_fragments(plan, 1))
    whole = run(plan, FedAsync(**options), run_errands, seed, [plan.all_groups()])
    assert [model.digest for model in one] == [model.digest for model in whole]


@settings(law, max_examples=60)
@given(
    data=st.data(),
    plan=plans(),
    fragments=st.booleans(),
    options=options,
    size=st.sampled_from([3, 1, 2, 5, 20]),
    rate=st.sampled_from([1.0, 0.3, 1.7]),
    seed=seeds,
)
def test_fedbuff_moves_the_model_by_the_mean_of_what_it_collected(
    data: st.DataObject,
    plan: ModelPlan,
    fragments: bool,
    options: dict[str, Any],
    size: int,
    rate: float,
    seed: int,
) -> None:
    """One number at a time; ages count changes of the model, and the last ones count too."""
    plan = replace(plan, buffers=())
    parts = fragments_of(plan) if fragments else (plan.all_groups(),)
    rest = {name: options[name] for name in ("staleness", "a", "b")}
    rule = FedBuff(size=size, server_rate=rate, fragments=fragments, **rest)
    sent = data.draw(errands(len(parts)))
    theta = by_block(plan, normal(seed, plan.parameters))
    changes, told = 0, []
    held = [[holds(part, plan.signature(n)) for n in range(plan.block_count)] for part in parts]
    waiting: list[tuple[Errand, float, list[Values]]] = []
    for errand, model in zip(sent, run(plan, rule, sent, seed, parts), strict=True):
        told.append(changes)
        age = changes - told[errand.taken]
        trust = staleness(rule.staleness, age, rule.a, rule.b)
        waiting.append((errand, trust, by_block(plan, normal(errand.seed, plan.parameters))))
        if len(waiting) == size or errand is sent[-1]:
            for block in range(plan.block_count):
                terms = [
                    trust * words[block]
                    for each, trust, words in waiting
                    if held[each.fragment][block]
                ]
                if terms:
                    theta[block] = theta[block] + rate * sum(terms) / len(terms)
            waiting, changes = [], changes + 1
        expected = np.concatenate(theta)
        assert np.abs(model.theta - expected).max() <= 1e-5 * (1 + np.abs(expected).max())


def test_fedbuff_by_default_weighs_by_the_root_of_the_age() -> None:
    rule = FedBuff()
    assert [rule.trust(age) for age in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]


def test_fedbuff_mixes_the_statistics_it_collected() -> None:
    """The mean over whole models of `v + s · (heard − v)`; a variance never falls below 0."""
    plan = ModelPlan(
        (Axis("a", (1, 1)),),
        (Tensor("w", "float32", (Dim(2, 0),)),),
        (Buffer("running_var", "float32", (Dim(2, 0),), statistic=True),),
    )
    before = {"running_var": np.array([4.0, 8.0], dtype=np.float32)}
    model = GlobalModel(plan, {"w": np.zeros(2, dtype=np.float32)}, before)
    rule = FedBuff(size=3, fragments=True)
    both: Choice = {"a": (0, 1)}
    one: Choice = {"a": (0,)}
    heard = [(both, [1.0, 2.0], 0), (one, [9.0], 0), (both, [0.0, 0.0], 3)]
    for number, (groups, values, age) in enumerate(heard, start=1):
        name, statistics = f"device{number}", {"running_var": np.array(values, dtype=np.float32)}
        model.reserve(name, number, groups)
        words = np.ones(2, dtype=np.float32)
        model.mix(rule, arrive(plan, name, number, 0.1, Turn(groups), words, statistics), age)
    expected = [
        sum(v + s * (new - v) for s, new in ((1.0, fresh), (0.5, stale))) / 2
        for v, fresh, stale in ((4.0, 1.0, 0.0), (8.0, 2.0, 0.0))
    ]
    assert model.buffers["running_var"].tolist() == pytest.approx(expected)
    assert model.version == 1


@often
@given(age=st.integers(0, 50), options=options)
def test_mixing_is_alpha_times_the_staleness(age: int, options: dict[str, Any]) -> None:
    rule = FedRaa(**options)
    expected = rule.alpha * staleness(rule.staleness, age, rule.a, rule.b)
    assert rule.mixing(age) == pytest.approx(expected, rel=1e-12)
    assert 0 < rule.mixing(age + 1) <= rule.mixing(age) <= rule.alpha


@settings(law, max_examples=25)
@given(plan=tied_plans(), seed=seeds)
def test_fragment_owns_its_group_on_every_axis_and_what_has_no_width(
    plan: tuple[ModelPlan, int], seed: int
) -> None:
    """Element by element: what an arrival with mixing 1 moves is what its fragment owns."""
    made, count = plan
    rule = FedRaa(alpha=1.0, staleness="constant")
    before = made.unflatten(normal(seed, made.parameters))
    words = made.unflatten(normal(seed + 1, made.parameters))
    for fragment in range(count):
        parts = tied_fragments(made, count)
        (model,) = run(made, rule, [Errand(0, 0, fragment, seed + 1)], seed, parts)
        after, groups = model.weights, parts[fragment]
        for tensor in made.tensors:
            expected = before[tensor.name].copy()
            for signature, owned in elements_by_block(made, tensor):
                if holds(groups, signature):
                    for where in owned:
                        expected[where] += words[tensor.name][where]
            assert np.array_equal(after[tensor.name], expected)


def test_arrival_without_a_reserved_fragment_is_refused_and_changes_nothing() -> None:
    plan = ModelPlan((), (Tensor("w", "float32", ()),))
    model = GlobalModel(plan, {"w": np.ones((), dtype=np.float32)}, {})
    arrival = arrive(plan, "device", 1, 0.1, Turn({}), np.ones(1, dtype=np.float32))
    with pytest.raises(StateError, match="nothing is reserved for 'device' in round 1"):
        model.mix(FedRaa(), arrival, 0)
    model.reserve("device", 1, {})
    model.release("device", 1)
    with pytest.raises(StateError):
        model.mix(FedRaa(), arrival, 0)
    assert model.theta.tolist() == [1]
    assert model.version == 0
