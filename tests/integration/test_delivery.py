"""The trained model comes back: exported from a run, and delivered to its devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")

import onnxruntime
import torch

from coordinator.cli import main
from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.run.folder import About, Run, create_run, read_history
from coordinator.service.courses.parts import Evaluator
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.task.saved_model import SavedModel
from coordinator.task.task import Task
from edge_sdk import Model
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.service import DeviceService
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.train.inference import Predictor
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.integration.federations import random_data
from tests.integration.test_docs import ROOT, Block, blocks_of
from tests.integration.test_surveys import network, rounds, saved, task  # noqa: F401  fixtures
from tests.waiting import until

ABOUT = About(task="digits", run="0123456789abcdef", source="t.py:f", batch_size=8)
PAGE = blocks_of((ROOT / "docs/inference.md").read_text(), "docs/inference.md")


@contextmanager
def device(config: DeviceConfig, own: ArrayData) -> Iterator[Thread]:
    """A device at work in a thread."""
    service = DeviceService(config, own)
    thread = Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        service.stop()
        thread.join()


def configured(
    name: str, state: Path, broker: BrokerSettings, level: float = 1.0, **changes: object
) -> DeviceConfig:
    """Takes every model, whatever its own data says."""
    usual = {"task": ABOUT.task, "seed": 3, "weigh": False, "deliver_margin": 1.0}
    usual |= {"name": name, "state_dir": state, "broker": broker, "policy": Policy(level=level)}
    return DeviceConfig(**{**usual, **changes})  # type: ignore[arg-type]


def run_block(text: str, folder: Path, kind: str) -> str:
    """Run a block of the page as it is printed."""
    bin_folder = Path(sys.executable).parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", text]
    if kind == "python":
        text = f"import numpy as np; x = np.load('new.npz')['x']\n{text}\nprint(scores.sum())"
        command = [sys.executable, "-c", text]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, f"{text}{ended.stdout}{ended.stderr}"
    return ended.stdout


def facts_of(path: Path) -> dict[str, str]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts: dict[str, str] = session.get_modelmeta().custom_metadata_map
    return facts


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
def test_trained_model_comes_back(
    task: Task,  # noqa: F811
    saved: SavedModel,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Over Mosquitto: exported while the run goes on and after it, delivered at every level."""
    data = saved.manifest.data.described(classes=("a", "b", "c"))
    saved = replace(saved, manifest=replace(saved.manifest, data=data))
    folder, state = tmp_path / "run", tmp_path / "tessera-state"
    create_run(folder, ABOUT, saved)
    random = np.random.default_rng(5)
    test = random_data(random, 60)
    np.savez(tmp_path / "new.npz", x=test.inputs[0], y=test.targets)
    config = ServiceConfig(
        machine=rounds(task, min_devices=3, min_participants=2),
        down=Encoding(),
        keeping=Keeping(keep_last=1),
        chunk_bytes=1024,
    )
    evaluate = Evaluator(Predictor(saved.plan, saved.manifest, saved.files), test)
    half_onnx, half_pt = tmp_path / "mid.onnx", tmp_path / "half.pt"
    with ExitStack() as stack:
        broker = stack.enter_context(embedded_broker(tmp_path / "broker", kind="mosquitto"))
        run = stack.enter_context(Run(folder))
        service = Service(run, config, open_link=partial(open_link, broker), evaluate=evaluate)
        big = stack.enter_context(
            device(
                configured("big", tmp_path / "big", broker, deliver="best"), random_data(random, 40)
            )
        )
        half = stack.enter_context(
            device(configured("half", state, broker, 0.5), random_data(random, 30))
        )
        rests = Policy(participation=1e-9)
        stack.enter_context(
            device(
                configured("idle", tmp_path / "idle", broker, policy=rests),
                random_data(random, 20),
            )
        )
        # A round opens once all of its model is published.
        while getattr(service.course.state, "round", 2) < 2:
            service.pump()
            time.sleep(0.002)
        # A device that skips all training has its model while the run goes on.
        until(lambda: (tmp_path / "idle/digits/idle/model.bin").exists())
        assert Model.open(tmp_path / "idle", "digits").round == 1
        command = ["export", str(folder), "--format", "onnx", "--level", "0.5"]
        assert main([*command, "--out", str(half_onnx)]) == 0
        assert "round 1, level 0.5" in capsys.readouterr().out
        assert facts_of(half_onnx)["tessera.round"] == "1"
        service.serve(Event())
        service.close()
        big.join()
        half.join()  # each has its model, and ends
        # One that was never there before: all it needs is retained by the broker.
        late = configured("late", tmp_path / "late", broker, policy=Policy(level=0.5))
        DeviceService(late, random_data(random, 9)).run()
    history = list(read_history(folder))
    accuracies = [max(each["accuracy"] for each in line["levels"]) for line in history]
    best = 1 + accuracies.index(max(accuracies))
    narrow = history[-1]["levels"][1]["accuracy"]
    assert main(["evaluate", str(folder), "--level", "0.5"]) == 0
    assert f"accuracy {narrow:.2%}" in capsys.readouterr().out
    new = str(tmp_path / "new.npz")
    assert main(["evaluate", str(folder), "--level", "0.5", "--data", new]) == 0
    assert f"accuracy {narrow:.2%}" in capsys.readouterr().out

    table = tmp_path / "new.csv"  # whose label has a name of its own
    pairs = zip(test.inputs[0].tolist(), test.targets.tolist(), strict=True)
    rows = [[*map(repr, x), "abc"[y]] for x, y in pairs]
    header = [*(f"x{n}" for n in range(len(rows[0]) - 1)), "kind"]
    table.write_text("\n".join(",".join(row) for row in [header, *rows]))
    settings = tmp_path / "run.toml"
    settings.write_text(
        '[task]\nname = "digits"\nsource = "task.py:f"\n[run]\nfolder = "run"\n'
        '[format]\nlabel = "kind"\n'
    )
    asked = ["evaluate", str(folder), "--level", "0.5", "--data", str(table)]
    assert main(asked) == 2
    assert main([*asked, "--config", str(settings)]) == 0
    assert f"accuracy {narrow:.2%}" in capsys.readouterr().out

    command = ["export", str(folder), "--level", "0.5", "--force"]
    assert main([*command, "--format", "onnx", "--out", str(half_onnx)]) == 0
    assert main([*command, "--format", "torch", "--out", str(half_pt)]) == 0
    expect_torch(half_onnx, half_pt, test)

    models = {name: Model.open(tmp_path / name, "digits") for name in ("big", "late")}
    models["half"] = Model.open(state, "digits")
    assert {name: each.level for name, each in models.items() if name != "big"} == {
        "half": 0.5,
        "late": 0.5,
    }
    assert (models["half"].round, models["late"].round, models["big"].round) == (3, 3, best)
    facts = facts_of(half_onnx)
    for name in ("half", "late"):
        assert models[name].accuracy == narrow
        assert models[name].delivered.digest == facts["tessera.hash"]
    assert json.loads(facts["tessera.data"])["classes"] == ["a", "b", "c"]

    write_settings(tmp_path / "device.toml")
    said = {block.text: run_block(block.text, tmp_path, block.kind) for block in runnable()}
    inferred = "".join(each for text, each in said.items() if "infer" in text)
    assert inferred.count(f"{narrow:.2%} of 60") == 2
    assert inferred.count("round              3") == 2
    scores = json.loads((tmp_path / "scores.json").read_text())
    outputs = models["half"](test.inputs[0].astype(np.float64))
    np.testing.assert_allclose(scores["outputs"], outputs, rtol=1e-5, atol=1e-6)
    assert scores["predicted"] == ["abc"[number] for number in outputs.argmax(1)]
    (printed,) = (each for text, each in said.items() if "Model.open" in text)
    assert printed.splitlines()[0] == "3 0.5 ('a', 'b', 'c')"
    assert float(printed.splitlines()[1]) == pytest.approx(float(outputs.sum()), rel=1e-5)


def runnable() -> list[Block]:
    return [block for block in PAGE if block.why_not is not None]


def write_settings(path: Path) -> None:
    text = next(block.text for block in PAGE if block.kind == "toml")
    path.write_text(f'{text}name = "half"\ndata = "new.npz"\n')


def expect_torch(exported: Path, state: Path, data: ArrayData) -> None:
    """The exported ONNX file answers as torch does, with the exported state in a narrow module."""
    module = network(8, 4)
    module.load_state_dict(torch.load(state, weights_only=True), strict=True)
    with torch.no_grad():
        wanted = module.eval()(torch.from_numpy(data.inputs[0])).numpy()
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x0": data.inputs[0]})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
