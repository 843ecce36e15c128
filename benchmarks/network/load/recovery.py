"""Time until devices are back, and a round finished, after the broker was away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.network.load.site.history import ClosedRound
from benchmarks.network.load.site.presences import Count, reached_at
from benchmarks.network.load.site.site import open_site
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from edge_sdk.transport.mqtt.connection import STABLE_S

METHOD = (
    "The same programs and devices, in the middle of rounds. Once all connections have lasted "
    f"longer than {STABLE_S:.0f} s, Mosquitto is ended (SIGTERM; without persistence nothing is "
    "retained) and, some seconds later, started again on the same port. From the order to start it "
    "until all devices' presences are on it, and until the coordinator's history has a further "
    "round. How long that takes depends on how long the broker was away: the pauses of those who "
    "try to reach it grow, up to half a minute."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Parameters: the broker stops after `settle_s` of rounds, and is away for `away_s`."""

    devices: int = 100
    together: int = 50
    settle_s: float = STABLE_S + 1.0
    away_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRow:
    """Seconds from the broker's return."""

    devices: int
    away_s: float
    round_s: float
    """Seconds until a round was over."""
    half_s: float
    """Seconds until half of the devices were present; `all_s`: all."""
    all_s: float


def measure_recovery(
    task: PreparedTask, config: RecoveryConfig, bytecode: Path, begin: Begin = silent
) -> RecoveryRow:
    """Stop and restart the broker. `begin`'s result is called three times."""
    tick = begin(f"{config.devices} devices, and the broker restarted")
    with open_site(task, config.devices, config.together, bytecode) as site:
        site.start_devices()
        site.wait_for_devices()
        tick()
        site.pause(config.settle_s)
        site.wait_for_rounds(1)
        tick()
        site.broker.stop()
        site.pause(config.away_s)
        started_s = time.time()
        site.broker.start()
        site.wait_for_devices()
        site.programs.wait_until(
            lambda: site.history.closed()[-1].at_s > started_s, "a round after the broker's return"
        )
        tick()
        return recovery_row(config, started_s, site.history.closed(), site.broker.presences.counts)


def recovery_row(
    config: RecoveryConfig,
    started_s: float,
    closed: Sequence[ClosedRound],
    counts: Sequence[Count],
) -> RecoveryRow:
    """Summarise the observations. Raises `FigureError` if they are incomplete."""
    half = reached_at(counts, (config.devices + 1) // 2)
    everybody = reached_at(counts, config.devices)
    over = next((entry.at_s for entry in closed if entry.at_s > started_s), None)
    if half is None or everybody is None or over is None:
        raise FigureError("devices, or a round, did not come back")
    return RecoveryRow(
        devices=config.devices,
        away_s=config.away_s,
        round_s=over - started_s,
        half_s=half - started_s,
        all_s=everybody - started_s,
    )


def recovery_figures(row: RecoveryRow) -> list[Figure]:
    """Return the figures of `measure_recovery`."""
    stem = f"load.recovery.{row.devices}"
    return [
        Figure(f"{stem}.first_round", row.round_s, "s"),
        Figure(f"{stem}.all_present", row.all_s, "s"),
    ]
