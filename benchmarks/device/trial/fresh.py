"""Fresh processes: each calls one function, which prints its result as JSON."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from benchmarks.device.trial.process import Asked
from benchmarks.report.imports import child_environment
from edge_sdk.program.processes import run_child

_CODE = "import sys; from {module} import {function} as f; f(*sys.argv[1:])"


class ProcessFailed(Exception):
    """A process failed; the text says why."""


def run_fresh(function: str, ask: Asked) -> Any:
    """Run a function of `benchmarks.device.trial.process`. Raises `ProcessFailed`."""
    return call_fresh("benchmarks.device.trial.process", function, ask.text())


def call_fresh(module: str, function: str, *arguments: str) -> Any:
    """Call the function in a fresh interpreter and return its result. Raises `ProcessFailed`."""
    code = _CODE.format(module=module, function=function)
    done = run_child([sys.executable, "-c", code, *arguments], child_environment(None))
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        more = "; the system does that where memory runs out" if name == "SIGKILL" else ""
        raise ProcessFailed(f"its process was ended by {name}{more}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ProcessFailed(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])  # libraries print too
