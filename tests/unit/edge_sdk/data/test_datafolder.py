"""A device's own data, from files and functions; whatever is wrong with it is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.folder import DataError, load_data, read_folder

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 0, 1])


def test_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=X[3:], y=Y[3:])
    np.savez(tmp_path / "a.npz", x0=X[:3], y=Y[:3])
    (tmp_path / "notes.txt").write_text("not data")
    data = read_folder(tmp_path)
    np.testing.assert_array_equal(data.inputs[0], X)
    np.testing.assert_array_equal(data.targets, Y)


def test_several_inputs_keep_their_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x1=X, x0=Y, y=Y)
    data = load_data(str(tmp_path))
    assert [array.ndim for array in data.inputs] == [1, 2]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no .npz file"),
        ({"a": {"x": X}}, "a.npz has no targets: name them y"),
        ({"a": {"y": Y}}, "has no inputs"),
        ({"a": {"x": X, "z": X, "y": Y}}, "a.npz has x0, z: name inputs x, or x0, x1"),
        ({"a": {"x": X, "y": Y[:3]}}, "same number of samples"),
        (
            {"a": {"x": X, "y": Y}, "b": {"x": X.astype(np.float64), "y": Y}},
            "x0 is float64 (4, 3) in",
        ),
        ({"a": {"x": X, "y": Y}, "b": {"x": X[:, :2], "y": Y}}, "float32 (4, 2) in"),
        ({"a": {"x": X, "y": Y}, "b": {"x0": X, "x1": X, "y": Y}}, "has 2 inputs"),
    ],
)
def test_folder_that_makes_no_sense_is_refused(
    tmp_path: Path, files: dict[str, dict[str, Any]], problem: str
) -> None:
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    with pytest.raises(DataError) as error:
        load_data(str(tmp_path))
    assert problem in str(error.value)


def test_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"a\.npz cannot be read"):
        load_data(str(tmp_path))
    with pytest.raises(DataError, match="is a file"):
        load_data(str(tmp_path / "a.npz"))
    with pytest.raises(DataError, match="is not there"):
        load_data(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "load",
    [
        lambda: (X, Y),
        lambda: ((X,), Y),
        lambda: ([X], Y),
        lambda: ArrayData((X,), Y),
        lambda: iter([(X[:1], Y[:1]), (X[1:], Y[1:])]),
        lambda: [((X[:3],), Y[:3]), ArrayData((X[3:],), Y[3:])],
    ],
)
def test_function_may_return_arrays_or_batches(load: Callable[[], Any]) -> None:
    data = load_data(load)
    np.testing.assert_array_equal(data.inputs[0], X)
    np.testing.assert_array_equal(data.targets, Y)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "returned NoneType"),
        ([], "returned no batches"),
        ([X], "batch 0 of"),
        ((X, Y, Y), "batch 0 of"),
        (([[1, 2]], Y), "x0 is list of 2, not a numpy array"),
        ((X, Y[:2]), "4 samples but 2 targets"),
        ([(X, Y), (X[:, :1], Y)], "x0 is float32 (4, 1) in batch 1 of"),
        ((np.float32(3), Y), "x0 is float32"),
    ],
)
def test_function_that_returns_something_else_is_refused(result: Any, problem: str) -> None:
    def load() -> Any:
        return result

    with pytest.raises(DataError) as error:
        load_data(load)
    assert problem in str(error.value)


def test_function_of_a_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import numpy as np\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Size:\n    n: int = 4\n"
        "def load():\n    return np.zeros((Size().n, 3)), np.zeros(Size().n)\n"
        "def fail():\n    raise KeyError('camera')\n"
    )
    assert len(load_data(f"{path}:load")) == 4
    with pytest.raises(DataError, match="KeyError: 'camera'") as error:
        load_data(f"{path}:fail")
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(DataError, match=r"has no function 'laod'.*load"):
        load_data(f"{path}:laod")


def test_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(DataError, match="ModuleNotFoundError"):
        load_data(f"{path}:load")
    with pytest.raises(DataError, match="is not there"):
        load_data(f"{tmp_path / 'none.py'}:load")


def test_function_of_a_module_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_data.py").write_text(
        "import numpy as np\ndef load():\n    return np.zeros((2, 3)), np.zeros(2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load_data("module_of_data:load")) == 2
    with pytest.raises(DataError, match=r"no\.such cannot be imported"):
        load_data("no.such:load")


def test_arrays_are_taken_as_they_are() -> None:
    assert load_data((X, Y)).inputs[0] is X
    data = ArrayData((X,), Y)
    assert load_data(data) is data
