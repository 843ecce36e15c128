"""CPU of the start of programs, beside `import numpy`: their help, and a device until it connects.

CPU is user and system time of fresh processes, bytecode cached, one thread for linear algebra.
Ratios are taken within a turn, whose processes ran one right after the other; the median counts.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.network.stage.files import write_device
from benchmarks.network.stage.programs import program_environment
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.program.processes import run_child

DRIVER = Path(__file__).parent / "drivers" / "connecting.py"
NUMPY, CONNECTED = "import numpy", "device, connected"
HELP = {
    "device --help": "edge_sdk.cli",
    "coordinator --help": "coordinator.cli",
    "bench --help": "benchmarks.cli",
}
HELP_TARGET, CONNECTED_TARGET = 1.5, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """The start of one program: CPU milliseconds, and their ratio to numpy's import."""

    program: str
    cpu_ms: float
    over_numpy: float
    target: float | None


def measure_start(turns: int, bytecode: Path, begin: Begin = silent) -> list[StartRow]:
    """Start every program `turns` times, after one that writes bytecode; as many ticks, and one."""
    tick = begin("start")
    with TemporaryDirectory(prefix="tessera-bench-") as temporary:
        folder = Path(temporary)
        (folder / "data").mkdir()
        np.savez(folder / "data" / "own.npz", x=np.zeros((8, 4), np.float32), y=np.zeros(8, int))
        with embedded_broker(folder / "broker") as broker:
            path = write_device(folder, "device", broker, weigh=True)
            commands = {
                NUMPY: ["-c", "import numpy"],
                CONNECTED: [str(DRIVER), "run", "--config", str(path)],
                **{name: ["-m", module, "--help"] for name, module in HELP.items()},
            }
            spent: dict[str, list[float]] = {name: [] for name in commands}
            for turn in range(turns + 1):
                for name, command in commands.items():
                    taken = _cpu_s(command, bytecode)
                    if turn:
                        spent[name].append(taken)
                tick()
    return start_rows(spent)


def start_rows(spent_s: dict[str, list[float]]) -> list[StartRow]:
    """Compare the programs with numpy's import, turn by turn."""
    targets = {CONNECTED: CONNECTED_TARGET, **dict.fromkeys(HELP, HELP_TARGET)}
    return [
        StartRow(
            program=name,
            cpu_ms=1e3 * median(each),
            over_numpy=median(own / base for own, base in zip(each, spent_s[NUMPY], strict=True)),
            target=targets.get(name),
        )
        for name, each in spent_s.items()
    ]


def start_figures(rows: Sequence[StartRow]) -> list[Figure]:
    """Return the ratios to numpy's import."""
    return [
        Figure(f"deployed.start.{_slug(row.program)}", row.over_numpy, "×", target=row.target)
        for row in rows
        if row.target is not None
    ]


def _slug(program: str) -> str:
    return program.replace("--", "").replace(",", "").replace(" ", "-")


def _cpu_s(command: Sequence[str], bytecode: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_child([sys.executable, *command], program_environment(bytecode))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise FigureError(f"{' '.join(command)} failed:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
