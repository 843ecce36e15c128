"""A job deployed on Flower: a SuperLink, a SuperNode for each device, and the app between them.

Everything is as Flower starts it by default, but for what would reach outside (telemetry, the
installation of packages). A SuperNode starts a process for every answer, which imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.fleet.peers.measure import DRIVERS, PeerError
from benchmarks.network.deployed.job import DeployedJob
from benchmarks.network.stage.ports import free_port
from benchmarks.network.stage.programs import Programs
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import HOST
from edge_sdk.program.processes import ChildProcess, run_child

APP_MODULE = "benchmarks.fleet.peers.drivers.deployed_on_flower"
APP = APP_MODULE.rpartition(".")[2]
PARTS = (APP, "turns")
"""Modules of the app, copied from the drivers."""
CONNECTION = "bench"
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerRow:
    """A job deployed on Flower. Seconds are of a round, CPU seconds of a device and round."""

    rounds: int
    devices: int
    wall_s: float
    cpu_s: float
    """Of a SuperNode's processes; of one that trains, until its answer is ready."""
    server_cpu_s: float
    """CPU seconds of the SuperLink's processes a round, for all devices."""
    peak_mb: float
    """Resident memory of a device's lasting processes, and at most of one that trains."""


def measure_on_flower(
    job: DeployedJob, python: str, rounds: int, begin: Begin = silent
) -> FlowerRow:
    """Deploy the job with Flower's programs, which stand beside `python`.

    The first round is not measured; `begin`'s result is called `rounds + 1` times. Raises
    `PeerError` or `FigureError` if the programs fail.
    """
    programs = programs_of(python)
    tick = begin(f"job {job.name.upper()} on Flower")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-flower-")))
        ours = stack.enter_context(Programs(folder, folder))
        (folder / "home").mkdir()
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
        }

        def start(program: str, *arguments: str, name: str) -> ChildProcess:
            log = folder / f"{name}.log"
            return ours.start(name, [str(programs / program), *arguments], log, environment)

        port = free_port()
        address = f"{HOST}:{port}"
        link = start(
            "flower-superlink",
            *("--insecure", "--host", HOST, "--port", str(port)),
            "--disable-runtime-dependency-installation",
            name="superlink",
        )
        ours.wait_until(lambda: _listens(port), "Flower's SuperLink")
        nodes = [
            start(
                "flower-supernode",
                *("--insecure", "--superlink", address, "--port", str(free_port())),
                *("--node-config", f"device={number}"),
                name=f"supernode-{number}",
            )
            for number in range(job.devices)
        ]
        app = write_app(job, rounds + 1, folder, address)
        done = run_child(
            [str(programs / "flwr"), "run", str(app), CONNECTION], environment, timeout_s=START_S
        )
        if done.returncode:
            raise PeerError(f"flwr run failed:\n{done.stdout}{done.stderr}")
        spent: list[tuple[float, float]] = []
        ended = folder / "rounds.jsonl"
        for number in range(1, rounds + 2):
            ours.wait_until(lambda n=number: len(_lines(ended)) >= n, f"round {number} of Flower")  # type: ignore[misc]
            if number in (1, rounds + 1):
                brief = _trainers(folder / "trained.jsonl")
                nodes_s = sum(cpu_s(lasting(each.pid, brief)) for each in nodes)
                spent.append((nodes_s, cpu_s(lasting(link.pid))))
            tick()
        brief = _trainers(folder / "trained.jsonl")
        held = max(resident_bytes(lasting(each.pid, brief)) for each in nodes)
        return row_of(job, _lines(ended), _lines(folder / "trained.jsonl"), spent, held)


def programs_of(python: str) -> Path:
    """Return the folder of an interpreter, which may be the name of a program on the path."""
    return Path(shutil.which(python) or python).absolute().parent


def row_of(
    job: DeployedJob,
    ended: Sequence[Mapping[str, Any]],
    trained: Sequence[Mapping[str, Any]],
    spent: Sequence[tuple[float, float]],
    lasting_bytes: int,
) -> FlowerRow:
    """Make the row of lines for rounds that ended and for processes that trained.

    `spent`: CPU seconds of all nodes' and of the server's lasting processes, when the first round
    ended and when the last one did. Raises `PeerError` if a device is missing in a round.
    """
    for line in ended:
        if line["errors"] or line["answers"] != job.devices:
            raise PeerError(
                f"Flower: {line['answers']} of {job.devices} devices answered in round "
                f"{line['round']}, {line['errors']} with an error"
            )
    rounds = len(ended) - 1
    measured = [line for line in trained if line["round"] > 1]
    (nodes_before, link_before), (nodes_after, link_after) = spent
    lasted, brief = nodes_after - nodes_before, sum(line["cpu_s"] for line in measured)
    return FlowerRow(
        rounds=rounds,
        devices=job.devices,
        wall_s=median(after["time"] - before["time"] for before, after in pairwise(ended)),
        cpu_s=(lasted + brief) / (rounds * job.devices),
        server_cpu_s=(link_after - link_before) / rounds,
        peak_mb=(lasting_bytes + max(line["peak_bytes"] for line in measured)) / 1e6,
    )


def write_app(job: DeployedJob, rounds: int, folder: Path, address: str) -> Path:
    """Write the app, its job and the name of the SuperLink; return the app's folder."""
    app = folder / "app"
    app.mkdir()
    for module in PARTS:
        shutil.copy(DRIVERS / f"{module}.py", app)
    path = replace(job, bare_devices=job.devices).bare().write(folder)
    settings = {
        "job": str(path),
        "rounds": rounds,
        "rounds_file": str(folder / "rounds.jsonl"),
        "trained": str(folder / "trained.jsonl"),
    }
    text = f"""\
[project]
name = "job"
version = "1.0.0"
description = "A job that other systems do too"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tessera"

[tool.flwr.app.components]
serverapp = "{APP}:server"
clientapp = "{APP}:client"

[tool.flwr.app.config]
"""
    text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (app / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n'
        f'[superlink.{CONNECTION}]\naddress = "{address}"\ninsecure = true\n',
        encoding="utf-8",
    )
    return app


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _trainers(path: Path) -> frozenset[int]:
    """Return the ids of processes that trained and told so; some may not have ended yet."""
    return frozenset(line["pid"] for line in _lines(path))


def lasting(pid: int, brief: Collection[int] = ()) -> list[psutil.Process]:
    """Return a program's process and those it began, without brief ones and what these began."""
    found, heads = [], [psutil.Process(pid)]
    while heads:
        each = heads.pop()
        if each.pid not in brief:
            found.append(each)
            with suppress(psutil.NoSuchProcess):
                heads += each.children()
    return found


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of those that live."""
    total = 0.0
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:2])
    return total


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the resident memory of those that live."""
    total = 0
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total
