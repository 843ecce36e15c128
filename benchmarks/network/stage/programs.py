"""The programs of a run as separate processes, ended with their context."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report.figures import FigureError
from benchmarks.report.imports import child_environment
from edge_sdk.program.processes import ChildProcess, Children, run_child
from edge_sdk.program.settings import PREFIX

POLL_S = 0.02
WAIT_S = 300.0
"""Limit for every wait for a program."""

WARM = (
    "import coordinator.cli, coordinator.operate.serve.serving, edge_sdk.cli, "
    "edge_sdk.device.service.service, "
    "edge_sdk.train.inference, edge_sdk.device.service.participation, "
    "edge_sdk.train.onnx, edge_sdk.transport.mqtt.link, safetensors.numpy"
)


def serve_command(config: Path) -> list[str]:
    """Return the command `tessera-coordinator serve` with these settings."""
    return ["-m", "coordinator.cli", "serve", "--config", str(config)]


def device_command(config: Path) -> list[str]:
    """Return the command `tessera-device run` with these settings."""
    return ["-m", "edge_sdk.cli", "run", "--config", str(config)]


class Programs(Children):
    """Starts programs with one thread for linear algebra, and bytecode in `bytecode`."""

    def __init__(self, folder: Path, bytecode: Path) -> None:
        """`folder`: for their logs."""
        super().__init__()
        self.folder, self._bytecode = folder, bytecode

    def begin(self, name: str, command: Sequence[str], *, piped: bool = False) -> ChildProcess:
        """Start Python with this command; its output goes to `<name>.log`, or to us if piped."""
        environment = program_environment(self._bytecode)
        return self.start(
            name,
            [sys.executable, *command],
            self.folder / f"{name}.log",
            environment,
            piped=piped,
        )

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises `FigureError` when a program fails, or after WAIT_S."""
        by = time.monotonic() + WAIT_S
        while not is_done():
            for program in self.started:
                check(program)
            if time.monotonic() >= by:
                raise FigureError(f"{what} did not happen within {WAIT_S:.0f} s")
            time.sleep(POLL_S)


def check(program: ChildProcess) -> None:
    """Raise `FigureError` with its last words if a program has failed."""
    if program.failed:
        raise FigureError(program.last_words())


def write_bytecode(bytecode: Path) -> None:
    """Compile what programs import, so that measured ones need not. Raises `FigureError`."""
    done = run_child([sys.executable, "-c", WARM], program_environment(bytecode))
    if done.returncode:
        raise FigureError(f"the programs cannot be imported:\n{done.stderr}")


def program_environment(bytecode: Path) -> dict[str, str]:
    """Return the environment of a program; settings come from files alone."""
    variables = child_environment(str(bytecode))
    return {name: text for name, text in variables.items() if not name.startswith(PREFIX)}
