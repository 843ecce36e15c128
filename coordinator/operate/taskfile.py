"""A task's code, on the coordinator only: "path/to/file.py:function" or "package.module:function".

The task's function takes no arguments and returns a `coordinator.Task`; a second function may
return test data, (inputs, targets) as numpy arrays, unless files hold it. Each runs in a separate
process: the one that serves devices loads neither torch nor the task's code.

    python -m coordinator.operate.taskfile SOURCE OUT.npz

calls a function and writes the test data it returns.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from coordinator.errors import ConfigError
from coordinator.run.folder import TaskFiles
from coordinator.service.close import RootTrainer
from coordinator.service.courses.parts import Evaluator
from coordinator.task.graphs.child import compile_in_child, load_function, locate
from coordinator.task.saved_model import SavedModel
from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import DataError
from edge_sdk.data.files import read_data
from edge_sdk.data.format import DataFormat
from edge_sdk.data.function import split_reference
from edge_sdk.data.source import open_data
from edge_sdk.program.processes import run_child
from edge_sdk.protocol.errors import TensorError, TesseraError
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Backend

log = logging.getLogger(__name__)


def compile_task(
    source: str,
    base: Path,
    *,
    batch_size: int,
    levels: Sequence[float] = LEVELS,
    distillation: bool = False,
    class_masks: bool = False,
    half: bool = False,
    hear: Callable[[str], object] = lambda _: None,
) -> SavedModel:
    """Trace and compile a task. Raises `GraphCompileError` with the error of its code.

    `hear` is told, from another thread, what is being done.
    """
    return compile_in_child(
        locate(source, base),
        levels=levels,
        batch_sizes=(batch_size,),
        distillation=distillation,
        class_masks=class_masks,
        half=half,
        hear=hear,
    )


def check_evaluation(source: str, base: Path, *, what: str = "[task] evaluation") -> None:
    """Raise `ConfigError` if the place of data is not there; does not read it.

    `what` names the setting in errors.
    """
    place = source if (function := split_reference(source)) is None else function[0]
    path = base / Path(place).expanduser()
    if (function is None or place.endswith(".py")) and not path.exists():
        raise ConfigError(f"{what} {source!r}: {path} is not there")


def load_evaluation(
    source: str,
    base: Path,
    spec: DataSpec,
    format: DataFormat | None = None,
    cache: Path | None = None,
    *,
    what: str = "[task] evaluation",
) -> ArrayData:
    """Load test data in the task's form, from a function, or from files as devices read them.

    `cache`: folder for data that memory does not hold; None: it must. `what` names the setting
    in errors. Raises `ConfigError`.
    """
    try:
        if split_reference(source) is None:
            place = str(base / Path(source).expanduser())
            read = open_data(place, format).read(spec, cache=cache)
        else:
            read = open_data(_call_elsewhere(source, base, what), format).read(spec)
    except DataError as error:
        raise ConfigError(f"{what} {source!r}: {error}") from error
    for note in read.notes:
        log.info("%s: %s", what, note)
    for warning in read.warnings:
        log.warning("%s: %s", what, warning)
    return read.data


def _call_elsewhere(source: str, base: Path, what: str) -> ArrayData:
    with TemporaryDirectory(prefix="tessera-evaluation-") as folder:
        path = Path(folder) / "data.npz"
        command = [sys.executable, "-m", "coordinator.operate.taskfile"]
        done = run_child([*command, locate(source, base), str(path)])
        if done.returncode != 0:
            said = done.stderr.strip() or f"the process ended with code {done.returncode}"
            raise ConfigError(f"{what} {source!r}: {said}")
        inputs, targets = read_data(path)
        if targets is None:
            raise ConfigError(f"{what} {source!r} returned no targets")
        return ArrayData(tuple(inputs[f"x{number}"] for number in range(len(inputs))), targets)


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


def make_root(task: TaskFiles, data: ArrayData) -> RootTrainer:
    """Make the trainer of the root's movement, with the task's graphs and onnxruntime.

    Raises `ConfigError` when the data does not fit the task.
    """
    try:
        task.manifest.data.check(data)
    except TensorError as error:
        raise ConfigError(f"[robust] data: {error}") from error

    def backend() -> Backend:
        from edge_sdk.train.onnx import OnnxBackend  # optional, and slow to load

        return OnnxBackend(task.plan, task.manifest, task.files)

    return RootTrainer(backend, data)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
