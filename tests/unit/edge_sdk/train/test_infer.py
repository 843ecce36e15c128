"""Models from files, made by hand here, run on data; numpy says what must come out."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.cli import main
from edge_sdk.data.files import read_data
from edge_sdk.protocol.errors import GraphError, TensorError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.train.inference import ExportedModel, accuracy

W = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)
SCORES = X @ W


def write(path: Path, batch: int | str | None, *, inputs: tuple[str, ...] = ("x0",)) -> Path:
    """Σ inputs · W: a model of three numbers in, four scores out."""
    nodes = [
        helper.make_node("Sum", list(inputs), ["sum"]),
        helper.make_node("MatMul", ["sum", "W"], ["outputs"]),
    ]
    graph = helper.make_graph(
        nodes,
        "by hand",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, 3]) for n in inputs],
        [helper.make_tensor_value_info("outputs", TensorProto.FLOAT, [batch, 4])],
        [numpy_helper.from_array(W, "W")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, ExportedModel]:
    """By the batch size they are made for; None: any."""
    folder = tmp_path_factory.mktemp("models")
    return {
        batch: ExportedModel(write(folder / f"{batch}.onnx", batch)) for batch in (None, 1, 4, 16)
    }


@given(
    batch=st.sampled_from([None, 1, 4, 16]),
    samples=st.integers(1, 10),
    batch_size=st.integers(1, 12),
)
def test_outputs_are_the_same_for_any_batch_size(
    models: dict[int | None, ExportedModel], batch: int | None, samples: int, batch_size: int
) -> None:
    result = models[batch].predict({"x0": X[:samples]}, batch_size=batch_size)
    np.testing.assert_allclose(result.outputs, SCORES[:samples], rtol=0, atol=1e-6)
    assert len(result.batch_seconds) == -(-samples // (batch or batch_size))


def test_seconds_per_batch_is_the_median(models: dict[int | None, ExportedModel]) -> None:
    times = iter([0, 9, 10, 11, 20, 22])
    result = models[None].predict({"x0": X}, batch_size=4, clock=lambda: next(times))
    assert list(result.batch_seconds) == [9, 1, 2]
    assert result.seconds_per_batch == 2


@pytest.mark.parametrize("names", [("a", "b"), ("x0", "x1"), ("x1", "x0")])
@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_are_found_by_name_or_place(
    tmp_path: Path, names: tuple[str, str], by_name: bool
) -> None:
    model = ExportedModel(write(tmp_path / "m.onnx", None, inputs=names))
    data = dict(zip(names if by_name else ("x0", "x1"), (X, 2 * X), strict=True))
    np.testing.assert_allclose(model.predict(data).outputs, 3 * SCORES, rtol=0, atol=1e-5)


def test_data_of_other_byte_order_or_layout_gives_the_same(
    models: dict[int | None, ExportedModel],
) -> None:
    for array in (X.astype(">f4"), np.asfortranarray(X), np.repeat(X, 2, axis=1)[:, ::2]):
        outputs = models[4].predict({"x0": array}).outputs
        np.testing.assert_allclose(outputs, SCORES, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"x0": X.astype(float)}, r"float64 of shape \(10, 3\).*float32 of shape \(\?, 3\)"),
        ({"x0": X[:, :2]}, r"float32 of shape \(10, 2\).*float32 of shape \(\?, 3\)"),
        ({"x0": X[0]}, r"of shape \(3,\).*of shape \(\?, 3\)"),
        ({"x0": X[:0]}, "at least one"),
        ({"x1": X}, "the data has x1; the model takes 'x0'"),
        ({"x0": X, "x1": X}, "the data has x0, x1; the model takes 'x0'"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    models: dict[int | None, ExportedModel], data: dict[str, Array], says: str
) -> None:
    with pytest.raises(TensorError, match=says):
        models[None].predict(data)


def test_inputs_of_different_lengths_are_refused(tmp_path: Path) -> None:
    model = ExportedModel(write(tmp_path / "m.onnx", None, inputs=("a", "b")))
    with pytest.raises(TensorError, match="equally many samples"):
        model.predict({"a": X, "b": X[:1]})


def test_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(GraphError, match=r"onnxruntime .* cannot load .*text\.onnx"):
        ExportedModel(tmp_path / "text.onnx")
    with pytest.raises(GraphError, match="not there"):
        ExportedModel(tmp_path / "none.onnx")
    with pytest.raises(GraphError, match=r"no provider 'Abacus'; it has .*CPUExecutionProvider"):
        ExportedModel(write(tmp_path / "m.onnx", None), providers=["Abacus"])


def test_model_that_gives_words_is_refused(tmp_path: Path) -> None:
    """Classifiers of other makers have labels for an output."""
    words = numpy_helper.from_array(np.array(["a"], dtype=object), "words")
    graph = helper.make_graph(
        [helper.make_node("Expand", ["words", "size"], ["outputs"]),
         helper.make_node("Shape", ["x0"], ["size"])][::-1],
        "words",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [None])],
        [helper.make_tensor_value_info("outputs", TensorProto.STRING, [None])],
        [words],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="not an array of numbers"):
        ExportedModel(tmp_path / "m.onnx").predict({"x0": X[:, 0]})


def test_data_file_is_read_as_written(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    np.savez(tmp_path / "b.npz", x=X, y=np.arange(10))
    np.savez(tmp_path / "c.npz", x0=X, x1=2 * X)
    inputs, labels = read_data(tmp_path / "a.npy")
    assert list(inputs) == ["x0"]
    assert np.array_equal(inputs["x0"], X)
    assert labels is None
    inputs, labels = read_data(tmp_path / "b.npz")
    assert list(inputs) == ["x0"]
    assert labels is not None
    assert labels.tolist() == list(range(10))
    inputs, labels = read_data(tmp_path / "c.npz")
    assert np.array_equal(inputs["x1"], 2 * X)
    assert labels is None


def _objects(path: Path) -> None:
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("d.csv", lambda path: path.write_text("1,2"), r"\.npy or \.npz file, not d\.csv"),
        ("d.npy", lambda path: None, "not there"),
        ("d.npy", lambda path: path.write_bytes(b"junk"), "cannot be read"),
        ("d.npy", lambda path: path.write_bytes(b""), "cannot be read"),
        ("d.npz", lambda path: path.write_bytes(b"PK\x03\x04junk"), "cannot be read"),
        ("d.npy", _objects, "cannot be read"),
        ("d.npz", lambda path: np.savez(path, y=X), "has no inputs"),
    ],
)
def test_data_file_that_is_no_data_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], object], says: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(TensorError, match=says):
        read_data(tmp_path / name)


def test_accuracy_counts_the_labels_with_the_highest_score() -> None:
    scores = np.random.default_rng(2).normal(size=(6, 3, 5))
    labels = np.random.default_rng(3).integers(0, 3, size=(6, 5))
    right = sum(
        int(max(range(3), key=lambda c, i=i, j=j: float(scores[i, c, j])) == labels[i, j])  # type: ignore[misc]
        for i, j in itertools.product(range(6), range(5))
    )
    assert 0 < right < 30
    assert accuracy(scores, labels) == pytest.approx(right / 30)


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (np.zeros((4, 3)), np.zeros(4)),  # labels are no classes
        (np.zeros((4, 1)), np.zeros(4, dtype=int)),  # a single output
        (np.zeros(4), np.zeros(4, dtype=int)),
        (np.zeros((4, 3)), np.zeros((4, 3), dtype=int)),
    ],
)
def test_accuracy_is_none_for_what_are_no_class_scores(outputs: Array, labels: Array) -> None:
    assert accuracy(outputs, labels) is None


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.array([0, 1, 2, 3]), "classes 0 to 3; the model has classes 0 to 2"),
        (np.array([-1, 1, 2, 0]), "classes -1 to 2; the model has classes 0 to 2"),
        (np.array([0, 1]), r"labels have shape \(2,\); there are 4 samples"),
    ],
)
def test_accuracy_refuses_labels_that_do_not_fit(labels: Array, says: str) -> None:
    with pytest.raises(TensorError, match=says):
        accuracy(np.zeros((4, 3)), labels)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a model, and data whose first seven labels of ten are right."""
    write(tmp_path / "m.onnx", None)
    labels = SCORES.argmax(axis=1)
    labels[7:] = (labels[7:] + 1) % 4
    np.savez(tmp_path / "d.npz", x=X, y=labels)
    return tmp_path


