"""`tessera-device explain`: everything a decision is made of."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="graphs are made by hand")

from edge_sdk.decide.decision import Decision, Policy
from edge_sdk.device.advice.explanation import Explanation, explain
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.participation import CONVERTED, NOTICE, OPENED
from edge_sdk.device.weighing import make_costing
from edge_sdk.machine.probe import StaticProbe
from edge_sdk.machine.snapshot import Battery, Heat, MemoryState, Snapshot, Trip, Zone
from edge_sdk.protocol.chunks import Blob, split_blob
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.transfer import TaskNotice
from edge_sdk.protocol.messages.wire import decode_message, encode_message
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.onnx import OnnxBackend
from tests.messages import make_opening
from tests.unit.edge_sdk.train.handmade import CLASSES, INPUTS, Handmade, bundle

BOARD = Snapshot(
    battery=Battery(present=False),
    memory=MemoryState(available_bytes=4e9, pressure=0.0),
    heat=Heat(zones=(Zone(name="cpu", celsius=51, trips=(Trip(kind="passive", celsius=85),)),)),
)


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    """A device that has taken part in a task."""
    return device_of(tmp_path, *bundle(Handmade()), inputs=(INPUTS,))


def device_of(
    tmp_path: Path,
    plan: ModelPlan,
    manifest: Manifest,
    files: Mapping[str, bytes],
    *,
    inputs: tuple[int, ...],
) -> DeviceConfig:
    folder = tmp_path / "state" / "toy" / "pi"
    (folder / "chunks").mkdir(parents=True)

    def kept(data: bytes) -> Blob:
        blob, chunks = split_blob(data, 1024)
        for name, chunk in chunks.items():
            (folder / "chunks" / name.hex()).write_bytes(chunk)
        return blob

    notice = TaskNotice(
        task="toy",
        run="0123456789abcdef",
        plan=kept(plan.encoded),
        manifest=kept(manifest.encoded),
        graphs={name: kept(data) for name, data in files.items()},
        chunk_bytes=1024,
    )
    opened = make_opening(plan_hash=plan.hash, steps=5, batch_size=4, train_deadline_s=1e6)
    (folder / NOTICE).write_bytes(encode_message(notice))
    (folder / OPENED).write_bytes(encode_message(opened))
    data = tmp_path / "data"
    data.mkdir()
    np.savez(
        data / "own.npz",
        x=np.zeros((8, *inputs), dtype=np.float32),
        y=np.arange(8, dtype=np.int64) % CLASSES,
    )
    return DeviceConfig(task="toy", name="pi", state_dir=tmp_path / "state", data=str(data))


def lines(explanation: Explanation) -> dict[str, list[str]]:
    """What is printed, by heading."""
    said: dict[str, list[str]] = {}
    for line in explanation.lines():
        if not line.startswith(" "):
            said[line] = []
        else:
            said[list(said)[-1]].append(line.strip())
    return said


def test_board_on_mains_trains_all_and_says_what_it_costs(config: DeviceConfig) -> None:
    explanation = explain(config, StaticProbe(BOARD))
    assert explanation.missing is None
    assert [cost.level for cost in explanation.costs] == [1.0, 0.75, 0.5, 0.25]
    assert all(0 < cost.seconds < math.inf and cost.peak_bytes > 0 for cost in explanation.costs)
    said = lines(explanation)
    assert said["decision"] == ["full model: all of it fits"]
    assert said["for the next level up"] == ["there is none: this is the whole model"]
    assert len(said["levels"]) == 5
    assert "heat     open    cpu 51 °C < 75 °C" in said["gates"]
    assert said["seen"] == [
        "memory   4,000 MB free, pressure 0 % (programs waiting for memory)",
        "battery  none: on mains",
        "heat     cpu 51 °C",
    ]
    json.dumps(explanation.to_dict(), allow_nan=False)


def test_second_pass_is_told(config: DeviceConfig) -> None:
    path = config.state_dir / "toy" / "pi" / OPENED
    opened = decode_message(path.read_bytes())
    assert isinstance(opened, RoundOpen)
    rule = replace(opened.local_rule, widths="sandwich")
    path.write_bytes(encode_message(replace(opened, local_rule=rule, levels=(1.0, 0.5))))
    explanation = explain(config, StaticProbe(BOARD))
    (said,) = lines(explanation)["decision"]
    assert said == "full model: all of it fits; a second, narrower pass a step fits"
    told = explanation.to_dict()
    assert told["passes"] == 2
    assert [level["second_s"] > 0 for level in told["levels"]] == [True, True, False, False]


def test_data_beyond_the_limit_is_mapped(config: DeviceConfig) -> None:
    np.savez(
        f"{config.data}/own.npz",
        x=np.zeros((70_000, INPUTS), dtype=np.float32),
        y=np.arange(70_000) % CLASSES,
    )
    assert explain(replace(config, data_mb=1), StaticProbe(BOARD)).missing is None
    assert list((config.state_dir / "toy" / "pi" / CONVERTED).glob("*/x0.bin"))


def test_lack_of_memory_is_what_the_next_level_is_short_of(config: DeviceConfig) -> None:
    explain(config, StaticProbe(BOARD))  # measures
    less = replace(BOARD, memory=MemoryState(available_bytes=1.25e6))
    explanation = explain(config, StaticProbe(less))
    assert explanation.decision.level is None
    assert explanation.decision.code == "memory"
    least = explanation.costs[-1].peak_bytes
    assert explanation.short_of() == f"level 25% needs {least / 1e6:.0f} MB, 1 MB free"


def test_closed_gate_comes_before_everything(config: DeviceConfig) -> None:
    low = replace(BOARD, battery=Battery(present=True, percent=24, charging=False))
    explanation = explain(config, StaticProbe(low))
    assert explanation.decision.reason == "skip: battery 24 % < 30 % and not charging"
    assert explanation.short_of() == (
        "the gate battery has to open: battery 24 % < 30 % and not charging"
    )


def test_device_without_a_task_says_what_is_missing(config: DeviceConfig, tmp_path: Path) -> None:
    new = replace(config, state_dir=tmp_path / "new")
    explanation = explain(new, StaticProbe(BOARD))
    assert explanation.missing == ("costs are known once this device has taken part in toy")
    assert not (tmp_path / "new").exists()
    unweighed = explain(replace(config, weigh=False, policy=Policy(level=0.5)), StaticProbe(BOARD))
    assert unweighed.missing == "weigh is false"
    assert unweighed.decision.level == 0.5


def test_chunk_that_is_gone_is_told(config: DeviceConfig) -> None:
    for path in (config.state_dir / "toy" / "pi" / "chunks").iterdir():
        path.unlink()
    explanation = explain(config, StaticProbe(BOARD))
    assert explanation.missing is not None
    assert explanation.missing.startswith("costs are not known: ")


def test_command_explains_this_machine(config: DeviceConfig, tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    path.write_text(f'task = "toy"\nname = "pi"\ndata = "data"\nstate_dir = "{config.state_dir}"\n')
    kept = {key: text for key, text in os.environ.items() if not key.startswith("TESSERA_")}
    done = subprocess.run(
        [sys.executable, "-m", "edge_sdk.cli", "explain", "--config", str(path), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=kept,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["not_weighed"] is None
    assert [each["name"] for each in told["gates"]] == [
        "battery",
        "heat",
        "network",
        "memory",
        "hours",
    ]
    assert told["level"] is None or told["level"] in (1.0, 0.75, 0.5, 0.25)


def test_ways_to_compute_are_shown(tmp_path: Path) -> None:
    """A convolution can be computed in several ways; what is fastest here is found out once."""
    pytest.importorskip("torch", reason="needs torch: a task is compiled")
    from torch import nn

    from benchmarks.models import Family
    from coordinator.task.graphs.compilation import compile_graphs
    from coordinator.task.task import make_task

    family = Family(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 3)
        ),
        (3, 6, 6),
        3,
    )
    task = make_task(family.model(), family.inputs(2), groups=4)
    graphs = compile_graphs(task)
    config = device_of(tmp_path, task.plan, graphs.manifest, graphs.files, inputs=(3, 6, 6))
    explanation = explain(config, StaticProbe(BOARD))
    assert explanation.tuned is None
    (first,) = lines(explanation)["ways to compute"]
    assert first.startswith("the default ones; the device looks for faster ones")
    assert explanation.to_dict()["ways"] is None
    backend = OnnxBackend(task.plan, graphs.manifest, graphs.files)
    folder = config.state_dir / "toy" / "pi"
    costs = make_costing(config, StaticProbe(BOARD), backend, graphs.manifest, folder, 8)
    costs.renew(lambda: False)  # as the device does when it is idle
    explanation = explain(config, StaticProbe(BOARD))
    said = lines(explanation)["ways to compute"]
    assert [line.partition("%")[0] for line in said] == ["25", "50", "75", "100"]
    assert all(line.endswith("of the default's time") for line in said)
    told = explanation.to_dict()["ways"]
    assert [each["level"] for each in told] == [0.25, 0.5, 0.75, 1.0]
    assert explain(config, StaticProbe(BOARD)).tuned == explanation.tuned == costs.tuned
    alone = replace(config, tune=False)
    assert explain(alone, StaticProbe(BOARD)).tuned == ()
    assert "ways to compute" not in lines(explain(alone, StaticProbe(BOARD)))


def test_device_with_fp16_graphs_says_that_they_have_no_choice() -> None:
    explanation = Explanation(
        BOARD,
        [],
        (),
        [],
        Decision(None, "skip"),
        None,
        only_default="graphs in fp16 have no others",
    )
    said = lines(explanation)["ways to compute"]
    assert said == ["the default ones: graphs in fp16 have no others"]
