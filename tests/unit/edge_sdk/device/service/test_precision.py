"""A device fetches and trains the graphs of one precision: its choice, or its hardware's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

from benchmarks.models import FAMILIES
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.device.config import DeviceConfig, load_config
from edge_sdk.device.service.participation import load_task
from edge_sdk.protocol.chunks import Blob, split_blob
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.local_rule import Precision
from edge_sdk.protocol.messages.transfer import TaskNotice
from edge_sdk.train.onnx import CPU, gradient_kind

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.fixture(scope="module")
def task() -> Task:
    model = FAMILIES["mlp"]
    return make_task(model.model(), model.inputs(2), groups=2)


@pytest.fixture(scope="module")
def graphs(task: Task) -> CompiledGraphs:
    return compile_graphs(task, half=True)


@pytest.mark.parametrize(
    ("precision", "providers", "half"),
    [
        ("auto", CPU, False),
        ("auto", (CUDA, *CPU), True),
        ("auto", (TENSORRT, CUDA, *CPU), True),
        ("auto", (*CPU, CUDA), False),  # the CPU takes everything
        ("auto", ("XnnpackExecutionProvider", *CPU), False),
        ("fp32", (CUDA, *CPU), False),
        ("fp16", CPU, True),
    ],
)
def test_precision_follows_choice_and_hardware(
    graphs: CompiledGraphs, precision: Precision, providers: tuple[str, ...], half: bool
) -> None:
    manifest = graphs.manifest
    kind = gradient_kind(manifest, providers, precision)
    assert kind == ("gradient-fp16" if half else "gradient")
    whole = tuple(each for each in manifest.graphs if each.kind != "gradient-fp16")
    without = replace(manifest, graphs=whole)
    assert gradient_kind(without, providers, precision) == "gradient"


@pytest.mark.parametrize(("precision", "kind"), [("auto", "gradient"), ("fp16", "gradient-fp16")])
def test_device_fetches_the_graphs_that_it_trains(
    task: Task, graphs: CompiledGraphs, tmp_path: Path, precision: Precision, kind: str
) -> None:
    held: dict[Blob, bytes] = {}
    fetched: list[bytes] = []

    def blob(data: bytes) -> Blob:
        made = split_blob(data, 4096)[0]
        held[made] = data
        return made

    def fetch(wanted: Blob, _: int, what: str) -> bytes:
        fetched.append(held[wanted])
        return held[wanted]

    notice = TaskNotice(
        task="digits",
        run="0" * 16,
        plan=blob(task.plan.encoded),
        manifest=blob(graphs.manifest.encoded),
        graphs={name: blob(file) for name, file in graphs.files.items()},
        chunk_bytes=4096,
    )
    config = DeviceConfig(task="digits", name="pi", state_dir=tmp_path, precision=precision)
    loaded = load_task(notice, config, fetch)
    assert loaded.backend.precision == ("fp16" if kind == "gradient-fp16" else "fp32")
    trains = [each.sha256 for each in graphs.manifest.graphs if each.kind == kind]
    assert [graphs.files[name] for name in trains] == fetched[2:]


def test_precision_is_one_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    path.write_text('task = "digits"\nprecision = "fp16"\n')
    assert load_config(path).precision == "fp16"
    path.write_text('task = "digits"\nprecision = "bf16"\n')
    with pytest.raises(ConfigError, match="precision"):
        load_config(path)
