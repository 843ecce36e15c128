"""Graphs on disk: what is found again, what is not, and what is compiled anew."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from coordinator.task.graphs.cache import TRANSLATOR, cache_key, compiled_graphs
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task, make_task
from tests.unit.test_layers import imports


class Shifted(nn.Module):
    """A constant of forward() is part of the graph, unlike the weights."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(6, 4), nn.Linear(4, 3), shift

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x) + torch.tensor([self.shift])))
        return out


def task_of(
    *,
    seed: int = 0,
    middle: type[nn.Module] = nn.ReLU,
    width: int = 4,
    groups: int = 2,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "mse",
) -> Task:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), middle(), nn.Linear(width, 3))
    targets = None if isinstance(loss, str) else torch.zeros(2, 3)
    return make_task(model, torch.zeros(2, 6), loss=loss, groups=groups, example_targets=targets)


def shifted_task(shift: float, targets: Tensor | None = None) -> Task:
    return make_task(Shifted(shift), torch.zeros(2, 6), groups=2, example_targets=targets)


def scaled_loss(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: factor * (outputs - targets).abs().mean(1)


def tabled_loss(*table: float) -> Callable[[Tensor, Tensor], Tensor]:
    held = torch.tensor(table)
    return lambda outputs, targets: (held * (outputs - targets)).abs().mean(1)


def key_of(task: Task, levels: tuple[float, ...] = (1.0,), sizes: tuple[int, ...] = (8,)) -> str:
    return cache_key(task, levels, sizes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_cache_gives_what_was_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh = compile_graphs(task_of())
    assert compiled_graphs(task_of(), cache_dir=tmp_path) == fresh
    stored = files_of(tmp_path)
    names = {f"graphs/{digest}.onnx" for digest in fresh.files}
    assert len(stored) == len(names) + 1
    assert names < set(stored)
    caplog.set_level(logging.INFO, "coordinator.task.graphs")
    # Other weights, same graphs: nothing is compiled.
    assert compiled_graphs(task_of(seed=1), cache_dir=tmp_path) == fresh
    # Names of classes are the task's own, whoever compiled the graphs.
    names_of = tuple(f"class {number}" for number in range(task_of().data.class_count or 0))
    named = compiled_graphs(replace(task_of(), classes=names_of), cache_dir=tmp_path)
    assert (named.manifest.data.classes, named.files) == (names_of, fresh.files)
    assert not [record for record in caplog.records if record.name.startswith("coordinator.")]
    assert files_of(tmp_path) == stored


def empty(data: bytes) -> bytes:
    return b""


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize("damage", [empty, flip])
@pytest.mark.parametrize("suffix", [".bin", ".onnx"])
def test_damaged_entry_is_compiled_anew_and_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    suffix: str,
    damage: Callable[[bytes], bytes],
) -> None:
    fresh = compiled_graphs(task_of(), cache_dir=tmp_path)
    whole = files_of(tmp_path)
    path = tmp_path / next(name for name in whole if name.endswith(suffix))
    path.write_bytes(damage(path.read_bytes()))
    assert compiled_graphs(task_of(), cache_dir=tmp_path) == fresh
    assert [r.levelname for r in caplog.records if "unusable" in r.message] == ["WARNING"]
    assert files_of(tmp_path) == whole


def test_graph_that_is_gone_is_compiled_anew(tmp_path: Path) -> None:
    fresh = compiled_graphs(task_of(), cache_dir=tmp_path)
    whole = files_of(tmp_path)
    next(tmp_path.glob("graphs/*")).unlink()
    assert compiled_graphs(task_of(), cache_dir=tmp_path) == fresh
    assert files_of(tmp_path) == whole


def test_entry_of_another_plan_is_compiled_anew(tmp_path: Path) -> None:
    compiled_graphs(task_of(), cache_dir=tmp_path)
    (other,) = tmp_path.glob("*.bin")
    wide = task_of(width=6)
    key = cache_key(wide, (1.0,), (32,))
    other.rename(tmp_path / f"{key}.bin")
    graphs = compiled_graphs(wide, cache_dir=tmp_path, levels=(1.0,))
    assert graphs.manifest.plan_hash == wide.plan.hash


def test_failed_write_leaves_the_entry_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_graphs(task_of(), cache_dir=tmp_path)
    before = files_of(tmp_path)

    def full(source: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        compiled_graphs(task_of(width=6), cache_dir=tmp_path)
    assert files_of(tmp_path) == before


def test_key_is_the_same_for_the_same_task() -> None:
    assert key_of(task_of()) == key_of(task_of(seed=1))
    assert key_of(task_of(loss=scaled_loss(2.0))) == key_of(task_of(loss=scaled_loss(2.0)))
    assert key_of(shifted_task(1.0)) == key_of(shifted_task(1.0))


def test_key_differs_with_all_that_graphs_follow_from() -> None:
    task = task_of()
    keys = [
        key_of(task),
        key_of(task, levels=(1.0, 0.5)),
        key_of(task, sizes=(16,)),
        cache_key(task, (1.0,), (8,), distillation=True),
        cache_key(task, (1.0,), (8,), class_masks=True),
        cache_key(task, (1.0,), (8,), half=True),
        key_of(task_of(middle=nn.Tanh)),  # same plan, another program
        key_of(task_of(width=6)),
        key_of(task_of(groups=4)),
        key_of(task_of(loss="bce-with-logits")),
        key_of(task_of(loss=scaled_loss(2.0))),
        key_of(task_of(loss=scaled_loss(3.0))),  # same name and source, another number
        key_of(task_of(loss=tabled_loss(1.0, 2.0, 3.0))),
        key_of(task_of(loss=tabled_loss(1.0, 2.0, 4.0))),
        key_of(shifted_task(1.0)),
        key_of(shifted_task(2.0)),
        key_of(shifted_task(1.0, torch.zeros(2, dtype=torch.uint8))),  # labels of another type
    ]
    assert len(set(keys)) == len(keys)


def test_key_covers_the_code_that_compiles() -> None:
    """The folders whose code the key hashes have all that they import, but files and processes."""
    folders = tuple(folder.replace("/", ".") + "." for folder in TRANSLATOR)
    package = Path(inspect.getfile(make_task)).parent
    compiler = [
        package / "task.py",
        *package.glob("graphs/**/*.py"),
        *package.glob("tracing/**/*.py"),
    ]
    found = {name for path in compiler for name in imports(path)}
    ours = {f"{name}." for name in found if name.startswith(("coordinator.", "edge_sdk."))}
    assert any(name.startswith("edge_sdk.protocol.") for name in ours)
    rest = ("coordinator.errors.", "edge_sdk.program.")
    assert {name for name in ours if not name.startswith((*folders, *rest))} == set()


@pytest.mark.parametrize("what", ["torch.__version__", "onnx.__version__"])
def test_key_differs_with_the_software(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of()
    before = key_of(task)
    monkeypatch.setattr(what, "0.0.1")
    assert key_of(task) != before
