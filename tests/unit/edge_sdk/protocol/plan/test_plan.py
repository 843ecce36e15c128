"""Input that does not fit a plan: one error family each, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_sdk.protocol.errors import BlockError, GroupError, PlanError, TensorError
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, MacTerm, Segment, Tensor

Arrays = dict[str, Any]
Groups = dict[str, tuple[int, ...]]


def frozen(arrays: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def without(name: str, arrays: Arrays) -> Arrays:
    return {other: array for other, array in arrays.items() if other != name}


# -- arrays ------------------------------------------------------------------------------------

# The last tensor of the plan is at fault, so that whatever is written first would show.
ARRAY_FAULTS: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "wrong shape": (lambda w: w | {"temperature": w["temperature"].reshape(1)}, "shape"),
    "transposed": (lambda w: w | {"qkv.weight": w["qkv.weight"].T}, "shape"),
    "float64": (lambda w: w | {"temperature": w["temperature"].astype(np.float64)}, "float64"),
    "float16": (lambda w: w | {"mix.weight": w["mix.weight"].astype(np.float16)}, "float16"),
    "unknown": (lambda w: w | {"extra": w["temperature"]}, "unknown tensor 'extra'"),
    "missing": (lambda w: without("temperature", w), "'temperature' is missing"),
    "list": (lambda w: w | {"mix.weight": w["mix.weight"].tolist()}, "list, not a numpy array"),
    "scalar": (lambda w: w | {"temperature": np.float32(1)}, "float32, not a numpy array"),
    "none": (lambda w: w | {"temperature": None}, "NoneType, not a numpy array"),
}

array_faults = pytest.mark.parametrize(
    ("fault", "text"), ARRAY_FAULTS.values(), ids=list(ARRAY_FAULTS)
)
Fault = Callable[[Arrays], Arrays]


@array_faults
def test_model_with_a_faulty_array_is_refused(
    plan: ModelPlan, weights: Arrays, groups: Groups, fault: Fault, text: str
) -> None:
    part = plan.cut(weights, groups)
    uses: list[Callable[[Arrays], object]] = [
        plan.check,
        plan.flatten,
        lambda arrays: plan.cut(arrays, groups),
        lambda arrays: plan.paste(arrays, part, groups),
    ]
    for use in uses:
        with pytest.raises(TensorError, match=text):
            use(fault(weights))


@array_faults
def test_submodel_with_a_faulty_array_is_refused(
    plan: ModelPlan, weights: Arrays, groups: Groups, fault: Fault, text: str
) -> None:
    part = fault(plan.cut(weights, groups))
    for use in (plan.scatter, plan.check):
        with pytest.raises(TensorError, match=text):
            use(part, groups)


@array_faults
def test_paste_of_a_faulty_array_writes_nothing(
    plan: ModelPlan, weights: Arrays, groups: Groups, fault: Fault, text: str
) -> None:
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    part = plan.cut(weights, groups)
    before = frozen(zeros), frozen(part)
    with pytest.raises(TensorError, match=text):
        plan.paste(zeros, fault(part), groups)
    assert (frozen(zeros), frozen(part)) == before


def test_paste_into_a_read_only_array_writes_nothing(
    plan: ModelPlan, weights: Arrays, groups: Groups
) -> None:
    part = plan.cut(weights, groups)
    for array in part.values():
        array += 1
    weights["temperature"].flags.writeable = False
    before = frozen(weights)
    with pytest.raises(TensorError, match="'temperature' is read-only"):
        plan.paste(weights, part, groups)
    assert frozen(weights) == before


def test_model_is_not_a_submodel(plan: ModelPlan, weights: Arrays, groups: Groups) -> None:
    with pytest.raises(TensorError, match="shape"):
        plan.scatter(weights, groups)
    with pytest.raises(TensorError, match="shape"):
        plan.cut(plan.cut(weights, groups), groups)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda b: b | {"norm.mean": np.ones(5, dtype=np.float32)}, "shape"),
        (lambda b: b | {"norm.steps": np.array(7.0)}, "float64"),
        (lambda b: b | {"norm.variance": np.ones(4, dtype=np.float32)}, "unknown"),
        (lambda b: without("norm.steps", b), "missing"),
    ],
    ids=["shape", "dtype", "unknown", "missing"],
)
def test_faulty_buffers_are_refused(
    plan: ModelPlan, buffers: Arrays, groups: Groups, fault: Fault, text: str
) -> None:
    with pytest.raises(TensorError, match=text):
        plan.cut_buffers(fault(buffers), groups)
    with pytest.raises(TensorError, match=text):
        plan.check_buffers(fault(buffers))


def test_statistics_are_only_the_averaged_buffers(
    plan: ModelPlan, buffers: Arrays, groups: Groups
) -> None:
    part = plan.cut_buffers(buffers, groups)
    plan.check_statistics({"norm.mean": part["norm.mean"]}, groups)
    for wrong in (part, {}, {"norm.mean": buffers["norm.mean"]}):
        with pytest.raises(TensorError):
            plan.check_statistics(wrong, groups)


# -- groups ------------------------------------------------------------------------------------

GROUP_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no axis": ({}, "hidden"),
    "missing axis": ({"hidden": (0,)}, "'heads'"),
    "unknown axis": ({"hidden": (0,), "heads": (0,), "tails": (0,)}, "unknown axis 'tails'"),
    "empty set": ({"hidden": (), "heads": (0,)}, "'hidden' has an empty set"),
    "too high": ({"hidden": (0, 3), "heads": (0,)}, "groups 0 to 2, not 3"),
    "negative": ({"hidden": (0,), "heads": (-1,)}, "groups 0 to 1, not -1"),
    "duplicate": ({"hidden": (1, 1), "heads": (0,)}, "twice"),
    "boolean": ({"hidden": (True,), "heads": (0,)}, "not a whole number"),
    "numpy boolean": ({"hidden": (np.True_,), "heads": (0,)}, "not a whole number"),
    "float": ({"hidden": (1.0,), "heads": (0,)}, "not a whole number"),
    "string": ({"hidden": "01", "heads": (0,)}, "not a whole number"),
    "none": ({"hidden": (None,), "heads": (0,)}, "not a whole number"),
}


@pytest.mark.parametrize(("bad", "text"), GROUP_FAULTS.values(), ids=list(GROUP_FAULTS))
def test_faulty_groups_are_refused(
    plan: ModelPlan,
    weights: Arrays,
    buffers: Arrays,
    groups: Groups,
    bad: dict[str, Any],
    text: str,
) -> None:
    part = plan.cut(weights, groups)
    blocks = plan.scatter(part, groups)
    flat = plan.flatten(weights)
    inputs = {**weights, **buffers, "flat": flat, "values": blocks.values, "ids": blocks.ids}
    before = frozen(inputs)
    uses: dict[str, Callable[[], object]] = {
        "choose": lambda: plan.choose(bad),
        "levels": lambda: plan.levels(bad),
        "cut": lambda: plan.cut(weights, bad),
        "cut_buffers": lambda: plan.cut_buffers(buffers, bad),
        "paste": lambda: plan.paste(weights, part, bad),
        "paste all": lambda: plan.paste(weights, weights, bad),
        "scatter": lambda: plan.scatter(part, bad),
        "assemble": lambda: plan.assemble(blocks, bad),
        "select": lambda: plan.select(flat, bad),
        "coverage": lambda: plan.coverage([groups, bad]),
        "submodel_parameters": lambda: plan.submodel_parameters(bad),
        "submodel_macs": lambda: plan.submodel_macs(bad),
        "check": lambda: plan.check(weights, bad),
        "check_buffers": lambda: plan.check_buffers(buffers, bad),
        "check_statistics": lambda: plan.check_statistics({}, bad),
    }
    for use in uses.values():
        with pytest.raises(GroupError, match=text):
            use()
    assert frozen(inputs) == before


@pytest.mark.parametrize("kind", [tuple, list, set, frozenset, np.array])
def test_choose_sorts_any_collection_of_ids(
    plan: ModelPlan, kind: Callable[[list[int]], Any]
) -> None:
    chosen = plan.choose({"heads": kind([1]), "hidden": kind([2, 0])})
    assert chosen == ((0, 2), (1,))
    assert all(type(group) is int for ids in chosen for group in ids)


@pytest.mark.parametrize("level", [0, -0.1, 1.0001, float("nan"), float("inf")])
def test_cost_at_no_level_is_refused(plan: ModelPlan, level: float) -> None:
    with pytest.raises(GroupError, match="level"):
        plan.cost_at(level)


@pytest.mark.parametrize("block", [-1, 3 + 6 + 9 + 1])
def test_signature_of_no_block_is_refused(plan: ModelPlan, block: int) -> None:
    with pytest.raises(GroupError, match="the plan has 19"):
        plan.signature(block)


# -- blocks ------------------------------------------------------------------------------------

BLOCK_FAULTS: dict[str, tuple[Callable[[Blocks], Any], str]] = {
    "not asked for": (lambda b: Blocks(b.ids + 1, b.values), "not asked for"),
    "not in the plan": (lambda b: Blocks(b.ids + 100, b.values), "not asked for"),
    "one missing": (lambda b: Blocks(b.ids[:-1], b.values), "is missing"),
    "none at all": (lambda b: Blocks(b.ids[:0], b.values[:0]), "is missing"),
    "descending": (lambda b: Blocks(b.ids[::-1], b.values), "ascending"),
    "repeated": (lambda b: Blocks(np.repeat(b.ids, 2), b.values), "unique"),
    "float ids": (lambda b: Blocks(b.ids.astype(np.float64), b.values), "ids are float64"),
    "int32 ids": (lambda b: Blocks(b.ids.astype(np.int32), b.values), "ids are int32"),
    "ids of 2 dimensions": (lambda b: Blocks(b.ids[None], b.values), "ids are int64 of 2"),
    "list of ids": (lambda b: Blocks(b.ids.tolist(), b.values), "ids are list"),
    "too few values": (lambda b: Blocks(b.ids, b.values[:-1]), "values for blocks that hold"),
    "too many values": (lambda b: Blocks(b.ids, np.repeat(b.values, 2)), "values for blocks"),
    "no values": (lambda b: Blocks(b.ids, b.values[:0]), "0 values"),
    "float64": (lambda b: Blocks(b.ids, b.values.astype(np.float64)), "values are float64"),
    "other byte order": (lambda b: Blocks(b.ids, b.values.astype(">f4")), "values are >f4"),
    "values of 2 dimensions": (lambda b: Blocks(b.ids, b.values[None]), "float32 of 2 dim"),
    "list of values": (lambda b: Blocks(b.ids, b.values.tolist()), "values are list"),
}


@pytest.mark.parametrize(("fault", "text"), BLOCK_FAULTS.values(), ids=list(BLOCK_FAULTS))
def test_faulty_blocks_are_refused(
    plan: ModelPlan,
    weights: Arrays,
    groups: Groups,
    fault: Callable[[Blocks], Blocks],
    text: str,
) -> None:
    blocks = plan.scatter(plan.cut(weights, groups), groups)
    before = frozen({"ids": blocks.ids, "values": blocks.values})
    with pytest.raises(BlockError, match=text):
        plan.assemble(fault(blocks), groups)
    assert frozen({"ids": blocks.ids, "values": blocks.values}) == before


def test_blocks_of_another_submodel_are_refused(
    plan: ModelPlan, weights: Arrays, groups: Groups
) -> None:
    other = {"hidden": (0, 1), "heads": (0,)}
    assert plan.submodel_parameters(other) == plan.submodel_parameters(groups)
    with pytest.raises(BlockError, match="not asked for"):
        plan.assemble(plan.scatter(plan.cut(weights, other), other), groups)


@pytest.mark.parametrize(
    "fault",
    [
        lambda flat: flat[:-1],
        lambda flat: np.append(flat, flat[:1]),
        lambda flat: flat.astype("f8"),
    ],
    ids=["short", "long", "float64"],
)
def test_vector_that_is_not_the_model_is_refused(
    plan: ModelPlan, weights: Arrays, groups: Groups, fault: Callable[[Array], Array]
) -> None:
    flat = fault(plan.flatten(weights))
    with pytest.raises(BlockError):
        plan.unflatten(flat)
    with pytest.raises(BlockError):
        plan.select(flat, groups)


@pytest.mark.parametrize("step", [2, -1])
def test_assemble_reads_values_that_are_not_contiguous(
    plan: ModelPlan, weights: Arrays, step: int
) -> None:
    flat = plan.flatten(weights)
    spread = np.full(len(flat) * abs(step), np.nan, dtype=np.float32)[::step]
    spread[:] = flat
    assert not spread.flags.c_contiguous
    assert frozen(plan.unflatten(spread)) == frozen(weights)


def test_blocks_are_subtracted_where_they_are_assembled(
    plan: ModelPlan, weights: Arrays, groups: Groups
) -> None:
    other = {name: np.asarray(np.cos(array)) for name, array in weights.items()}
    for chosen in (groups, plan.all_groups()):
        arrays, start = plan.cut(weights, chosen), plan.cut(other, chosen)
        wanted = {name: np.asarray(array - start[name]) for name, array in arrays.items()}
        plan.subtract(arrays, plan.scatter(start, chosen), chosen)
        assert frozen(arrays) == frozen(wanted)


def test_nothing_is_subtracted_that_does_not_fit(
    plan: ModelPlan, weights: Arrays, groups: Groups
) -> None:
    arrays = plan.cut(weights, groups)
    before = frozen(arrays)
    blocks = plan.scatter(arrays, groups)
    with pytest.raises(BlockError, match="values"):
        plan.subtract(arrays, Blocks(blocks.ids, blocks.values[:-1]), groups)
    with pytest.raises(TensorError, match="missing"):
        plan.subtract(without("temperature", arrays), blocks, groups)
    assert frozen(arrays) == before


# -- plans -------------------------------------------------------------------------------------

HIDDEN = Axis("hidden", (2, 2))
WEIGHT = Tensor("w", "float32", (Dim(4, 0),))


CHAIN = Axis("chain", (1, 1, 1), depth=True)
STACK = Tensor("s.*", "float32", (Dim(3, 1), Dim(2)), ("s.0", "s.1", "s.2"))


def weight(*dims: Dim) -> tuple[Tensor, ...]:
    return (Tensor("w", "float32", dims),)


PLAN_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "depth without a stack": ({"axes": (HIDDEN, CHAIN)}, "no weight is stacked along it"),
    "depth of uneven groups": (
        {"axes": (HIDDEN, Axis("chain", (2, 1), depth=True)), "tensors": (WEIGHT, STACK)},
        "its groups are equal",
    ),
    "stack of fewer rows": (
        {"axes": (HIDDEN, CHAIN), "tensors": (WEIGHT, replace(STACK, members=("s.0", "s.1")))},
        "stacks 2 arrays along",
    ),
    "stack along a width": ({"tensors": (replace(WEIGHT, members=tuple("abcd")),)}, "of a stack"),
    "depth behind": (
        {"axes": (HIDDEN, CHAIN), "tensors": (STACK, *weight(Dim(4), Dim(3, 1)))},
        "an axis of depth is the first dimension of a stack",
    ),
    "depth in a segment": (
        {
            "axes": (HIDDEN, CHAIN),
            "tensors": (STACK, *weight(Dim(7, segments=(Segment(4, 0), Segment(3, 1))))),
        },
        "an axis of depth is the first dimension of a stack",
    ),
    "row like a tensor": (
        {"axes": (HIDDEN, CHAIN), "tensors": (STACK, Tensor("s.1", "float32", ()))},
        "'s.1' is used twice",
    ),
    "no tensors": ({"tensors": ()}, "at least one tensor"),
    "axis twice": ({"axes": (HIDDEN, HIDDEN)}, "axis name 'hidden' is used twice"),
    "tensor twice": ({"tensors": (WEIGHT, WEIGHT)}, "tensor name 'w' is used twice"),
    "buffer like a tensor": ({"buffers": (Buffer("w", "float32", ()),)}, "'w' is used twice"),
    "no groups": ({"axes": (Axis("hidden", ()),)}, "0 groups"),
    "65 groups": ({"axes": (Axis("hidden", (1,) * 65),)}, "65 groups; 1 to 64"),
    "group without atoms": ({"axes": (Axis("hidden", (4, 0)),)}, "without atoms"),
    "group of negative size": ({"axes": (Axis("hidden", (5, -1)),)}, "without atoms"),
    "float64 weight": ({"tensors": (Tensor("w", "float64", ()),)}, r"float64.*\.float\(\)"),
    "int64 weight": ({"tensors": (Tensor("w", "int64", ()),)}, "int64"),
    "size 0": ({"tensors": weight(Dim(0))}, "empty dimension"),
    "outer 0": ({"tensors": weight(Dim(4, 0, 0, 1))}, "empty dimension"),
    "inner 0": ({"tensors": weight(Dim(4, 0, 1, 0))}, "empty dimension"),
    "whole with outer": ({"tensors": weight(Dim(4, None, 2, 1))}, "whole dimension"),
    "whole with inner": ({"tensors": weight(Dim(4, None, 1, 2))}, "whole dimension"),
    "unknown axis": ({"tensors": weight(Dim(4, 1))}, "names axis 1; the plan has 1"),
    "negative axis": ({"tensors": weight(Dim(4, -1))}, "names axis -1"),
    "size that is not the axis's": ({"tensors": weight(Dim(5, 0))}, "is not 5"),
    "wrong outer": ({"tensors": weight(Dim(8, 0, 3, 1))}, "is not 8"),
    "faulty buffer": ({"buffers": (Buffer("b", "float32", (Dim(3, 0),)),)}, "'b'.*is not 3"),
    "negative cost": ({"macs": (MacTerm(-1, (0,)),)}, "cost term"),
    "cost of an unknown axis": ({"macs": (MacTerm(1, (1,)),)}, "cost term"),
    "17 dimensions": ({"tensors": weight(*[Dim(1)] * 17)}, "17 dimensions"),
    "more parameters than 64 bits": (
        {"tensors": weight(Dim(2**31), Dim(2**31), Dim(2))},
        "too many parameters",
    ),
    "more blocks than memory": (
        {"axes": (Axis("hidden", (1,) * 64),), "tensors": weight(*[Dim(64, 0)] * 5)},
        "too many blocks",
    ),
}


@pytest.mark.parametrize(("change", "text"), PLAN_FAULTS.values(), ids=list(PLAN_FAULTS))
def test_plan_that_cannot_work_is_refused(change: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"axes": (HIDDEN,), "tensors": (WEIGHT,)}
    ModelPlan(**fields)
    with pytest.raises(PlanError, match=text):
        ModelPlan(**fields | change)


def test_plan_takes_as_many_groups_as_allowed() -> None:
    plan = ModelPlan((Axis("hidden", (1,) * 64),), weight(Dim(64, 0), Dim(64, 0)))
    assert plan.block_count == 64 * 64


def test_plan_takes_as_many_dimensions_as_allowed() -> None:
    axis = Axis("hidden", (1, 1))
    plan = ModelPlan((axis,), weight(*[Dim(2, 0)] * 11, *[Dim(1)] * 5))
    array = np.arange(2**11, dtype=np.float32).reshape(plan.tensors[0].shape)
    assert plan.flatten({"w": array}).tolist() == list(range(2**11))
    assert plan.unflatten(plan.flatten({"w": array}))["w"].tolist() == array.tolist()


def test_plan_without_axes_is_one_block_per_tensor() -> None:
    plan = ModelPlan((), (*weight(Dim(2), Dim(3)), Tensor("scale", "float32", ())))
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scale": np.array(7, dtype=np.float32),
    }
    assert plan.block_sizes.tolist() == [6, 1]
    assert plan.signature(0) == ()
    assert plan.scatter(arrays, {}).values.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert plan.cost_at(0.1).parameters == 7
