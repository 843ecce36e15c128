"""Compile in a child process, so that the process serving devices never loads torch or onnx.

    python -m coordinator.task.graphs.child TASK OUT_DIR --batch-size 32 --level 1.0 --level 0.5

TASK is "path/to/file.py:function" or "package.module:function". The function takes no arguments and
returns a `coordinator.Task`. OUT_DIR becomes a saved model (`coordinator.task.saved_model`): the
plan, the task's initial weights and buffers, the manifest and the graphs. It is read back without
torch, and every part is checked.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from coordinator.task.graphs.compiled import BATCH_SIZES, check_wanted
from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.saved_model import SavedModel, check_folder_free, read_model, save_model
from edge_sdk.program.processes import run_child
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.plan import LEVELS

MARK = "\x1e"
"""First character of a line that tells the parent what the child is doing."""


def compile_in_child(
    task_source: str,
    *,
    levels: Sequence[float] = LEVELS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    distillation: bool = False,
    class_masks: bool = False,
    half: bool = False,
    cache_dir: Path | None = None,
    timeout_s: float | None = None,
    hear: Callable[[str], object] = lambda _: None,
) -> SavedModel:
    """Trace and compile a task in a separate process: plan, initial weights and buffers, graphs.

    `task_source` is a reference as above, relative to the working directory. `cache_dir` None means
    no cache; cached graphs are not compiled again, but the task is still traced. `timeout_s` None
    means no limit. `hear` is told, from another thread, what the child is doing. Raises
    `GraphCompileError` with the child's stderr.
    """
    _parse(task_source)
    check_wanted(levels, batch_sizes)
    with TemporaryDirectory(prefix="tessera-graphs-") as folder:
        made = Path(folder) / "task"
        command = [sys.executable, "-m", "coordinator.task.graphs.child"]
        command += [f"--level={float(level)!r}" for level in levels]
        command += [f"--batch-size={int(size)}" for size in batch_sizes]
        command += ["--distillation"] if distillation else []
        command += ["--class-masks"] if class_masks else []
        command += ["--half"] if half else []
        command += [] if cache_dir is None else [f"--cache-dir={cache_dir}"]
        try:
            done = run_child(
                [*command, "--", task_source, str(made)],
                timeout_s=timeout_s,
                hear=lambda line: line[:1] == MARK and hear(line[1:]),
            )
        except subprocess.TimeoutExpired as error:
            raise GraphCompileError(
                f"compiling task {task_source!r} took longer than {timeout_s} s"
            ) from error
        if done.returncode != 0:
            said = done.stderr.strip() or f"the process ended with code {done.returncode}"
            raise GraphCompileError(f"task {task_source!r} did not compile: {said}")
        return read_model(made)


class _Progress(logging.Handler):
    """Tells the parent what the compiler logs."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell(record.getMessage())


def _tell(words: str) -> None:
    print(f"{MARK}{words}".replace("\n", " "), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the child process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.task.graphs.child")
    parser.add_argument("task", help="path/to/file.py:function or package.module:function")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--level", type=float, action="append", default=[])
    parser.add_argument("--batch-size", type=int, action="append", default=[])
    parser.add_argument("--distillation", action="store_true")
    parser.add_argument("--class-masks", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--cache-dir", type=Path)
    options = parser.parse_args(arguments)
    logger = logging.getLogger("coordinator.task")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Progress())
    try:
        _compile(options)
    except TesseraError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _compile(options: argparse.Namespace) -> None:
    check_folder_free(options.out_dir)
    _tell("loading torch and the task's code")
    function = load_function(options.task)
    from coordinator.task.graphs.cache import compiled_graphs
    from coordinator.task.graphs.compilation import compile_graphs
    from coordinator.task.task import Task

    _tell("making the task: the model is built and traced")
    task = function()
    if not isinstance(task, Task):
        raise GraphCompileError(f"{options.task} returned {type(task).__name__}, not a Task")
    wanted: dict[str, Any] = {
        "levels": options.level or LEVELS,
        "batch_sizes": options.batch_size or BATCH_SIZES,
        "distillation": options.distillation,
        "class_masks": options.class_masks,
        "half": options.half,
    }
    _tell("compiling the model's graphs")
    if options.cache_dir is None:
        graphs = compile_graphs(task, **wanted)
    else:
        graphs = compiled_graphs(task, cache_dir=options.cache_dir, **wanted)
    model = SavedModel(
        task.plan, task.weights, task.buffers, graphs.manifest, graphs.files, names=task.names
    )
    save_model(model, options.out_dir)


def _parse(reference: str, kind: str = "function") -> tuple[str, str]:
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        whose = "a task" if kind == "function" else "one's own"
        raise GraphCompileError(
            f"{whose} is 'path/to/file.py:{kind}' or 'package.module:{kind}', not {reference!r}"
        )
    return place, name


def locate(reference: str, base: Path) -> str:
    """Return a reference with its file, if it names one, relative to a folder."""
    place, colon, name = reference.rpartition(":")
    return f"{base / place}{colon}{name}" if place.endswith(".py") else reference


def load_function(reference: str, kind: str = "function") -> Callable[..., object]:
    """Return the function, or class, that a reference names.

    `kind` is the word for it in errors. Raises `GraphCompileError` if it does not exist.
    """
    place, name = _parse(reference, kind)
    module = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise GraphCompileError(f"{place} has no {kind} {name!r}")
    found: Callable[..., object] = function
    return found


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise GraphCompileError(f"there is no file {path.absolute()}")
    # A unique name: the file may share its name with a module that is already loaded.
    spec = spec_from_file_location("tessera_task", path)
    if spec is None or spec.loader is None:
        raise GraphCompileError(f"{path} cannot be loaded as Python")
    module = sys.modules["tessera_task"] = module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))  # for imports beside it, as if it were run
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise GraphCompileError(
            f"{path} imports {error.name!r}, which is not there: install it beside the coordinator"
        ) from error
    except SyntaxError as error:
        raise GraphCompileError(
            f"{error.filename}, line {error.lineno}, is not Python: {error.msg}"
        ) from error
    return module


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the task's code imports
        raise GraphCompileError(f"there is no module {name!r}") from error


if __name__ == "__main__":
    sys.exit(main())
