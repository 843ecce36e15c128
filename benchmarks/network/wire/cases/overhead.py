"""Cost of a round besides its training: wall-clock seconds, and CPU of all programs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.network.stage.files import (
    RunSettings,
    device_names,
    run_folder,
    write_device,
    write_run,
)
from benchmarks.network.stage.processes import cpu_s
from benchmarks.network.stage.programs import Programs, device_command, serve_command
from benchmarks.network.stage.tasks import BATCH_SIZE, PreparedTask
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from coordinator.run.folder import is_run, read_history
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job
from edge_sdk.train.onnx import OnnxBackend

WALL_TARGET_S = 1.0
CPU_TARGET_S = 0.1
COORDINATOR = "coordinator"

METHOD = (
    "A program for the coordinator, one for each device, and a broker, on this machine; the whole "
    "model on every device, rule ram-fed, fp32. Wall: from one entry of the coordinator's history "
    "to the next, so all that a round is, publishing, bids, uploads, closing and checkpoint "
    "included, less the longest training that a device reports for it; median over rounds. Where "
    "there are more devices than cores, the others' training that the longest one did not overlap "
    "with is in it too. CPU: user and system time of all programs over all measured rounds, less "
    "for each device and round the CPU time of the same training alone (thread time, median, in a "
    "process that does nothing else); what crowding adds to training counts as overhead. The first "
    "round is not measured."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """Parameters: `rounds` are measured after one that is not."""

    devices: int = 10
    steps: int = 20
    rounds: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadRow:
    """Seconds of a round, medians; CPU seconds per device and round, means."""

    devices: int
    rounds: int
    wall_s: float
    slowest_training_s: float
    overhead_s: float
    longest_overhead_s: float
    coordinator_cpu_s: float
    broker_cpu_s: float | None
    """None: the broker is not a separate process, and not counted."""
    device_cpu_s: float
    """CPU seconds of a device, including training."""
    training_cpu_s: float
    """CPU seconds of the same training alone."""

    @property
    def overhead_cpu_s(self) -> float:
        """CPU seconds of all programs, less the training."""
        everything = self.coordinator_cpu_s + (self.broker_cpu_s or 0.0) + self.device_cpu_s
        return everything - self.training_cpu_s


def measure_overhead(
    task: PreparedTask, config: OverheadConfig, bytecode: Path, begin: Begin = silent
) -> OverheadRow:
    """Run the programs; `begin`'s result is called for every measured round."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        tick = begin(f"{config.devices} devices")
        training_cpu_s = training_alone_cpu_s(task, config.steps)
        before = set(psutil.Process().children())
        broker = stack.enter_context(embedded_broker(folder / "broker"))
        brokers = [each.pid for each in set(psutil.Process().children()) - before]
        programs = stack.enter_context(Programs(folder, bytecode))
        settings = RunSettings(
            devices=config.devices, rounds=config.rounds + 2, steps=config.steps
        )  # one before and one after, so that nobody says goodbye during the measurement
        programs.begin(COORDINATOR, serve_command(write_run(folder, task, settings, broker)))
        for name in device_names(config.devices):
            programs.begin(name, device_command(write_device(folder, name, broker, stay=True)))
        run = run_folder(folder)
        pids = {
            "coordinator": [programs.started[0].pid],
            "broker": brokers,
            "devices": [program.pid for program in programs.started[1:]],
        }
        used: list[dict[str, float]] = []
        for number in range(1, config.rounds + 2):
            programs.wait_until(lambda n=number: _closed(run) >= n, f"round {number}")  # type: ignore[misc]
            used.append({who: sum(map(cpu_s, each)) for who, each in pids.items()})
            if number > 1:
                tick()
        history = list(read_history(run))[: config.rounds + 1]
    spent = {who: used[-1][who] - used[0][who] for who in pids}
    return overhead_row(config, history, spent, training_cpu_s, has_broker=bool(brokers))


def overhead_row(
    config: OverheadConfig,
    history: Sequence[Mapping[str, Any]],
    spent_s: Mapping[str, float],
    training_cpu_s: float,
    *,
    has_broker: bool,
) -> OverheadRow:
    """Summarise a history, whose first entry is not measured, and CPU seconds."""
    walls = [entry["time"] - before["time"] for before, entry in pairwise(history)]
    trainings = [max(device["train_s"] for device in entry["devices"]) for entry in history[1:]]
    overheads = [wall - training for wall, training in zip(walls, trainings, strict=True)]
    turns = config.devices * len(walls)
    return OverheadRow(
        devices=config.devices,
        rounds=len(walls),
        wall_s=median(walls),
        slowest_training_s=median(trainings),
        overhead_s=median(overheads),
        longest_overhead_s=max(overheads),
        coordinator_cpu_s=spent_s["coordinator"] / turns,
        broker_cpu_s=spent_s["broker"] / turns if has_broker else None,
        device_cpu_s=spent_s["devices"] / turns,
        training_cpu_s=training_cpu_s,
    )


def training_alone_cpu_s(task: PreparedTask, steps: int, reps: int = 5) -> float:
    """CPU seconds of this many steps on the whole model, on this thread; median."""
    model = task.model
    backend = OnnxBackend(model.plan, model.manifest, model.files, threads=1)
    taken = []
    for number in range(reps + 1):
        job = Job(
            groups=model.plan.all_groups(),
            weights=dict(model.weights),
            buffers=dict(model.buffers),
            rule=LocalRule(learning_rate=0.01),
            mask_stream=stream(0, "wire", number, "dropout"),
        )
        batches = task.data.batches(steps, BATCH_SIZE, stream(0, "wire", number, "batches"))
        started = time.thread_time()
        backend.train(job, batches)
        taken.append(time.thread_time() - started)
    return median(taken[1:])  # the first one makes the session


def overhead_figures(row: OverheadRow) -> list[Figure]:
    """Return the figures of `measure_overhead`."""
    stem = f"wire.round.{row.devices}"
    return [
        Figure(f"{stem}.overhead", row.overhead_s, "s", target=WALL_TARGET_S),
        Figure(f"{stem}.wall", row.wall_s, "s"),
        Figure(f"{stem}.cpu_per_device", row.overhead_cpu_s, "s", target=CPU_TARGET_S),
    ]


def _closed(run: Path) -> int:
    """Number of finished rounds."""
    return len(list(read_history(run))) if is_run(run) else 0
