"""Laws of fragments: they cover the model, split as much as possible and fit the offer."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.errors import ConfigError
from coordinator.masks import Situation, fragments_of, make_masks
from coordinator.masks.groups import splitting
from coordinator.masks.groups.fragments import FragmentKind, fragments_within, never_trained
from coordinator.masks.groups.splitting import heaviest, split_axes
from coordinator.masks.policies.gre_raa import GreRaaMasks
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.protocol.streams import stream
from tests.property.strategies import elements_by_block, holds, law, levels, plans, seeds

KINDS: list[FragmentKind] = ["alternate", "rotating", "tied"]


def owners(plan: ModelPlan) -> list[tuple[tuple[tuple[str, int], ...], int]]:
    """The (axis, group) pairs that own the parameters of each block, and how many those are."""
    return [
        (signature, len(owned))
        for tensor in plan.tensors
        for signature, owned in elements_by_block(plan, tensor)
    ]


def split_parameters(
    found: list[tuple[tuple[tuple[str, int], ...], int]], split: set[str]
) -> int | None:
    """Parameters that one split axis owns; None if two own one of them."""
    total = 0
    for signature, size in found:
        number = sum(axis in split for axis, _ in signature)
        if number > 1:
            return None
        total += number * size
    return total


def is_small(plan: ModelPlan) -> bool:
    """True if there are few ways to take one group of every axis."""
    return prod(len(axis.groups) for axis in plan.axes) <= 36


@settings(law, max_examples=60)
@given(plan=plans())
def test_alternate_fragments_hold_every_parameter_once_or_all_of_them_do(plan: ModelPlan) -> None:
    fragments = fragments_of(plan)
    for signature, _ in owners(plan):
        assert sum(holds(fragment, signature) for fragment in fragments) in (1, len(fragments))
    assert not never_trained(plan, "alternate").any()


@settings(law, max_examples=60)
@given(plan=plans())
def test_alternate_fragments_split_no_tensor_twice_and_as_many_parameters_as_can_be(
    plan: ModelPlan,
) -> None:
    chosen = [plan.axes[number] for number in split_axes(plan)]
    assert len({len(axis.groups) for axis in chosen}) <= 1
    for tensor in plan.tensors:
        assert sum(dim.axis in split_axes(plan) for dim in tensor.dims) <= 1
    best, found = 0, owners(plan)
    free = [axis for axis in plan.axes if not axis.depth or plan.regions == "depth"]
    for size in range(1, len(free) + 1):
        for some in combinations(free, size):
            if len({len(axis.groups) for axis in some}) == 1 and len(some[0].groups) > 1:
                best = max(best, split_parameters(found, {axis.name for axis in some}) or 0)
    assert split_parameters(found, {axis.name for axis in chosen}) == best


graphs = st.integers(1, 11).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 20), min_size=count, max_size=count),
        st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))),
    )
)


def neighbours(count: int, pairs: set[tuple[int, int]]) -> list[set[int]]:
    meets: list[set[int]] = [set() for _ in range(count)]
    for one, other in pairs:
        if one != other:
            meets[one].add(other)
            meets[other].add(one)
    return meets


@settings(law, max_examples=150)
@given(graph=graphs)
def test_heaviest_is_the_best_of_all_sets(graph: tuple[list[int], set[tuple[int, int]]]) -> None:
    weights, pairs = graph
    meets = neighbours(len(weights), pairs)
    best = 0
    for chosen in range(2 ** len(weights)):
        some = [n for n in range(len(weights)) if chosen >> n & 1]
        if all(other not in meets[one] for one, other in combinations(some, 2)):
            best = max(best, sum(weights[n] for n in some))
    found = heaviest(dict(enumerate(weights)), meets)
    assert all(other not in meets[one] for one, other in combinations(found, 2))
    assert sum(weights[n] for n in found) == best


def test_heaviest_beyond_the_exact_search_keeps_its_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    count = 60
    weights = [int(each) for each in rng.integers(1, 100, count)]
    pairs = {(int(a), int(b)) for a, b in rng.integers(0, count, (240, 2))}
    meets = neighbours(count, pairs)
    promised = sum(weight / (1 + len(meets[n])) for n, weight in enumerate(weights))
    for most, branches in ((64, 50), (8, 20_000), (0, 0)):
        monkeypatch.setattr(splitting, "MOST_EXACT", most)
        monkeypatch.setattr(splitting, "BRANCHES", branches)
        found = heaviest(dict(enumerate(weights)), meets)
        assert found == heaviest(dict(enumerate(weights)), meets)
        assert all(other not in meets[one] for one, other in combinations(found, 2))
        assert sum(weights[n] for n in found) >= promised


@law
@given(plan=plans(), kind=st.sampled_from(KINDS), level=levels, seed=seeds)
def test_fragments_of_a_level_stay_within_its_cost(
    plan: ModelPlan, kind: FragmentKind, level: float, seed: int
) -> None:
    try:
        offered = fragments_within(plan, kind, level, stream(seed, "masks"))
        whole = fragments_of(plan, kind)
    except ConfigError:
        assert kind == "tied"
        return
    cost = plan.cost_at(level)
    for number, groups in offered.items():
        assert plan.submodel_parameters(groups) <= cost.parameters
        assert plan.submodel_macs(groups) <= cost.macs
        if kind != "rotating":  # a part of the fragment, and all of it where the level allows it
            assert all(set(groups[axis]) <= set(ids) for axis, ids in whole[number].items())
    if level == 1 and kind != "rotating":
        assert offered == dict(enumerate(whole))


SQUARE = ModelPlan(
    (Axis("a", (2, 1)), Axis("b", (1, 1, 1))),
    (
        Tensor("recurrent", "float32", (Dim(3, 0), Dim(3, 0))),
        Tensor("mixed", "float32", (Dim(3, 1), Dim(3, 0))),
        Tensor("bias", "float32", (Dim(3, 0),)),
    ),
)


@settings(law, max_examples=25)
@given(
    plan=plans(min_axes=1).filter(is_small), assign=st.sampled_from(["gre", "random"]), seed=seeds
)
def test_rotating_fragments_cover_every_block_but_those_between_groups_of_one_axis(
    plan: ModelPlan, assign: str, seed: int
) -> None:
    masks, never = make_masks("gre-raa", fragments="rotating", assign=assign), []
    for block in range(plan.block_count):
        groups: dict[str, set[int]] = {}
        for axis, group in plan.signature(block):
            groups.setdefault(axis, set()).add(group)
        never.append(any(len(each) > 1 for each in groups.values()))
    assert never_trained(plan, "rotating").tolist() == never
    times = np.zeros(plan.block_count, dtype=np.int64)
    for round in range(1, 1500):
        offers = [Bid(device="d", round=round, level=1.0, reason="test")]
        draw = stream(seed, "masks", round)
        masked = masks(Situation(plan, round, offers, times, times, None, draw))
        times = times + plan.coverage(masked.values())
        if (times > 0).tolist() == [not each for each in never]:
            return
    raise AssertionError(f"blocks {np.flatnonzero(times == 0)} were never trained")


def test_axis_that_meets_itself_stays_whole_and_rotating_cannot_train_what_lies_between() -> None:
    assert split_axes(SQUARE) == (1,)
    assert fragments_of(SQUARE) == tuple({"a": (0, 1), "b": (j,)} for j in range(3))
    recurrent = never_trained(SQUARE, "rotating")[:4]
    assert recurrent.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("kind", "groups", "parameters"),
    [
        ("alternate", (1, 1, 1), 0),
        ("rotating", (1, 1, 1), 2 * 2 * 1),  # of the recurrent weight, on both sides
        ("tied", (2, 1), 2 * (2 * 2 * 1)),  # of both weights
    ],
)
def test_untrained_share_counts_parameters(
    kind: FragmentKind, groups: tuple[int, ...], parameters: int
) -> None:
    plan = replace(SQUARE, axes=(SQUARE.axes[0], Axis("b", groups)))
    share = GreRaaMasks(fragments=kind).untrained_share(plan)
    assert share == pytest.approx(parameters / plan.parameters)
