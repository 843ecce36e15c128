"""Start programs that end when their parent does, even if the parent is killed.

    python -I -S orphans.py PARENT PROGRAM ARGUMENT…

becomes PROGRAM, an absolute path, which gets SIGTERM as soon as the thread of process PARENT that
started it ends. Only Linux can do that. It is a separate program because our code must not run
between fork and exec where there are threads. It imports only the standard library, to be quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def without_orphans(command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it ends with this thread; on other systems, return it unchanged."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> NoReturn:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        print(f"prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != parent:
        sys.exit(1)  # The parent ended before we could ask to be told.
    os.execv(command[0], command)  # noqa: S606  the program we were asked to become


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
