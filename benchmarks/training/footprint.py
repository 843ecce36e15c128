"""Costs of training besides time: memory of the process, disk of its environment.

`MEMORY_METHOD` and `DISK_METHOD`, which are written with the data, describe the measurements.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.models import FAMILIES
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.imports import child_environment
from benchmarks.report.progress import Begin, silent
from benchmarks.training.process import BACKENDS
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.saved_model import SavedModel
from coordinator.task.task import make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.program.processes import run_child
from edge_sdk.protocol.plan.codec import encode_plan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.codec import encode_manifest

RSS_TARGETS_MB = {"mlp": 65.0, "cnn": 100.0, "vit-small": 190.0}
DISK_TARGET_MB = 165.0
GROUPS = 4
PROJECT = "tessera-fl"
INSTALLERS = frozenset({"pip", "setuptools"})

MEMORY_METHOD = (
    "Median VmHWM, the most ever resident, of fresh processes that train the full model on one "
    "thread. The onnx process has the files that a device is sent and imports only the SDK, numpy "
    "and onnxruntime; the torch process has the task's code, which it traces."
)
DISK_METHOD = (
    "Sum of the sizes of the files in the RECORD of every distribution that tessera-fl[onnx] or "
    "tessera-fl[torch] requires, directly or not, in the environment that ran this: with the "
    "bytecode that pip compiled and listed, without pip and setuptools, not rounded up to blocks "
    "of a file system. Modules of an editable tessera-fl, which no RECORD lists, are counted "
    "where they are."
)

_CHILD = "import sys; from benchmarks.training.process import main; main(*sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class FootprintConfig:
    """Parameters: `reps` processes of each kind; each takes `steps` steps of `batch` samples."""

    reps: int = 3
    steps: int = 20
    batch: int = 32


@dataclass(frozen=True, slots=True)
class FootprintRow:
    """One family on one backend. Medians over the processes; MB are 10⁶ bytes."""

    family: str
    backend: str
    steps: int
    peak_mb: float
    imported_mb: float
    """Peak after the imports, before anything was loaded."""
    packages: tuple[str, ...]
    """Packages the process had imported, besides Python's own modules."""


@dataclass(frozen=True, slots=True)
class DiskRow:
    """Disk use of one extra."""

    extra: str
    size_mb: float
    distributions: dict[str, float]
    """MB by name, the largest first."""


def measure_memory(
    families: Sequence[str], config: FootprintConfig, begin: Begin = silent
) -> list[FootprintRow]:
    """Train in fresh processes, the backends in turn.

    `begin` is called with each family, and its result `config.reps + 1` times.
    """
    with TemporaryDirectory() as bytecode:
        return [
            row for name in families for row in _memory_rows(name, config, bytecode, begin(name))
        ]


def _memory_rows(
    family: str, config: FootprintConfig, bytecode: str, tick: Callable[[], None]
) -> list[FootprintRow]:
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
    with TemporaryDirectory() as files:
        write_files(family, config.batch, Path(files))
        # Compiling bytecode takes memory: one process does it before those that count. torch has
        # too much of it to repeat that, and no target.
        train_in_child("onnx", family, config.steps, files, bytecode)
        tick()
        for _ in range(config.reps):
            for backend in BACKENDS:
                own = bytecode if backend == "onnx" else None
                runs[backend].append(train_in_child(backend, family, config.steps, files, own))
            tick()
    return [
        FootprintRow(
            family=family,
            backend=backend,
            steps=results[0]["steps"],
            peak_mb=median(run["peak_mb"] for run in results),
            imported_mb=median(run["imported_mb"] for run in results),
            packages=tuple(results[0]["packages"]),
        )
        for backend, results in runs.items()
    ]


def write_files(family: str, batch: int, folder: Path) -> None:
    """Write the files with which a device trains the full model, and a batch of data."""
    model = FAMILIES[family]
    task = make_task(model.model(), model.inputs(2), groups=GROUPS)
    compiled = compile_graphs(task, levels=(1.0,), batch_sizes=(batch,))
    labels = stream(0, "footprint", "labels").integers(model.classes, size=batch)
    saved = SavedModel(task.plan, task.weights, task.buffers, compiled.manifest, compiled.files)
    write_task(saved, ArrayData((model.inputs(batch).numpy(),), labels), folder)


def write_task(model: SavedModel, batch: ArrayData, folder: Path) -> None:
    """Write the same for a model that is already compiled."""
    (folder / "plan").write_bytes(encode_plan(model.plan))
    (folder / "manifest").write_bytes(encode_manifest(model.manifest))
    for digest, data in model.files.items():
        (folder / f"{digest}.onnx").write_bytes(data)
    arrays: dict[str, Mapping[str, Any]] = {
        "weights": model.weights,
        "buffers": model.buffers,
        "batch": {"x0": batch.inputs[0], "targets": batch.targets},
    }
    for name, content in arrays.items():
        np.savez(folder / f"{name}.npz", **content)


def train_in_child(
    backend: str, family: str, steps: int, files: str, bytecode: str | None
) -> dict[str, Any]:
    """Train in a fresh process on the files of `write_files` and return its report.

    `bytecode`: its bytecode cache; None: that of this process. Raises `FigureError`.
    """
    done = run_child(
        [sys.executable, "-c", _CHILD, backend, files, family, str(steps)],
        child_environment(bytecode),
    )
    if done.returncode:
        raise FigureError(f"{family} did not train on {backend} in a new process:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    if backend == "onnx" and "torch" in result["packages"]:
        raise FigureError(f"{family}: the process of the onnx backend imported torch")
    return result


def measure_disk(extra: str) -> DiskRow:
    """Sum up what an extra of this project installs. Raises `FigureError` if not installed."""
    sizes = {name: _size_bytes(found) / 1e6 for name, found in required(PROJECT, {extra}).items()}
    ordered = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    return DiskRow(extra, sum(sizes.values()), ordered)


def required(name: str, extras: set[str]) -> dict[str, Distribution]:
    """Return a distribution and everything it requires here, except installers."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *sorted(extras))]
    while waiting:
        name, extra = waiting.pop()
        name = canonicalize_name(name)
        if name in INSTALLERS or (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise FigureError(
                f"{name} is not installed, so its size is not known: pip install '{PROJECT}[bench]'"
            ) from None
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, wanted) for wanted in ("", *sorted(needed.extras))]
    return found


def _size_bytes(found: Distribution) -> int:
    listed = found.files or ()
    paths = {Path(str(path.locate())) for path in listed}
    recorded = {path.parts[0] for path in listed}
    for package in (found.read_text("top_level.txt") or "").split():
        if package not in recorded and found.metadata["Name"] == PROJECT:
            spec = find_spec(package)
            for place in (spec and spec.submodule_search_locations) or ():
                paths |= {
                    path for path in Path(place).rglob("*") if "__pycache__" not in path.parts
                }
    return sum(path.stat().st_size for path in paths if path.is_file())


def footprint_figures(memory: Sequence[FootprintRow], disk: Sequence[DiskRow]) -> list[Figure]:
    """Return the figures of `measure_memory` and `measure_disk`."""
    figures = [
        Figure(
            f"footprint.{row.family}.{row.backend}.rss",
            row.peak_mb,
            "MB",
            target=RSS_TARGETS_MB.get(row.family) if row.backend == "onnx" else None,
        )
        for row in memory
    ]
    return figures + [
        Figure(
            f"footprint.environment.{row.extra}.disk",
            row.size_mb,
            "MB",
            target=DISK_TARGET_MB if row.extra == "onnx" else None,
        )
        for row in disk
    ]
