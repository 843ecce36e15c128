"""The coordinator's sums over devices, against loops over single parameters of named tensors."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.model import GlobalModel, mean_statistics
from coordinator.aggregate.rules import Closing
from coordinator.aggregate.rules.fed_raa import FedRaa
from coordinator.aggregate.rules.ra_fed import RaFed
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Buffer, Tensor
from tests.property.rules.histories import Turn, arrive, normal
from tests.property.strategies import (
    Choice,
    bits_of,
    choices,
    kept_along,
    kept_elements,
    law,
    plans,
    seeds,
)


@st.composite
def fleets(draw: st.DrawFn, plan: ModelPlan) -> list[Arrival]:
    """Movements of up to five devices, each of groups of its own."""
    return [
        random_arrival(plan, f"device{n}", draw(parts(plan)), draw(seeds))
        for n in range(draw(st.integers(0, 5)))
    ]


def parts(plan: ModelPlan) -> st.SearchStrategy[Choice]:
    """The whole model, often, and any submodel."""
    return st.one_of(st.just(plan.all_groups()), choices(plan))


def random_arrival(plan: ModelPlan, device: str, groups: Choice, seed: int) -> Arrival:
    rng = np.random.default_rng(seed)
    statistics = {
        buffer.name: np.asarray(
            rng.standard_normal([len(kept_along(plan, dim, groups)) for dim in buffer.dims]),
            dtype=buffer.dtype,
        )
        for buffer in plan.buffers
        if buffer.statistic
    }
    words = normal(seed, plan.parameters)
    return arrive(plan, device, 1, 0.1, Turn(groups), words, statistics)


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


def buffers_of(plan: ModelPlan, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {b.name: rng.integers(0, 100, b.shape).astype(b.dtype) for b in plan.buffers}


@law
@given(data=st.data(), plan=plans())
def test_ra_fed_is_the_mean_over_devices_that_hold_a_parameter(
    data: st.DataObject, plan: ModelPlan
) -> None:
    arrivals = data.draw(fleets(plan))
    parts = [plan.assemble(a.contribution.blocks, a.groups) for a in arrivals]
    closing = Closing(
        plan=plan,
        round=1,
        theta=np.zeros(plan.parameters, dtype=np.float32),
        learning_rate=0.1,
        fresh=[arrival.contribution for arrival in arrivals],
    )
    result = RaFed().move(closing)
    assert result.dtype == np.float32
    moved = plan.unflatten(result)
    for tensor in plan.tensors:
        said = [
            (dict(a.groups), part[tensor.name]) for a, part in zip(arrivals, parts, strict=True)
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
def test_mean_statistics_averages_over_whole_models_alone(
    data: st.DataObject, plan: ModelPlan, seed: int
) -> None:
    arrivals = data.draw(fleets(plan))
    buffers = buffers_of(plan, seed)
    before = bits_of(buffers)
    new = mean_statistics(plan, buffers, arrivals)
    assert bits_of(buffers) == before
    plan.check_buffers(new)
    for buffer in plan.buffers:
        if not buffer.statistic:
            assert np.array_equal(new[buffer.name], buffers[buffer.name])
            continue
        said = [
            (dict(a.groups), a.movement.statistics[buffer.name])
            for a in arrivals
            if plan.choose(a.groups) == plan.choose(plan.all_groups())
        ]
        for where, values in words_about(plan, buffer, said).items():
            old = buffers[buffer.name][where]
            expected = np.dtype(buffer.dtype).type(sum(values) / len(values)) if values else old
            assert new[buffer.name][where] == expected


@settings(law, max_examples=50)
@given(data=st.data(), plan=plans(), seed=seeds, age=st.integers(0, 9))
def test_mix_moves_statistics_as_it_moves_weights(
    data: st.DataObject, plan: ModelPlan, seed: int, age: int
) -> None:
    rule = FedRaa()
    alpha = 0.6 * (age + 1) ** -0.5
    buffers = buffers_of(plan, seed)
    model = GlobalModel(plan, plan.unflatten(normal(seed, plan.parameters)), buffers)
    arrival = random_arrival(plan, "device", data.draw(parts(plan)), seed)
    model.reserve("device", 1, arrival.groups)
    model.mix(rule, arrival, age)
    plan.check_buffers(model.buffers)
    for buffer in plan.buffers:
        got, old = model.buffers[buffer.name], buffers[buffer.name]
        if not buffer.statistic:
            assert np.array_equal(got, old)
            continue
        said = []
        if plan.choose(arrival.groups) == plan.choose(plan.all_groups()):
            said = [(dict(arrival.groups), arrival.movement.statistics[buffer.name])]
        for where, values in words_about(plan, buffer, said).items():
            expected = (1 - alpha) * old[where] + alpha * values[0] if values else old[where]
            assert abs(got[where] - expected) <= 1e-6 * (1 + abs(expected))


def test_mix_leaves_a_statistic_without_dimensions_an_array() -> None:
    buffer = Buffer("scale", "float32", (), statistic=True)
    plan = ModelPlan((), (Tensor("w", "float32", ()),), (buffer,))
    zero = np.zeros((), dtype=np.float32)
    model = GlobalModel(plan, {"w": zero}, {"scale": zero})
    model.reserve("device", 1, {})
    model.mix(FedRaa(), random_arrival(plan, "device", {}, 0), 0)
    plan.check_buffers(model.buffers)
