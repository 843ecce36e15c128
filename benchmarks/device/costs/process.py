"""Code that runs in the fresh processes of `benchmarks.device.costs.comparison`.

It imports only what a device needs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

from benchmarks.device.trial.trainee import RULE, Trainee
from edge_sdk.decide.costs.calibration import KeptCosts, calibrate, load, save
from edge_sdk.decide.costs.model import CostModel
from edge_sdk.machine.resident import forget_peak, peak_resident_bytes, resident_bytes
from edge_sdk.protocol.messages.local_rule import LocalRule

COSTS = "costs.json"


def kept_model(device: Trainee) -> CostModel:
    """Return the model an earlier process calibrated. Raises `LookupError` if none did."""
    kept = load(device.folder / COSTS)
    if kept is None:
        raise LookupError(f"{device.folder} has no calibration")
    return CostModel(device.plan, device.manifest, kept.calibration, kept.learned)


def time_levels(directory: str, levels: str, batch: str, reps: str, burst_s: str) -> None:
    """Calibrate and keep the result; then train at every level in turn, and print both as JSON."""
    device = Trainee(Path(directory))
    offered = [float(level) for level in levels.split(",")]
    started = time.perf_counter()
    calibration = calibrate(
        device.backend,
        device.manifest,
        levels=offered,
        batch=int(batch),
        clock=time.process_time,
    )
    took_s = time.perf_counter() - started
    save(device.folder / COSTS, KeptCosts(machine=device.machine, calibration=calibration))
    model = kept_model(device)
    rounds = {}
    for level in offered:
        [one] = model.predict([level], device.opened(1, int(batch), RULE, "fp32"))
        steps = max(4, min(50, int(float(burst_s) / one.seconds)))
        rounds[level] = device.opened(steps, int(batch), RULE, "fp32")
    times: dict[float, list[float]] = {level: [] for level in offered}
    for _ in range(int(reps)):
        for level, opened in rounds.items():
            times[level].append(device.round(opened, level, time.process_time).times.train_s)
    rows = [
        {
            "level": level,
            "steps": opened.steps,
            "predicted_s": model.predict([level], opened)[0].seconds,
            "measured_s": median(times[level]),
        }
        for level, opened in rounds.items()
    ]
    print(json.dumps({"calibration_s": took_s, "levels": rows}))


def peak_of_round(
    directory: str, level: str, batch: str, rule: str, encoding: str, before: str
) -> None:
    """Take part in one round; print the growth of the process and its prediction.

    `before`: a level trained first, whose memory is still held; empty: none.
    """
    device = Trainee(Path(directory))
    rules = {"momentum": RULE, "sam": LocalRule(learning_rate=1e-4, momentum=0.9, sam_radius=0.01)}
    opened = device.opened(4, int(batch), rules[rule], encoding)
    model = kept_model(device)
    held = 0
    if before:
        empty = resident_bytes()
        device.round(opened, float(before))
        held = max(0, resident_bytes() - empty)
        forget_peak()
    start = resident_bytes()
    device.round(opened, float(level))
    grown = max(0, peak_resident_bytes() - start)
    [cost] = model.predict([float(level)], opened, held_bytes=held)
    print(json.dumps({"predicted_bytes": cost.peak_bytes, "grown_bytes": grown}))
