"""Cost of `import edge_sdk` in fresh interpreters: memory and CPU seconds, beside numpy's.

- Memory is `VmHWM` of the child: its peak resident memory. (`getrusage` would not work: Linux
  passes `ru_maxrss` from the parent through `exec`.)
- CPU is `time.process_time()` around the import statement alone, with one BLAS thread. With more,
  OpenBLAS' idle threads spin while numpy loads; that adds the same seconds to every child and
  would make any ratio look better than it is.
- Bytecode is cached, as after an installation, in the run's own directory, so that neither a source
  tree without caches nor `PYTHONDONTWRITEBYTECODE` makes us time the compiler.
- `edge_sdk` defers imports it needs only later, so a third child also uses the names that a device
  needs before it trains: deferring hides nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import edge_sdk
from benchmarks.report.figures import Figure, FigureError
from edge_sdk.program.processes import THREAD_VARIABLES, run_child

STATEMENTS = {
    "numpy": "import numpy",
    "edge_sdk": "import edge_sdk",
    "edge_sdk, a device": "from edge_sdk import Device, ModelPlan, load_config, run_device",
}
RSS_TARGET_MB = 30.0
CPU_TARGET = 1.3

MEASURABLE = Path("/proc/self/status").exists()
"""True if peak memory can be read from Linux' /proc."""

_CHILD = """
import time
before = time.process_time()
{statement}
cpu_s = time.process_time() - before
with open("/proc/self/status") as status:
    peak_kib = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(cpu_s, peak_kib)
"""


@dataclass(frozen=True, slots=True)
class ImportRow:
    """Medians over the repetitions; `cpu_ratio` is to `import numpy`."""

    statement: str
    rss_mb: float
    cpu_ms: float
    cpu_ratio: float


def measure_imports(reps: int, tick: Callable[[], None] = lambda: None) -> list[ImportRow]:
    """Import in turn, `reps` times each; `tick` is called `reps + 1` times."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in STATEMENTS}
    with TemporaryDirectory() as bytecode:
        for rep in range(reps + 1):
            for name, statement in STATEMENTS.items():
                sample = _import(statement, bytecode)
                if rep > 0:  # the first writes the bytecode
                    runs[name].append(sample)
            tick()
    # Ratios within a repetition, whose children ran one right after the other.
    return [
        ImportRow(
            STATEMENTS[name],
            median(rss for _, rss in samples),
            median(cpu_s for cpu_s, _ in samples) * 1e3,
            median(
                cpu_s / base for (cpu_s, _), (base, _) in zip(samples, runs["numpy"], strict=True)
            ),
        )
        for name, samples in runs.items()
    ]


def import_figures(rows: list[ImportRow]) -> list[Figure]:
    """Return the figures of `measure_imports`."""
    numpy, sdk, names = rows
    return [
        Figure("import.rss", sdk.rss_mb, "MB", target=RSS_TARGET_MB),
        Figure("import.cpu_over_numpy", sdk.cpu_ratio, "×", target=CPU_TARGET),
        Figure("import.cpu", sdk.cpu_ms, "ms"),
        Figure("import.device.rss", names.rss_mb, "MB"),
        Figure("import.device.cpu_over_numpy", names.cpu_ratio, "×"),
        Figure("import.numpy.rss", numpy.rss_mb, "MB"),
    ]


def child_environment(bytecode: str | None) -> dict[str, str]:
    """Return a child's environment: our packages, one BLAS thread, its own bytecode directory.

    None: bytecode is where this process has it.
    """
    root = str(Path(edge_sdk.__file__).parents[1])
    env = dict(os.environ)
    if bytecode is not None:
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["PYTHONPYCACHEPREFIX"] = bytecode
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env | dict.fromkeys(THREAD_VARIABLES, "1")


def _import(statement: str, bytecode: str) -> tuple[float, float]:
    """Return (CPU seconds, peak MB) of a child that runs the statement."""
    done = run_child(
        [sys.executable, "-c", _CHILD.format(statement=statement)], child_environment(bytecode)
    )
    if done.returncode:
        raise FigureError(f"{statement!r} failed in a fresh interpreter:\n{done.stderr}")
    cpu_s, peak_kib = done.stdout.split()
    return float(cpu_s), int(peak_kib) * 1024 / 1e6
