"""Ctrl-C in the middle of a benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.waiting import HANGS_S


def interrupted(
    arguments: Sequence[str],
    said: str,
    folder: Path,
    begun: Callable[[psutil.Process], None] = lambda _: None,
    *,
    by: signal.Signals = signal.SIGINT,
) -> list[str]:
    """The last lines of `tessera-bench`, which is interrupted when it has said something.

    It ends with 130. `folder` takes its temporary files; `begun` is called before the signal `by`.
    """
    code = f"import sys; from benchmarks.cli import main; sys.exit(main({list(arguments)}))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        assert process.stderr is not None
        while said not in (line := process.stderr.readline()):
            assert line, f"it ended and never said: {said}"
        begun(psutil.Process(process.pid))
        process.send_signal(by)
        try:
            _, errors = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:  # Python drops a signal that arrives in a destructor
            process.send_signal(by)
            _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130
    return errors.splitlines()
