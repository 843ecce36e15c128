"""Saved models and exports: what comes back is what went in, and computes what torch does."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")

import onnxruntime
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from benchmarks.models import resnet
from coordinator.cli import main
from coordinator.errors import ConfigError
from coordinator.task.export import FORMATS, export_model, pick_level
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.levels import LevelScore, LevelScores, level_model
from coordinator.task.saved_model import Origin, SavedModel, load_weights, read_model, save_model
from coordinator.task.task import Task, make_task
from edge_sdk.protocol.errors import GraphError, PlanError, ProtocolError, TensorError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.graphs import Port, SizeTerm


class TwoInputs(nn.Module):
    """Numbers and tokens, each with a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.dense = nn.Linear(5, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.dense(numbers) + self.table(tokens).mean(1))
        out: torch.Tensor = self.out(hidden)
        return out


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(72, 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model with weights and statistics that no fresh one has, and how to make inputs for it."""

    module: nn.Module
    task: Task
    saved: SavedModel
    inputs: Callable[[int], tuple[Array, ...]]

    def expected(self, samples: int) -> Array:
        """What the torch module itself says."""
        with torch.no_grad():
            outputs = self.module.eval()(*(torch.from_numpy(a) for a in self.inputs(samples)))
        return np.asarray(outputs.numpy())


def images(samples: int) -> tuple[Array, ...]:
    return (np.random.default_rng(5).normal(size=(samples, 1, 8, 8)).astype(np.float32),)


def numbers_and_tokens(samples: int) -> tuple[Array, ...]:
    random = np.random.default_rng(6)
    numbers = random.normal(size=(samples, 5)).astype(np.float32)
    return numbers, random.integers(0, 11, size=(samples, 7))


CASES = {"batch-norm": (batch_norm, images), "two-inputs": (TwoInputs, numbers_and_tokens)}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    make, inputs = CASES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()
    task = make_task(module, tuple(torch.from_numpy(a) for a in inputs(2)), groups=4)
    graphs = compile_graphs(task)
    random = np.random.default_rng(7)
    state = {
        name: torch.from_numpy(random.uniform(0.1, 0.9, size=t.shape).astype(np.float32))
        if t.is_floating_point()
        else t + 3
        for name, t in module.state_dict().items()
    }
    module.load_state_dict(state)
    weights, buffers = task.traced.weights_of(module), task.traced.buffers_of(module)
    saved = SavedModel(task.plan, weights, buffers, graphs.manifest, graphs.files)
    return Case(module, task, saved, inputs)


@pytest.fixture
def folder(case: Case, tmp_path: Path) -> Path:
    save_model(case.saved, tmp_path / "model")
    return tmp_path / "model"


def same(one: dict[str, Array], two: dict[str, Array]) -> bool:
    return set(one) == set(two) and all(
        one[name].dtype == two[name].dtype and np.array_equal(one[name], two[name]) for name in one
    )


def test_saved_model_is_read_as_it_was(case: Case, folder: Path) -> None:
    read = read_model(folder)
    assert read.plan == case.saved.plan
    assert read.manifest == case.saved.manifest
    assert read.files == case.saved.files
    assert same(dict(read.weights), dict(case.saved.weights))
    assert same(dict(read.buffers), dict(case.saved.buffers))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_onnx_export_computes_what_torch_does(case: Case, tmp_path: Path, samples: int) -> None:
    export_model(case.saved, "onnx", tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    inputs = case.inputs(samples)
    names = [f"x{number}" for number in range(len(inputs))]
    assert [node.name for node in session.get_inputs()] == names
    assert [tuple(node.shape) for node in session.get_inputs()] == [
        ("batch", *array.shape[1:]) for array in inputs
    ]
    (output,) = session.get_outputs()
    (got,) = session.run(None, dict(zip(names, inputs, strict=True)))
    wanted = case.expected(samples)
    assert output.name == "outputs"
    assert tuple(output.shape) == ("batch", wanted.shape[1])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    traced = case.task.traced.predict(case.saved.weights, case.saved.buffers, inputs)
    np.testing.assert_allclose(got, traced, rtol=1e-5, atol=1e-5)


def halved(case: Case, rescale: float) -> SavedModel:
    """The model, saved with a level ½ of groups 1 and 3, which is the one to deploy."""
    plan = case.task.plan
    half = LevelScore(0.5, {axis.name: (1, 3) for axis in plan.axes}, 0.9)
    levels = LevelScores((LevelScore(1.0, plan.all_groups(), 0.8), half), rescale)
    return replace(case.saved, levels=levels)


def test_level_is_exported_as_a_model_that_computes_what_torch_does(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a saved model, with statistics of unlabelled samples; the command's default level."""
    saved, inputs = halved(case, 0.5), case.inputs(40)
    save_model(saved, tmp_path / "model")
    samples: dict[str, Any] = {f"x{number}": array for number, array in enumerate(inputs)}
    np.savez(tmp_path / "samples.npz", **samples)
    command = ["export", str(tmp_path / "model"), "--format", "onnx"]
    command += ["--out", str(tmp_path / "m.onnx"), "--samples", str(tmp_path / "samples.npz")]
    assert main(command) == 0
    groups = saved.levels.by_level[0.5].groups
    parameters = case.task.plan.submodel_parameters(groups)
    assert f"level 0.5, {parameters:,} parameters" in capsys.readouterr().out
    wanted = level_model(
        case.task.traced, saved.weights, saved.buffers, 0.5, groups, rescale=0.5, samples=inputs
    )
    outputs = case.task.traced.predict(
        wanted.weights, wanted.buffers, inputs, groups=groups, rescale=0.5
    )
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, samples)
    np.testing.assert_allclose(got, outputs, rtol=1e-4, atol=1e-4)
    assert np.abs(got - case.expected(40)).max() > 1e-2


