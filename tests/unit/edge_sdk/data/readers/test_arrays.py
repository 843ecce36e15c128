"""Arrays from .npz and .npy files, against numpy's own reader."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.data.errors import DataError
from edge_sdk.data.readers import arrays
from edge_sdk.data.source import open_data
from edge_sdk.protocol.plan.layout import Array
from tests.unit.edge_sdk.data.specs import spec_of

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 0, 1])
SPEC = spec_of(3)


def test_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=X[3:], y=Y[3:])
    np.savez_compressed(tmp_path / "a.npz", x0=X[:3], y=Y[:3])
    (tmp_path / "notes.txt").write_text("not data")
    read = open_data(str(tmp_path)).read(SPEC)
    np.testing.assert_array_equal(read.data.inputs[0], X)
    np.testing.assert_array_equal(read.data.targets, Y)
    assert (read.notes, read.warnings, read.counts) == ((), (), (2, 2, 0))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8"])
def test_npy_files_of_any_order_are_what_numpy_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any, dtype: str
) -> None:
    monkeypatch.setattr(arrays, "rows_of", lambda _: 3)
    random = np.random.default_rng(0)
    x = np.array(random.normal(size=(10, 2, 3)), dtype=dtype, order=order)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(10) % 3)
    read = open_data(str(tmp_path)).read(spec_of(2, 3))
    loaded: Array = np.load(tmp_path / "x.npy")
    np.testing.assert_array_equal(read.data.inputs[0], loaded.astype(np.float32))
    assert read.data.targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert read.notes == (("x0 is float64 and rounded to float32",) if "8" in dtype else ())


def test_single_file_without_targets_is_for_inference(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    read = open_data(str(tmp_path / "a.npy")).read(SPEC, labelled=False)
    assert not read.labelled
    np.testing.assert_array_equal(read.data.inputs[0], X)
    with pytest.raises(DataError, match=r"a\.npy has no targets: name them y"):
        open_data(str(tmp_path / "a.npy")).read(SPEC)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a": {"x": X}}, "a.npz has no targets: name them y"),
        ({"a": {"y": Y}}, "a.npz has no inputs"),
        ({"a": {"x": X, "z": X, "y": Y}}, "a.npz: 'z' is neither an input nor the targets"),
        ({"a": {"x0": X, "x2": X, "y": Y}}, "a.npz has x0, x2: name inputs x, or x0, x1"),
        ({"a": {"x": X, "y": Y[:3]}}, "as many samples as the others, not 3 and 4"),
        ({"a": {"x": X[:0], "y": Y[:0]}}, "is empty"),
        ({"a": {"x": X, "y": Y}, "b": {"x": X[:, :2], "y": Y}}, "b.npz, sample 0: x0 is float32 2"),
        ({"a": {"x0": X, "x1": X, "y": Y}}, "a.npz, sample 0: 2 inputs, but the task wants 1"),
        ({"a": {"x": np.float32(3), "y": Y}}, "is a single number: samples come first"),
        ({"a": {"x": np.array(["a", "b"]), "y": Y[:2]}}, "not numbers"),
        ({"a": {"x": X.astype(complex), "y": Y}}, "must be plain numbers"),
    ],
)
def test_files_that_make_no_sense_are_refused(
    tmp_path: Path, files: dict[str, dict[str, Any]], problem: str
) -> None:
    for name, content in files.items():
        np.savez(tmp_path / f"{name}.npz", **content)
    with pytest.raises(DataError) as error:
        open_data(str(tmp_path)).read(SPEC)
    assert problem in str(error.value)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}, []], dtype=object), y=Y[:2])
    with pytest.raises(DataError, match="must be plain numbers"):
        open_data(str(tmp_path)).read(SPEC)


def bytes_of(path: Path, **content: Any) -> bytes:
    np.savez(path / "made.npz", **content)
    data = (path / "made.npz").read_bytes()
    (path / "made.npz").unlink()
    return data


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 2000),
    raw=st.none() | st.binary(max_size=80),
)
def test_bad_bytes_raise_one_error(
    tmp_path: Path, flips: list[tuple[int, int]], cut: int, raw: bytes | None
) -> None:
    """Whatever is flipped, cut or made up: the samples come, or `DataError`."""
    data = bytearray(bytes_of(tmp_path, x=X, y=Y))
    for at, value in flips:
        data[at % len(data)] = value
    (tmp_path / "a.npz").write_bytes(bytes(data[: max(1, len(data) - cut)]) if raw is None else raw)
    with suppress(DataError):
        assert len(open_data(str(tmp_path)).read(SPEC).data) >= 1
