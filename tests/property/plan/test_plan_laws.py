"""The laws of `ModelPlan`, over random plans, against element-by-element definitions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.errors import GroupError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, MacTerm, Tensor
from tests.property.strategies import (
    bits_of,
    choices,
    elements_by_block,
    holds,
    kept_elements,
    law,
    naive_cut,
    plans,
    random_bits,
    seeds,
    shapes_of,
)

UNEQUAL = ModelPlan((Axis("a", (5, 1, 4)),), (Tensor("w", "float32", (Dim(10, 0),)),))


@law
@given(plan=plans(), seed=seeds)
def test_blocks_partition_every_tensor(plan: ModelPlan, seed: int) -> None:
    weights = random_bits(shapes_of(plan), seed)
    signatures, tensors, values = [], [], []
    for number, tensor in enumerate(plan.tensors):
        for signature, owned in elements_by_block(plan, tensor):
            signatures.append(signature)
            tensors.append(number)
            values.append([weights[tensor.name][where].tobytes() for where in owned])
    assert plan.block_count == len(signatures)
    assert [plan.signature(block) for block in range(plan.block_count)] == signatures
    assert plan.block_tensors.tolist() == tensors
    assert plan.block_sizes.tolist() == [len(block) for block in values]
    assert plan.parameters == sum(array.size for array in weights.values())
    flat = plan.flatten(weights)
    for block, expected in enumerate(values):
        start, end = plan.block_offsets[block : block + 2]
        assert flat[start:end].tobytes() == b"".join(expected)
    assert plan.block_offsets[-1] == len(flat)


@law
@given(data=st.data(), plan=plans(), seed=seeds)
def test_cut_keeps_what_the_groups_own(data: st.DataObject, plan: ModelPlan, seed: int) -> None:
    groups = data.draw(choices(plan))
    weights = random_bits(shapes_of(plan), seed)
    expected = {t.name: naive_cut(plan, t, weights[t.name], groups) for t in plan.tensors}
    part = plan.cut(weights, groups)
    assert bits_of(part) == bits_of(expected)
    assert list(part) == [tensor.name for tensor in plan.tensors]
    assert not any(np.shares_memory(part[name], weights[name]) for name in part)


@settings(law, max_examples=60)
@given(data=st.data(), plan=plans(), seed=seeds)
def test_places_within_a_submodel_hold_the_narrower_one(
    data: st.DataObject, plan: ModelPlan, seed: int
) -> None:
    groups = data.draw(choices(plan))
    narrower = {
        axis: tuple(data.draw(st.lists(st.sampled_from(own), min_size=1, unique=True)))
        for axis, own in groups.items()
    }
    weights = random_bits(shapes_of(plan), seed)
    part, at = plan.cut(weights, groups), plan.places_within(groups, narrower)
    assert set(at) == {each.name for each in (*plan.tensors, *plan.buffers)}
    assert bits_of({name: array[at[name]] for name, array in part.items()}) == bits_of(
        plan.cut(weights, narrower)
    )
    rng = np.random.default_rng(seed)
    buffers = {b.name: rng.integers(0, 10**6, b.shape).astype(b.dtype) for b in plan.buffers}
    inside = plan.cut_buffers(buffers, groups)
    for name, array in plan.cut_buffers(buffers, narrower).items():
        np.testing.assert_array_equal(inside[name][at[name]], array)
    for axis in plan.axes:
        if others := set(range(len(axis.groups))) - set(groups[axis.name]):
            with pytest.raises(GroupError, match=axis.name):
                plan.places_within(groups, {**narrower, axis.name: (min(others),)})


def test_places_of_one_run_are_slices() -> None:
    dims = (Dim(8, 0), Dim(4), Dim(16, 0, 1, 2))
    plan = ModelPlan((Axis("a", (2, 2, 2, 2)),), (Tensor("w", "float32", dims),))
    at = plan.places_within({"a": (0, 1, 3)}, {"a": (1, 3)})["w"]
    assert at == (slice(2, 6), slice(None), slice(4, 12), ...)


@law
@given(data=st.data(), plan=plans(), seed=seeds)
def test_cut_buffers_keeps_what_the_groups_own(
    data: st.DataObject, plan: ModelPlan, seed: int
) -> None:
    groups = data.draw(choices(plan))
    rng = np.random.default_rng(seed)
    buffers = {b.name: rng.integers(0, 10**6, b.shape).astype(b.dtype) for b in plan.buffers}
    part = plan.cut_buffers(buffers, groups)
    plan.check_buffers(part, groups)
    for buffer in plan.buffers:
        where = kept_elements(plan, buffer, groups)
        assert part[buffer.name].dtype == buffer.dtype
        assert part[buffer.name].ravel().tolist() == [buffers[buffer.name][at] for at in where]


@law
@given(plan=plans(), seed=seeds)
def test_cut_to_all_groups_is_the_model(plan: ModelPlan, seed: int) -> None:
    weights = random_bits(shapes_of(plan), seed)
    assert bits_of(plan.cut(weights, plan.all_groups())) == bits_of(weights)
    assert bits_of(plan.unflatten(plan.flatten(weights))) == bits_of(weights)
    everything = np.arange(plan.block_count)
    assert np.array_equal(plan.block_ids(plan.choose(plan.all_groups())), everything)


@law
@given(data=st.data(), plan=plans(), seed=seeds)
def test_assemble_undoes_scatter(data: st.DataObject, plan: ModelPlan, seed: int) -> None:
    groups = data.draw(choices(plan))
    weights = random_bits(shapes_of(plan), seed)
    shapes = {t.name: naive_cut(plan, t, weights[t.name], groups).shape for t in plan.tensors}
    movement = random_bits(shapes, seed + 1)
    blocks = plan.scatter(movement, groups)
    held = [b for b in range(plan.block_count) if holds(groups, plan.signature(b))]
    assert blocks.ids.tolist() == held
    assert blocks.size_bytes == 4 * plan.submodel_parameters(groups)
    assert bits_of(plan.assemble(blocks, groups)) == bits_of(movement)
    again = plan.scatter(plan.assemble(blocks, groups), groups)
    assert again.values.tobytes() == blocks.values.tobytes()


@law
@given(data=st.data(), plan=plans(), seed=seeds)
def test_select_is_scatter_of_cut(data: st.DataObject, plan: ModelPlan, seed: int) -> None:
    groups = data.draw(choices(plan))
    weights = random_bits(shapes_of(plan), seed)
    selected = plan.select(plan.flatten(weights), groups)
    scattered = plan.scatter(plan.cut(weights, groups), groups)
    assert np.array_equal(selected.ids, scattered.ids)
    assert selected.values.tobytes() == scattered.values.tobytes()
    assert bits_of(plan.assemble(selected, groups)) == bits_of(plan.cut(weights, groups))


@law
@given(data=st.data(), plan=plans(), seed=seeds)
def test_paste_writes_the_groups_and_nothing_else(
    data: st.DataObject, plan: ModelPlan, seed: int
) -> None:
    groups = data.draw(choices(plan))
    target = random_bits(shapes_of(plan), seed)
    before = {name: array.copy() for name, array in target.items()}
    part = plan.cut(random_bits(shapes_of(plan), seed + 1), groups)
    plan.paste(target, part, groups)
    assert bits_of(plan.cut(target, groups)) == bits_of(part)
    for tensor in plan.tensors:
        written = set(kept_elements(plan, tensor, groups))
        for where in product(*(range(size) for size in tensor.shape)):
            if where not in written:
                old, new = before[tensor.name][where], target[tensor.name][where]
                assert old.tobytes() == new.tobytes()
    plan.paste(target, plan.cut(before, groups), groups)
    assert bits_of(target) == bits_of(before)


@law
@given(data=st.data(), plan=plans())
def test_coverage_counts_the_submodels_that_hold_a_block(
    data: st.DataObject, plan: ModelPlan
) -> None:
    submodels = data.draw(st.lists(choices(plan), max_size=4))
    expected = [
        sum(holds(groups, plan.signature(block)) for groups in submodels)
        for block in range(plan.block_count)
    ]
    assert plan.coverage(submodels).tolist() == expected


@law
@given(data=st.data(), plan=plans())
def test_submodel_costs_count_what_is_kept(data: st.DataObject, plan: ModelPlan) -> None:
    groups = data.draw(choices(plan))
    kept = [
        [atom for g, size in enumerate(axis.groups) for atom in range(size) if g in chosen]
        for axis, chosen in zip(plan.axes, groups.values(), strict=True)
    ]

    def macs_of(term: MacTerm) -> int:
        return sum(term.macs for _ in product(*(kept[axis] for axis in term.axes)))

    assert plan.submodel_macs(groups) == sum(macs_of(term) for term in plan.macs)
    elements = [kept_elements(plan, tensor, groups) for tensor in plan.tensors]
    assert plan.submodel_parameters(groups) == sum(map(len, elements))
    shares = [len(atoms) / axis.atoms for atoms, axis in zip(kept, plan.axes, strict=True)]
    assert list(plan.levels(groups).values()) == shares
