"""The coordinator's sums over devices, against loops over single parameters."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model import mean_statistics
from coordinator.rules.ra_fed import ra_fed
from edge_sdk.protocol.layout import Array
from edge_sdk.protocol.messages import Movement
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.protocol.specs import Tensor

from .strategies import Choice, bits_of, choices, kept_along, kept_elements, law, plans, seeds


@st.composite
def fleets(draw: st.DrawFn, plan: ModelPlan) -> list[Movement]:
    """Movements of up to five devices, each of groups of its own."""
    return [
        random_movement(plan, f"device{n}", draw(choices(plan)), draw(seeds))
        for n in range(draw(st.integers(0, 5)))
    ]


def random_movement(plan: ModelPlan, device: str, groups: Choice, seed: int) -> Movement:
    rng = np.random.default_rng(seed)

    def normal(tensor: Tensor) -> Array:
        shape = [len(kept_along(plan, dim, groups)) for dim in tensor.dims]
        return np.asarray(rng.standard_normal(shape), dtype=tensor.dtype)

    return Movement(
        device=device,
        round=1,
        plan_hash=plan.hash,
        groups=groups,
        blocks=plan.scatter({tensor.name: normal(tensor) for tensor in plan.tensors}, groups),
        statistics={buffer.name: normal(buffer) for buffer in plan.buffers if buffer.statistic},
        learning_rate=0.1,
        samples=1,
        loss=1.0,
        train_s=0.0,
    )


def words_about(
    plan: ModelPlan, tensor: Tensor, said: list[tuple[Choice, Array]]
) -> dict[tuple[int, ...], list[float]]:
    """For every element of the full tensor, what each device that holds it says."""
    heard: dict[tuple[int, ...], list[float]] = {
        where: [] for where in product(*(range(size) for size in tensor.shape))
    }
    for groups, array in said:
        elements = kept_elements(plan, tensor, groups)
        for where, value in zip(elements, array.ravel().tolist(), strict=True):
            heard[where].append(value)
    return heard


@law
@given(data=st.data(), plan=plans())
def test_ra_fed_is_the_mean_over_devices_that_hold_a_parameter(
    data: st.DataObject, plan: ModelPlan
) -> None:
    movements = data.draw(fleets(plan))
    parts = [plan.assemble(movement.blocks, movement.groups) for movement in movements]
    result = ra_fed(plan, movements)
    assert result.dtype == np.float32
    moved = plan.unflatten(result)
    for tensor in plan.tensors:
        said = [
            (dict(m.groups), part[tensor.name]) for m, part in zip(movements, parts, strict=True)
        ]
        for where, values in words_about(plan, tensor, said).items():
            got = float(moved[tensor.name][where])
            if values:
                scale = sum(map(abs, values)) / len(values)
                assert abs(got - sum(values) / len(values)) <= 1e-6 * scale
            else:
                assert got == 0


@law
@given(data=st.data(), plan=plans(), seed=seeds)
def test_mean_statistics_averages_where_devices_covered(
    data: st.DataObject, plan: ModelPlan, seed: int
) -> None:
    movements = data.draw(fleets(plan))
    rng = np.random.default_rng(seed)
    buffers = {b.name: rng.integers(0, 100, b.shape).astype(b.dtype) for b in plan.buffers}
    before = bits_of(buffers)
    new = mean_statistics(plan, buffers, movements)
    assert bits_of(buffers) == before
    plan.check_buffers(new)
    for buffer in plan.buffers:
        if not buffer.statistic:
            assert np.array_equal(new[buffer.name], buffers[buffer.name])
            continue
        said = [(dict(m.groups), m.statistics[buffer.name]) for m in movements]
        for where, values in words_about(plan, buffer, said).items():
            old = buffers[buffer.name][where]
            expected = np.dtype(buffer.dtype).type(sum(values) / len(values)) if values else old
            assert new[buffer.name][where] == expected
