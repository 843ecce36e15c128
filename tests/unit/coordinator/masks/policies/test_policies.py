"""What is particular to each policy; what all have in common is in tests/property."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy, level_groups, make_masks, settle_masks
from coordinator.masks.policies.static import StaticMasks
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.unit.coordinator.masks.fleet import chain, situation_of

ONE = chain((2,) * 8)
TWO = chain((2,) * 4, (2,) * 4)


def windows(policy: MaskPolicy, plan: ModelPlan, level: float, rounds: int) -> list[set[int]]:
    """The groups of the first axis that one device gets, round by round."""
    masks = [policy(situation_of(plan, [level], round=r)) for r in range(1, rounds + 1)]
    return [set(each["d000"]["h0"]) for each in masks]


# -- random, static, greedy ----------------------------------------------------------------------


def test_random_masks_are_uniform_over_subsets() -> None:
    drawn = Counter(
        make_masks("random")(situation_of(chain((1,) * 4), [0.5], seed=seed))["d000"]["h0"]
        for seed in range(1200)
    )
    assert len(drawn) == 6
    assert max(abs(count - 200) for count in drawn.values()) < 5 * np.sqrt(200)


def test_static_masks_are_leading_groups_in_every_round() -> None:
    for round in (1, 2, 7):
        masks = make_masks("static")(situation_of(TWO, [0.5, 0.25], round=round, seed=round))
        assert masks == {"d000": {"h0": (0, 1), "h1": (0, 1)}, "d001": {"h0": (0,), "h1": (0,)}}


def test_greedy_masks_take_the_groups_of_largest_norm() -> None:
    rng = np.random.default_rng(3)
    norms = rng.random(TWO.block_count)
    masks = make_masks("greedy")(situation_of(TWO, [0.5, 0.25], norms=norms.tolist()))
    for axis in ("h0", "h1"):
        norm = [
            sum(norms[b] for b in range(TWO.block_count) if (axis, g) in TWO.signature(b))
            for g in range(4)
        ]
        largest = sorted(range(4), key=lambda g: -norm[g])
        assert masks["d000"][axis] == tuple(sorted(largest[:2]))
        assert masks["d001"][axis] == (largest[0],)


def test_greedy_masks_tied_rank_by_the_blocks_of_all_axes() -> None:
    norms = [0.0] * TWO.block_count
    for block in range(TWO.block_count):
        owners = TWO.signature(block)
        norms[block] = 2.0 * (owners == (("h0", 1),)) + 3.0 * (owners == (("h1", 2),))
    masks = make_masks("greedy", tied=True)(situation_of(TWO, [0.25], norms=norms))
    assert masks == {"d000": {"h0": (2,), "h1": (2,)}}


def test_greedy_masks_without_norms_are_refused() -> None:
    situation = situation_of(TWO, [0.5])
    object.__setattr__(situation, "norms", None)
    with pytest.raises(ValueError, match="norms"):
        make_masks("greedy")(situation)


# -- prunefl --------------------------------------------------------------------------------------


def test_prunefl_masks_are_the_set_with_most_importance_per_cost() -> None:
    """On one axis, the best of all sets, found by trying every one."""
    uneven = chain((1, 2, 3, 1, 2, 4))
    for seed in range(20):
        random = np.random.default_rng(seed)
        worth = random.random(uneven.block_count) ** 4
        overhead = float(random.choice([0.0, 0.1, 1.0]))

        def rate(groups: tuple[int, ...], worth: Any = worth, overhead: float = overhead) -> float:
            held = uneven.covers(uneven.choose({"h0": groups}))
            cost = overhead * uneven.parameters + uneven.submodel_parameters({"h0": groups})
            return float(worth[held].sum() / cost)

        sets = [
            tuple(np.flatnonzero(flags).tolist())
            for flags in product((0, 1), repeat=6)
            if any(flags)
        ]
        situation = situation_of(uneven, [1.0, 1.0], round=2, importance=worth.tolist())
        masks = make_masks("prunefl", overhead=overhead)(situation)
        assert masks["d000"] == masks["d001"] == {"h0": max(sets, key=rate)}


def test_prunefl_masks_of_a_share_are_the_best_groups_of_every_axis() -> None:
    random = np.random.default_rng(3)
    worth, importance = random.random(TWO.block_count), random.random(TWO.block_count)
    policy = make_masks("prunefl", level=0.5, period=4)
    options: dict[str, Any] = {"norms": worth.tolist(), "importance": importance.tolist()}
    masks = policy(situation_of(TWO, [1.0, 0.5, 0.25], round=2, **options))
    for axis in ("h0", "h1"):  # all groups cost the same
        sums = [
            sum(importance[b] for b in range(TWO.block_count) if (axis, g) in TWO.signature(b))
            for g in range(4)
        ]
        largest = sorted(range(4), key=lambda g: -sums[g])
        assert masks["d000"][axis] == masks["d001"][axis] == tuple(sorted(largest[:2]))
        assert masks["d002"][axis] == (largest[0],)
    measured = policy(situation_of(TWO, [1.0, 0.5, 0.25], round=5, **options))
    assert measured == {**masks, "d000": {"h0": (0, 1, 2, 3), "h1": (0, 1, 2, 3)}}


def test_prunefl_masks_before_a_measurement_are_those_of_the_largest_norm() -> None:
    norms = np.random.default_rng(4).random(TWO.block_count).tolist()
    offers = [1.0, 0.5]
    first = make_masks("prunefl")(situation_of(TWO, offers, round=2, norms=norms))
    assert first == make_masks("greedy")(situation_of(TWO, offers, norms=norms))


# -- nested and core -----------------------------------------------------------------------------


def test_nested_masks_take_the_longest_beginning_of_the_order_that_fits() -> None:
    plan = chain((1, 2, 4, 6, 7))
    masks = make_masks("nested")(situation_of(plan, [0.05, 0.2, 0.5, 0.7, 1.0]))
    wanted = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
    assert [groups["h0"] for groups in masks.values()] == wanted


def test_nested_masks_begin_with_the_smallest_group_where_groups_differ() -> None:
    masks = make_masks("nested")(situation_of(chain((7, 6, 4, 2, 1)), [0.05, 0.3, 0.4]))
    assert [groups["h0"] for groups in masks.values()] == [(4,), (4,), (0, 4)]


def test_nested_masks_at_random_differ_by_seed_and_axis_and_never_by_round() -> None:
    plan = chain((1,) * 16, (1,) * 16)
    drawn = set()
    for seed in (0, 1):
        policy = make_masks("nested", order="random", seed=seed)
        groups = [policy(situation_of(plan, [0.25], round=r, seed=r))["d000"] for r in (1, 9)]
        assert groups[0] == groups[1]
        drawn |= set(groups[0].values())
    assert len(drawn) == 4
    tied = make_masks("nested", order="random", tied=True)(situation_of(plan, [0.25]))["d000"]
    assert tied["h0"] == tied["h1"]


def test_nested_masks_by_importance_keep_the_order_of_the_first_model() -> None:
    rng = np.random.default_rng(3)
    norms = rng.random(TWO.block_count)
    policy = settle_masks(make_masks("nested", order="importance"), TWO, lambda: norms)
    greedy = make_masks("greedy")(situation_of(TWO, [0.75, 0.5, 0.25], norms=norms.tolist()))
    for round in (1, 5):
        later = rng.random(TWO.block_count).tolist()
        assert policy(situation_of(TWO, [0.75, 0.5, 0.25], norms=later, round=round)) == greedy
    assert level_groups(policy, TWO, 0.5) == greedy["d001"]
    assert settle_masks(policy, TWO, lambda: pytest.fail("settled once")) is policy


def test_nested_masks_by_importance_need_the_first_model() -> None:
    policy = make_masks("nested", order="importance")
    with pytest.raises(ConfigError, match="settle_masks"):
        policy(situation_of(TWO, [0.5]))
    with pytest.raises(ConfigError, match="settle_masks"):
        policy.longest_gap(TWO, [0.5])


def test_core_masks_keep_the_core_and_turn_the_rest() -> None:
    policy = make_masks("core", core=0.25)
    half = windows(policy, ONE, 0.5, 8)
    assert half[:3] == [{0, 1, 2, 3}, {0, 1, 3, 4}, {0, 1, 4, 5}]
    assert half[5:7] == [{0, 1, 7, 2}, {0, 1, 2, 3}]
    assert windows(policy, ONE, 0.25, 8) == [{0, 1}] * 8
    assert level_groups(policy, ONE, 0.5) == {"h0": (0, 1, 2, 3)}


def test_core_masks_of_half_the_width_train_every_block_between_two_axes() -> None:
    policy = make_masks("core")
    covered = np.zeros(TWO.block_count, dtype=np.int64)
    for round in range(1, 10):
        covered += TWO.coverage(policy(situation_of(TWO, [0.5], round=round)).values())
    assert covered.min() > 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nested", {"order": "norm"}, "order = 'norm': must be one of leading, random, importance"),
        ("nested", {"seed": -1}, "seed = -1: must be at least 0"),
        ("nested", {"core": 0.5}, "core is not a known key"),
        ("nested", {"ranked": ((0,),)}, "ranked is not a known key"),
        ("core", {"core": 0}, "core = 0"),
        ("core", {"core": 1.5}, "core = 1.5"),
    ],
)
def test_ordered_masks_refuse_options_that_make_no_sense(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_masks(name, **options)


@pytest.mark.parametrize("name", ["random", "rolling", "greedy", "coverage", "gre-raa"])
def test_level_of_a_policy_without_an_order_is_its_leading_groups(name: str) -> None:
    assert level_groups(make_masks(name), TWO, 0.5) == {"h0": (0, 1), "h1": (0, 1)}


@pytest.mark.parametrize(
    ("groups", "nests"),
    [((2, 2, 2, 2), True), ((2, 1, 2), True), ((1, 2, 4, 6, 7), True), ((7, 6, 4, 2, 1), False)],
)
def test_static_masks_nest_unless_larger_groups_come_first(
    groups: tuple[int, ...], nests: bool
) -> None:
    plan, policy = chain(groups), StaticMasks()
    assert policy.nests(plan) == nests
    sets = [set(policy.groups_at(plan, level / 20)["h0"]) for level in range(1, 21)]
    assert all(one <= other for one, other in pairwise(sets)) == nests
    masks = policy(situation_of(plan, [0.5]))
    assert policy.groups_at(plan, 0.5) == masks["d000"]


# -- rolling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "common"), [(0.0, 0), (0.5, 2), (0.75, 3)])
def test_rolling_windows_keep_the_overlap(overlap: float, common: int) -> None:
    shown = windows(make_masks("rolling", overlap=overlap), ONE, 0.5, 12)
    assert {len(each) for each in shown} == {4}
    assert all(len(one & other) == common for one, other in pairwise(shown))
    for window in shown:  # neighbours, around the end
        assert sum((group + 1) % 8 not in window for group in window) == 1


def test_rolling_windows_of_devices_start_apart() -> None:
    masks = make_masks("rolling")(situation_of(ONE, [0.25] * 40))
    assert len({groups["h0"] for groups in masks.values()}) == 8


def test_rolling_shared_and_tied_is_one_window_start_for_all() -> None:
    policy = make_masks("rolling", shared=True, tied=True)
    for round in range(1, 12):
        masks = policy(situation_of(TWO, [0.25, 0.5, 0.75], round=round))
        start = (round - 1) % 4
        for device, width in zip(masks, (1, 2, 3), strict=True):
            window = tuple(sorted((start + n) % 4 for n in range(width)))
            assert masks[device] == {"h0": window, "h1": window}


def test_rolling_wheels_bring_every_block_by() -> None:
    policy = make_masks("rolling")
    pairs = set()
    for round in range(1, 17):
        groups = policy(situation_of(TWO, [0.25], round=round))["d000"]
        pairs |= set(product(groups["h0"], groups["h1"]))
    assert len(pairs) == 16


@pytest.mark.parametrize("overlap", [-0.1, 1.0, float("nan")])
def test_rolling_refuses_an_overlap_that_is_no_share(overlap: float) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        make_masks("rolling", overlap=overlap)


def test_rolling_refuses_an_overlap_of_shared_windows() -> None:
    with pytest.raises(ConfigError, match="overlap has no effect with shared"):
        make_masks("rolling", overlap=0.5, shared=True)


# -- disjoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_disjoint_masks_deal_every_group_before_any_twice(tied: bool) -> None:
    for seed in range(10):
        situation = situation_of(TWO, [0.5, 0.25, 0.75, 0.5], seed=seed)
        masks = make_masks("disjoint", tied=tied)(situation)
        for axis in ("h0", "h1"):
            dealt = Counter(group for groups in masks.values() for group in groups[axis])
            assert sorted(dealt.values()) == [2, 2, 2, 2]
            assert not set(masks["d000"][axis]) & set(masks["d001"][axis])


def test_disjoint_masks_of_unequal_groups_do_not_overlap_while_they_fit() -> None:
    plan = chain((1, 2, 4, 6, 7))
    for seed in range(20):
        masks = make_masks("disjoint")(situation_of(plan, [0.5, 0.5, 0.05], seed=seed))
        first, second, small = (set(groups["h0"]) for groups in masks.values())
        assert first
        assert not first & second
        assert small == {0}  # 5 % of 20 atoms: nothing else fits


# -- gre-raa -------------------------------------------------------------------------------------

UNEQUAL = chain((1, 2, 4, 6, 7), (2, 4, 8, 12, 14))


def offer(level: float, **speeds: float) -> Bid:
    return Bid(
        device="d000", round=1, level=level, reason="test", samples=100,
        compute=speeds.get("compute"), bytes_per_s=speeds.get("bytes_per_s"),
    )  # fmt: skip


def fragment(bid: Bid, times: list[int] | None = None, seed: int = 0, **options: float) -> int:
    situation = situation_of(UNEQUAL, [bid], times_covered=times, seed=seed)
    (groups,) = make_masks("gre-raa", **options)(situation).values()
    assert groups["h0"] == groups["h1"]
    (number,) = groups["h0"]
    return number


def updated(*times: int) -> list[int]:
    """Coverage of the blocks of each fragment; blocks of several have been covered by all."""
    counts = []
    for block in range(UNEQUAL.block_count):
        owners = {group for _, group in UNEQUAL.signature(block)}
        counts.append(times[owners.pop()] if len(owners) == 1 else sum(times))
    return counts


def test_gre_raa_gives_the_fragment_updated_least() -> None:
    assert fragment(offer(1.0), updated(4, 3, 5, 2, 6)) == 3
    assert fragment(offer(0.25), updated(4, 3, 5, 2, 6)) == 1  # 3 and 4 are above the level


def test_gre_raa_breaks_ties_at_random() -> None:
    given = {fragment(offer(1.0), updated(2, 1, 1, 9, 1), seed) for seed in range(40)}
    assert given == {1, 2, 4}


def test_gre_raa_keeps_to_the_delay_limit() -> None:
    sizes = [
        UNEQUAL.submodel_parameters({"h0": (j,), "h1": (j,)})
        for j in range(len(UNEQUAL.axes[0].groups))
    ]
    times = updated(9, 8, 7, 6, 5)
    limit = sizes[2] * 100 / 50.0 + 8 * sizes[2] / 20.0
    slow = offer(1.0, compute=50.0, bytes_per_s=20.0)
    assert fragment(slow, times, delay_limit_s=limit) == 2
    assert fragment(slow, times, delay_limit_s=limit * 0.999) == 1
    assert fragment(slow, times) == 4
    assert fragment(offer(1.0), times, delay_limit_s=limit) == 4  # unknown speed costs nothing


def test_gre_raa_gives_the_smallest_if_none_fits() -> None:
    times = updated(9, 0, 0, 0, 0)
    assert fragment(offer(1.0, compute=1e-3), times, delay_limit_s=1.0) == 0
    assert fragment(offer(0.01), times) == 0


def test_gre_raa_spreads_devices_that_are_assigned_together() -> None:
    masks = make_masks("gre-raa")(situation_of(UNEQUAL, [1.0] * 10))
    assert Counter(groups["h0"] for groups in masks.values()) == {(j,): 2 for j in range(5)}


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_gre_raa_refuses_a_limit_that_is_no_time(limit: float) -> None:
    with pytest.raises(ConfigError, match="delay_limit_s"):
        make_masks("gre-raa", delay_limit_s=limit)


# -- gaps ----------------------------------------------------------------------------------------

PLAIN = ModelPlan((Axis("a", (1,) * 4),), (Tensor("w", "float32", (Dim(4, 0),)),))


@pytest.mark.parametrize(
    ("name", "plan", "levels", "gap"),
    [
        *((name, TWO, [0.25, 1.0], 0)
          for name in ("random", "rolling", "static", "greedy", "coverage", "disjoint")),
        *((name, TWO, [0.5, 0.5], None) for name in ("random", "static", "greedy", "disjoint")),
        *((name, ONE, [], None)
          for name in ("random", "rolling", "static", "greedy", "coverage", "disjoint", "gre-raa")),
        ("rolling", ONE, [0.25], 3),
        ("rolling", ONE, [0.5, 0.25], 1),
        ("coverage", ONE, [0.25], 3),
        ("coverage", ONE, [0.25, 0.25, 0.5], 0),
        ("coverage", chain((1, 2, 4, 6, 7)), [0.3, 0.3], None),  # 35 % fits nobody
        ("coverage", chain((1, 2, 4, 6, 7)), [0.35], 4),
        ("disjoint", ONE, [0.5, 0.5], 0),
        ("disjoint", ONE, [0.5, 0.25], None),
        ("gre-raa", PLAIN, [0.5, 0.25, 1.0], 2),
        ("gre-raa", TWO, [1.0], None),  # nothing between different groups
        ("gre-raa", chain((8,)), [0.5], 0),
    ],
)  # fmt: skip
def test_longest_gap_is_as_proven(
    name: str, plan: ModelPlan, levels: list[float], gap: int | None
) -> None:
    assert make_masks(name).longest_gap(plan, levels) == gap


def test_longest_gap_of_tied_windows_too_narrow_for_a_pair_is_unbounded() -> None:
    assert make_masks("rolling", tied=True).longest_gap(TWO, [0.5]) is None
    assert make_masks("rolling", tied=True, shared=True).longest_gap(TWO, [0.75]) is not None
    assert make_masks("coverage", tied=True).longest_gap(TWO, [0.25]) is None
    # One cell a round: 4 of biases, 4 and 6 of weights between same and different groups.
    assert make_masks("coverage", tied=True).longest_gap(TWO, [0.5]) == 13
