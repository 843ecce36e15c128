"""A device's data as batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.streams import stream


def numbered(samples: int) -> ArrayData:
    """Samples that can be told apart, by both inputs and by the target."""
    numbers = np.arange(samples)
    pairs = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    return ArrayData((pairs, numbers.astype(np.int32)), 10 * numbers)


def samples_of(batch: Batch) -> list[int]:
    pairs, numbers = batch.inputs
    np.testing.assert_array_equal(pairs[:, 0], numbers)
    np.testing.assert_array_equal(pairs[:, 1], -numbers)
    np.testing.assert_array_equal(batch.targets, 10 * numbers)
    return [int(number) for number in numbers]


@settings(max_examples=200)
@given(
    samples=st.integers(1, 25),
    size=st.integers(1, 30),
    steps=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_batches_walk_through_the_data(samples: int, size: int, steps: int, seed: int) -> None:
    data = numbered(samples)
    batches = [samples_of(batch) for batch in data.batches(steps, size, stream(seed))]
    assert [len(batch) for batch in batches] == [min(size, samples)] * steps
    in_a_pass = samples // min(size, samples)
    for start in range(0, steps, in_a_pass):
        seen = [number for batch in batches[start : start + in_a_pass] for number in batch]
        assert len(set(seen)) == len(seen), "twice in one pass, or even in one batch"
        assert set(seen) <= set(range(samples))
        if samples % size == 0 and start + in_a_pass <= steps:
            assert len(seen) == samples
    again = [samples_of(batch) for batch in data.batches(steps, size, stream(seed))]
    assert again == batches


def test_batches_are_shuffled_anew_in_every_pass_and_stream() -> None:
    data = numbered(40)
    first, second = (samples_of(batch) for batch in data.batches(2, 40, stream(1, "batches")))
    (other,) = (samples_of(batch) for batch in data.batches(1, 40, stream(2, "batches")))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(40))
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(40))}) == 4


def test_batches_are_copies() -> None:
    data = numbered(3)
    (batch,) = data.batches(1, 3, stream(3))
    batch.inputs[0][:] = batch.targets[:] = -7
    assert data.inputs[0][2, 0] == 2
    assert data.targets[2] == 20


def test_no_data_gives_no_batches() -> None:
    empty = numbered(0)
    assert len(empty) == 0
    assert list(empty.batches(5, 4, stream(4))) == []


def test_data_needs_one_target_per_sample() -> None:
    with pytest.raises(TrainingError, match="5 samples but 4 targets"):
        ArrayData((np.zeros((4, 2)), np.zeros(5)), np.zeros(4))
