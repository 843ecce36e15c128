"""A deployed job on our programs, on Flower's where it is installed, and as a bare loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fleet.peers.measure import BARE, OURS, PEERS, installed_version
from benchmarks.network.deployed import measure as deployed
from benchmarks.network.deployed.job import SMALL, DeployedJob
from benchmarks.network.peers.flower import measure_on_flower
from benchmarks.network.stage.programs import write_bytecode
from benchmarks.network.stage.tasks import prepare_perceptron
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent

FLOWER = PEERS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRow:
    """The job on one system: seconds of a round, CPU seconds of a device and round."""

    name: str
    version: str = ""
    wall_s: float
    cpu_s: float
    over_bare: float
    """`cpu_s` over that of the bare loop."""
    peak_mb: float | None = None
    """Most memory of a device's processes together; None: it is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A deployed job on several systems, the bare loop first."""

    job: str
    devices: int
    systems: tuple[SystemRow, ...]
    install: str = ""
    """Command that installs Flower; empty if it was measured."""


def measure_beside(job: DeployedJob, python: str, rounds: int, begin: Begin = silent) -> Beside:
    """Deploy the job here, and then on the Flower of `python`, with so many rounds there.

    `begin`'s result is called at most `ticks` times. Raises `PeerError` or `FigureError`.
    """
    version = installed_version(FLOWER, python)
    with TemporaryDirectory(prefix="tessera-bench-") as bytecode:
        write_bytecode(Path(bytecode))
        task = prepare_perceptron(job.widths)
        row = deployed.measure_deployed(job, task, Path(bytecode), begin=begin)
    ours = row.checkouts[0]
    systems = [
        SystemRow(name=BARE, wall_s=row.bare_wall_s, cpu_s=row.bare_cpu_s, over_bare=1.0),
        SystemRow(
            name=OURS,
            wall_s=row.wall_s,
            cpu_s=ours.cpu_s,
            over_bare=ours.over_bare,
            peak_mb=ours.peak_mb,
        ),
    ]
    if version:
        theirs = measure_on_flower(job, python, rounds, begin)
        systems.append(
            SystemRow(
                name=FLOWER.name,
                version=version,
                wall_s=theirs.wall_s,
                cpu_s=theirs.cpu_s,
                over_bare=theirs.cpu_s / row.bare_cpu_s,
                peak_mb=theirs.peak_mb,
            )
        )
    return Beside(
        job=job.name,
        devices=job.devices,
        systems=tuple(systems),
        install="" if version else FLOWER.install,
    )


def ticks(rounds: int) -> int:
    """Return the most ticks of `measure_beside` of job J."""
    return deployed.ticks(SMALL) + rounds + 1


def beside_figures(found: Beside) -> Iterator[Figure]:
    """Yield CPU over the bare loop's, and our rounds and CPU over those of Flower."""
    rows = {row.name: row for row in found.systems}
    stem = f"peers.deployed.{found.job}"
    for name in (OURS, FLOWER.name):
        if name in rows:
            yield Figure(f"{stem}.{name}.cpu_over_bare", rows[name].over_bare, "×")
    if FLOWER.name in rows:
        ours, theirs = rows[OURS], rows[FLOWER.name]
        for what, ratio in (
            ("wall", ours.wall_s / theirs.wall_s),
            ("cpu", ours.cpu_s / theirs.cpu_s),
        ):
            yield Figure(f"{stem}.{what}_over_flower", ratio, "×", target=1.0)
