"""Tasks and test data as code: run elsewhere, checked here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError
from coordinator.operate.taskfile import load_evaluation, make_evaluator
from edge_sdk.data.arrays import ArrayData
from tests.unit.coordinator.service.service_world import (
    PLAN,
    rounds_config,
    saved_model,
    task_files,
)

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


def test_function_returns_test_data(source: Path) -> None:
    data = load_evaluation("tests.py:pair", source)
    assert np.array_equal(data.inputs[0], np.ones((3, 4), dtype=np.float32))
    assert data.targets.tolist() == [0, 1, 2]


def test_several_inputs_keep_their_order(source: Path) -> None:
    data = load_evaluation("tests.py:two_inputs", source)
    assert [array.shape for array in data.inputs] == [(2, 1), (2, 5)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", "returns list"),
        ("fails", "no data today"),
        ("gone", "no function 'gone'"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(source: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_evaluation(f"tests.py:{name}", source)


def test_file_of_arrays_needs_no_code(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 4), dtype=np.float32), y=np.array([1, 2]))
    assert load_evaluation("a.npz", tmp_path).targets.tolist() == [1, 2]
    np.savez(tmp_path / "b.npz", x=np.ones((2, 4)))
    with pytest.raises(ConfigError, match="no y"):
        load_evaluation("b.npz", tmp_path)
    with pytest.raises(ConfigError, match="not there"):
        load_evaluation("c.npz", tmp_path)


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
