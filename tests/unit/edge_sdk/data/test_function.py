"""Data of the owner's function, or in memory; whatever is wrong with it is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import DataError
from edge_sdk.data.function import call_reference, load_arrays, split_reference

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 0, 1])


def load_data(reference: str) -> ArrayData:
    found = split_reference(reference)
    assert found is not None
    return call_reference(*found)


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
    data = load_arrays(load)
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
        load_arrays(load)
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
    assert load_arrays((X, Y)).inputs[0] is X
    data = ArrayData((X,), Y)
    assert load_arrays(data) is data