def infer(folder: Path, *options: str, data: str = "d.npz") -> int:
    given = ["--model", str(folder / "m.onnx"), "--data", str(folder / data)]
    return main(["infer", *given, *options])


def test_command_prints_a_summary_and_writes_outputs(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer(files, "--batch-size", "4", "--out", str(files / "o.npy")) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["rows"] == "10"
    assert printed["batches"] == "3"
    assert printed["providers"] == "CPUExecutionProvider"
    assert printed["accuracy"] == "70.00% of 10"
    assert float(printed["seconds_per_batch"]) >= 0
    np.testing.assert_allclose(np.load(files / "o.npy"), SCORES, rtol=0, atol=1e-6)

    assert infer(files, "--out", str(files / "o.json")) == 0
    written = json.loads((files / "o.json").read_text())
    assert written["accuracy"] == pytest.approx(0.7)
    np.testing.assert_allclose(written["outputs"], SCORES, rtol=0, atol=1e-6)


def test_command_without_class_labels_says_why_there_is_no_accuracy(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(files / "floats.npz", x=X, y=SCORES)
    assert infer(files, data="floats.npz") == 0
    assert "accuracy           none: labels are float32 of shape (10, 4)" in capsys.readouterr().out
    np.save(files / "bare.npy", X)
    assert infer(files, data="bare.npy") == 0
    assert "accuracy" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "data", "says"),
    [
        (["--out", "o.txt"], "d.npz", "--out must end in one of .npy, .json"),
        (["--out", "nowhere/o.npy"], "d.npz", "an existing folder"),
        (["--out", "bare.npy"], "bare.npy", "would replace the data"),
        (["--out", "o.json"], "nan.npy", "use .npy"),
        (["--batch-size", "0"], "d.npz", "batch_size must be at least 1, not 0"),
        (["--provider", "Abacus"], "d.npz", "no provider 'Abacus'"),
        ([], "none.npz", "no data"),
    ],
)
def test_command_refuses_in_words(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    data: str,
    says: str,
) -> None:
    monkeypatch.chdir(files)
    np.save("bare.npy", X)
    np.save("nan.npy", X * np.float32(np.nan))
    before = {path: path.read_bytes() for path in files.iterdir()}
    assert infer(files, *options, data=data) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("tessera-device: ")
    assert captured.out == ""
    assert {path: path.read_bytes() for path in files.iterdir()} == before


def test_command_without_onnxruntime_says_what_to_install(files: Path) -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from edge_sdk.cli import main; "
    given = ["infer", "--model", str(files / "m.onnx"), "--data", str(files / "d.npz")]
    result = subprocess.run(
        [sys.executable, "-c", code + f"sys.exit(main({given!r}))"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "onnxruntime is not installed" in result.stderr
    assert "pip install 'tessera-fl[onnx]'" in result.stderr
