"""Compiling in a child process, seen from a parent without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.task.graphs import child
from coordinator.task.graphs.child import compile_in_child
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.saved_model import read_model
from tests.unit.coordinator.task.graphs.test_cache import files_of, task_of

TASKS = """
import torch
from torch import nn
from coordinator.task.task import make_task
from neighbour import WIDTH

class Odd(nn.Module):
    def forward(self, x):
        return torch.i0(x)

def task_of(middle=nn.ReLU, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, WIDTH), middle(), nn.Linear(WIDTH, 3))
    return make_task(model, torch.zeros(2, 6), groups=2, **{"loss": "mse", **options})

def good():
    print("chatter of the task's own")
    return task_of()

def own_loss():
    loss = lambda outputs, targets: (outputs - targets).abs().mean(1)
    return task_of(loss=loss, example_targets=torch.zeros(2, 3))

def normalised():
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_mean.uniform_(-1, 1)
    return task_of(lambda: norm, loss="cross-entropy")

def unsupported():
    return task_of(Odd)

def number():
    return 7
"""

PARENT = """
import sys
from pathlib import Path
from coordinator.task.graphs.child import compile_in_child
from coordinator.task.saved_model import save_model
model = compile_in_child(sys.argv[1], levels=(1.0,), batch_sizes=(8,))
save_model(model, Path("out"))
assert not {"torch", "onnx", "onnxruntime"} & set(sys.modules), "the parent loaded them"
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks, and where processes are started."""
    (tmp_path / "my-tasks.py").write_text(TASKS)
    (tmp_path / "my_tasks.py").write_text(TASKS)
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def importable(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks can be loaded in this process, by what a child runs, and are gone afterwards."""
    monkeypatch.syspath_prepend(tasks)
    for name in ("my_tasks", "neighbour"):
        # As if it had been there: so that it is taken away in the end.
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]


def test_parent_without_torch_gets_the_same_model(tasks: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, "my-tasks.py:good"],
        cwd=tasks,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    task = task_of()
    here = compile_graphs(task, levels=(1.0,), batch_sizes=(8,))
    got = read_model(tasks / "out")
    assert got.plan == task.plan
    assert got.manifest == here.manifest
    assert got.files == here.files
    assert set(got.weights) == set(task.weights)
    for name, array in task.weights.items():
        np.testing.assert_array_equal(got.weights[name], array)


@pytest.mark.usefixtures("importable")
def test_child_passes_buffers_on_and_makes_the_graphs_a_rule_needs(tasks: Path) -> None:
    wanted = ["--level=1.0", "--distillation", "--class-masks", "--half"]
    assert child.main(["my_tasks:normalised", "out", *wanted]) == 0
    model = read_model(tasks / "out")
    masked = {entry.kind for entry in model.manifest.graphs if "classes" in entry.input_names}
    assert masked == {"gradient", "distillation", "gradient-fp16"}
    torch.manual_seed(3)
    mean = torch.empty(4).uniform_(-1, 1)
    np.testing.assert_array_equal(model.buffers["1.running_mean"], mean.numpy())
    np.testing.assert_array_equal(model.buffers["1.running_var"], np.ones(4, np.float32))
    assert set(model.weights) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.usefixtures("importable")
def test_child_uses_the_cache(tasks: Path) -> None:
    cache = tasks / "cache"
    assert child.main(["my_tasks:own_loss", "first", f"--cache-dir={cache}"]) == 0
    first = read_model(tasks / "first")
    assert first.manifest.loss == "custom"
    stored = files_of(cache)
    assert len(stored) == len(first.files) + 1
    again = compile_in_child("my_tasks:own_loss", cache_dir=cache)
    assert (again.manifest, again.files) == (first.manifest, first.files)
    assert files_of(cache) == stored  # the key is the same in another process


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("neighbour:good", "task 'neighbour:good' did not compile: neighbour has no function"),
        ("broken:task", "(?s)Traceback.*ZeroDivisionError: in the task's own code"),
    ],
)
def test_failure_is_told_as_the_child_said_it(tasks: Path, reference: str, said: str) -> None:
    (tasks / "broken.py").write_text("""raise ZeroDivisionError("in the task's own code")\n""")
    with pytest.raises(GraphCompileError, match=said):
        compile_in_child(reference)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("unsupported", r"aten\.i0 \(module '1'\)"),
        ("number", "^my_tasks:number returned int, not a Task\n$"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_child_says_what_cannot_be_compiled(
    capsys: pytest.CaptureFixture[str], function: str, said: str
) -> None:
    assert child.main([f"my_tasks:{function}", "out"]) == 1
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("my_tasks", "not 'my_tasks'"),
        (":good", "not ':good'"),
        ("my_tasks:", "not 'my_tasks:'"),
        ("my_tasks:a b", "package.module:function"),
    ],
)
def test_reference_of_another_form_is_refused(reference: str, said: str) -> None:
    with pytest.raises(GraphCompileError, match=said):
        compile_in_child(reference)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere.py:good", "no file .*nowhere.py"),
        ("no_such_package.tasks:good", "no module 'no_such_package.tasks'"),
        ("my_tasks:bad", "my_tasks has no function 'bad'"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_reference_to_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], reference: str, said: str
) -> None:
    assert child.main([reference, "out"]) == 1
    assert re.search(said, capsys.readouterr().err)


def test_child_that_takes_too_long_is_ended(tasks: Path) -> None:
    (tasks / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(GraphCompileError, match=r"took longer than 0\.5 s"):
        compile_in_child("slow:task", timeout_s=0.5)


def test_nothing_asked_for_is_refused() -> None:
    with pytest.raises(GraphCompileError, match="at least one level"):
        compile_in_child("my_tasks:good", levels=())
