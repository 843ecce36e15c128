"""fed-raa and fedasync against their definition, over random arrivals in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import make_rule
from coordinator.aggregate.rules.fed_raa import FedAsync, FedRaa
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Tensor, split_atoms
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


def groups_of(plan: ModelPlan, fragment: int) -> Choice:
    return {axis.name: (fragment,) for axis in plan.axes}


def run(
    plan: ModelPlan, rule: FedRaa, run_errands: list[Errand], seed: int, *, whole: bool = False
) -> list[GlobalModel]:
    """The model after every update, as the coordinator makes it: reserve, then mix."""
    model = GlobalModel(plan, plan.unflatten(normal(seed, plan.parameters)), {})
    after = []
    for now in range(len(run_errands)):
        for number, errand in enumerate(run_errands):
            if errand.taken == now:
                groups = plan.all_groups() if whole else groups_of(plan, errand.fragment)
                model.reserve(f"device{number}", number + 1, groups)
        errand = run_errands[now]
        turn = Turn(plan.all_groups() if whole else groups_of(plan, errand.fragment), errand.seed)
        words = normal(errand.seed, plan.parameters)
        arrival = arrive(plan, f"device{now}", now + 1, 0.1, turn, words)
        model.mix(rule, arrival, now - errand.taken)
        after.append(GlobalModel(plan, model.weights, {}))
    assert model.version == len(run_errands)
    return after


def assert_follows(
    plan: ModelPlan, rule: FedRaa, run_errands: list[Errand], seed: int, *, whole: bool = False
) -> None:
    """Each update moves what its fragment owns and nothing else, from the version it started at."""
    start = by_block(plan, normal(seed, plan.parameters))
    versions: list[list[Values]] = [start]
    for errand, model in zip(
        run_errands, run(plan, rule, run_errands, seed, whole=whole), strict=True
    ):
        alpha = rule.alpha * staleness(rule.staleness, errand.back - errand.taken, rule.a, rule.b)
        words = by_block(plan, normal(errand.seed, plan.parameters))
        now = list(versions[-1])
        for block in range(plan.block_count):
            owned = all(group == errand.fragment for _, group in plan.signature(block))
            if whole or owned:
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
    assert_follows(plan[0], FedRaa(**options), data.draw(errands(plan[1])), seed)


@often
@given(run_errands=errands(1), plan=plans(), options=options, seed=seeds)
def test_fedasync_mixes_each_arrival_into_the_whole_model(
    run_errands: list[Errand], plan: ModelPlan, options: dict[str, Any], seed: int
) -> None:
    rule = make_rule("fedasync", **options)
    assert isinstance(rule, FedAsync)
    assert_follows(replace(plan, buffers=()), rule, run_errands, seed, whole=True)


@often
@given(run_errands=errands(1), plan=plans(), options=options, seed=seeds)
def test_fed_raa_with_one_fragment_is_fedasync(
    run_errands: list[Errand], plan: ModelPlan, options: dict[str, Any], seed: int
) -> None:
    axes = tuple(replace(axis, groups=(axis.atoms,)) for axis in plan.axes)
    plan = replace(plan, axes=axes, buffers=())
    one = run(plan, FedRaa(**options), run_errands, seed)
    whole = run(plan, FedAsync(**options), run_errands, seed, whole=True)
    assert [model.digest for model in one] == [model.digest for model in whole]


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
        (model,) = run(made, rule, [Errand(0, 0, fragment, seed + 1)], seed)
        after, groups = model.weights, groups_of(made, fragment)
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
