"""Conversions to the task's form, said once; and samples that memory does not hold."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.mapped import Collector, ReadData
from edge_sdk.data.source import SampleSource, describe_read, open_data
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import ArraySpec
from tests.unit.edge_sdk.data.specs import spec_of

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 0, 1])


def test_arrays_in_the_right_form_are_not_copied() -> None:
    read = open_data((X, Y)).read(spec_of(3))
    assert read.data.inputs[0] is X
    assert read.data.targets is Y
    assert read.notes == read.warnings == ()


@pytest.mark.parametrize(
    ("x", "spec", "expected", "note"),
    [
        (X.astype(np.float64), spec_of(3), X, "x0 is float64 and rounded to float32"),
        (X.astype(np.int16), spec_of(3), X, "x0 is int16 and becomes float32"),
        (X.astype(np.uint8), spec_of(3), X, "x0 is uint8 and becomes float32"),
        (X.reshape(4, 1, 3), spec_of(3), X, "x0 is 1×3 and taken as 3"),
        (X.astype(np.int64), spec_of(3, dtype="int32"), X, "x0 is int64 and becomes int32"),
        (X, spec_of(3, dtype="int64"), X, "x0 is float32 and becomes int64"),
        (
            np.full((4, 2, 2), 51, np.uint8),
            spec_of(2, 2),
            np.full((4, 2, 2), 0.2),
            "x0 is scaled from 0…255 to 0…1",
        ),
        (
            np.full((4, 2, 2), 51, np.uint8),
            spec_of(1, 2, 2, range=(-1.0, 1.0)),
            np.full((4, 1, 2, 2), -0.6),
            "x0 is scaled from 0…255 to -1…1",
        ),
    ],
)
def test_conversion_is_made_and_said_once(x: Array, spec: Any, expected: Any, note: str) -> None:
    read = open_data((x, Y)).read(spec)
    np.testing.assert_allclose(read.data.inputs[0], expected, rtol=1e-6)
    assert read.data.inputs[0].dtype.name == spec.inputs[0].dtype
    assert read.notes.count(note) == 1


@pytest.mark.parametrize(
    ("y", "spec", "expected"),
    [
        (Y.astype(np.uint8), spec_of(3), [0, 1, 0, 1]),
        (Y.astype(np.float64), spec_of(3), [0, 1, 0, 1]),
        (Y.reshape(4, 1), spec_of(3), [0, 1, 0, 1]),
        (np.array(["a", "b", "a", "c"]), spec_of(3, classes=("a", "b", "c")), [0, 1, 0, 2]),
        (np.array(["2.0", "10", "2", "7"]), spec_of(3, classes=("2", "10", "7")), [0, 1, 0, 2]),
        (np.array(["2.0", "1", "0", "1"]), spec_of(3, classes=("a", "b", "c")), [2, 1, 0, 1]),
        (Y, spec_of(3, targets=ArraySpec("float32", (1,))), [[0], [1], [0], [1]]),
        (
            np.array(["off", "on", "on", "off"]),
            spec_of(3, targets=ArraySpec("float32", (), 1), classes=("off", "on")),
            [0, 1, 1, 0],
        ),
        (Y.astype(bool), spec_of(3), [0, 1, 0, 1]),
    ],
)
def test_targets_become_the_task_s(y: Array, spec: Any, expected: Any) -> None:
    read = open_data((X, y)).read(spec)
    assert read.data.targets.tolist() == expected
    assert read.data.targets.dtype.name == spec.targets.dtype


@pytest.mark.parametrize(
    ("x", "y", "spec", "problem"),
    [
        (X * np.nan, Y, spec_of(3), "the data, sample 0, x0[0]: nan (not a number): must be a fin"),
        (
            np.where(X == 7, np.inf, X),
            Y,
            spec_of(3),
            "the data, sample 2, x0[1]: inf: must be a fi",
        ),
        (X.astype(np.float64) * 1e38, Y, spec_of(3), "does not fit float32"),
        (X, Y, spec_of(4), "sample 0: x0 is float32 3, the task wants float32 4"),
        (X, Y + 2, spec_of(3), "the data, sample 1, y: label 3: the task has 3 classes, 0 to 2"),
        (X, Y - 0.5, spec_of(3), "label -0.5"),
        (X, Y * 0.5, spec_of(3), "the data, sample 1, y: 0.5: must be a whole number (int64)"),
        (X + 0.5, Y, spec_of(3, dtype="int64"), "x0[0]: 0.5: must be a whole number (int64)"),
        (
            X,
            np.array(list("abcd")),
            spec_of(3),
            "its classes have no names: label with numbers fro",
        ),
        (
            X,
            Y,
            spec_of(3, targets=ArraySpec("float32", (2,))),
            "y is int64 numbers, the task wants",
        ),
        (X * 1000, Y, spec_of(3, range=(0.0, 1.0)), "must be values from 0 to 1; give the lowest"),
        (X[:0], Y[:0], spec_of(3), "the data is empty"),
        (X.astype(np.int64) + 300, Y, spec_of(3, dtype="uint8"), "300: must be a number of uint8"),
    ],
)
def test_what_cannot_be_converted_is_named(x: Array, y: Array, spec: Any, problem: str) -> None:
    with pytest.raises(DataError) as error:
        open_data((x, y)).read(spec)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_oddities_are_warnings() -> None:
    read = open_data((X / 10, Y * 0)).read(spec_of(3, range=(0.0, 1.0)))
    first, second = read.warnings
    assert first.startswith("x0: values from 0 to 1.1 leave the task's range 0 to 1")
    assert second == "all 4 samples are of class 0: the device learns nothing else"


def test_range_of_all_blocks_is_one_warning(tmp_path: Path) -> None:
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=X / 11 + number / 4 - 0.25, y=Y)
    (warning,) = open_data(str(tmp_path)).read(spec_of(3, range=(0.0, 1.0))).warnings
    assert warning.startswith("x0: values from -0.25 to 1.25 leave the task's range 0 to 1")


def test_values_outside_the_given_range_are_named() -> None:
    with pytest.raises(DataError, match=r"x0\[2\]: 11: must be 0 to 10, as range says"):
        open_data((X, Y), DataFormat(range=(0.0, 10.0))).read(spec_of(3))


# -- larger than memory ---------------------------------------------------------------------------


def test_larger_data_is_converted_once_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(5000, 30)), random.integers(0, 3, 5000)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    spec, cache = spec_of(30), tmp_path / "cache"

    def read() -> Any:
        return open_data(str(tmp_path / "a.npz")).read(spec, cache=cache, limit_bytes=10_000)

    first = read()
    assert first.mapped
    assert "mapped from a file" in describe_read(first, spec)
    np.testing.assert_array_equal(first.data.inputs[0], x.astype(np.float32))
    np.testing.assert_array_equal(first.data.targets, y)
    (folder,) = cache.iterdir()
    # The second time nothing is read but the mapped file.
    with monkeypatch.context() as patch:
        patch.setattr(SampleSource, "blocks", None)
        again = read()
    assert (again.notes, again.warnings, again.counts) == (
        first.notes,
        first.warnings,
        first.counts,
    )
    np.testing.assert_array_equal(again.data.inputs[0], x.astype(np.float32))
    rows = again.data.inputs[0][[3, 1]]
    assert type(rows) is np.ndarray
    # Another file of the same name is converted anew, and the old conversion goes.
    np.savez(tmp_path / "a.npz", x=x[:4000] + 1, y=y[:4000])
    assert len(read().data) == 4000
    assert [each.name for each in cache.iterdir()] != [folder.name]
    # A conversion that was damaged is made again.
    (folder,) = cache.iterdir()
    os.truncate(folder / "x0.bin", 100)
    np.testing.assert_array_equal(read().data.inputs[0], (x[:4000] + 1).astype(np.float32))


def test_conversion_holds_no_more_than_its_limit(tmp_path: Path) -> None:
    """An array of 48 MB passes through, while a few MB are held."""
    x = np.lib.format.open_memmap(
        tmp_path / "x.npy", mode="w+", dtype=np.float64, shape=(60_000, 100)
    )
    x[:] = np.arange(100)
    x.flush()
    del x
    np.save(tmp_path / "y.npy", np.zeros(60_000, np.int64))
    tracemalloc.start()
    try:
        read = open_data(str(tmp_path)).read(
            spec_of(100), cache=tmp_path / "cache", limit_bytes=2**20
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read.mapped
    assert read.data.inputs[0].nbytes == 24_000_000
    assert peak < 20 * 2**20


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    x = np.zeros((3000, 3))
    x[2999, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=np.zeros(3000))
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.npz, sample 2999, x0\[1\]: nan"):
        open_data(str(tmp_path / "a.npz")).read(spec_of(3), cache=cache, limit_bytes=100)
    assert not cache.exists() or not list(cache.iterdir())


def test_conversions_at_the_same_time_leave_each_other_alone(tmp_path: Path) -> None:
    """Of the same data, and of other data: `check` beside `run`."""
    spec, nothing = spec_of(3), ReadData(ArrayData((), Y[:0]))

    def collector(key: str) -> Collector:
        return Collector(spec, 1, tmp_path, key)

    with collector("a") as first, collector("b") as other, collector("a") as second:
        for each in (first, other, second):
            each.add((X, Y))
        for each in (second, other, first):
            each.add((X, Y))
            found = each.finish(nothing)
            np.testing.assert_array_equal(found.data.inputs[0], np.concatenate([X, X]))
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_source_is_described_before_it_is_read(tmp_path: Path) -> None:
    assert open_data(ArrayData((X,), Y)).describe() == "4 samples, float32 3"
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    assert open_data(str(tmp_path)).describe() == f"arrays: 1 file in {tmp_path}"
    for name, problem in (("none", "is not there"), ("b.txt", "b.txt is not one of those")):
        (tmp_path / "b.txt").write_text("")
        with pytest.raises(DataError, match=problem):
            open_data(str(tmp_path / name))


def test_unlabelled_conversion_is_never_taken_for_a_labelled_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    cache = tmp_path / "cache"

    def read(*, labelled: bool) -> Any:
        source = open_data(str(tmp_path / "a.npz"))
        return source.read(spec_of(3), cache=cache, limit_bytes=1, labelled=labelled)

    assert not read(labelled=False).labelled
    again = read(labelled=False)
    assert (again.mapped, again.labelled) == (True, False)
    with pytest.raises(DataError, match="has no targets"):
        read(labelled=True)
