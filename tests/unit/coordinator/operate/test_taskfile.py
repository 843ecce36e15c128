"""Tasks and test data as code: run elsewhere, checked here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError
from coordinator.operate.taskfile import (
    check_evaluation,
    load_evaluation,
    make_evaluator,
    make_root,
)
from coordinator.task.graphs.child import load_function
from coordinator.task.graphs.errors import GraphCompileError
from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.format import DataFormat
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from tests.unit.coordinator.service.service_world import (
    PLAN,
    rounds_config,
    saved_model,
    task_files,
)
from tests.unit.edge_sdk.train.handmade import CLASSES, INPUTS

SOURCE = """
import sys
import numpy as np

def pair():
    assert "torch" not in sys.modules
    return np.ones((3, 4), dtype=np.float32), np.array([0, 1, 2])

def two_inputs():
    return (np.zeros((2, 1)), np.ones((2, 5))), np.array([1.5, 2.5])

def wrong():
    return [1, 2, 3]

def fails():
    raise ValueError("no data today")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "tests.py").write_text(SOURCE)
    return tmp_path


SPEC = DataSpec((ArraySpec("float32", (4,)),), ArraySpec("int64", (), 2))
TWO = DataSpec((ArraySpec("float32", (1,)), ArraySpec("float64", (5,))), ArraySpec("float32"))


def test_function_returns_test_data(source: Path) -> None:
    data = load_evaluation("tests.py:pair", source, SPEC)
    assert np.array_equal(data.inputs[0], np.ones((3, 4), dtype=np.float32))
    assert data.targets.tolist() == [0, 1, 2]


def test_place_of_test_data_is_looked_for_before_anything_is_compiled(source: Path) -> None:
    for there in ("tests.py:pair", "tests.py", "some.module:function", str(source)):
        check_evaluation(there, source)
    for missing in ("data.csv", "other.py:pair"):
        with pytest.raises(ConfigError, match=rf"evaluation '{missing}': .* is not there"):
            check_evaluation(missing, source)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import nowhere_to_be_found", "own.py imports 'nowhere_to_be_found', which is not there"),
        ("def make_task(:\n  pass", "own.py, line 1, is not Python: invalid syntax"),
    ],
)
def test_code_that_cannot_be_loaded_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(GraphCompileError) as error:
        load_function(f"{tmp_path / 'own.py'}:make_task")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_several_inputs_keep_their_order(source: Path) -> None:
    data = load_evaluation("tests.py:two_inputs", source, TWO)
    assert [array.shape for array in data.inputs] == [(2, 1), (2, 5)]
    assert [array.dtype.name for array in data.inputs] == ["float32", "float64"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", "returns list"),
        ("fails", "no data today"),
        ("gone", "no function 'gone'"),
        ("two_inputs", "2 inputs, but the task wants 1"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(source: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_evaluation(f"tests.py:{name}", source, SPEC)


def test_files_are_read_as_on_a_device(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 4), dtype=np.float32), y=np.array([1, 2]))
    assert load_evaluation("a.npz", tmp_path, SPEC).targets.tolist() == [1, 2]
    np.savez(tmp_path / "b.npz", x=np.ones((2, 4)))
    with pytest.raises(ConfigError, match=r"evaluation 'b.npz': b.npz has no targets"):
        load_evaluation("b.npz", tmp_path, SPEC)
    with pytest.raises(ConfigError, match="not there"):
        load_evaluation("c.npz", tmp_path, SPEC)
    (tmp_path / "d.csv").write_text("a,b,c,d,kind\n1,2,3,4,0\n5,6,7,8,2\n")
    data = load_evaluation("d.csv", tmp_path, SPEC, DataFormat(label=("kind",)))
    assert data.inputs[0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert data.targets.tolist() == [0, 2]


def test_accuracy_is_that_of_the_model_in_numpy() -> None:
    saved, random = saved_model(), np.random.default_rng(11)
    inputs = np.asarray(random.normal(size=(50, 4)), dtype=np.float32)
    targets = random.integers(0, 3, size=50)
    model = GlobalModel(PLAN, saved.weights, saved.buffers)
    weights = {name: array.astype(np.float64) for name, array in saved.weights.items()}
    hidden = np.tanh(inputs @ weights["w1"].T + weights["b1"])
    scores = weights["temperature"] * (hidden @ weights["w2"].T)
    expected = float(np.mean(scores.argmax(axis=1) == targets))
    evaluate = make_evaluator(task_files(), ArrayData((inputs,), targets))
    scores = evaluate(model, rounds_config().unscored())
    assert scores.accuracies[1.0] == expected
    assert len(scores.accuracies) > 1
    assert 0 < expected < 1


def test_data_of_another_task_is_refused() -> None:
    wrong = ArrayData((np.ones((2, 5), dtype=np.float32),), np.array([0, 1]))
    with pytest.raises(ConfigError, match="evaluation"):
        make_evaluator(task_files(), wrong)


def test_root_trains_the_whole_model_as_a_device_would_and_repeats() -> None:
    random = np.random.default_rng(1)
    inputs = random.standard_normal((12, INPUTS)).astype(np.float32)
    data = ArrayData((inputs,), random.integers(0, CLASSES, 12))
    saved, config = saved_model(), rounds_config()
    model = GlobalModel(PLAN, saved.weights, saved.buffers)
    before = model.digest
    movements = []
    for round in (1, 2, 1):
        movement = make_root(task_files(), data)(config, model, round)
        assert movement is not None
        movement.check(PLAN.block_ids(PLAN.choose(PLAN.full_groups())), PLAN.block_sizes)
        movements.append(movement.values.tobytes())
    assert movements[0] == movements[2] != movements[1]
    assert model.digest == before
    with pytest.raises(ConfigError, match=r"\[robust\] data"):
        make_root(task_files(), ArrayData((inputs[:, :-1],), data.targets))
