"""Timed and metered trainings, run in the fresh processes of `own_profile.profiling`.

It imports only what a device needs, and nothing else runs beside it.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.device.trial.process import SENSOR_PERIOD_S
from benchmarks.device.trial.trainee import RULE, Trainee, onnx_backend
from edge_sdk.decide.costs.work import largest_groups
from edge_sdk.decide.emulation.emulation import PASSES
from edge_sdk.machine.energy import EnergyMeter, probed_watts
from edge_sdk.machine.probe import choose_probe

MOST_STEPS = 200
SETTLE_S = 5.0
"""Seconds until sensors that are programs have answered."""


def pace(folder: str, levels: str, threads: str, batch: str, burst_s: str) -> None:
    """Time the steps of each level for about `burst_s`; print rows as JSON."""
    trainee = _trainee(folder, threads)
    rows = []
    for level in map(float, levels.split(",")):
        steps = _steps(trainee, level, int(batch), float(burst_s))
        took = trainee.round(trainee.opened(steps, int(batch), RULE, "fp32"), level).times
        rows.append(
            {
                "level": level,
                "macs": _macs(trainee, level, int(batch)),
                # The first step makes the momentum and fills the caches.
                "step_s": median(took.step_s[1:]),
            }
        )
    print(json.dumps(rows))


def endure(folder: str, level: str, threads: str, batch: str, seconds: str, root: str) -> None:
    """Train for this long; print the watts drawn, and steps per second, as JSON.

    `first_per_s` and `last_per_s` are of the first and the last third of the time.
    """
    probe = choose_probe(Path(root))
    try:
        probe.snapshot()  # starts the sensors that are programs
        probe.settle(SETTLE_S)
        watts = probed_watts(probe)
        trainee = _trainee(folder, threads)
        opened = trainee.opened(
            _steps(trainee, float(level), int(batch), min(0.5, float(seconds) / 9)),
            int(batch),
            RULE,
            "fp32",
        )
        rates: list[tuple[float, float]] = []
        with EnergyMeter(watts, period_s=SENSOR_PERIOD_S) as meter:
            started = time.perf_counter()
            while (now := time.perf_counter() - started) < float(seconds):
                took = trainee.round(opened, float(level)).times
                rates.append((now, opened.steps / took.train_s))
    finally:
        probe.close()
    third = float(seconds) / 3
    first = [rate for at, rate in rates if at < third] or [rates[0][1]]
    last = [rate for at, rate in rates if at >= 2 * third] or [rates[-1][1]]
    energy = meter.energy
    said = {
        "seconds": float(seconds),
        "first_per_s": median(first),
        "last_per_s": median(last),
        "train_w": None if energy is None else energy.gross_j / energy.seconds,
        "sensor_hz": meter.hz,
    }
    print(json.dumps(said))


def _trainee(folder: str, threads: str) -> Trainee:
    return Trainee(Path(folder), partial(onnx_backend, threads=int(threads)))


def _steps(trainee: Trainee, level: float, batch: int, seconds: float) -> int:
    """Return as many batches as fit into this many seconds, at least three; the graph is open."""
    first = trainee.round(trainee.opened(3, batch, RULE, "fp32"), level).times
    return max(3, min(MOST_STEPS, int(seconds / min(first.step_s))))


def _macs(trainee: Trainee, level: float, batch: int) -> int:
    """Count a step's multiply-accumulates as the emulator does, so that profiles match."""
    plan = trainee.plan
    return PASSES * batch * plan.submodel_macs(largest_groups(plan, level))
