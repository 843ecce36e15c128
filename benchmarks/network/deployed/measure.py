"""Deploys a job: a coordinator, a broker and devices as programs, and the bare loop around them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import edge_sdk
from benchmarks.fleet.peers.measure import BARE, PeerTurn, RunningPeer, Simulator
from benchmarks.network.deployed.job import DeployedJob
from benchmarks.network.stage.files import (
    RunSettings,
    device_names,
    run_folder,
    write_device,
    write_run,
)
from benchmarks.network.stage.processes import cpu_s, peak_resident_bytes
from benchmarks.network.stage.programs import Programs, serve_command
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from coordinator.run.folder import is_run, read_history
from edge_sdk.program.processes import Children

DRIVER = Path(__file__).parent / "drivers" / "device.py"
OURS, AGAINST = "this checkout", "the other"
TURNS = 3
"""Turns of the bare loop before the devices start, and as many when they have ended."""
REST = "the rest"

METHOD = (
    "A program for the coordinator, one for each device, and a broker, on this machine. Devices "
    "weigh their levels and measure their costs, as by default, and train the whole model; rule "
    "ram-fed, fp32. The bare loop trains as many devices one after the other with torch on one "
    "thread; it takes turns before the devices start and after they end, and its median counts. "
    "CPU: user and system time of the devices' programs from one end of a round to a later one. "
    "One device of each checkout is metered: CPU of its parts by thread time, each less the parts "
    "within it. Peak: VmHWM of the devices' programs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckoutRow:
    """Devices with one checkout's code: CPU seconds a device and round, peak memory in MB."""

    checkout: str
    devices: int
    cpu_s: float
    over_bare: float
    peak_mb: float
    parts_s: Mapping[str, float]
    """CPU seconds a round of the parts of the metered device."""
    fsyncs: float
    """Calls of `fsync` a round, of the metered device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedRow:
    """A deployed job. Seconds are of a round, CPU seconds of a device and round."""

    job: str
    rounds: int
    devices: int
    model_mb: float
    wall_s: float
    bare_wall_s: float
    """Wall-clock seconds of the bare loop for all devices of a round."""
    bare_cpu_s: float
    coordinator_cpu_s: float
    """CPU seconds of the coordinator a round, for all devices."""
    broker_cpu_s: float
    checkouts: tuple[CheckoutRow, ...]


def measure_deployed(
    job: DeployedJob,
    task: PreparedTask,
    bytecode: Path,
    against: Path | None = None,
    begin: Begin = silent,
) -> DeployedRow:
    """Run the programs; `begin`'s result is called `ticks` times.

    `against`: every other device runs the code of this checkout. Raises `FigureError`.
    """
    roots = {OURS: Path(edge_sdk.__file__).parents[1]}
    if against is not None:
        roots[AGAINST] = against.absolute()
    names = device_names(job.devices)
    code = {name: list(roots)[number % len(roots)] for number, name in enumerate(names)}
    metered = {checkout: f"{checkout.replace(' ', '-')}.jsonl" for checkout in roots}
    tick = begin(f"job {job.name.upper()}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        turns = _bare_turns(job, folder)
        tick()
        held: list[int] = []
        broker = stack.enter_context(
            embedded_broker(folder / "broker", hold=lambda child: held.append(child.pid))
        )
        programs = stack.enter_context(Programs(folder, bytecode))
        rounds = job.warm + job.rounds
        settings = RunSettings(devices=job.devices, rounds=rounds + 1, steps=job.steps)
        run = run_folder(folder)
        programs.begin("coordinator", serve_command(write_run(folder, task, settings, broker)))
        for name in names:
            path = write_device(folder, name, broker, stay=True, weigh=True)
            first = next(each for each in names if code[each] == code[name])
            meter = str(folder / metered[code[name]]) if name == first else "-"
            root = str(roots[code[name]])
            command = [str(DRIVER), root, meter, "run", "--config", str(path)]
            programs.begin(name, command)
        coordinator, *devices = (program.pid for program in programs.started)
        used: list[dict[int, float]] = []
        for number in range(job.warm, rounds + 1):
            programs.wait_until(lambda n=number: _closed(run) >= n, f"round {number}")  # type: ignore[misc]
            if number in (job.warm, rounds):
                used.append({pid: cpu_s(pid) for pid in (coordinator, *held, *devices)})
            if number > job.warm:
                tick()
        peaks = {pid: peak_resident_bytes(pid) / 1e6 for pid in devices}
        history = list(read_history(run))[job.warm - 1 : rounds]
        lines = {checkout: _lines(folder / path) for checkout, path in metered.items()}
        programs.stop(*programs.started)
        turns += _bare_turns(job, folder)
        tick()
    _check_whole(history)
    spent = {pid: (used[-1][pid] - before) / job.rounds for pid, before in used[0].items()}
    bare_s = median(turn.cpu_s for turn in turns) / job.bare_devices
    rows = []
    for checkout in roots:
        own = [pid for name, pid in zip(names, devices, strict=True) if code[name] == checkout]
        device_s = sum(spent[pid] for pid in own) / len(own)
        parts_s, fsyncs = parts_of(lines[checkout][job.warm : rounds + 1])
        rows.append(
            CheckoutRow(
                checkout=checkout,
                devices=len(own),
                cpu_s=device_s,
                over_bare=device_s / bare_s,
                peak_mb=max(peaks[pid] for pid in own),
                parts_s=parts_s,
                fsyncs=fsyncs,
            )
        )
    return DeployedRow(
        job=job.name,
        rounds=job.rounds,
        devices=job.devices,
        model_mb=task.full_bytes / 1e6,
        wall_s=median(after["time"] - before["time"] for before, after in pairwise(history)),
        bare_wall_s=median(turn.seconds for turn in turns) * job.devices / job.bare_devices,
        bare_cpu_s=bare_s,
        coordinator_cpu_s=spent[coordinator],
        broker_cpu_s=sum(spent[pid] for pid in held),
        checkouts=tuple(rows),
    )


def ticks(job: DeployedJob) -> int:
    """Return the ticks of `measure_deployed`."""
    return job.rounds + 2


def parts_of(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], float]:
    """Return CPU seconds a round of every part, and the calls of `fsync`, from a meter's lines.

    There is a line for the beginning, and one for the end of each round.
    """
    if len(lines) < 2:
        raise FigureError(f"a metered device wrote {len(lines)} lines: it took part in no round")
    first, last, rounds = lines[0], lines[-1], len(lines) - 1
    parts = {
        name: (spent - first["parts_s"].get(name, 0.0)) / rounds
        for name, spent in last["parts_s"].items()
    }
    parts[REST] = (last["cpu_s"] - first["cpu_s"]) / rounds - sum(parts.values())
    calls = last["counts"].get("fsync", 0) - first["counts"].get("fsync", 0)
    return dict(sorted(parts.items(), key=lambda part: -part[1])), calls / rounds


def deployed_figures(row: DeployedRow, job: DeployedJob) -> list[Figure]:
    """Return the figures of a job."""
    ours, *others = row.checkouts
    stem = f"deployed.{row.job}"
    most_mb = None if job.rss_models is None else job.rss_models * row.model_mb + job.rss_mb
    figures = [
        Figure(f"{stem}.cpu_over_bare", ours.over_bare, "×", target=job.cpu_target),
        Figure(f"{stem}.wall", row.wall_s, "s", target=job.wall_target_s),
        Figure(f"{stem}.wall_over_bare", row.wall_s / row.bare_wall_s, "×"),
        Figure(f"{stem}.peak", ours.peak_mb, "MB", target=most_mb),
        Figure(f"{stem}.fsyncs", ours.fsyncs, "calls"),
    ]
    figures += [
        Figure(f"{stem}.part.{name.replace(' ', '-')}", spent / row.bare_cpu_s, "×")
        for name, spent in ours.parts_s.items()
    ]
    figures += [Figure(f"{stem}.cpu_over_other", ours.cpu_s / each.cpu_s, "×") for each in others]
    return figures


def _bare_turns(job: DeployedJob, folder: Path) -> list[PeerTurn]:
    import sys

    place = folder / "bare"
    place.mkdir(exist_ok=True)
    with Children() as children:
        bare = RunningPeer(
            children, Simulator(BARE, "", "bare_torch.py"), sys.executable, job.bare().write(place)
        )
        turns = [bare.turn() for _ in range(TURNS)]
        bare.end()
    return turns


def _check_whole(history: Sequence[Mapping[str, Any]]) -> None:
    """Raise `FigureError` if a device trained less than the whole model."""
    for entry in history:
        for device in entry["devices"]:
            if device.get("level") != 1.0:
                raise FigureError(
                    f"round {entry['round']}: {device['device']} trained level "
                    f"{device.get('level')}: this machine has no room for the job"
                )


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _closed(run: Path) -> int:
    """Number of finished rounds."""
    return len(list(read_history(run))) if is_run(run) else 0
