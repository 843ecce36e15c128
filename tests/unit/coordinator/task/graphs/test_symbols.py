"""Sizes found by comparing traces."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.task.graphs.errors import NotSymbolicError
from coordinator.task.graphs.symbols import TracePoint, multiply, prime_points, subtract
from edge_sdk.protocol.task.graphs import SizeTerm
from tests.unit.coordinator.task.graphs.oracle import CompiledModel


@given(st.lists(st.booleans(), max_size=8), st.booleans())
def test_points_share_no_size_that_varies(axes: list[bool], batch: bool) -> None:
    base = TracePoint((4,) * len(axes), 32)
    points = prime_points(axes, batch=batch, base=base)
    free = [
        size
        for point in points
        for size, varies in zip((*point.kept, point.batch), (*axes, batch), strict=True)
        if varies
    ]
    assert len(set(free)) == len(free)
    assert all(size % factor for size in free for factor in range(2, size))
    for point in points:
        fixed = zip((*point.kept, point.batch), (*axes, batch), (*base.kept, 32), strict=True)
        assert all(size == wanted for size, varies, wanted in fixed if not varies)


TERMS = st.builds(
    SizeTerm,
    st.integers(1, 9),
    st.lists(st.integers(0, 2), max_size=2).map(lambda axes: tuple(sorted(axes))),
    st.just(False),
)


@given(st.lists(st.one_of(TERMS, st.integers(1, 9)), min_size=1, max_size=4))
def test_product_of_sizes_has_the_product_of_their_values(sizes: list[SizeTerm | int]) -> None:
    def value(size: SizeTerm | int) -> int:
        return size if isinstance(size, int) else size.value((3, 5, 7), 11)

    assert value(multiply(*sizes)) == prod(map(value, sizes))


def test_difference_of_unlike_sizes_is_refused() -> None:
    assert subtract(SizeTerm(5, (1,)), SizeTerm(2, (1,))) == SizeTerm(3, (1,))
    assert subtract(SizeTerm(5, (1,)), SizeTerm(5, (1,))) == 0
    with pytest.raises(NotSymbolicError):
        subtract(SizeTerm(5, (1,)), SizeTerm(2, (0,)))
    both = SizeTerm(5, (1,), more=(SizeTerm(2, (2,)),))
    assert subtract(both, SizeTerm(5, (1,))) == SizeTerm(2, (2,))


@pytest.mark.parametrize("name", ["lenet-28", "resnet-gn", "vit-small"])
def test_ports_state_the_sizes_of_the_plan(name: str, compiled: CompiledModel) -> None:
    made = compiled(name)
    plan = made.task.plan
    gradient = made.graphs.manifest.graphs[0]
    ports = {port.name: port for port in (*gradient.inputs, *gradient.outputs)}
    for tensor in plan.tensors:
        wanted = tuple(
            SizeTerm(dim.size) if dim.axis is None else SizeTerm(dim.outer * dim.inner, (dim.axis,))
            for dim in tensor.dims
        )
        assert ports[f"g:{tensor.name}"].dims == wanted
        if f"w:{tensor.name}" in ports:
            assert ports[f"w:{tensor.name}"].dims == wanted
    assert ports["sample_weights"].dims == (SizeTerm(1, (), True),)
