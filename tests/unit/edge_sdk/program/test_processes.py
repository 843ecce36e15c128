"""Child processes end with us, and Ctrl-C waits until they are known."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from edge_sdk.program.processes import (
    THREAD_VARIABLES,
    ChildProcess,
    Children,
    limit_threads,
    run_child,
    uninterrupted,
)
from tests.waiting import HANGS_S, until

ROOT = Path(__file__).resolve().parents[4]
SLEEPS = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def begin(children: Children, code: str, log: Path) -> ChildProcess:
    """A child that has said that it is here."""
    child = children.start(log.stem, python(code), log)
    until(lambda: "here" in log.read_text())
    return child


# -- one that is waited for ----------------------------------------------------------------------


def test_child_is_heard_to_its_end() -> None:
    code = "import os, sys; print(os.environ['SAY']); print('no', file=sys.stderr); sys.exit(3)"
    done = run_child(python(code), {**os.environ, "SAY": "yes"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "yes\n", "no\n")


def test_child_that_takes_too_long_is_gone() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(subprocess.TimeoutExpired):
        run_child(python(SLEEPS), timeout_s=0.01)
    assert set(psutil.Process().children()) <= before


def test_interruption_waits_for_the_end_of_the_block() -> None:
    handler = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_interruption_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupted_child_is_gone() -> None:
    before = set(psutil.Process().children())
    # The child interrupts us, so it is certain to have started.
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_child(python(code))
    assert set(psutil.Process().children()) <= before


# -- several that run beside us ------------------------------------------------------------------


def test_children_end_with_their_context(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), Children() as children:  # noqa: PT012
        one = begin(children, SLEEPS, tmp_path / "one.log")
        other = begin(children, SLEEPS, tmp_path / "other.log")
        children.stop(other)
        assert other.process.returncode == -signal.SIGTERM
        assert one.is_running
        raise ValueError("no")
    assert one.process.returncode == -signal.SIGTERM
    assert children.started == []


def test_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    with Children(stop_s=0.01) as children:
        child = begin(children, STUBBORN, tmp_path / "stubborn.log")
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("grandchild_code", [SLEEPS, STUBBORN])
def test_what_a_child_has_started_ends_with_it(tmp_path: Path, grandchild_code: str) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"said = [sys.executable, '-c', {grandchild_code!r}]\n"
        "started = subprocess.Popen(said, stdout=subprocess.PIPE, text=True)\n"
        "print(started.pid, started.stdout.readline(), flush=True)\n"
        "time.sleep(600)"
    )
    with Children() as children:
        child = begin(children, code, tmp_path / "parent.log")
        grandchild = psutil.Process(int(child.log.read_text().split()[0]))
    with suppress(psutil.NoSuchProcess):
        grandchild.wait(HANGS_S)
    assert not grandchild.is_running()


def test_failed_child_has_last_words(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start("broken", python("raise SystemExit('no room')"), tmp_path / "log")
        until(lambda: not child.is_running)
        assert child.failed
        assert child.last_words() == "broken ended with code 1:\n  no room"


OWNER = """
import sys, time
from pathlib import Path
from edge_sdk.program.processes import Children
with Children() as children:
    child = children.start("child", [sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends programs with their parent")
def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command, environment = python(OWNER, SLEEPS, str(log)), {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
        try:
            assert owner.stdout is not None
            child = psutil.Process(int(owner.stdout.readline()))
            until(lambda: "here" in log.read_text())
        finally:
            owner.kill()
    with suppress(psutil.NoSuchProcess):
        child.wait(HANGS_S)
    assert not child.is_running()


# -- threads -------------------------------------------------------------------------------------

OMP, OPENBLAS, MKL = THREAD_VARIABLES


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("1", "1", "1")),
        ({OMP: "4"}, ("4", "4", "4")),
        ({OPENBLAS: "2"}, ("1", "2", "1")),
        ({OMP: "4", MKL: "3"}, ("4", "4", "3")),
    ],
)
def test_threads_are_limited_unless_somebody_said(
    given: dict[str, str], expected: tuple[str, ...]
) -> None:
    limit_threads(given)
    assert tuple(given[name] for name in THREAD_VARIABLES) == expected


def test_child_computes_with_one_thread() -> None:
    plain = {name: text for name, text in os.environ.items() if name not in THREAD_VARIABLES}
    code = f"import os; print([os.environ[name] for name in {THREAD_VARIABLES!r}])"
    assert run_child(python(code), plain).stdout == "['1', '1', '1']\n"


@pytest.mark.parametrize("program", ["edge_sdk.cli", "coordinator.cli", "benchmarks.cli"])
def test_program_limits_threads_before_numpy_is_loaded(program: str) -> None:
    code = (
        f"import os, sys; from {program} import main; loaded = 'numpy' in sys.modules\n"
        "try: main(['--version'])\n"
        f"finally: print(loaded, [os.environ[n] for n in {THREAD_VARIABLES!r}])"
    )
    done = run_child(python(code), {"PYTHONPATH": str(ROOT), OMP: "1", OPENBLAS: "7"})
    assert done.stdout.splitlines()[-1] == "False ['1', '7', '1']", done.stderr


# -- nobody else does it -------------------------------------------------------------------------

STARTERS = {
    "edge_sdk/program/processes.py",
    "edge_sdk/machine/sensors/commands.py",  # many short ones, for which a launcher is too slow
}


@pytest.mark.parametrize("package", ["edge_sdk", "coordinator", "benchmarks"])
def test_processes_are_started_in_one_module(package: str) -> None:
    starts = re.compile(r"\bsubprocess\.(Popen\(|run\b|call\b|check_)|\bos\.(fork|spawn|system)\b")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if starts.search(path.read_text())
    }
    assert found <= STARTERS
