"""Data against a task's spec: what passes, and in which words the rest is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.protocol.errors import TensorError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec

IMAGES = DataSpec((ArraySpec("float32", (1, 28, 28)),), ArraySpec("int64", (), 9))
TOKENS = DataSpec((ArraySpec("int32", (4,), 19),), ArraySpec("float32", (2,), 1))
NUMBERS = DataSpec((ArraySpec("float32", (3,)),), ArraySpec("float32", (3,)))


def images(samples: int = 6, dtype: str = "float32", shape: tuple[int, ...] = (1, 28, 28)) -> Array:
    return np.zeros((samples, *shape), dtype)


def labels(*values: int, dtype: str = "int64") -> Array:
    return np.array(values or (0, 1, 2, 3, 4, 9), dtype)


def tokens(value: int = 0) -> Array:
    found = np.zeros((6, 4), np.int32)
    found[3, 1] = value
    return found


def shares(value: float = 0.5) -> Array:
    found = np.zeros((6, 2), np.float32)
    found[4, 1] = value
    return found


@pytest.mark.parametrize(
    ("spec", "inputs", "targets"),
    [
        (IMAGES, images(), labels()),
        (IMAGES, images(dtype=">f4"), labels(dtype=">i8")),  # another byte order
        (IMAGES, images(0), labels()[:0]),
        (TOKENS, tokens(19), shares(1)),
        (NUMBERS, images(2, shape=(3,)), np.full((2, 3), -1e9, np.float32)),
    ],
)
def test_data_of_the_task_passes(spec: DataSpec, inputs: Array, targets: Array) -> None:
    spec.check(ArrayData((inputs,), targets))
    spec.check(Batch((inputs,), targets))


@pytest.mark.parametrize(
    ("spec", "inputs", "targets", "words"),
    [
        (
            IMAGES,
            images(dtype="float64", shape=(28, 28)),
            labels(),
            "x0: the task needs float32 1×28×28, the data is float64 28×28",
        ),
        (IMAGES, images(dtype="float64"), labels(), "the data is float64 1×28×28"),
        (IMAGES, images(shape=(28, 28, 1)), labels(), "the data is float32 28×28×1"),
        (
            IMAGES,
            images(),
            labels(dtype="int32"),
            "targets: the task needs int64 numbers, the data is int32 numbers",
        ),
        (IMAGES, images(), labels()[:, None], "int64 numbers, the data is int64 1"),
        (IMAGES, images(), labels(0, 1), "6 samples but 2 targets"),
        (
            IMAGES,
            images(),
            labels(0, 1, 2, 3, 4, 12),
            "label 12 at sample 5: the task has 10 classes, 0 to 9",
        ),
        (IMAGES, images(), labels(0, -1, 2, 3, 4, 12), "label -1 at sample 1: "),
        (IMAGES, images(), np.array(3), "samples come first"),
        (IMAGES, [[0.0]], labels(), "x0: the task needs float32 1×28×28, the data is list"),
        (
            TOKENS,
            tokens(20),
            shares(),
            r"x0: id 20 at sample 3, place \[1\]: the task's vocabulary has 20 ids, 0 to 19",
        ),
        (TOKENS, tokens(-1), shares(), "x0: id -1 at sample 3"),
        (TOKENS, tokens(), shares(1.5), r"target 1.5 at sample 4, place \[1\]: .* needs 0 to 1"),
        (TOKENS, tokens(), shares(float("nan")), "target nan at sample 4"),
        (NUMBERS, images(2, shape=(3,)), images(2, shape=(4,)), "float32 3, the data is float32 4"),
    ],
)
def test_other_data_is_refused_in_words(
    spec: DataSpec, inputs: Any, targets: Any, words: str
) -> None:
    with pytest.raises(TensorError, match=words):
        spec.check(Batch((inputs,), targets))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((), "the task needs 2 inputs, the data has 0"),
        ((labels(0),), "the task needs 2 inputs, the data has 1"),
        ((labels(0), labels(0, 1)), r"all inputs need equally many samples; they have \[1, 2\]"),
    ],
)
def test_inputs_of_another_number_are_refused(inputs: tuple[Array, ...], words: str) -> None:
    spec = DataSpec((ArraySpec("int64"), ArraySpec("int64")), ArraySpec("int64"))
    with pytest.raises(TensorError, match=words):
        spec.check(Batch(inputs, labels(0)))


@settings(max_examples=150)
@given(
    values=st.lists(st.lists(st.integers(-2, 8), min_size=2, max_size=2), max_size=5),
    highest=st.integers(0, 6),
    dtype=st.sampled_from(["int8", "int64", "float32"]),
)
def test_first_stray_value_is_the_one_named(
    values: list[list[int]], highest: int, dtype: str
) -> None:
    """Against a loop over all values."""
    spec = DataSpec((ArraySpec("int8"),), ArraySpec(dtype, (2,), highest))
    data = Batch((np.zeros(len(values), np.int8),), np.array(values, dtype).reshape(-1, 2))
    stray = None
    for sample, row in enumerate(values):
        for place, value in enumerate(row):
            if not 0 <= value <= highest and stray is None:
                stray = f" {np.dtype(dtype).type(value)} at sample {sample}, place [{place}]: "
    if stray is None:
        spec.check(data)
    else:
        with pytest.raises(TensorError) as caught:
            spec.check(data)
        assert stray in str(caught.value)
