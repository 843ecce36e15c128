"""All parts of `tessera-bench load`, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.network.load import held, recovery
from benchmarks.network.load.held import HeldConfig, HeldRow
from benchmarks.network.load.recovery import RecoveryConfig, RecoveryRow
from benchmarks.network.stage.programs import write_bytecode
from benchmarks.network.stage.tasks import prepare_perceptron
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent

METHOD = {"held": held.METHOD, "recovery": recovery.METHOD}

MAX_PROCESSES = 8
"""Most processes that devices share: each takes 90 MB before it has any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Both parts, with a perceptron of `widths`, including inputs and outputs."""

    widths: tuple[int, ...] = (64, 64, 10)
    held: HeldConfig = field(default_factory=HeldConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    @property
    def ticks(self) -> int:
        """Ticks of all parts together."""
        return 1 + (self.held.rounds + 2) + 3

    def with_devices(self, number: int) -> LoadConfig:
        """Return the parameters for this many devices, also an upper limit for the restart."""
        fewer = min(number, self.recovery.devices)
        together = max(self.held.together, math.ceil(number / MAX_PROCESSES))
        return replace(
            self,
            held=replace(self.held, devices=number, together=together),
            recovery=replace(self.recovery, devices=fewer),
        )


FULL = LoadConfig()
QUICK = LoadConfig(
    held=HeldConfig(devices=60, rounds=5, together=30),
    recovery=RecoveryConfig(devices=30, together=30, away_s=2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRows:
    """Results of all parts."""

    held: HeldRow
    recovery: RecoveryRow


def measure_load(config: LoadConfig, begin: Begin = silent) -> LoadRows:
    """Measure everything; the results of `begin` are called `config.ticks` times in all."""
    with TemporaryDirectory(prefix="tessera-bench-") as temporary:
        bytecode = Path(temporary)
        tick = begin("task and programs")
        write_bytecode(bytecode)
        task = prepare_perceptron(config.widths)
        tick()
        return LoadRows(
            held=held.measure_held(task, config.held, bytecode, begin),
            recovery=recovery.measure_recovery(task, config.recovery, bytecode, begin),
        )


def load_figures(rows: LoadRows) -> Iterator[Figure]:
    """Return the figures of both parts."""
    yield from held.held_figures(rows.held)
    yield from recovery.recovery_figures(rows.recovery)