def test_level_without_scales_is_exported_as_a_narrow_state(case: Case, tmp_path: Path) -> None:
    """And with the statistics of its last evaluation, as a saved model has them."""
    saved, inputs = halved(case, 0.0), case.inputs(40)
    groups = saved.levels.by_level[0.5].groups
    part = level_model(
        case.task.traced, saved.weights, saved.buffers, 0.5, groups, rescale=0.0, samples=inputs
    )
    whole, half = saved.levels.levels
    scored = replace(saved.levels, levels=(whole, replace(half, statistics=part.statistics)))
    save_model(replace(saved, levels=scored), tmp_path / "model")
    read = read_model(tmp_path / "model")
    assert read.levels.accuracies == {1.0: 0.8, 0.5: 0.9}
    export_model(read, "safetensors", tmp_path / "m.safetensors")
    state = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    assert same(state, {**part.weights, **part.buffers})


def test_level_with_untrained_weights_is_not_the_one_to_deploy(case: Case) -> None:
    """However accurate it is: while a model grows, its larger levels are partly as they were."""
    saved, plan = halved(case, 0.0), case.task.plan
    quarter = LevelScore(0.25, {axis.name: (1,) for axis in plan.axes}, 0.5)
    levels = replace(saved.levels, levels=(*saved.levels.levels, quarter))
    trained = plan.covers(plan.choose(quarter.groups))
    origin = Origin("toy", "0123456789abcdef", 2, trained)
    growing = replace(saved, levels=levels, origin=origin)
    samples = case.inputs(8)
    assert pick_level(growing, samples=samples).level == 0.25
    assert pick_level(replace(growing, origin=None), samples=samples).level == 0.5


