"""Calibrating: real steps of a real backend, a machine with a known law, and the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

import torch

from benchmarks.models import mlp
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.costs.calibration import (
    MOST_STEPS,
    KeptCosts,
    MachineKey,
    calibrate,
    load,
    save,
    this_machine,
    why_calibrate,
)
from edge_sdk.decide.costs.model import (
    Calibration,
    CostModel,
    Learned,
    Sample,
    memory_bound,
)
from edge_sdk.decide.costs.work import forward_work, work_at
from edge_sdk.machine.resident import peak_resident_bytes, resident_bytes
from edge_sdk.machine.snapshot import Cpu, Power, Snapshot
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import NonFiniteError, TrainingError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Job, Metrics, Trained
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.messages import make_opening
from tests.waiting import HANGS_S

LEVELS = (1.0, 0.75, 0.5, 0.25)


def small_task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_task(mlp(12, 64, 4), torch.zeros(2, 12), groups=4)


@pytest.fixture(scope="module")
def task() -> Task:
    return small_task()


@pytest.fixture(scope="module")
def compiled(task: Task) -> CompiledGraphs:
    return compile_graphs(task, levels=LEVELS, batch_sizes=(8, 32))


class LawfulBackend:
    """A backend whose steps take what a law says, on a clock of its own."""

    def __init__(self, task: Task, *, slowness: float = 1.0, wanted: int | None = None) -> None:
        self.now = 0.0
        self.trained: list[tuple[int, int]] = []
        self._task = task
        self._slowness = slowness
        self._wanted = wanted

    @property
    def plan(self) -> ModelPlan:
        return self._task.plan

    @property
    def data(self) -> DataSpec | None:
        return self._task.data

    def clock(self) -> float:
        return self.now

    def step_s(self, groups_kept: int, samples: int) -> float:
        return self._slowness * (1e-3 + 1e-4 * samples + 1e-6 * groups_kept * samples)

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        self.plan.check(job.weights, job.groups)
        [kept] = self.plan.kept_atoms(self.plan.choose(job.groups))
        if self._wanted is not None and any(
            (array != self._wanted).any() for array in job.buffers.values()
        ):
            raise NonFiniteError("nan")
        steps = 0
        for batch in batches:
            self._task.data.check(batch)
            self.now += self.step_s(kept, len(batch.targets))
            self.trained.append((kept, len(batch.targets)))
            steps += 1
        return Trained({}, {}, Metrics(steps, 0, 1.0, 1.0, 1.0))


def opened(task: Task, steps: int, batch: int) -> RoundOpen:
    return make_opening(plan_hash=task.plan.hash, steps=steps, batch_size=batch)


# -- measuring -----------------------------------------------------------------------------------


def test_calibration_of_a_machine_with_a_law_predicts_every_level(
    task: Task, compiled: CompiledGraphs
) -> None:
    machine = LawfulBackend(task)
    found = calibrate(machine, compiled.manifest, levels=LEVELS, batch=32, clock=machine.clock)
    assert [(s.level, s.samples) for s in found.samples] == [
        (0.25, 8),
        (0.25, 32),
        (1.0, 8),
        (1.0, 32),
    ]
    assert {s.steps for s in found.samples} == {MOST_STEPS}
    model = CostModel(task.plan, compiled.manifest, found)
    for batch in (16, 64):
        for cost in model.predict(LEVELS, opened(task, 10, batch)):
            truth = 10 * machine.step_s(round(64 * cost.level), batch)
            assert cost.seconds == pytest.approx(truth, rel=1e-6)


def test_calibration_of_a_slow_machine_takes_few_steps(
    task: Task, compiled: CompiledGraphs
) -> None:
    machine = LawfulBackend(task, slowness=1000)
    found = calibrate(
        machine, compiled.manifest, levels=LEVELS, batch=32, clock=machine.clock, limit_s=3
    )
    assert len(found.samples) == 1
    # One opens the graph, one is not like the others, one is timed.
    assert machine.trained == [(16, 8)] * 3
    [cost] = CostModel(task.plan, compiled.manifest, found).predict([1.0], opened(task, 10, 32))
    assert cost.seconds > 10 * found.samples[0].step_s


def test_calibration_tries_the_largest_level_before_the_largest_batch(
    task: Task, compiled: CompiledGraphs
) -> None:
    machine = LawfulBackend(task, slowness=100)
    found = calibrate(
        machine, compiled.manifest, levels=LEVELS, batch=32, clock=machine.clock, limit_s=6
    )
    tried = {(each.level, each.samples) for each in found.samples}
    assert (1.0, 8) in tried
    assert (1.0, 32) not in tried
    assert machine.now < 2 * 6


def test_calibration_leaves_out_what_may_not_fit(task: Task, compiled: CompiledGraphs) -> None:
    machine = LawfulBackend(task)
    with pytest.raises(TrainingError, match=r"level 0\.25 cannot be calibrated"):
        calibrate(machine, compiled.manifest, levels=LEVELS, room_bytes=1e6, clock=machine.clock)
    assert not machine.trained
    least, most = (
        memory_bound(
            work_at(task.plan, compiled.manifest, level, 32),
            32 * (12 * 4 + 8),
            LocalRule(learning_rate=0.1, momentum=0.9),
            Encoding(),
        )
        for level in (0.25, 1.0)
    )
    room = (least + most) / 2
    calibrate(machine, compiled.manifest, levels=LEVELS, room_bytes=room, clock=machine.clock)
    assert {kept for kept, _ in machine.trained} >= {16}
    assert (64, 32) not in machine.trained


def test_calibration_finds_constants_that_a_model_can_take() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(12, 64), torch.nn.Linear(64, 4)
            self.register_buffer("scale", torch.ones(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.first(x * self.get_buffer("scale"))
            out: torch.Tensor = self.last(torch.relu(hidden))
            return out

    task = make_task(Masked(), torch.zeros(2, 12), groups=4)
    machine = LawfulBackend(task, wanted=1)
    assert calibrate(machine, None, levels=(1.0,), clock=machine.clock).samples
    never = LawfulBackend(task, wanted=7)
    with pytest.raises(NonFiniteError):
        calibrate(never, None, levels=(1.0,), clock=never.clock)


def test_calibration_of_the_onnx_backend_times_real_steps(
    task: Task, compiled: CompiledGraphs
) -> None:
    backend = OnnxBackend(task.plan, compiled.manifest, compiled.files)
    found = calibrate(backend, compiled.manifest, levels=LEVELS, batch=16, limit_s=HANGS_S)
    works = [
        work_at(task.plan, compiled.manifest, level, b) for level in (0.25, 1.0) for b in (4, 16)
    ]
    assert [s.work for s in found.samples] == works
    assert all(s.step_s > 0 and s.grown_bytes > 0 for s in found.samples)
    grown = [s.grown_bytes for s in found.samples]
    assert grown == sorted(grown)
    assert found.net_w is None


def test_calibration_of_the_torch_backend_needs_no_manifest(task: Task) -> None:
    found = calibrate(TorchBackend(task), None, levels=LEVELS, batch=16, limit_s=HANGS_S)
    assert len(found.samples) == 4
    costs = CostModel(task.plan, None, found).predict(LEVELS, opened(task, 5, 16))
    assert all(cost.seconds > 0 and cost.peak_bytes > 0 for cost in costs)


def test_calibration_with_a_sensor_knows_the_watts_above_idle(
    task: Task, compiled: CompiledGraphs
) -> None:
    machine = LawfulBackend(task)
    found = calibrate(
        machine,
        compiled.manifest,
        levels=LEVELS,
        watts=lambda: 5.0 if machine.trained else 2.0,
        clock=machine.clock,
    )
    assert found.idle_w == pytest.approx(2.0)
    # The meter's first reading is from before the first step.
    assert found.net_w is not None
    assert 0 < found.net_w <= 3


def test_peak_is_at_least_what_is_resident_and_sees_an_array() -> None:
    before = peak_resident_bytes()
    large = np.ones(8_000_000)
    assert resident_bytes() > 0
    assert peak_resident_bytes() >= before
    assert peak_resident_bytes() >= large.nbytes


# -- the file ------------------------------------------------------------------------------------


def kept(**changes: Any) -> KeptCosts:
    sample = Sample(
        level=0.5,
        samples=8,
        macs=10**6,
        weight_bytes=4096,
        activation_bytes=0,
        step_s=0.01,
        fixed_s=0.1,
        steps=5,
        grown_bytes=2e7,
    )
    machine = MachineKey(
        tessera="0.1.0",
        runtime="onnxruntime 1.23.0",
        plan_hash="ab" * 32,
        providers="CPUExecutionProvider",
        threads=1,
        system="Linux aarch64",
        cores=4.0,
        power_mode="MAXN",
        graphs="cd" * 32,
    )
    whole = KeptCosts(
        machine=machine,
        calibration=Calibration(samples=(sample, sample), idle_w=1.5, net_w=None),
        learned=Learned(rounds=3, ratio=1.2, ratios={"0.5": 1.25}),
    )
    return replace(whole, **changes)


def test_file_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save(path, kept())
    assert load(path) == kept()
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]


def test_file_that_is_not_there_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path / "costs.json") is None
    assert not caplog.records


def _change(content: dict[str, Any], *path: str | int, value: Any) -> bytes:
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"\xff\xfe{",
        lambda _: b"[" * 100_000,
        lambda _: b"[1, 2]",
        lambda c: json.dumps(c).encode()[:-20],
        lambda c: _change(c, "version", value=2),
        lambda c: _change(c, "machine", value=None),
        lambda c: _change(c, "calibration", "samples", value=[]),
        lambda c: _change(c, "calibration", "samples", 0, "step_s", value=-1),
        lambda c: _change(c, "calibration", "samples", 0, "step_s", value="fast"),
        lambda c: _change(c, "calibration", "samples", 0, "step_s", value=float("nan")),
        lambda c: _change(c, "calibration", "samples", 0, "surprise", value=1),
        lambda c: _change(c, "calibration", "samples", 0, "fixed_s", value=-2.0),
        lambda c: _change(c, "learned", "ratios", value={"fast": 1.0}),
        lambda c: _change(c, "learned", "ratios", value={"0.5": 0.0}),
        lambda c: _change(c, "learned", "ratio", value=-1.0),
    ],
)
def test_file_that_is_damaged_is_told_and_measured_anew(
    damage: Callable[[dict[str, Any]], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    save(path, kept())
    path.write_bytes(damage(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING):
        found = load(path)
    assert found is None
    assert "measuring costs again" in caplog.text
    assert why_calibrate(found, kept().machine) == "nothing was measured yet"


# -- when it is done again -----------------------------------------------------------------------


def test_calibration_holds_for_the_same_machine() -> None:
    assert why_calibrate(kept(), kept().machine) is None


@pytest.mark.parametrize("name", [each.name for each in fields(MachineKey)])
def test_calibration_is_due_when_the_machine_changed(name: str) -> None:
    machine = kept().machine
    value = getattr(machine, name)
    other: Any = f"{value}x" if isinstance(value, str) else value + 1
    said = why_calibrate(kept(), replace(machine, **{name: other}))
    assert said is not None
    assert name in said


def test_calibration_is_due_when_predictions_are_off() -> None:
    off = replace(kept().learned, rounds=10, off=0.31)
    assert why_calibrate(kept(learned=off), kept().machine) == "predictions are off by 31%"


def test_machine_is_described_by_versions_and_snapshot(task: Task) -> None:
    import onnxruntime

    snapshot = Snapshot(cpu=Cpu(cores=2.0), power=Power(mode="15W"))
    machine = this_machine(task.plan, snapshot, providers=("CPUExecutionProvider",), threads=2)
    assert machine.runtime == f"onnxruntime {onnxruntime.__version__}"
    assert machine.plan_hash == task.plan.hash
    assert (machine.cores, machine.power_mode, machine.threads) == (2.0, "15W", 2)
    assert this_machine(task.plan, Snapshot(), runtime="torch").runtime.startswith("torch 2")


def test_forward_pass_of_a_model_without_statistics_is_known(
    task: Task, compiled: CompiledGraphs
) -> None:
    """Its manifest has no statistics graph; a forward pass is that of the evaluation."""
    assert {entry.kind for entry in compiled.manifest.graphs} == {"gradient", "evaluate"}
    groups = task.plan.full_groups()
    known = forward_work(task.plan, compiled.manifest, groups, 32)
    assert known.macs == 32 * task.plan.submodel_macs(groups)
    assert 3 * known.macs >= work_at(task.plan, compiled.manifest, 1.0, 32).macs > known.macs
