"""`coverage` against the papers' figures and against trying every choice there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

import numpy as np
import pytest

from coordinator.masks import MASKS, Masks, Situation, make_masks
from coordinator.masks.groups.bundles import Bundle, bundles_of
from coordinator.masks.groups.cells import cells_of
from coordinator.masks.policies.coverage.exact import Choice, best_choices
from coordinator.masks.policies.coverage.goal import Goal, make_goal
from coordinator.masks.policies.coverage.search import deal_cells, search_choices, sure_cells
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.unit.coordinator.masks.fleet import chain, situation_of

Value = tuple[tuple[int, ...], int, int]

ONE_AXIS = chain((5, 5, 5, 5))


def value(situation: Situation, choices: Iterator[Mapping[str, tuple[int, ...]]]) -> Value:
    """The three steps, block by block from its signature; smaller is better."""
    chosen = list(choices)
    plan, coverage = situation.plan, []
    left: dict[int, int] = {}
    for block in range(plan.block_count):
        holders = sum(
            all(group in groups[axis] for axis, group in plan.signature(block)) for groups in chosen
        )
        age = situation.round - int(situation.last_covered[block])
        left[age] = left.get(age, 0) + (holders == 0)
        coverage.append(holders)
    by_age = tuple(left[age] for age in sorted(left, reverse=True))
    return by_age, sum(by_age), -min(coverage)


def kept_norm(situation: Situation, masks: Iterator[Mapping[str, tuple[int, ...]]]) -> float:
    """Squared norm of the weights that devices keep, summed over devices and blocks."""
    plan, norms = situation.plan, situation.norms
    assert norms is not None
    return sum(
        float(norms[block])
        for groups in masks
        for block in range(plan.block_count)
        if all(group in groups[axis] for axis, group in plan.signature(block))
    )


def allowed(axis: Axis, level: float) -> list[tuple[int, ...]]:
    """Every set of groups of an axis that a level allows, from the definition."""
    groups = range(len(axis.groups))
    sets = [s for size in groups for s in combinations(groups, size + 1)]
    if max(axis.groups) - min(axis.groups) <= 1:
        return [s for s in sets if len(s) <= max(1, level * len(axis.groups) + 1e-9)]
    within = [s for s in sets if sum(axis.groups[g] for g in s) <= level * axis.atoms + 1e-9]
    return within or [(int(np.argmin(axis.groups)),)]


def brute_force(situation: Situation, tied: bool) -> tuple[Value, float]:
    """The best of all choices of all devices, and the largest norm among those."""
    plan = situation.plan
    each = []
    for bid in situation.offers:
        assert bid.level is not None
        sets = [allowed(axis, bid.level) for axis in plan.axes]
        full = [choice for choice in product(*sets) if not tied or len(set(choice)) == 1]
        each.append([dict(zip((a.name for a in plan.axes), s, strict=True)) for s in full])
    best: tuple[Value, float] | None = None
    for choices in product(*each):
        this = value(situation, iter(choices)), -kept_norm(situation, iter(choices))
        best = this if best is None else min(best, this)
    assert best is not None
    return best[0], -best[1]


def searched(situation: Situation, tied: bool) -> tuple[Goal, list[Choice], list[Choice] | None]:
    """What search alone finds, and what enumeration finds."""
    bundles = bundles_of(situation.plan, tied)
    levels = list(situation.levels.values())
    cells = cells_of(situation.plan, bundles)
    goal = make_goal(cells, situation.last_covered, situation.norms)
    start = [
        tuple(bundle.take(level, range(bundle.count)) for bundle in bundles) for level in levels
    ]
    found = search_choices(goal, bundles, levels, start, situation.stream)
    return goal, found, best_choices(goal, bundles, levels, situation.stream)


def by_axis(
    bundles: tuple[Bundle, ...], plan: ModelPlan, choices: list[Choice]
) -> Iterator[dict[str, tuple[int, ...]]]:
    for choice in choices:
        yield {
            plan.axes[number].name: groups
            for bundle, groups in zip(bundles, choice, strict=True)
            for number in bundle.numbers
        }


def random_case(seed: int) -> tuple[Situation, bool]:
    """A plan of one to three axes, one to six devices, ages and norms of any kind."""
    rng = np.random.default_rng(seed)
    count, groups = int(rng.integers(1, 4)), int(rng.integers(2, 5))
    shapes = [(2,) * groups, (3, 4, 4, 3)[:groups], (1, 2, 4, 6, 7)]
    shape = shapes[int(rng.integers(3))]
    plan = chain(*[shape] * min(count, 3 if len(shape) < 5 else 2))
    levels = rng.choice([0.25, 0.34, 0.5, 0.75, 1.0], int(rng.integers(1, 7))).tolist()
    now = int(rng.integers(1, 6))
    last = rng.integers(0, now, plan.block_count) * int(rng.integers(2))
    norms = rng.integers(0, 9, plan.block_count)
    situation = situation_of(
        plan, levels, seed=seed, round=now, last_covered=last.tolist(), norms=norms.tolist()
    )
    return situation, bool(rng.integers(3) == 0)


def coverage_min(plan: ModelPlan, masks: Masks) -> int:
    return int(plan.coverage(masks.values()).min())


@pytest.mark.parametrize(
    ("reduced", "level", "greedy", "optimised"),
    [(6, 0.5, 4, 7), (6, 0.75, 4, 8)],
    ids=["figure 1: half", "table 1: three quarters"],
)
def test_coverage_reaches_the_minimum_coverage_of_every_parameter_matters(
    reduced: int, level: float, greedy: int, optimised: int
) -> None:
    levels = [1.0] * 4 + [level] * reduced
    assert coverage_min(ONE_AXIS, make_masks("greedy")(situation_of(ONE_AXIS, levels))) == greedy
    found = make_masks("coverage")(situation_of(ONE_AXIS, levels))
    assert coverage_min(ONE_AXIS, found) == optimised
    situation = situation_of(ONE_AXIS, levels)
    _, by_search, _ = searched(situation, tied=False)
    choices = by_axis(bundles_of(ONE_AXIS, False), ONE_AXIS, by_search)
    assert value(situation, choices) == ((0,), 0, -optimised)


@pytest.mark.parametrize(
    ("axes", "levels", "tied"),
    [
        ([(2, 2, 2, 2)], [0.5, 0.25, 0.75], False),
        ([(2, 2, 2, 2)], [0.25, 0.25, 0.25], False),
        ([(1, 2, 4, 6, 7)], [0.35, 0.3, 0.05], False),
        ([(2, 2), (2, 2)], [0.5, 0.5], False),
        ([(2, 2), (2, 2)], [0.5, 0.5, 1.0], False),
        ([(1, 2, 5), (2, 2)], [0.5, 0.7], False),
        ([(2, 2, 2), (2, 2, 2)], [0.34, 0.67], False),
        ([(2, 2, 2), (2, 2, 2)], [0.34, 0.67, 0.67], True),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coverage_equals_brute_force_on_small_cases(
    axes: list[tuple[int, ...]], levels: list[float], tied: bool, seed: int
) -> None:
    plan = chain(*axes)
    rng = np.random.default_rng(seed)
    situation = situation_of(
        plan,
        levels,
        seed=seed,
        round=4,
        last_covered=(rng.integers(0, 4, plan.block_count) * (seed > 0)).tolist(),
        norms=rng.integers(0, 9, plan.block_count).tolist(),
    )
    best, norm = brute_force(situation, tied)
    masks = make_masks("coverage", tied=tied)(situation)
    assert value(situation, iter(masks.values())) == best
    assert kept_norm(situation, iter(masks.values())) == pytest.approx(norm)


def test_search_without_enumeration_finds_the_best_in_nearly_all_small_cases() -> None:
    cases = same = 0
    for seed in range(60):
        situation, tied = random_case(seed)
        _, found, best = searched(situation, tied)
        if best is None:
            continue
        bundles = bundles_of(situation.plan, tied)
        reached = value(situation, by_axis(bundles, situation.plan, found))
        optimum = value(situation, by_axis(bundles, situation.plan, best))
        assert optimum <= reached
        cases += 1
        same += reached == optimum
    assert cases >= 30
    assert same >= 0.95 * cases


@pytest.mark.parametrize("seed", range(12))
def test_coverage_is_never_worse_than_random_from_the_same_stream(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = chain((2,) * 6, (1, 2, 4, 6, 7), (3,) * 4)
    levels = rng.choice([0.2, 0.4, 0.6], int(rng.integers(2, 9))).tolist()
    last = rng.integers(0, 5, plan.block_count).tolist()
    masks: dict[str, Masks] = {}
    for name in ("random", "coverage"):
        situation = situation_of(plan, levels, seed=seed, round=5, last_covered=last)
        masks[name] = make_masks(name)(situation)
    bundles = bundles_of(plan, False)
    goal = make_goal(cells_of(plan, bundles), situation.last_covered, None)
    assert best_choices(goal, bundles, levels, situation.stream) is None  # this one is searched
    values = {name: value(situation, iter(each.values())) for name, each in masks.items()}
    assert values["coverage"] <= values["random"]


@pytest.mark.parametrize("seed", range(8))
def test_searched_choices_cover_the_cells_that_waited_longest(seed: int) -> None:
    """The step that the bound on gaps rests on, for fleets too large to try every choice."""
    rng = np.random.default_rng(seed)
    plan = chain((1,) * 6, (1,) * 6, (1, 2, 4, 6, 7))
    levels = rng.choice([0.2, 0.36, 0.5, 0.66], 4).tolist()
    bundles = bundles_of(plan, False)
    cells = cells_of(plan, bundles)
    ages = rng.permutation(cells.count) + 1  # every cell its own age: one order, no ties
    last = (ages[cells.of_block]).tolist()
    situation = situation_of(plan, levels, seed=seed, round=cells.count + 1, last_covered=last)
    sure = sum(sure_cells(cells, bundles, level) for level in levels)
    assert sure >= 2
    _, found, best = searched(situation, tied=False)
    assert best is None
    for choices in (
        found,
        deal_cells(
            make_goal(cells, situation.last_covered, None), bundles, levels, situation.stream
        ),
    ):
        coverage = plan.coverage(by_axis(bundles, plan, choices))
        waited = sorted((age, block) for block, age in enumerate(last) if plan.signature(block))
        oldest = sorted({age for age, _ in waited})[:sure]
        assert all(coverage[block] for age, block in waited if age in oldest)


def test_coverage_takes_the_block_that_waited_longest_first() -> None:
    plan = ModelPlan((Axis("a", (1, 1, 1)),), (Tensor("w", "float32", (Dim(3, 0),)),))
    situation = situation_of(plan, [0.34], round=9, last_covered=[8, 3, 7])
    assert make_masks("coverage")(situation) == {"d000": {"a": (1,)}}


def test_coverage_breaks_ties_by_weight_norm() -> None:
    plan = ModelPlan((Axis("a", (1, 1, 1)),), (Tensor("w", "float32", (Dim(3, 0),)),))
    situation = situation_of(plan, [0.67, 0.67], norms=[1.0, 5.0, 2.0])
    masks = make_masks("coverage")(situation)
    assert sorted(groups["a"] for groups in masks.values()) == [(0, 1), (1, 2)]


def test_coverage_without_norms_still_covers() -> None:
    situation = situation_of(ONE_AXIS, [0.5, 0.5])
    bare = Situation(
        plan=situation.plan,
        round=1,
        offers=situation.offers,
        last_covered=situation.last_covered,
        times_covered=situation.times_covered,
        norms=None,
        stream=situation.stream,
    )
    assert coverage_min(ONE_AXIS, MASKS["coverage"]()(bare)) == 1


def test_coverage_of_a_large_fleet_is_even() -> None:
    plan = chain(*[(2,) * 8] * 10)
    levels = np.random.default_rng(1).choice([1 / 8, 0.25, 0.5], 60).tolist()
    drawn = make_masks("random")(situation_of(plan, levels))
    found = make_masks("coverage")(situation_of(plan, levels))
    # No choice can do better than the mean over the blocks between two axes.
    mean = sum(int(level * 8) ** 2 for level in levels) / 64
    assert coverage_min(plan, drawn) < 0.5 * mean
    assert 0.75 * mean < coverage_min(plan, found) <= mean