def test_level_that_cannot_be_exported_is_refused(case: Case, tmp_path: Path) -> None:
    samples, path = case.inputs(4), tmp_path / "m"
    with pytest.raises(ConfigError, match=r"has no level 0\.3; its levels are 1, 0\.5"):
        export_model(halved(case, 0.5), "onnx", path, level=0.3)
    with pytest.raises(ConfigError, match="its levels are 1 alone"):
        export_model(case.saved, "onnx", path, level=0.5)
    with pytest.raises(ConfigError, match=r"rescale = 0\.5.*--format onnx"):
        export_model(halved(case, 0.5), "torch", path, samples=samples)
    if case.task.buffers:
        with pytest.raises(ConfigError, match=r"statistics of its own.*--samples"):
            export_model(halved(case, 0.0), "onnx", path)
    assert not path.exists()
    export_model(halved(case, 0.5), "torch", path, level=1.0)
    assert same_as_module(case, path)


def same_as_module(case: Case, path: Path) -> bool:
    state, wanted = torch.load(path, weights_only=True), case.module.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def static(saved: SavedModel, batch: int) -> SavedModel:
    """The same model, had its evaluation graph been compiled for one batch size."""

    def fixed(port: Port) -> Port:
        dims = (
            SizeTerm(dim.coefficient * batch, dim.axes) if dim.batch else dim for dim in port.dims
        )
        return replace(port, dims=tuple(dims))

    entries = tuple(
        entry
        if entry.kind == "gradient"
        else replace(
            entry,
            batch=batch,
            activations=(),
            products=(),
            inputs=tuple(fixed(port) for port in entry.inputs),
            outputs=tuple(fixed(port) for port in entry.outputs),
        )
        for entry in saved.manifest.graphs
    )
    return replace(saved, manifest=replace(saved.manifest, graphs=entries))


def test_onnx_export_of_a_static_graph_keeps_its_batch(case: Case, tmp_path: Path) -> None:
    export_model(static(case.saved, 4), "onnx", tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert {node.shape[0] for node in (*session.get_inputs(), *session.get_outputs())} == {4}
    feeds = {f"x{number}": array for number, array in enumerate(case.inputs(4))}
    np.testing.assert_allclose(session.run(None, feeds)[0], case.expected(4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_state_export_loads_into_the_torch_module(case: Case, tmp_path: Path, format: str) -> None:
    path = tmp_path / "file"
    export_model(case.saved, format, path)
    if format == "torch":
        state = torch.load(path, weights_only=True)
    else:
        state = safetensors.torch.load_file(path)
    wanted = case.module.state_dict()
    assert set(state) == set(wanted)
    for name, tensor in wanted.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)


@pytest.mark.parametrize("format", FORMATS)
def test_export_is_the_same_bytes_each_time(case: Case, tmp_path: Path, format: str) -> None:
    for name in ("a", "b"):
        export_model(case.saved, format, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("format", "suffix"), [("safetensors", ".safetensors"), ("torch", ".pt"), ("torch", ".pth")]
)
def test_weights_exported_can_be_loaded_again(
    case: Case, tmp_path: Path, format: str, suffix: str
) -> None:
    path = tmp_path / f"file{suffix}"
    export_model(case.saved, format, path)
    weights, buffers = load_weights(path, case.saved.plan)
    assert same(weights, dict(case.saved.weights))
    assert same(buffers, dict(case.saved.buffers))


def test_buffers_the_file_lacks_are_those_given(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file(dict(case.saved.weights), path)
    weights, buffers = load_weights(path, case.saved.plan, buffers=case.saved.buffers)
    assert same(weights, dict(case.saved.weights))
    assert same(buffers, dict(case.saved.buffers))


Change = Callable[[dict[str, torch.Tensor], str], object]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state, name: state.pop(name), "'{name}' is missing"),
        (lambda state, name: state.update(extra=torch.ones(1)), "unknown tensor 'extra'"),
        (
            lambda state, name: state.update({name: torch.ones(2, 2, 2)}),
            r"'{name}' has shape \(2, 2, 2\), not \(",
        ),
        (
            lambda state, name: state.update({name: state[name].double()}),
            "'{name}' is float64; the plan says float32",
        ),
        (lambda state, name: state.update({name: state[name].bfloat16()}), "(?i)bf"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "bfloat16"],
)
def test_weights_that_do_not_fit_are_refused(
    case: Case, tmp_path: Path, suffix: str, change: Change, says: str
) -> None:
    state = {name: tensor.clone() for name, tensor in case.module.state_dict().items()}
    name = case.saved.plan.tensors[0].name
    change(state, name)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(state, path)
    with pytest.raises(TensorError, match=says.replace("{name}", name)) as raised:
        load_weights(path, case.saved.plan)
    assert str(path) in str(raised.value)


class Trap:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_weights_in_a_file_that_holds_none_are_refused(case: Case, tmp_path: Path) -> None:
    plan = case.saved.plan
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "nested.pt")
    (tmp_path / "trap.pt").write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    for name in ("junk.pt", "junk.safetensors", "junk.txt"):
        (tmp_path / name).write_bytes(b"\xffjunk" * 9)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "empty.safetensors").touch()
    for name, says in {
        "list.pt": "holds list, not a state_dict",
        "nested.pt": "entry 'model' is dict, not a tensor",
        "trap.pt": "can load safely",
        "junk.pt": "can load safely",
        "empty.pt": "can load safely",
        "junk.safetensors": "not a readable safetensors file",
        "empty.safetensors": "not a readable safetensors file",
    }.items():
        with pytest.raises(TensorError, match=says):
            load_weights(tmp_path / name, plan)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((tmp_path / "trap.pt").read_bytes())
    assert (tmp_path / "sprung").exists(), "the trap does not work"
    for name, says in {"junk.txt": "must end in one of", "none.pt": "not a file"}.items():
        with pytest.raises(ConfigError, match=says):
            load_weights(tmp_path / name, plan)


