"""Memory of the coordinator while a large model goes to devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.network.stage.files import TASK, RunSettings, device_names, write_run
from benchmarks.network.stage.memory import Peak
from benchmarks.network.stage.processes import anonymous_bytes, cpu_s
from benchmarks.network.stage.programs import Programs, serve_command
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.network.wire.cases.pulling import PullingDevice
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.program.processes import ChildProcess
from edge_sdk.transport.settings import BrokerSettings

TARGET = 3.0
QUIET_S = 0.4
"""Seconds without CPU use after which a program counts as idle."""

METHOD = (
    "Anonymous memory (RssAnon, what is no file's) of `tessera-coordinator serve`, read every 10 "
    "ms: once it idles with a small model; from its start with a large one until that is "
    "published and nobody has come; and while devices, threads of this process, bid and pull all "
    "of it at the same time. Growth is the most of all that over the idle coordinator "
    "with the small model; serving alone is the most while devices pull over what it was before "
    "they came. MB are 10⁶ bytes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """`widths` of a perceptron, inputs and outputs included."""

    devices: int = 8
    widths: tuple[int, ...] = (784, 3072, 3072, 3072, 1152, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """Anonymous memory in MB of 10⁶ bytes."""

    devices: int
    model_mb: float
    small_mb: float
    """Memory when idle with a small model."""
    published_mb: float
    """Memory when idle with the large one."""
    publishing_peak_mb: float
    serving_peak_mb: float
    seconds: float
    """Time until all devices had the whole model."""

    @property
    def growth(self) -> float:
        """Growth in multiples of the model."""
        peak = max(self.publishing_peak_mb, self.serving_peak_mb)
        return (peak - self.small_mb) / self.model_mb

    @property
    def serving_growth(self) -> float:
        """Growth for the devices alone, in multiples of the model."""
        return (self.serving_peak_mb - self.published_mb) / self.model_mb


def measure_serving(
    small: PreparedTask,
    large: PreparedTask,
    devices: int,
    bytecode: Path,
    begin: Begin = silent,
) -> ServingRow:
    """Serve both models, one after the other. `begin` is called once, its result three times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        tick = begin(f"{large.full_bytes / 1e6:.0f} MB to {devices} devices")
        broker = stack.enter_context(embedded_broker(folder / "broker"))
        programs = stack.enter_context(Programs(folder, bytecode))
        idle = _serve(programs, "small", small, devices, broker)
        _wait_until_quiet(programs, idle)
        small_bytes = anonymous_bytes(idle.pid)
        programs.stop(idle)
        tick()
        program = _serve(programs, "large", large, devices, broker)
        with Peak(program) as publishing:
            _wait_until_quiet(programs, program)
        published_bytes = anonymous_bytes(program.pid)
        tick()
        started = time.monotonic()
        with Peak(program) as serving:
            _pull(programs, large, device_names(devices), broker)
        seconds = time.monotonic() - started
        tick()
    return ServingRow(
        devices=devices,
        model_mb=large.full_bytes / 1e6,
        small_mb=small_bytes / 1e6,
        published_mb=published_bytes / 1e6,
        publishing_peak_mb=publishing.most_bytes / 1e6,
        serving_peak_mb=serving.most_bytes / 1e6,
        seconds=seconds,
    )


def _serve(
    programs: Programs, name: str, task: PreparedTask, devices: int, broker: BrokerSettings
) -> ChildProcess:
    folder = programs.folder / name
    folder.mkdir()
    settings = RunSettings(devices=devices, rounds=1)
    return programs.begin(name, serve_command(write_run(folder, task, settings, broker)))


def _pull(
    programs: Programs, task: PreparedTask, names: Sequence[str], broker: BrokerSettings
) -> None:
    """Let devices with these names pull a whole model at the same time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        devices = [
            stack.enter_context(PullingDevice(name, TASK, task.model.plan, broker, folder / name))
            for name in names
        ]

        def is_done() -> bool:
            for device in devices:
                if device.failure is not None:
                    raise FigureError(f"a device did not get the model: {device.failure}")
            return all(device.pulled.is_set() for device in devices)

        programs.wait_until(is_done, "that all devices have the model")


def _wait_until_quiet(programs: Programs, program: ChildProcess) -> None:
    """Wait until it has computed something, and then nothing for QUIET_S."""
    spent, since = 0.0, time.monotonic()

    def is_quiet() -> bool:
        nonlocal spent, since
        now_spent = cpu_s(program.pid)
        if now_spent > spent:
            spent, since = now_spent, time.monotonic()
        return time.monotonic() - since >= QUIET_S

    programs.wait_until(lambda: cpu_s(program.pid) > 0, "the start of the coordinator")
    programs.wait_until(is_quiet, "that the coordinator has nothing to do")


def serving_figures(row: ServingRow) -> list[Figure]:
    """Return the figures of `measure_serving`."""
    stem = f"wire.serving.{row.devices}"
    return [
        Figure(f"{stem}.growth_over_model", row.growth, "×", target=TARGET),
        Figure(f"{stem}.pulling_over_model", row.serving_growth, "×"),
    ]
