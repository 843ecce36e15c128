"""Programs that do not outlive the one that started them, even when that is killed.

    python -I -S orphans.py PARENT PROGRAM ARGUMENT…

becomes PROGRAM, an absolute path, which gets SIGTERM as soon as the thread of process PARENT that
started it ends. Only Linux can do that. It is a program of its own because nothing of ours may run
between fork and exec where there are threads, and imports the standard library alone to be quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def without_orphans(command: Sequence[str]) -> list[str]:
    """The command that starts `command` so that it ends with this thread; elsewhere, as it is."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> NoReturn:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        print(f"prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != parent:
        sys.exit(1)  # It ended before we could ask to be told.
    os.execv(command[0], command)  # noqa: S606  what we were told to become


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
