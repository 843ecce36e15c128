"""What holds for every mask policy: never more than offered, replayable, tied, bounded gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.errors import ConfigError
from coordinator.masks import (
    MASKS,
    MaskPolicy,
    OrderedMasks,
    Situation,
    make_masks,
    settle_masks,
)
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, MacTerm, Tensor, split_atoms
from edge_sdk.protocol.streams import stream
from tests.property.strategies import law, levels, plans, seeds

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MASKS),
    *((name, {"tied": True}) for name in MASKS if name != "gre-raa"),
    ("rolling", {"overlap": 0.5}),
    ("rolling", {"shared": True}),
    ("rolling", {"shared": True, "tied": True}),
    ("gre-raa", {"delay_limit_s": 1.0}),
    ("nested", {"order": "random", "seed": 3}),
    ("core", {"order": "random", "core": 0.5}),
    ("prunefl", {"period": 3, "overhead": 0.0}),
    ("prunefl", {"level": 0.6}),
]
ORDERED: list[tuple[str, dict[str, Any]]] = [
    (name, {"order": order, "tied": tied})
    for name in ("nested", "core")
    for order in ("leading", "random", "importance")
    for tied in (False, True)
]

UNEQUAL = ModelPlan(
    (Axis("a", split_atoms(20, [5, 10, 20, 30, 35])), Axis("b", (2, 2, 1))),
    (Tensor("w", "float32", (Dim(20, 0), Dim(5, 1))),),
    macs=(MacTerm(1, (0, 1)),),
)


def situation_of(plan: ModelPlan, offered: Sequence[float], seed: int, round: int = 3) -> Situation:
    """Random ages, coverage, norms and speeds; the same for the same seed."""
    rng = np.random.default_rng(seed)
    return Situation(
        plan=plan,
        round=round,
        offers=[
            Bid(
                device=f"device{n}",
                round=round,
                level=level,
                reason="test",
                samples=10,
                compute=None if rng.random() < 0.3 else 10.0 ** rng.integers(0, 5),
                bytes_per_s=None if rng.random() < 0.3 else 10.0 ** rng.integers(0, 5),
            )
            for n, level in enumerate(offered)
        ],
        last_covered=rng.integers(0, round, plan.block_count),
        times_covered=rng.integers(0, 5, plan.block_count),
        norms=rng.random(plan.block_count),
        stream=stream(seed, "masks", round),
        importance=rng.random(plan.block_count),
    )


@law
@example(plan=UNEQUAL, variant=("random", {}), offered=[0.05], seed=0)  # below the smallest group
@given(
    plan=plans(),
    variant=st.sampled_from(VARIANTS),
    offered=st.lists(levels, max_size=4),
    seed=seeds,
)
def test_masks_stay_within_what_was_offered(
    plan: ModelPlan, variant: tuple[str, dict[str, Any]], offered: list[float], seed: int
) -> None:
    name, options = variant
    policy = make_masks(name, **options)
    try:
        chosen = policy(situation_of(plan, offered, seed))
    except ConfigError:
        assert options.get("tied") or name == "gre-raa"
        assert len({len(axis.groups) for axis in plan.axes}) > 1 or len(plan.axes) > 1
        with pytest.raises(ConfigError):
            policy.longest_gap(plan, offered)
        return
    assert chosen == policy(situation_of(plan, offered, seed))
    assert list(chosen) == [f"device{n}" for n in range(len(offered))]
    for level, groups in zip(offered, chosen.values(), strict=True):
        assert list(groups) == [axis.name for axis in plan.axes]
        for axis in plan.axes:
            ids = groups[axis.name]
            assert ids == tuple(sorted(set(ids)))
            assert ids
            if max(axis.groups) - min(axis.groups) <= 1:
                wanted = max(1, int(level * len(axis.groups) + 1e-9))
                mixed = options.get("tied") and any(not other.equal for other in plan.axes)
                exact = name not in ("gre-raa", "prunefl") and not mixed
                assert len(ids) == wanted if exact else len(ids) <= wanted
            else:
                atoms = sum(axis.groups[g] for g in ids)
                assert atoms <= max(min(axis.groups), level * axis.atoms + 1e-6)
        cost = plan.cost_at(level)
        assert plan.submodel_parameters(groups) <= cost.parameters <= plan.parameters
        assert plan.submodel_macs(groups) <= cost.macs
        if options.get("tied") or name == "gre-raa":
            widest = max((len(axis.groups) for axis in plan.axes), default=0)
            same = [groups[axis.name] for axis in plan.axes if len(axis.groups) == widest]
            assert len(set(same)) <= 1


@settings(law, max_examples=40)
@example(plan=UNEQUAL, variant=("nested", {"order": "random"}), pair=[0.05, 0.3], seed=5, round=1)
@given(
    plan=plans(),
    variant=st.sampled_from(ORDERED),
    pair=st.lists(levels, min_size=2, max_size=2),
    seed=seeds,
    round=st.integers(1, 200),
)
def test_ordered_levels_lie_within_larger_ones(
    plan: ModelPlan,
    variant: tuple[str, dict[str, Any]],
    pair: list[float],
    seed: int,
    round: int,
) -> None:
    norms = np.random.default_rng(seed).random(plan.block_count)
    try:
        policy = settle_masks(make_masks(variant[0], **variant[1]), plan, lambda: norms)
        chosen = policy(situation_of(plan, pair, seed, round))
    except ConfigError:
        assert variant[1]["tied"]
        return
    assert isinstance(policy, OrderedMasks)
    narrow, wide = [list(chosen.values())[n] for n in np.argsort(pair, kind="stable")]
    assert all(set(narrow[axis]) <= set(wide[axis]) for axis in wide)
    for level, groups in zip(pair, chosen.values(), strict=True):
        assert policy.groups_at(plan, level, round) == groups
        for axis in plan.axes:
            atoms = sum(axis.groups[g] for g in groups[axis.name])
            most = axis.atoms_at(level)
            assert atoms <= most
    if variant[0] == "nested":
        assert chosen == policy(situation_of(plan, pair, seed + 1, round + 1))
    assert policy.groups_at(plan, 1.0, round) == plan.all_groups()


def longest_streak(
    policy: MaskPolicy, plan: ModelPlan, offered: Sequence[float], rounds: int, seed: int
) -> int:
    """The most rounds in a row that some block stayed uncovered, devices and offers constant."""
    rng = np.random.default_rng(seed)
    norms = rng.random(plan.block_count)
    last = np.zeros(plan.block_count, dtype=np.int64)
    times = np.zeros(plan.block_count, dtype=np.int64)
    longest = 0
    for round in range(1, rounds + 1):
        masks = policy(
            Situation(
                plan=plan,
                round=round,
                offers=[
                    Bid(device=f"device{n}", round=round, level=level, reason="test")
                    for n, level in enumerate(offered)
                ],
                last_covered=last.copy(),
                times_covered=times.copy(),
                norms=norms,
                stream=stream(seed, "masks", round),
                importance=norms[::-1].copy() if round > 1 else None,
            )
        )
        coverage = plan.coverage(masks.values())
        times += coverage
        last[coverage > 0] = round
        longest = max(longest, int((round - last).max()))
        norms = norms * rng.uniform(0.9, 1.1, plan.block_count)
    return longest


def mlp(*axes: tuple[int, ...]) -> ModelPlan:
    """Hidden layers with these groups, weights between neighbours and a bias each."""
    named = tuple(Axis(f"h{n}", groups) for n, groups in enumerate(axes))
    dims = [Dim(axis.atoms, n) for n, axis in enumerate(named)]
    biases = [Tensor(f"b{n}", "float32", (dim,)) for n, dim in enumerate(dims)]
    weights = [Tensor(f"w{n}", "float32", (dims[n], dims[n - 1])) for n in range(1, len(axes))]
    return ModelPlan(named, (*biases, *weights))


SQUARE = ModelPlan(
    (Axis("a", (1,) * 3), Axis("b", (1, 1))),
    (
        Tensor("recurrent", "float32", (Dim(3, 0), Dim(3, 0))),
        Tensor("mixed", "float32", (Dim(2, 1), Dim(3, 0))),
    ),
)
TRIANGLE = ModelPlan(
    tuple(Axis(name, (1, 1, 1)) for name in "abc"),
    tuple(
        Tensor(f"w{one}{other}", "float32", (Dim(3, one), Dim(3, other)))
        for one, other in ((0, 1), (1, 2), (2, 0))
    ),
)
FLEETS: list[tuple[ModelPlan, list[float]]] = [
    (mlp((2,) * 4), [0.25]),
    (mlp((2,) * 5), [0.4, 0.2]),
    (mlp((1, 2, 4, 6, 7)), [0.35, 0.05]),
    (mlp((2,) * 4, (2,) * 4), [0.25]),
    (mlp((2,) * 4, (2,) * 4), [0.5, 0.75]),
    (mlp((2,) * 3, (2,) * 4), [0.5, 0.34]),
    (mlp((1, 2, 4, 6, 7), (2, 2, 2)), [0.5, 0.35]),
    (mlp((2,) * 3, (2,) * 3, (2,) * 3), [0.34, 0.67]),
    (mlp((1,) * 4, (1, 1)), [0.5]),
    (SQUARE, [0.67]),
    (SQUARE, [0.67, 0.34]),
    (TRIANGLE, [0.34]),
    (TRIANGLE, [0.67, 0.34, 0.34]),
    (mlp((2,) * 4, (3,) * 4), [1.0, 0.25]),
    (UNEQUAL, [1.0, 0.2]),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_masks_never_leave_a_block_uncovered_longer_than_the_longest_gap(
    name: str, options: dict[str, Any]
) -> None:
    policy = make_masks(name, **options)
    bounds = 0
    for seed, (plan, offered) in enumerate(FLEETS):
        try:
            bound = policy.longest_gap(plan, offered)
        except ConfigError:
            continue
        if bound is not None:
            bounds += 1
            rounds = min(3 * bound + 4, 60)
            assert longest_streak(policy, plan, offered, rounds, seed) <= bound
    assert bounds or name == "gre-raa"


@law
@given(
    variant=st.sampled_from(
        [("rolling", {}), ("rolling", {"overlap": 0.5}), ("rolling", {"shared": True}),
         ("rolling", {"tied": True}), ("static", {}), ("disjoint", {}), ("gre-raa", {}),
         ("core", {}), ("core", {"tied": True}), ("core", {"order": "random", "core": 0.4})]
    ),
    axes=st.lists(
        st.sampled_from([(1,) * 4, (2,) * 4, (2, 2, 2), (1, 2, 3), (1, 2, 4, 6, 7), (1, 1)]),
        min_size=1, max_size=3,
    ),
    offered=st.lists(st.sampled_from([0.2, 0.34, 0.5, 0.67, 0.75]), min_size=1, max_size=3),
    seed=seeds,
)  # fmt: skip
def test_masks_of_any_small_fleet_keep_to_the_longest_gap(
    variant: tuple[str, dict[str, Any]],
    axes: list[tuple[int, ...]],
    offered: list[float],
    seed: int,
) -> None:
    policy, plan = make_masks(variant[0], **variant[1]), mlp(*axes)
    try:
        bound = policy.longest_gap(plan, offered)
    except ConfigError:
        return
    if bound is not None:
        assert longest_streak(policy, plan, offered, min(3 * bound + 4, 60), seed) <= bound


@pytest.mark.parametrize(
    ("name", "plan", "offered"),
    [
        ("rolling", mlp((2,) * 4), [0.25]),
        ("rolling", mlp((2,) * 5), [0.4]),
        ("core", mlp((2,) * 4), [0.5, 0.25]),
        ("core", mlp((2,) * 5), [0.6]),
        ("coverage", mlp((2,) * 4), [0.25]),
        ("coverage", mlp((2,) * 5), [0.4]),
    ],
)
def test_longest_gap_is_reached_on_one_axis(
    name: str, plan: ModelPlan, offered: list[float]
) -> None:
    policy = make_masks(name)
    bound = policy.longest_gap(plan, offered)
    assert bound is not None
    assert longest_streak(policy, plan, offered, 40, seed=0) == bound


@pytest.mark.parametrize("name", ["rolling", "coverage"])
def test_longest_gap_of_two_axes_is_within_twice_what_must_be(name: str) -> None:
    plan = mlp((2,) * 4, (2,) * 4)
    bound = make_masks(name).longest_gap(plan, [0.25])
    assert bound is not None
    assert 15 <= bound <= 2 * 15  # sixteen blocks between the axes, one a round
