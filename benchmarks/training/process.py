"""One training and its peak memory, in the fresh processes of `training.footprint`.

It imports only what the backend needs: for onnx, the SDK, numpy and onnxruntime.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_sdk.train.backend import Backend

BACKENDS = ("onnx", "torch")


def main(backend: str, directory: str, family: str, steps: str) -> None:
    """Train for some steps on the files of a directory; print the costs as JSON."""
    folder = Path(directory)
    make = _onnx(folder) if backend == "onnx" else _torch(family)
    # Only what training needs on top of its backend.
    import numpy as np

    from edge_sdk.data.arrays import Batch
    from edge_sdk.protocol.messages.local_rule import LocalRule
    from edge_sdk.protocol.streams import stream
    from edge_sdk.train.backend import Job

    imported_mb = peak_mb()
    with np.load(folder / "batch.npz") as arrays:
        batch = Batch((arrays["x0"],), arrays["targets"])
    with np.load(folder / "weights.npz") as arrays:
        weights = dict(arrays)
    with np.load(folder / "buffers.npz") as arrays:
        buffers = dict(arrays)
    trainer = make()
    job = Job(
        groups=trainer.plan.all_groups(),
        weights=weights,
        owned=True,
        buffers=buffers,
        rule=LocalRule(learning_rate=0.01, momentum=0.9),
        mask_stream=stream(0, "footprint", "dropout"),
    )
    trained = trainer.train(job, [batch] * int(steps))
    result = {
        "imported_mb": imported_mb,
        "peak_mb": peak_mb(),
        "steps": trained.metrics.steps,
        "packages": loaded_packages(),
    }
    print(json.dumps(result))


def peak_mb() -> float:
    """Peak resident memory of this process, in 10⁶ bytes."""
    with open("/proc/self/status") as status:
        kib = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    return int(kib) * 1024 / 1e6


def loaded_packages() -> list[str]:
    """Top-level modules in memory that came from files and are not Python's own."""
    names = {
        name.partition(".")[0]
        for name, module in sys.modules.items()
        if getattr(module, "__spec__", None) is not None  # Cython makes some up
    }
    return sorted(name for name in names - sys.stdlib_module_names if not name.startswith("_"))


def _onnx(folder: Path) -> Callable[[], Backend]:
    """Import what the onnx backend needs; returns its constructor from a device's files."""
    from edge_sdk.protocol.plan.codec import decode_plan
    from edge_sdk.protocol.task.codec import decode_manifest
    from edge_sdk.train.onnx import OnnxBackend

    def make() -> Backend:
        plan = decode_plan((folder / "plan").read_bytes())
        manifest = decode_manifest((folder / "manifest").read_bytes())
        files = {path.stem: path.read_bytes() for path in folder.glob("*.onnx")}
        return OnnxBackend(plan, manifest, files, threads=1, lean=True)

    return make


def _torch(family: str) -> Callable[[], Backend]:
    """Do the same for torch, from the task's code, which it traces."""
    from benchmarks.models import FAMILIES
    from coordinator.task.task import make_task
    from edge_sdk.train.torch import TorchBackend

    def make() -> Backend:
        model = FAMILIES[family]
        return TorchBackend(make_task(model.model(), model.inputs(2), groups=4), threads=1)

    return make
