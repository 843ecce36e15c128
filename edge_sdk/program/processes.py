"""Child processes: started, waited for, stopped and reaped. None outlives us.

    with Children() as children:                        programs that run beside us
        child = children.start("broker", [path, "-c", config], log)
    done = run_child([sys.executable, "-m", module])    one that is waited for

On Linux a child ends even when we are killed (`orphans.py`); the thread that starts it must then
live as long as the child. Ctrl-C cannot come between the start of a child and its registration.
Every child computes with one BLAS thread unless a variable says otherwise: many threads for small
matrices cost more than they gain, and several programs would wait for each other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edge_sdk.program.orphans import without_orphans

if TYPE_CHECKING:
    from typing_extensions import Self

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Read once by numpy's and torch's linear algebra, when it is loaded."""
STOP_S = 10.0
"""Seconds a child may take to end when asked; then it is killed."""
TAIL_LINES = 15


def limit_threads(environment: MutableMapping[str, str], threads: int = 1) -> None:
    """Set the threads of linear algebra, unless already set: OMP_NUM_THREADS is for all."""
    wanted = environment.get(THREAD_VARIABLES[0], str(threads))
    for name in THREAD_VARIABLES:
        environment.setdefault(name, wanted)


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A program started in its own process group, and its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Process number."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """True while it runs."""
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """True if it ended before its work was done."""
        return self.process.poll() not in (None, 0)

    def last_words(self) -> str:
        """Describe its end: exit code and last lines of output."""
        said = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n  ".join([f"{self.name} ended with code {self.process.returncode}:", *said])

    def signal(self, number: signal.Signals) -> None:
        """Signal it and its children, which may outlive it; nothing happens if all have ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Children:
    """Programs that have all ended when the context is left, in any way."""

    def __init__(self, stop_s: float = STOP_S) -> None:
        self._stop_s = stop_s
        self.started: list[ChildProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*self.started)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
    ) -> ChildProcess:
        """Start a program, an absolute path with arguments; its output is appended to the log.

        `environment`: None is ours. `piped`: the caller writes its input and reads its output, and
        the log has its errors alone. Ctrl-C in a terminal is for us; we stop children in order.
        """
        with log.open("ab") as output, uninterrupted():
            process = subprocess.Popen(  # noqa: S603  what we are asked for, no shell
                without_orphans(command),
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                env=_limited(environment),
                start_new_session=True,
            )
            self.started.append(ChildProcess(name, process, log))
        return self.started[-1]

    def stop(self, *children: ChildProcess) -> None:
        """Ask all to end, and kill those that do not; they are reaped and forgotten."""
        running = [child for child in children if child.is_running]
        try:
            for child in running:
                child.signal(signal.SIGTERM)
            by = time.monotonic() + self._stop_s
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, by - time.monotonic()))
        finally:
            for child in running:
                child.signal(signal.SIGKILL)  # also for its children, which may outlive it
            for child in children:
                child.process.wait()
                for pipe in (child.process.stdin, child.process.stdout):
                    if pipe is not None:
                        with suppress(OSError):  # what was not written any more is lost
                            pipe.close()
                self.started.remove(child)


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    timeout_s: float | None = None,
    hear: Callable[[str], object] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output and exit code; it shares our group.

    `environment`, `folder`: None is ours. `hear` gets each line of its output at once, from another
    thread. Raises `subprocess.TimeoutExpired`, and then it is killed.
    """
    with ExitStack() as stack:
        with uninterrupted():
            process = start_piped(command, environment, stdin=subprocess.DEVNULL, folder=folder)
            stack.callback(_end, process)
        if hear is None:
            said, errors = process.communicate(timeout=timeout_s)
            return subprocess.CompletedProcess(process.args, process.returncode, said, errors)
        lines, words = list[str](), list[str]()
        pumps = [
            threading.Thread(target=_pump, args=(process.stdout, lines, hear), daemon=True),
            threading.Thread(target=_pump, args=(process.stderr, words, None), daemon=True),
        ]
        for pump in pumps:
            pump.start()
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            for pump in pumps:
                pump.join()
        return subprocess.CompletedProcess(process.args, code, "".join(lines), "".join(words))


def _pump(stream: IO[str], lines: list[str], hear: Callable[[str], object] | None) -> None:
    for line in stream:
        lines.append(line)
        if hear is not None:
            hear(line.rstrip("\n"))


def start_piped(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    stdin: int = subprocess.PIPE,
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """Start a program whose output the caller reads, ends and reaps; it shares our group.

    `folder`: that in which it runs; None is ours.
    """
    return subprocess.Popen(  # noqa: S603  what we are asked for, no shell
        without_orphans(command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_limited(environment),
        cwd=folder,
        text=True,
        errors="replace",
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: a process being started belongs to nobody.

    Then it is handled as usual.
    """
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
        signal.raise_signal(signal.SIGINT)


def _limited(environment: Mapping[str, str] | None) -> dict[str, str]:
    limited = dict(os.environ if environment is None else environment)
    limit_threads(limited)
    return limited


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
