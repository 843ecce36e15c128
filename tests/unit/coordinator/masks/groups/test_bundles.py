from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import ConfigError
from coordinator.masks import MASKS, OrderedMasks, fragments_of, make_masks
from coordinator.masks.groups.bundles import bundles_of
from coordinator.masks.groups.cells import cells_of
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.unit.coordinator.masks.fleet import chain, situation_of

TIED = [name for name in MASKS if name != "gre-raa"]


def test_bundles_tied_are_one_choice_but_for_axes_short_of_atoms() -> None:
    plan = chain((2,) * 4, (1, 1), (3,) * 4)
    assert [bundle.numbers for bundle in bundles_of(plan, tied=True)] == [(0, 2), (1,)]
    assert [bundle.numbers for bundle in bundles_of(plan, tied=False)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("name", TIED)
def test_tied_masks_refuse_axes_of_different_group_counts(name: str) -> None:
    plan = chain((2,) * 4, (3,) * 3)
    policy = make_masks(name, tied=True)
    with pytest.raises(ConfigError, match=r"'h1' has 3, axis 'h0' has 4"):
        policy(situation_of(plan, [0.5]))
    with pytest.raises(ConfigError, match="the same number of groups on every axis"):
        policy.longest_gap(plan, [0.5])


def test_tied_fragments_refuse_axes_of_different_group_counts() -> None:
    with pytest.raises(ConfigError, match="the same number of groups on every axis"):
        make_masks("gre-raa", fragments="tied")(situation_of(chain((2,) * 4, (3,) * 3), [0.5]))


@pytest.mark.parametrize("name", TIED)
def test_tied_masks_refuse_axes_without_a_common_smallest_group(name: str) -> None:
    with pytest.raises(ConfigError, match=r"smallest on every axis.*'h0', 'h1'"):
        make_masks(name, tied=True)(situation_of(chain((1, 5), (5, 1)), [0.5]))


@pytest.mark.parametrize("name", TIED)
def test_tied_masks_leave_an_axis_short_of_atoms_to_itself(name: str) -> None:
    plan = chain((2,) * 4, (1, 1), (3,) * 4)
    masks = make_masks(name, tied=True)(situation_of(plan, [0.5, 0.25, 1.0]))
    for (_, groups), wanted in zip(masks.items(), [(2, 1), (1, 1), (4, 2)], strict=True):
        assert groups["h0"] == groups["h2"]
        assert (len(groups["h0"]), len(groups["h1"])) == wanted


def test_tied_masks_of_equal_and_unequal_axes_stay_within_both() -> None:
    plan = chain((5, 5, 5), (1, 2, 7))
    for seed in range(20):
        (groups,) = make_masks("random", tied=True)(situation_of(plan, [0.67], seed=seed)).values()
        assert groups["h0"] == groups["h1"]
        assert groups["h0"] in {(0,), (0, 1), (1,)}  # group 2 alone is 70 % of h1


def test_tied_fragments_share_the_groups_of_an_axis_short_of_atoms() -> None:
    plan = chain((2,) * 4, (1, 1))
    assert fragments_of(plan, "tied") == (
        {"h0": (0,), "h1": (0,)},
        {"h0": (1,), "h1": (0,)},
        {"h0": (2,), "h1": (1,)},
        {"h0": (3,), "h1": (1,)},
    )


def test_cells_hold_blocks_of_the_same_groups() -> None:
    axes = (Axis("a", (2, 2, 2)), Axis("b", (1, 1)))
    dims = {"a": Dim(6, 0), "b": Dim(2, 1), "-": Dim(3)}
    shapes = ["ab", "ba", "baa", "aba", "a", "-", "-b", "aa"]
    plan = ModelPlan(
        axes, tuple(Tensor(shape, "float32", tuple(dims[c] for c in shape)) for shape in shapes)
    )
    bundles = bundles_of(plan, tied=False)
    cells = cells_of(plan, bundles)
    for block in range(plan.block_count):
        owners = {(axes[b].name, group) for b, group in cells.groups(int(cells.of_block[block]))}
        assert owners == set(plan.signature(block))
    together: dict[tuple[tuple[str, int], ...], set[int]] = {}
    for block in range(plan.block_count):
        signature = tuple(sorted(plan.signature(block)))
        together.setdefault(signature, set()).add(int(cells.of_block[block]))
    assert all(len(each) == 1 for each in together.values())
    values = [float(block) for block in range(plan.block_count)]
    sums = cells.group_sums(cells.sums(np.array(values)), bundles)
    for number, axis in enumerate(axes):
        for group in range(len(axis.groups)):
            owned = [b for b in range(plan.block_count) if (axis.name, group) in plan.signature(b)]
            assert sums[number][group] == sum(values[block] for block in owned)


def test_make_masks_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        make_masks("rnadom")
    with pytest.raises(ConfigError, match=f"known are {', '.join(MASKS)}$"):
        make_masks("xyzzy")
    with pytest.raises(ConfigError, match="did you mean 'overlap'"):
        make_masks("rolling", overlp=0.5)


def with_copies(*axes: tuple[int, ...]) -> ModelPlan:
    """A perceptron whose second axis is followed by one of alternatives."""
    plan = chain(*axes)
    copies = Axis("copies", (1,) * 4, alternatives=True)
    scale = Tensor("scale", "float32", (Dim(4, len(axes)), Dim(plan.axes[1].atoms, 1)))
    return ModelPlan(axes=(*plan.axes, copies), tensors=(*plan.tensors, scale))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_alternative_is_that_of_the_level_under_every_policy(name: str, tied: bool) -> None:
    plan, offers = with_copies((2,) * 4, (3,) * 4), [1.0, 0.75, 0.5, 0.3, 0.25, 0.1]
    policy = make_masks(name, tied=tied)
    for round in (1, 2):
        masks = policy(situation_of(plan, offers, round=round))
        assert [groups["copies"] for groups in masks.values()] == [
            (3,),
            (2,),
            (1,),
            (0,),
            (0,),
            (0,),
        ]
        without = policy(situation_of(chain((2,) * 4, (3,) * 4), offers, round=round))
        if name not in (
            "coverage",
            "greedy",
            "places",
        ):  # which look at all blocks, of which there are more
            others = [{axis: groups[axis] for axis in ("h0", "h1")} for groups in masks.values()]
            assert others == list(without.values())


def test_blocks_of_alternatives_are_in_one_cell() -> None:
    plan = with_copies((2,) * 4, (3,) * 4)
    bundles = bundles_of(plan, tied=False)
    assert [bundle.numbers for bundle in bundles] == [(0,), (1,)]
    cells = cells_of(plan, bundles)
    of = {
        plan.tensors[n].name: cells.of_block[plan.block_tensors == n]
        for n in range(len(plan.tensors))
    }
    assert of["scale"].tolist() == of["bias1"].tolist() * 4


@pytest.mark.parametrize("name", ["nested", "core", "static"])
def test_levels_with_alternatives_do_not_nest(name: str) -> None:
    policy = make_masks(name)
    assert isinstance(policy, OrderedMasks)
    assert policy.nests(chain((2,) * 4, (3,) * 4))
    assert not policy.nests(with_copies((2,) * 4, (3,) * 4))


def with_blocks(groups: tuple[int, ...], *counts: int) -> ModelPlan:
    """Chains of so many residual blocks; the hidden layer of each is cut into these groups."""
    plan = chain(groups)
    axes, tensors = list(plan.axes), list(plan.tensors)
    for number, count in enumerate(counts):
        axes.append(Axis(f"chain{number}", (1,) * count, depth=True))
        members = tuple(f"{number}.{row}" for row in range(count))
        dims = (Dim(count, len(axes) - 1), Dim(plan.axes[0].atoms, 0), Dim(2))
        tensors.append(Tensor(f"{number}.*", "float32", dims, members))
    return ModelPlan(axes=tuple(axes), tensors=tuple(tensors))


BLOCKS = with_blocks((2,) * 4, 6, 3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_level_is_a_share_of_blocks_under_every_policy(name: str, tied: bool) -> None:
    offers = {1.0: (4, 6, 3), 0.75: (3, 4, 2), 0.5: (2, 3, 1), 0.25: (1, 1, 1), 0.1: (1, 1, 1)}
    policy = make_masks(name, tied=tied)
    for round in (1, 2, 3):
        masks = policy(situation_of(BLOCKS, list(offers), round=round))
        found = [tuple(len(ids) for ids in groups.values()) for groups in masks.values()]
        assert found == list(offers.values())
        for groups, level in zip(masks.values(), offers, strict=True):
            bound = BLOCKS.cost_at(level)
            assert BLOCKS.submodel_parameters(groups) <= bound.parameters
    policy.longest_gap(BLOCKS, list(offers))


def test_tied_masks_leave_chains_to_themselves() -> None:
    """Even where a chain has as many blocks as a width has groups, or more."""
    plan = with_blocks((2,) * 4, 4, 12)
    assert [bundle.numbers for bundle in bundles_of(plan, tied=True)] == [(0,), (1,), (2,)]
    only = with_blocks((3,), 5)
    assert [bundle.numbers for bundle in bundles_of(only, tied=True)] == [(0,), (1,)]


@pytest.mark.parametrize("name", ["coverage", "rolling"])
def test_blocks_are_all_covered_in_turn(name: str) -> None:
    policy = make_masks(name)
    gap = policy.longest_gap(BLOCKS, [0.5, 0.5])
    assert gap is not None
    last, longest = np.zeros(BLOCKS.block_count, dtype=np.int64), 0
    for round in range(1, 3 * gap + 4):
        masks = policy(situation_of(BLOCKS, [0.5, 0.5], round=round, last_covered=last.tolist()))
        covered = BLOCKS.coverage(masks.values()) > 0
        last = np.where(covered, round, last)
        longest = max(longest, int((round - last).max()))
    assert 0 < longest <= gap


def test_tied_fragments_of_chains_are_single_blocks() -> None:
    plan = with_blocks((2,) * 2, 4)
    assert fragments_of(plan, "tied") == tuple(
        {"h0": (number // 2,), "chain0": (number,)} for number in range(4)
    )


def test_alternate_fragments_keep_chains_whole_beside_widths_and_split_them_alone() -> None:
    plan = with_blocks((2,) * 2, 4)
    assert fragments_of(plan) == tuple({"h0": (j,), "chain0": (0, 1, 2, 3)} for j in range(2))
    alone = ModelPlan(
        (Axis("blocks", (1,) * 3, depth=True),),
        (Tensor("w", "float32", (Dim(3, 0), Dim(2)), members=("w.0", "w.1", "w.2")),),
    )
    assert fragments_of(alone) == tuple({"blocks": (j,)} for j in range(3))
