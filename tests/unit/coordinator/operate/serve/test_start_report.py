"""Lines that `serve` prints before a run begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from coordinator.operate.config import read_config
from coordinator.operate.serve import serving
from coordinator.operate.serve.serving import start_report
from coordinator.rounds.state import RoundsConfig
from coordinator.run.folder import About, Run, TaskFiles, create_run
from coordinator.run.steering.settings import with_settings
from coordinator.service.service import ServiceConfig
from coordinator.task.saved_model import SavedModel
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.transport.settings import BrokerSettings

BROKER = BrokerSettings(host="localhost")
PLAN = ModelPlan(
    (Axis("a", (1, 1)), Axis("b", (3, 3))), (Tensor("w", "float32", (Dim(2, 0), Dim(6, 1))),)
)
MANIFEST = Manifest(
    plan_hash=PLAN.hash,
    opset=18,
    ir_version=9,
    min_onnxruntime="1.18.0",
    loss="cross-entropy",
    tolerance=0.0,
    data=DataSpec((ArraySpec("float32", (3,)),), ArraySpec("int64", ())),
    graphs=(),
)


@pytest.mark.parametrize("rule", ["fed-raa", "ra-fed"])
@pytest.mark.parametrize("kind", ["tied", "alternate", "rotating"])
def test_start_says_once_how_much_of_the_model_is_never_trained(
    tmp_path: Path, rule: str, kind: str
) -> None:
    (tmp_path / "run.toml").write_text(
        "[task]\nname = 't'\nsource = 't.py:f'\n[run]\nfolder = 'run'\n"
        f"[rule]\nname = '{rule}'\n[mask]\nname = 'gre-raa'\n[mask.options]\nfragments = '{kind}'\n"
    )
    config = read_config(tmp_path / "run.toml", environment={})
    about = About(task="t", run="0123456789abcdef", source="t.py:f", batch_size=32)
    weights = {"w": np.zeros((2, 6), dtype=np.float32)}
    create_run(config.run.folder, about, SavedModel(PLAN, weights, {}, MANIFEST, {}))
    with Run(config.run.folder) as run:
        service = ServiceConfig(
            machine=config.machine(PLAN),
            down=Encoding(),
            keeping=config.keeping,
            chunk_bytes=65536,
        )
        lines = list(start_report(config, run, service, BROKER, None))
    said = [line for line in lines if line.startswith("fragments")]
    if kind != "tied":
        assert said == []
        return
    assert len(said) == 1
    assert "warning: 50.0% of the parameters lie between tied fragments" in said[0]


def test_start_says_how_the_model_grows_and_added_rounds_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[task]\nname = 't'\nsource = 't.py:f'\n[run]\nfolder = 'run'\nrounds = 30\ngrow = 0.5\n"
        "widths = 'sandwich'\nlevels = [1.0, 0.5]\n"
        "[rule]\nname = 'ra-fed'\n[mask]\nname = 'nested'\n"
    )
    config = read_config(tmp_path / "run.toml", environment={})
    about = About(task="t", run="0123456789abcdef", source="t.py:f", batch_size=32)
    weights = {"w": np.zeros((2, 6), dtype=np.float32)}
    create_run(config.run.folder, about, SavedModel(PLAN, weights, {}, MANIFEST, {}))
    machine = config.machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    machine = with_settings(machine, {"rounds": 5030})
    service = ServiceConfig(
        machine=machine, down=Encoding(), keeping=config.keeping, chunk_bytes=65536
    )

    def grows(run: Run) -> list[str]:
        lines = start_report(config, run, service, BROKER, None)
        return [line for line in lines if line.startswith("grows")]

    with Run(config.run.folder) as run:
        assert grows(run) == ["grows      50% until round 15"]
        newest = run.latest()
        covered = np.ones_like(newest.fleet.times_covered)
        whole = replace(newest, fleet=replace(newest.fleet, times_covered=covered))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "latest", lambda: whole)
            assert grows(run) == ["grows      no more: it trains the whole model"]


@pytest.mark.parametrize(("made", "wanted"), [*product(("fp32", "fp16"), repeat=2)])
def test_start_warns_of_a_precision_that_came_after_the_graphs(
    tmp_path: Path, made: str, wanted: str
) -> None:
    (tmp_path / "run.toml").write_text(
        "[task]\nname = 't'\nsource = 't.py:f'\n[run]\nfolder = 'run'\nrounds = 3\n"
        f"precision = '{wanted}'\n[rule]\nname = 'ra-fed'\n"
    )
    config = read_config(tmp_path / "run.toml", environment={})
    about = About(task="t", run="0123456789abcdef", source="t.py:f", batch_size=32)
    weights = {"w": np.zeros((2, 6), dtype=np.float32)}
    create_run(config.run.folder, about, SavedModel(PLAN, weights, {}, MANIFEST, {}))
    service = ServiceConfig(
        machine=config.machine(PLAN), down=Encoding(), keeping=config.keeping, chunk_bytes=65536
    )
    with Run(config.run.folder) as run:
        if made == "fp16":
            half = SimpleNamespace(kind="gradient-fp16")
            manifest = SimpleNamespace(data=MANIFEST.data, graphs=(half,))
            run.task = cast(TaskFiles, SimpleNamespace(plan=PLAN, manifest=manifest, files={}))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(serving, "can_survey", lambda *_: False)
                lines = list(start_report(config, run, service, BROKER, None))
        else:
            lines = list(start_report(config, run, service, BROKER, None))
    said = [line for line in lines if line.startswith("precision")]
    warned = [line for line in said if "warning" in line]
    words = {"fp16": "has no graphs in float16", "fp32": "made with graphs in float16"}
    assert [words[wanted] in line for line in warned] == [True] * (made != wanted)
    told = [line for line in said if "there are graphs in float16" in line]
    assert len(told) == (made == wanted == "fp16")
