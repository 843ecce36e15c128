"""Child processes that never outlive us, even if Ctrl-C comes while one is being started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: a process in the middle of its start is nobody's."""
    if threading.current_thread() is not threading.main_thread():
        yield  # such a thread is not interrupted anyway
        return
    pressed: list[int] = []

    def note(number: int, _frame: Any) -> None:
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if pressed:
        raise KeyboardInterrupt


def run_child(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter with these arguments says, and its exit code."""
    with ExitStack() as stack:
        with uninterrupted():
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
        said, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
