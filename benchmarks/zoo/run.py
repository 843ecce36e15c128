"""Try models one after another, each in a process of its own with a limit on its computing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.zoo.build import missing_package
from benchmarks.zoo.names import CURE, ZOO
from benchmarks.zoo.outcome import ZooOutcome, read_outcomes, write_outcomes
from coordinator.task.graphs.cache import translator_version
from edge_sdk.program.processes import run_child


def try_model(key: str, limit_s: float, before: ZooOutcome | None = None) -> ZooOutcome:
    """Try a model; whatever its process does, there is an outcome. `before` is an earlier one."""
    nothing = ZooOutcome(key, translator_version())
    if package := missing_package(ZOO[key]):
        return nothing.failed(f"not tried: {package} is not installed; {CURE}")
    with TemporaryDirectory(prefix="tessera-zoo-") as folder:
        file = Path(folder) / "outcome.jsonl"
        command = [sys.executable, "-m", "benchmarks.zoo.process", key, str(file), str(limit_s)]
        if before is not None:
            earlier = Path(folder) / "before.jsonl"
            write_outcomes(earlier, [before])
            command.append(str(earlier))
        done = run_child(command)
        found = read_outcomes(file).get(key, nothing)
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            doing = "tracing" if not found.traced else "compiling"
            doing = "the step" if found.compiled else doing
            why = "took longer than" if done.returncode == -signal.SIGXCPU else "was killed within"
            return found.failed(f"{doing} {why} {limit_s:g} s of computing")
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return found.failed(f"the process ended with code {done.returncode}: {last}", raw=True)
        return found
