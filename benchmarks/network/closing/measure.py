"""From the last movement of a round to the opening of the next, and from a start to an answer."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.network.closing.devices_process import PACE_S, AskingDevice, Events
from benchmarks.network.closing.metered_serve import KEPT
from benchmarks.network.deployed.job import LARGE, DeployedJob
from benchmarks.network.stage.files import (
    TASK,
    RunSettings,
    device_names,
    run_folder,
    write_run,
)
from benchmarks.network.stage.programs import WAIT_S, Programs, check, serve_command
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.program.control import is_served
from edge_sdk.program.processes import ChildProcess
from edge_sdk.transport.settings import BrokerSettings

SERVE = Path(__file__).parent / "metered_serve.py"
ASKING = "asking"
CLOSE_TARGET_S, WAIT_TARGET_MS, START_TARGET_S = 0.8, 50.0, 2.0
WARM = 2
"""Rounds before those that are measured: memory is empty in the first, and grows in it."""

PartCall = tuple[str, float, float, float]
"""A part of a close, its beginning and end (seconds of the monotonic clock), its CPU seconds."""

METHOD = (
    "`tessera-coordinator serve` with rule ram-fed, movements and model as fp32, over Mosquitto on "
    "loopback. Devices, all in one other process, upload a movement of the whole model in every "
    "round and train nothing. Close: from when the last movement is on disk until its device hears "
    "of the next opening. Parts: seconds of their calls within it; some lie within others or run "
    "beside them. Questions: one device offers movements of another run, and the control socket is "
    "asked for the devices in quarantine, each every 20 ms; those that were asked during a close "
    "count, and the coordinator's loop answers both. One that was held up by the one before counts "
    "from when it was due. Start: from the start of the process, whose run is there already, until "
    "it first answers a device."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRow:
    """A closed round. Seconds of the parts are in `parts_s`, CPU seconds in `parts_cpu_s`."""

    close_s: float
    device_waits_s: tuple[float, ...]
    operator_waits_s: tuple[float, ...]
    parts_s: Mapping[str, float]
    parts_cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingRow:
    """The closed rounds of a job, and the seconds of every start of its coordinator."""

    job: str
    model_mb: float
    devices: int
    rounds: tuple[ClosedRow, ...]
    starts_s: tuple[float, ...]

    @property
    def close_s(self) -> float:
        """Median seconds of a close."""
        return median(each.close_s for each in self.rounds)

    @property
    def start_s(self) -> float:
        """Median seconds of a start; 0 if there was none."""
        return median(self.starts_s) if self.starts_s else 0.0

    @property
    def waits_ms(self) -> tuple[float, float]:
        """Milliseconds within which 99 of 100 answers came: to the device, and to the operator."""
        device = [wait for each in self.rounds for wait in each.device_waits_s]
        operator = [wait for each in self.rounds for wait in each.operator_waits_s]
        return 1e3 * float(np.quantile(device, 0.99)), 1e3 * float(np.quantile(operator, 0.99))

    def parts_s(self, cpu: bool = False) -> dict[str, float]:
        """Median seconds of every part, the longest first."""
        found = [each.parts_cpu_s if cpu else each.parts_s for each in self.rounds]
        names = dict.fromkeys(name for each in found for name in each)
        parts = {name: median(each.get(name, 0.0) for each in found) for name in names}
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def measure_closing(
    job: DeployedJob,
    task: PreparedTask,
    bytecode: Path,
    *,
    rounds: int,
    starts: int,
    begin: Begin = silent,
) -> ClosingRow:
    """Close rounds, and start again; the results of `begin` are called `rounds + starts` times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        broker = stack.enter_context(embedded_broker(folder / "broker"))
        programs = stack.enter_context(Programs(folder, bytecode))
        number = WARM + rounds
        settings = RunSettings(devices=job.devices + 1, rounds=number + 1, steps=job.steps)
        config = write_run(folder, task, settings, broker)
        times = folder / "times.jsonl"
        command = [str(SERVE), str(times), *serve_command(config)[2:]]
        tick = begin(f"closing {job.name.upper()}")
        coordinator = programs.begin("coordinator", command)
        programs.wait_until(lambda: is_served(run_folder(folder)), "the start of the coordinator")
        (folder / "plan").write_bytes(task.model.plan.encoded)
        asked = {
            "plan": str(folder / "plan"),
            "task": TASK,
            "broker": asdict(broker),
            "devices": device_names(job.devices),
            "asking": ASKING,
            "run": str(run_folder(folder)),
            "rounds": number,
        }
        (folder / "devices.json").write_text(json.dumps(asked))
        devices = programs.begin(
            "devices",
            ["-m", "benchmarks.network.closing.devices_process", str(folder / "devices.json")],
            piped=True,
        )
        told = []
        for said in _lines(devices, number + 1):
            told.append(said)
            if len(told) > WARM + 1:
                tick()
        programs.stop(devices, coordinator)
        calls = [json.loads(line) for line in times.read_text().splitlines()]
        tick = begin(f"starts of {job.name.upper()}")
        seconds = []
        for _ in range(starts):
            seconds.append(_start_s(programs, config, broker))
            tick()
    return ClosingRow(
        job=job.name,
        model_mb=task.full_bytes / 1e6,
        devices=job.devices,
        rounds=tuple(closed_row(each, calls) for each in told[WARM + 1 :]),
        starts_s=tuple(seconds),
    )


