"""Child processes end with us, and Ctrl-C waits until they are known."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from benchmarks.report.children import run_child, uninterrupted


def test_child_is_heard_to_its_end() -> None:
    code = "import os, sys; print(os.environ['SAY']); print('no', file=sys.stderr); sys.exit(3)"
    done = run_child(["-c", code], {**os.environ, "SAY": "yes"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "yes\n", "no\n")


def test_interruption_waits_for_the_end_of_the_block() -> None:
    handler = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupted_child_is_gone() -> None:
    before = set(psutil.Process().children())
    # The child interrupts us, so it is certain to have started.
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_child(["-c", code], dict(os.environ))
    assert set(psutil.Process().children()) <= before
