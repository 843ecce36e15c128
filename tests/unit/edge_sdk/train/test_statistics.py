"""Moments merge as the moments of all values together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.protocol.errors import TensorError
from edge_sdk.train.statistics import Moments, moments_of

MEAN, VAR = "norm.running_mean", "norm.running_var"


def of(values: NDArray[np.float64]) -> Moments:
    return moments_of(len(values), {MEAN: values.mean(0), VAR: values.var(0)})


batches = st.lists(
    st.integers(1, 9).flatmap(
        lambda rows: st.lists(
            st.tuples(*[st.floats(-1e3, 1e3, width=32)] * 2), min_size=rows, max_size=rows
        )
    ),
    min_size=1,
    max_size=5,
)


@given(batches)
def test_merged_moments_are_those_of_all_values(rows: list[list[tuple[float, float]]]) -> None:
    values = [np.array(each, dtype=np.float64) for each in rows]
    merged = of(values[0])
    for each in values[1:]:
        merged = merged.merged(of(each))
    together = np.concatenate(values)
    assert merged.count == len(together)
    np.testing.assert_allclose(merged.means[MEAN], together.mean(0), rtol=1e-12, atol=1e-9)
    wanted = together.var(0) * len(together)
    np.testing.assert_allclose(merged.m2s[VAR], wanted, rtol=1e-9, atol=1e-6)


def test_buffers_take_means_and_variances_in_their_own_type() -> None:
    values = np.array([[1.0, 5.0], [3.0, 5.0], [5.0, 2.0]])
    buffers = {
        MEAN: np.zeros(2, np.float32),
        VAR: np.ones(2, np.float32),
        "steps": np.array(7),
    }
    filled = of(values).fill(buffers)
    np.testing.assert_allclose(filled[MEAN], [3, 4])
    np.testing.assert_allclose(filled[VAR], [8 / 3, 2])
    assert filled["steps"] == 7
    assert filled[VAR].dtype == np.float32
    assert buffers[MEAN].max() == 0


def test_moments_of_different_models_do_not_merge() -> None:
    other = moments_of(2, {"other.running_mean": np.zeros(2), "other.running_var": np.ones(2)})
    with pytest.raises(TensorError, match="different models"):
        of(np.ones((3, 2))).merged(other)


def test_moments_of_no_samples_are_refused() -> None:
    with pytest.raises(TensorError, match="0 samples"):
        moments_of(0, {MEAN: np.zeros(2), VAR: np.ones(2)})
