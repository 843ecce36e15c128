"""The programs of a run as processes of their own, ended with their context."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report.children import run_child, uninterrupted
from benchmarks.report.figures import FigureError
from benchmarks.report.imports import child_environment
from edge_sdk.device.config import PREFIX

POLL_S = 0.02
WAIT_S = 300.0
"""For anything that a program is waited for."""
STOP_S = 10.0
TAIL_LINES = 15

WARM = (
    "import coordinator.cli, coordinator.operate.serving, edge_sdk.cli, "
    "edge_sdk.device.service.service, "
    "edge_sdk.train.inference, edge_sdk.device.service.participation, "
    "edge_sdk.train.onnx, edge_sdk.transport.mqtt.link, safetensors.numpy"
)


def serve_command(config: Path) -> list[str]:
    """`tessera-coordinator serve` with these settings."""
    return ["-m", "coordinator.cli", "serve", "--config", str(config)]


def device_command(config: Path) -> list[str]:
    """`tessera-device run` with these settings."""
    return ["-m", "edge_sdk.cli", "run", "--config", str(config)]


@dataclass(frozen=True, slots=True)
class StageProcess:
    """A program that was started, and the file that has what it says."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def check(self) -> None:
        """Raise `FigureError` with its last words if it has failed."""
        if self.process.poll() not in (None, 0):
            said = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise FigureError(
                "\n  ".join([f"{self.name} ended with code {self.process.returncode}:", *said])
            )


@dataclass(slots=True)
class Programs:
    """Starts programs with one thread for linear algebra, and bytecode in `bytecode`."""

    folder: Path
    """For their logs."""
    bytecode: Path
    started: list[StageProcess] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str]) -> StageProcess:
        """Start Python with this command; what it says goes to `<name>.log`."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output, uninterrupted():
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=program_environment(self.bytecode),
                # Ctrl-C in a terminal is for us, who stop them in order.
                start_new_session=True,
            )
            self.started.append(StageProcess(name, process, log))
        return self.started[-1]

    def end(self, program: StageProcess) -> None:
        """Let one end in order, or else at once; it is nobody's concern any more."""
        _end([program])
        self.started.remove(program)

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises `FigureError` when a program fails, or after WAIT_S."""
        by = time.monotonic() + WAIT_S
        while not is_done():
            for program in self.started:
                program.check()
            if time.monotonic() >= by:
                raise FigureError(f"{what} did not happen within {WAIT_S:.0f} s")
            time.sleep(POLL_S)


@contextmanager
def running(folder: Path, bytecode: Path) -> Iterator[Programs]:
    """Programs that have ended when the context is left, however that comes about."""
    programs = Programs(folder, bytecode)
    try:
        yield programs
    finally:
        _end(programs.started)


def write_bytecode(bytecode: Path) -> None:
    """Compile what programs import, so that none of those measured has to. Raises `FigureError`."""
    done = run_child(["-c", WARM], program_environment(bytecode))
    if done.returncode:
        raise FigureError(f"the programs cannot be imported:\n{done.stderr}")


def program_environment(bytecode: Path) -> dict[str, str]:
    """Variables of a program; settings come from files alone."""
    variables = child_environment(str(bytecode))
    return {name: text for name, text in variables.items() if not name.startswith(PREFIX)}


def _end(programs: Sequence[StageProcess]) -> None:
    try:
        for program in programs:
            _signal(program, signal.SIGTERM)
        by = time.monotonic() + STOP_S
        for program in programs:
            with suppress(subprocess.TimeoutExpired):
                program.process.wait(max(0.0, by - time.monotonic()))
    finally:
        for program in programs:
            _signal(program, signal.SIGKILL)
            program.process.wait()


def _signal(program: StageProcess, number: signal.Signals) -> None:
    """Tell a program and what it has started."""
    if program.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(program.process.pid, number)
