"""A task's code, on the coordinator only: "path/to/file.py:function" or "package.module:function".

The task's function takes no arguments and returns a `coordinator.Task`; a second function may
return test data, (inputs, targets) as numpy arrays. Each runs in a separate process: the one that
serves devices loads neither torch nor the task's code.

    python -m coordinator.operate.taskfile SOURCE OUT.npz

calls a function and writes the test data it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from coordinator.errors import ConfigError
from coordinator.run.folder import TaskFiles
from coordinator.service.courses import Evaluator
from coordinator.task.graphs.child import compile_in_child, load_function
from coordinator.task.saved_model import SavedModel
from edge_sdk.data.arrays import ArrayData
from edge_sdk.program.processes import run_child
from edge_sdk.protocol.errors import ProtocolError, TensorError, TesseraError
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.layout import Array


def compile_task(
    source: str,
    base: Path,
    *,
    batch_size: int,
    levels: Sequence[float] = LEVELS,
    distillation: bool = False,
    class_masks: bool = False,
) -> SavedModel:
    """Trace and compile a task. Raises `GraphCompileError` with the error of its code."""
    return compile_in_child(
        _located(source, base),
        levels=levels,
        batch_sizes=(batch_size,),
        distillation=distillation,
        class_masks=class_masks,
    )


def load_evaluation(source: str, base: Path) -> ArrayData:
    """Load test data from a function, or from an .npz file with x (or x0, x1 …) and y.

    Raises `ConfigError` when that fails.
    """
    if source.endswith(".npz"):
        return _read_npz(base / source)
    with TemporaryDirectory(prefix="tessera-evaluation-") as folder:
        path = Path(folder) / "data.npz"
        command = [sys.executable, "-m", "coordinator.operate.taskfile"]
        done = run_child([*command, _located(source, base), str(path)])
        if done.returncode != 0:
            said = done.stderr.strip() or f"the process ended with code {done.returncode}"
            raise ConfigError(f"[task] evaluation {source!r}: {said}")
        return _read_npz(path)


def make_evaluator(task: TaskFiles, data: ArrayData) -> Evaluator:
    """Make an evaluator that needs the task's graphs and onnxruntime alone.

    Raises `ConfigError` when the data does not fit the task.
    """
    # onnxruntime is optional, and slow to load.
    from edge_sdk.train.inference import Predictor

    try:
        task.manifest.data.check(data)
    except TensorError as error:
        raise ConfigError(f"[task] evaluation: {error}") from error
    return Evaluator(Predictor(task.plan, task.manifest, task.files), data)


def main(arguments: list[str]) -> int:
    """Run the child process; returns the exit code."""
    source, out = arguments
    try:
        inputs, targets = _pair(source, load_function(source)())
    except TesseraError as error:
        print(error, file=sys.stderr)
        return 1
    arrays: dict[str, Any] = {f"x{number}": array for number, array in enumerate(inputs)}
    np.savez(Path(out), y=targets, **arrays)
    return 0


def _pair(source: str, found: Any) -> tuple[tuple[Array, ...], Array]:
    if isinstance(found, ArrayData):
        return found.inputs, found.targets
    if isinstance(found, tuple) and len(found) == 2:
        inputs, targets = found
        arrays = inputs if isinstance(inputs, tuple) else (inputs,)
        if all(isinstance(array, np.ndarray) for array in (*arrays, targets)):
            return arrays, targets
    raise ConfigError(f"{source} returns {type(found).__name__}, not (inputs, targets) of numpy")


def _located(source: str, base: Path) -> str:
    place, colon, function = source.rpartition(":")
    return f"{base / place}{colon}{function}" if place.endswith(".py") else source


def _read_npz(path: Path) -> ArrayData:
    from edge_sdk.data.files import read_data

    try:
        inputs, targets = read_data(path)
        if targets is None:
            raise ConfigError(f"{path} has no y: test data needs targets")
        return ArrayData(tuple(inputs[name] for name in _ordered(inputs)), targets)
    except ProtocolError as error:
        raise ConfigError(str(error)) from error


def _ordered(inputs: dict[str, Array]) -> list[str]:
    return [f"x{number}" for number in range(len(inputs)) if f"x{number}" in inputs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
