"""What runs in the fresh processes of `benchmarks.costs.compare`.

Nothing but what a device needs is imported. A round is what a device does with one, from the
chunks of the model to the movement on its disk; only the link is left out.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from edge_sdk.profile.calibration import (
    Kept,
    Machine,
    calibrate,
    load,
    save,
    this_machine,
)
from edge_sdk.profile.costs import CostModel
from edge_sdk.profile.resident import forget_peak, peak_resident_bytes, resident_bytes
from edge_sdk.profile.snapshot import Snapshot
from edge_sdk.profile.work import largest_groups
from edge_sdk.protocol.block_codec import encode_blocks
from edge_sdk.protocol.chunks import Chunks
from edge_sdk.protocol.encoding import Encoding
from edge_sdk.protocol.graph_codec import decode_manifest
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.messages import Movement, RoundOpen
from edge_sdk.protocol.model_index import decode_index, unpack_model
from edge_sdk.protocol.plan_codec import decode_plan
from edge_sdk.stores import FolderMovements
from edge_sdk.streams import stream
from edge_sdk.train.backend import Job
from edge_sdk.train.data import ArrayData
from edge_sdk.train.onnx import OnnxBackend

COSTS = "costs.json"
RULE = LocalRule(learning_rate=1e-4, momentum=0.9)


class Device:
    """A device with the files of a task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = decode_plan((folder / "plan").read_bytes())
        self.manifest = decode_manifest((folder / "manifest").read_bytes())
        files = {path.stem: path.read_bytes() for path in folder.glob("*.onnx")}
        self.backend = OnnxBackend(self.plan, self.manifest, files, threads=1)
        self.index = decode_index(self.plan, (folder / "index").read_bytes())
        with np.load(folder / "data.npz") as arrays:
            self.data = ArrayData((arrays["x0"],), arrays["targets"])

    @property
    def machine(self) -> Machine:
        """What a calibration holds for; sensors play no part here."""
        return this_machine(self.plan, Snapshot(), providers=self.backend.providers)

    def model(self) -> CostModel:
        """As an earlier process calibrated it. Raises `LookupError` if none did."""
        kept = load(self.folder / COSTS)
        if kept is None:
            raise LookupError(f"{self.folder} has no calibration")
        return CostModel(self.plan, self.manifest, kept.calibration, kept.learned)

    def opened(self, steps: int, batch: int, rule: LocalRule, encoding: str) -> RoundOpen:
        """A round that asks for this."""
        return RoundOpen(
            round=1,
            plan_hash=self.plan.hash,
            rule=rule,
            steps=steps,
            batch_size=batch,
            bid_s=1,
            train_s=1,
            encoding=Encoding.parse(encoding),
        )

    def round(self, opened: RoundOpen, level: float) -> float:
        """Take part in a round; the result is the CPU seconds of its training."""
        groups, plan = largest_groups(self.plan, level), self.plan
        blocks, buffers = unpack_model(plan, self.index, groups, _Files(self.folder / "chunks"))
        job = Job(
            groups=groups,
            weights=plan.assemble(blocks, groups),
            buffers=buffers,
            rule=opened.rule,
            mask_stream=stream(0, "costs", "dropout"),
        )
        batches = self.data.batches(opened.steps, opened.batch_size, stream(0, "costs", "batches"))
        started = time.process_time()
        trained = self.backend.train(job, batches)
        took = time.process_time() - started
        moved = plan.scatter(trained.movement, groups)
        movement = Movement(
            device="device",
            round=opened.round,
            plan_hash=plan.hash,
            payload=encode_blocks(plan, groups, moved, opened.encoding, stream(0, "costs", "up")),
            statistics=trained.statistics,
            learning_rate=opened.rule.learning_rate,
            level=level,
            samples=len(self.data),
            loss=trained.metrics.mean_loss,
            train_s=took,
            keeps_copy=False,
        )
        with TemporaryDirectory() as temporary:
            FolderMovements(Path(temporary)).keep(movement)
        return took


class _Files(Chunks):
    """Chunks in a folder, as a device's cache has them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, hash: bytes, /) -> bytes:
        return (self._folder / hash.hex()).read_bytes()


def time_levels(directory: str, levels: str, batch: str, reps: str, burst_s: str) -> None:
    """Calibrate and keep that; then train at every level in turn, and print both as JSON."""
    device = Device(Path(directory))
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
    save(device.folder / COSTS, Kept(machine=device.machine, calibration=calibration))
    model = device.model()
    rounds = {}
    for level in offered:
        [one] = model.predict([level], device.opened(1, int(batch), RULE, "fp32"))
        steps = max(4, min(50, int(float(burst_s) / one.seconds)))
        rounds[level] = device.opened(steps, int(batch), RULE, "fp32")
    times: dict[float, list[float]] = {level: [] for level in offered}
    for _ in range(int(reps)):
        for level, opened in rounds.items():
            times[level].append(device.round(opened, level))
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
    """Take part in one round; print by how much the process grew, and what was predicted.

    `before`: a level that is trained first, whose memory is held then; empty: none.
    """
    device = Device(Path(directory))
    rules = {"momentum": RULE, "sam": LocalRule(learning_rate=1e-4, momentum=0.9, sam_radius=0.01)}
    opened = device.opened(4, int(batch), rules[rule], encoding)
    model = device.model()
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
