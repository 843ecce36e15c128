"""Cost of receiving: CPU and memory of a coordinator while many large movements arrive at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.network.stage.files import TASK, RunSettings, device_names, write_run
from benchmarks.network.stage.memory import Peak
from benchmarks.network.stage.processes import anonymous_bytes, cpu_s
from benchmarks.network.stage.programs import WAIT_S, Programs, serve_command, write_bytecode
from benchmarks.network.stage.tasks import PreparedTask, prepare_perceptron
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.program.processes import ChildProcess

MEMORY_TARGET_MB = 200.0
CPU_TARGET_MS = 4.0

METHOD = (
    "`tessera-coordinator serve` with a perceptron of 5 million parameters (20 MB as fp32) over "
    "Mosquitto on loopback. Devices, all in one other process, bid, and then upload a movement of "
    "the whole model each, all at the same time; one more device bids and sends nothing, so that "
    "the round stays open and no closing is measured. CPU is that of the coordinator's process "
    "from the first offer until the last receipt, when every movement is on its disk; memory its "
    "largest anonymous memory (RssAnon, what is no file's) in that time, read every 10 ms. MB are "
    "10⁶ bytes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig:
    """`widths` of a perceptron, inputs and outputs included."""

    devices: int = 32
    widths: tuple[int, ...] = (784, 1536, 1536, 1024, 10)
    repeats: int = 3


FULL = IngestConfig()
QUICK = IngestConfig(devices=16, repeats=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestRow:
    """One wave of uploads."""

    devices: int
    movement_mb: float
    before_mb: float
    """Anonymous memory before the wave."""
    peak_mb: float
    cpu_s: float
    seconds: float

    @property
    def total_mb(self) -> float:
        """Megabytes that arrived."""
        return self.devices * self.movement_mb

    @property
    def cpu_ms_per_mb(self) -> float:
        """CPU milliseconds for each megabyte."""
        return 1e3 * self.cpu_s / self.total_mb


def measure_ingest(config: IngestConfig, begin: Begin = silent) -> list[IngestRow]:
    """Measure all repeats; the results of `begin` are called `repeats + 1` times."""
    with ExitStack() as stack:
        bytecode = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        tick = begin("task and programs")
        write_bytecode(bytecode)
        task = prepare_perceptron(config.widths)
        tick()
        rows = []
        for _ in range(config.repeats):
            tick = begin(f"{config.devices} × {task.full_bytes / 1e6:.0f} MB")
            rows.append(_wave(task, config.devices, bytecode))
            tick()
        return rows


def _wave(task: PreparedTask, devices: int, bytecode: Path) -> IngestRow:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        broker = stack.enter_context(embedded_broker(folder / "broker"))
        programs = stack.enter_context(Programs(folder, bytecode))
        settings = RunSettings(devices=devices + 1, rounds=1)
        run = write_run(folder, task, settings, broker)
        coordinator = programs.begin("coordinator", serve_command(run))
        (folder / "plan").write_bytes(task.model.plan.encoded)
        *senders, silent_one = device_names(devices + 1)
        asked = folder / "senders.json"
        asked.write_text(
            json.dumps(
                {
                    "plan": str(folder / "plan"),
                    "task": TASK,
                    "broker": asdict(broker),
                    "senders": senders,
                    "silent": silent_one,
                }
            )
        )
        command = ["-m", "benchmarks.network.ingest.senders_process", str(asked)]
        process = programs.begin("senders", command, piped=True)
        lines = _lines(process)
        _expect(lines, "ready", process)
        before, began_cpu, began = anonymous_bytes(coordinator.pid), cpu_s(coordinator.pid), _now()
        with Peak(coordinator) as peak:
            _say(process)
            _expect(lines, "sent", process)
            took, spent = _now() - began, cpu_s(coordinator.pid) - began_cpu
        _say(process)
        return IngestRow(
            devices=devices,
            movement_mb=task.full_bytes / 1e6,
            before_mb=before / 1e6,
            peak_mb=peak.most_bytes / 1e6,
            cpu_s=spent,
            seconds=took,
        )


def _now() -> float:
    return time.monotonic()


def _lines(process: ChildProcess) -> Iterator[str]:
    pipe = process.process.stdout
    if pipe is None:
        raise FigureError("the senders have no output")
    return (line.decode().strip() for line in pipe)


def _expect(lines: Iterator[str], word: str, process: ChildProcess) -> None:
    """Wait for a line. Raises `FigureError` when the process ends without it, or hangs."""
    timer = threading.Timer(WAIT_S, process.process.kill)
    timer.start()
    try:
        if next(lines, None) != word:
            raise FigureError(f"the senders failed before {word!r}: {process.last_words()}")
    finally:
        timer.cancel()


def _say(process: ChildProcess) -> None:
    pipe = process.process.stdin
    if pipe is None:
        raise FigureError("the senders have no input")
    pipe.write(b"\n")
    pipe.flush()


def ingest_figures(rows: list[IngestRow]) -> list[Figure]:
    """Return the figures: the largest memory, and the least CPU time, of the repeats."""
    stem = f"ingest.{rows[0].devices}"
    cheapest = min(rows, key=lambda row: row.cpu_s)
    return [
        Figure(
            f"{stem}.anonymous",
            max(row.peak_mb for row in rows),
            "MB",
            target=MEMORY_TARGET_MB,
        ),
        Figure(f"{stem}.cpu_per_mb", cheapest.cpu_ms_per_mb, "ms", target=CPU_TARGET_MS),
        Figure(
            f"{stem}.grown_over_movement",
            max(row.peak_mb - row.before_mb for row in rows) / rows[0].movement_mb,
            "×",
        ),
        Figure(f"{stem}.wall", min(row.seconds for row in rows), "s"),
    ]