def closed_row(told: Mapping[str, Any], calls: Sequence[PartCall]) -> ClosedRow:
    """Return the round before an opening that the devices tell of, with its parts."""
    ended = told["opened_s"]
    began = max(end for part, _, end, _ in calls if part == KEPT and end < ended)
    parts, cpu = dict[str, float](), dict[str, float]()
    for part, start, end, spent in calls:
        if began <= start < ended:
            parts[part] = parts.get(part, 0.0) + min(end, ended) - start
            cpu[part] = cpu.get(part, 0.0) + spent
    device, operator = (
        tuple(waited for at, waited in told[waits] if began <= at < ended)
        for waits in ("device_waits", "operator_waits")
    )
    return ClosedRow(
        close_s=ended - began,
        device_waits_s=device,
        operator_waits_s=operator,
        parts_s=parts,
        parts_cpu_s=cpu,
    )


def _lines(devices: ChildProcess, number: int) -> Iterator[dict[str, Any]]:
    pipe = devices.process.stdout
    if pipe is None:
        raise FigureError("the devices have no output")
    for count in range(number):
        if not (line := pipe.readline()):
            raise FigureError(f"the devices ended in round {count + 1}: {devices.last_words()}")
        yield json.loads(line)


def _start_s(programs: Programs, config: Path, broker: BrokerSettings) -> float:
    """Start the coordinator; return the seconds until a device that asks is answered."""
    events: Events = queue.SimpleQueue()
    device = AskingDevice(ASKING, TASK, broker, events)
    try:
        began = due = time.monotonic()
        coordinator = programs.begin("again", serve_command(config))
        while not device.waits:
            if (now := time.monotonic()) >= due:
                device.ask(now)
                due += PACE_S
                check(coordinator)
            if now > began + WAIT_S:
                raise FigureError(f"the coordinator answered nobody within {WAIT_S:.0f} s")
            with suppress(queue.Empty):
                device.handle(events.get(timeout=PACE_S)[1])
        took = time.monotonic() - began
        programs.stop(coordinator)
        return took
    finally:
        device.close()


def closing_figures(row: ClosingRow) -> list[Figure]:
    """Return the figures of a job; the targets are those of the large one."""
    stem, large = f"closing.{row.job}", row.job == LARGE.name
    device_ms, operator_ms = row.waits_ms
    wait_target = WAIT_TARGET_MS if large else None
    figures = [
        Figure(f"{stem}.close", row.close_s, "s", target=CLOSE_TARGET_S if large else None),
        Figure(f"{stem}.device_wait_p99", device_ms, "ms", target=wait_target),
        Figure(f"{stem}.operator_wait_p99", operator_ms, "ms", target=wait_target),
        *(Figure(f"{stem}.part.{name}", spent, "s") for name, spent in row.parts_s().items()),
    ]
    if row.starts_s:
        figures.append(Figure(f"{stem}.start", row.start_s, "s", target=START_TARGET_S))
    return figures