def test_model_is_not_saved_over_anything(case: Case, folder: Path) -> None:
    before = (folder / "plan.bin").read_bytes()
    with pytest.raises(ConfigError, match="not empty"):
        save_model(case.saved, folder)
    with pytest.raises(ConfigError, match="is a file"):
        save_model(case.saved, folder / "plan.bin")
    with pytest.raises(ConfigError, match="parent"):
        save_model(case.saved, folder / "a" / "b")
    assert (folder / "plan.bin").read_bytes() == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("pattern", "damage", "error", "says"),
    [
        ("plan.bin", Path.unlink, ConfigError, r"not a saved model: it has no plan\.bin"),
        ("weights.safetensors", Path.unlink, ConfigError, "it has no weights"),
        ("manifest.bin", Path.unlink, ConfigError, "it has no manifest"),
        ("plan.bin", flip, PlanError, r"plan\.bin: "),
        ("manifest.bin", flip, GraphError, r"manifest\.bin: .*damaged"),
        ("graphs/*.onnx", Path.unlink, GraphError, "is missing"),
        ("graphs/*.onnx", flip, GraphError, "damaged or altered"),
    ],
)
def test_damaged_folder_is_refused(
    folder: Path,
    pattern: str,
    damage: Callable[[Path], None],
    error: type[Exception],
    says: str,
) -> None:
    damage(sorted(folder.glob(pattern))[0])
    with pytest.raises(error, match=says):
        read_model(folder)


def test_folder_put_together_from_two_models_is_refused(case: Case, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        other = make_task(
            nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.ones(2, 3), groups=2
        )
    (folder / "plan.bin").write_bytes(other.plan.encoded)
    with pytest.raises(ProtocolError, match=r"weights\.safetensors: unknown tensor"):
        read_model(folder)
    safetensors.numpy.save_file(other.weights, folder / "weights.safetensors")
    with pytest.raises(GraphError, match="made for plan"):
        read_model(folder)


@pytest.mark.parametrize("format", FORMATS)
def test_export_command_replaces_only_if_told(
    folder: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "out"
    out.write_text("dear to somebody")
    command = ["export", str(folder), "--format", format, "--out", str(out)]
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "dear to somebody"
    assert main([*command, "--force"]) == 0
    assert f"{out.stat().st_size:,} B" in capsys.readouterr().out
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "out"]


@pytest.mark.parametrize(
    ("model", "out", "says"),
    [
        ("none", "out", "not there"),
        ("model/plan.bin", "out", "a file"),
        ("model/graphs", "out", "not a saved model"),
        ("model", "model", "name a file"),
        ("model", "none/out", "name a file"),
    ],
)
def test_export_command_refuses_in_words(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, out: str, says: str
) -> None:
    at = folder.parent
    assert main(["export", str(at / model), "--format", "onnx", "--out", str(at / out)]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in at.iterdir()] == ["model"]


class Tied(nn.Module):
    """Shares a weight between two layers, and has a buffer that torch does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.dense = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("ones", torch.ones(12), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.dense(self.table(tokens).mean(1)))) * self.ones
        return out


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_tied_weights_are_all_there(tmp_path: Path, format: str) -> None:
    module = Tied()
    task = make_task(module, torch.zeros(2, 5, dtype=torch.int64), groups=4)
    graphs = compile_graphs(task, levels=(1.0, 0.5), batch_sizes=(4,))
    half = LevelScore(0.5, {axis.name: (1, 3) for axis in task.plan.axes})
    levels = LevelScores((LevelScore(1.0, task.plan.all_groups()), half))
    manifest, files = graphs.manifest, graphs.files
    saved = SavedModel(task.plan, task.weights, task.buffers, manifest, files, levels, task.names)
    save_model(saved, tmp_path / "model")
    saved = read_model(tmp_path / "model")
    for level in (1.0, 0.5):
        path = tmp_path / f"{level:g}"
        export_model(saved, format, path, level=level)
        if format == "torch":
            state = torch.load(path, weights_only=True)
        else:
            state = safetensors.torch.load_file(path)
        assert torch.equal(state["table.weight"], state["out.weight"])
        if level == 1:
            fresh = Tied()
            fresh.load_state_dict(state, strict=True)
            tokens = torch.arange(10).reshape(2, 5)
            assert torch.equal(fresh(tokens), module(tokens))


def test_exported_file_says_what_it_is(case: Case, tmp_path: Path) -> None:
    """The hash is that of weights and buffers, computed here in a naive way."""
    plan = case.task.plan
    origin = Origin("toy", "0123456789abcdef", 7, np.ones(plan.block_count, dtype=bool))
    levels = LevelScores((LevelScore(1.0, plan.all_groups(), 0.8),))
    names = tuple("abcd"[: case.expected(1).shape[1]])
    data = case.saved.manifest.data.described(classes=names)
    manifest = replace(case.saved.manifest, data=data)
    model = replace(case.saved, origin=origin, levels=levels, manifest=manifest)
    export_model(model, "onnx", tmp_path / "m.onnx")
    export_model(model, "safetensors", tmp_path / "m.safetensors")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["tessera"]) == facts
    wanted = hashlib.sha256()
    for name, array in sorted(model.arrays.items()):
        wanted.update(f"{name}\n{array.dtype}\n{list(array.shape)}\n".encode() + array.tobytes())
    assert facts["tessera.hash"] == wanted.hexdigest()
    found = [facts[f"tessera.{name}"] for name in ("task", "run", "round", "level", "accuracy")]
    assert found == ["toy", "0123456789abcdef", "7", "1", "0.8"]
    described = json.loads(facts["tessera.data"])
    assert described["classes"] == list(names)
    arrays = case.inputs(1)
    assert [each["type"] for each in described["inputs"]] == [array.dtype.name for array in arrays]
    assert [each["shape"] for each in described["inputs"]] == [list(a.shape[1:]) for a in arrays]
    assert described["targets"] == {"type": "int64", "shape": [], "highest": len(names) - 1}


def test_export_replaces_nothing_but_files(case: Case, tmp_path: Path) -> None:
    """A device, such as /dev/null, is a path that exists, too; a pipe stands for it here."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="name a file"):
        export_model(case.saved, "onnx", tmp_path / "pipe", force=True)
    assert (tmp_path / "pipe").is_fifo()


def test_export_of_unknown_format_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format 'gguf'; choose one of onnx"):
        export_model(case.saved, "gguf", tmp_path / "out")


def test_export_needs_no_torch(folder: Path) -> None:
    """But for the format that is torch's own."""
    code = "import sys; sys.modules['torch'] = None; from coordinator.cli import main; "
    for format, returns in {"onnx": 0, "safetensors": 0, "torch": 2}.items():
        out = folder.parent / format
        command = ["export", str(folder), "--format", format, "--out", str(out)]
        result = subprocess.run(
            [sys.executable, "-c", code + f"sys.exit(main({command!r}))"],
            capture_output=True,
            text=True,
        )
        assert result.returncode == returns, result.stderr
        assert out.exists() == (returns == 0)
    assert "torch is not installed" in result.stderr


# -- regions by depth ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> tuple[nn.Module, SavedModel]:
    """Three residual blocks with BatchNorm; its second level has one of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = resnet(nn.BatchNorm2d, (4,), 3)
    task = make_task(module, torch.randn(2, 3, 6, 6), regions="depth")
    graphs = compile_graphs(task, levels=(1.0, 0.34))
    levels = LevelScores(
        (LevelScore(1.0, {"blocks": (0, 1, 2)}), LevelScore(0.34, {"blocks": (2,)}))
    )
    saved = SavedModel(task.plan, task.weights, task.buffers, graphs.manifest, graphs.files, levels)
    return module.eval(), saved


def test_stacks_are_saved_under_the_names_of_the_module(
    deep: tuple[nn.Module, SavedModel], tmp_path: Path
) -> None:
    module, saved = deep
    save_model(saved, tmp_path / "model")
    state = safetensors.torch.load_file(tmp_path / "model" / "weights.safetensors")
    assert set(state) == set(module.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    back = read_model(tmp_path / "model")
    for name, array in (*saved.weights.items(), *saved.buffers.items()):
        assert np.array_equal({**back.weights, **back.buffers}[name], array)
    torch.save(module.state_dict(), tmp_path / "init.pt")
    weights, _ = load_weights(tmp_path / "init.pt", saved.plan)
    assert all(np.array_equal(weights[name], saved.weights[name]) for name in saved.weights)


def test_level_with_fewer_blocks_is_exported_as_a_smaller_module(
    deep: tuple[nn.Module, SavedModel], tmp_path: Path
) -> None:
    module, saved = deep
    inputs = np.random.default_rng(1).normal(size=(20, 3, 6, 6)).astype(np.float32)
    part = export_model(saved, "torch", tmp_path / "out.pt", level=0.34, samples=(inputs,))
    small = resnet(nn.BatchNorm2d, (4,), 1)
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    head = {name: f"6.{name[2:]}" for name in state if name.startswith("8.")}
    small.load_state_dict({head.get(name, name): array for name, array in state.items()})
    with torch.no_grad():
        wanted = small.eval()(torch.from_numpy(inputs)).numpy()
    export_model(saved, "onnx", tmp_path / "out.onnx", level=0.34, samples=(inputs,))
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    (got,) = session.run(["outputs"], {"x0": inputs})
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert part.weights["*.conv1.weight"].shape == (1, 4, 4, 3, 3)
    assert np.array_equal(state["3.conv1.weight"], saved.weights["*.conv1.weight"][2])
    assert set(state) < set(module.state_dict())
