"""`serve --runs`: one process serves every run file of a folder, and follows the folder's changes.

    <folder>/  coordinator.toml   settings that the runs share (optional)
               digits.toml …      a run each
               coordinator/       the process's own: broker, join codes, socket, lock

Each run is served by `serving.serve` in a thread of its own, with its own folder, lock, control
socket and links; the broker and the way in for devices are shared.

| the file | the run |
|---|---|
| appears | starts |
| disappears | stops, as by SIGTERM |
| changes | stops and starts again with the new settings, if these can be read |
| cannot be read, or its task cannot be used | is shown as broken until the file is saved again |

| the run | then |
|---|---|
| is complete | stays listed; nothing is served for it, until rounds are added |
| is stopped by an operator | stays down until its file is saved again |
| fails (alone, exit code 1), or the broker refuses it | starts again after 10 s … 10 minutes |
| is replaced by another coordinator | stays down until its file is saved again |

Two coordinators of a task that both restart would go on replacing each other. A run that ends, in
any way, leaves the others alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError, StopRequestedError
from coordinator.operate.config import (
    PROCESS_FILE,
    PROCESS_LOCK,
    ProcessConfig,
    ServeConfig,
    read_run,
)
from coordinator.operate.http.opening import OpenPage, open_http
from coordinator.operate.serve.runs import ServedRuns
from coordinator.operate.serve.serving import (
    Say,
    ServeEnd,
    explain_failure,
    is_journal,
    reach_broker,
    serve,
    try_broker,
)
from coordinator.run.folder import RunError
from coordinator.run.steering.orders import read_steered
from coordinator.run.steering.settings import length_of
from coordinator.service.outgoing.fence import FencedError
from coordinator.service.overview.facts import kept_facts
from edge_sdk.program.control import ControlCommand, ControlSocket
from edge_sdk.program.files import lock_file, make_folder
from edge_sdk.program.logs import fact, log_scope
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.transport.probe import BrokerFacts
from edge_sdk.transport.settings import BrokerSettings, LinkError

if TYPE_CHECKING:
    from coordinator.operate.joining.codes import CodeBook
    from coordinator.operate.joining.opening import Entrance, Joining

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the folder. A file counts once two looks found it the same."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Seconds until a failed run starts again: the first time, and at most."""
STEADY_S = 600.0
"""Seconds after which a run that was served counts as sound again."""
DIGEST = 32
"""Bytes of a file's mark that stand for its content; the others stand for when it was saved."""
DESCRIPTORS = 65_536
"""Most open files and sockets to ask the system for; a run needs about 20."""


class RunStanding(Enum):
    """Standing of a run file."""

    STARTING = "starting"
    SERVED = "served"
    STOPPING = "stopping"
    COMPLETE = "complete"
    STOPPED = "stopped"
    """An operator stopped it (tessera-coordinator stop); it starts when its file is saved again."""
    FAILED = "failed"
    """It will be started again."""
    FENCED = "fenced"
    BROKEN = "broken"
    """The file or its task cannot be used."""


class RunWatchdog(Watchdog):
    """Hears signs of life of a run's loop, for the process, which speaks for all."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_s: float | None = None
        """Time of the newest one; None: the loop has not begun."""
        self.began = threading.Event()

    def ready(self, status: str) -> None:  # noqa: ARG002
        """Note that the run is served."""
        self.began.set()

    def alive(self, now: float) -> None:
        """Note that the loop ran."""
        super().alive(now)
        self.heard_s = now


class RunThread:
    """One serving of a run, from start to end, in a thread."""

    def __init__(self, work: Callable[[threading.Event, Watchdog], ServeEnd], name: str) -> None:
        self.watchdog = RunWatchdog()
        self.error: BaseException | None = None
        self.end: ServeEnd | None = None
        self._work = work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the run to stop."""
        self._stop.set()

    @property
    def ended(self) -> bool:
        """True once nothing of it runs any more."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.end = self._work(self._stop, self.watchdog)
        except StopRequestedError:
            pass
        except BaseException as error:  # the outermost level of this thread; see `_judge`
            self.error = error


@dataclass(slots=True)
class RunFile:
    """A run file, and what became of it."""

    path: Path
    seen: bytes | None = None
    """Mark of the content at the last look."""
    taken: bytes | None = None
    """Mark of the content that was acted on; None: of none yet."""
    running: bytes = b""
    """Digest of the content whose settings the run has."""
    config: ServeConfig | None = None
    standing: RunStanding = RunStanding.STARTING
    thread: RunThread | None = None
    error: str | None = None
    failures: int = 0
    due_s: float | None = 0.0
    """Time at which to start it; None: not by itself."""
    served_s: float = 0.0
    started: bool = False
    """True once a run of its present task was started; else what is shown of that is another's."""
    take_over: bool = False
    length: int = 0
    """Rounds, or updates, that it was made to have when it started or was complete."""

    def facts(self, now: float) -> dict[str, Any]:
        """Describe it for lists."""
        config = self.config
        waits = self.due_s is not None and self.thread is None
        return {
            "file": self.path.name,
            "task": None if config is None else config.task.name,
            "folder": None if config is None else str(config.run.folder),
            "state": self.standing.value,
            "error": self.error,
            "failures": self.failures,
            "again_s": max(0.0, self.due_s - now) if waits and self.due_s is not None else None,
        }


class SharedSite:
    """The broker of all runs of a process, the way in for devices, and the operator's page."""

    alone = False

    def __init__(
        self,
        runs: ServedRuns,
        *,
        broker: BrokerSettings | None = None,
        entrance: Entrance | None = None,
        book: CodeBook | None = None,
        page: OpenPage | None = None,
        at_once: int | None = None,
    ) -> None:
        """`broker`: the embedded one; None: each run reaches the one that its settings name.

        `at_once`: runs that may load their task's code at a time; None: half as many as there are
        processors.
        """
        self.runs, self.opened_page = runs, page
        self._broker, self._entrance, self._book = broker, entrance, book
        self._facts: BrokerFacts | None = None
        self._probing = threading.Lock()
        self._rooms = threading.Semaphore(at_once or max(1, (os.cpu_count() or 1) // 2))

    @contextmanager
    def preparing(self, stop: threading.Event) -> Iterator[None]:
        """See `RunSite`: a few at a time, so that runs which train are not held up."""
        with _held(self._rooms, stop):
            yield

    def page(
        self,
        config: ServeConfig,  # noqa: ARG002
    ) -> AbstractContextManager[tuple[ServedRuns, OpenPage | None]]:
        """See `RunSite`."""
        return nullcontext((self.runs, self.opened_page))

    def reach(
        self, config: ServeConfig
    ) -> AbstractContextManager[tuple[BrokerSettings, Entrance | None]]:
        """See `RunSite`."""
        return nullcontext((self._broker or config.broker, self._entrance))

    def probe(self, settings: BrokerSettings, stop: threading.Event) -> BrokerFacts | None:
        """See `RunSite`: one run tries the broker for all."""
        with _held(self._probing, stop):
            if self._facts is None:
                self._facts = try_broker(settings, stop)
            return self._facts

    @contextmanager
    def join(
        self,
        config: ServeConfig,
        run: Path,  # noqa: ARG002
        entrance: Entrance,  # noqa: ARG002
    ) -> Iterator[Joining]:
        """See `RunSite`: by the codes of the process."""
        from coordinator.operate.joining.opening import Joining

        assert self._book is not None  # noqa: S101  there is one with an entrance
        yield Joining(self._book, config, shared=True)


@contextmanager
def _held(lock: threading.Lock | threading.Semaphore, stop: threading.Event) -> Iterator[None]:
    """Hold a lock. Raises `StopRequestedError` if a stop is requested before it is ours."""
    while not lock.acquire(timeout=0.2):
        if stop.is_set():
            raise StopRequestedError
    try:
        yield
    finally:
        lock.release()


@contextmanager
def open_site(config: ProcessConfig, files: Callable[[], Any]) -> Iterator[SharedSite]:
    """Open what the runs of a process share, for the duration of the context.

    `files` answers the command `runs.list`. Raises `ConfigError` if another process has the folder.
    """
    home = config.folder
    with ExitStack() as stack:
        make_folder(home, mode=0o700)
        try:
            lock = lock_file(home / PROCESS_LOCK, mode=0o600)
        except BlockingIOError as error:
            raise ConfigError(
                f"{home} is in use by another process, which serves these runs: stop that one"
            ) from error
        stack.callback(os.close, lock)
        settings, entrance = stack.enter_context(reach_broker(config, home))
        commands: dict[str, ControlCommand] = {"runs.list": files}
        book = None
        if entrance is not None:
            from coordinator.operate.joining.opening import book_commands, open_desk

            book = stack.enter_context(open_desk(config, home, entrance, None))
            commands |= {**book_commands(book), "broker.reload": entrance.reload}
        runs = ServedRuns()
        page = stack.enter_context(open_http(config.http, runs, home))
        if page is not None:
            commands |= page.commands()
        control = ControlSocket(home, commands)
        stack.callback(control.close)
        control.start()
        broker = settings if config.broker.embedded else None
        yield SharedSite(runs, broker=broker, entrance=entrance, book=book, page=page)


class Supervisor:
    """Follows a folder of run files; `look` is called by one thread, the others by any."""

    def __init__(
        self,
        folder: Path,
        config: ProcessConfig,
        say: Say,
        *,
        take_over: bool = False,
        clock: Callable[[], float] = time.monotonic,
        work: Callable[..., ServeEnd] = serve,
    ) -> None:
        """`take_over`: of runs that are there at the first look. `work`: serves one run."""
        self.site: SharedSite | None = None
        """Must be set before the first look."""
        self._folder, self._config, self._say = folder, config, say
        self._take_over, self._clock, self._work = take_over, clock, work
        self._files: dict[Path, RunFile] = {}
        self._lock = threading.Lock()
        self._first = True
        self._shared = _mark(folder / PROCESS_FILE)

    def listing(self) -> list[dict[str, Any]]:
        """Describe all run files, in the order of their names."""
        with self._lock:
            now = self._clock()
            return [each.facts(now) for _, each in sorted(self._files.items())]

    def look(self) -> None:
        """Look at the folder and at the runs once, and do what is due."""
        with self._lock:
            found = {path: _mark(path) for path in self._paths()}
            for path in found.keys() - self._files.keys():
                self._files[path] = RunFile(path, take_over=self._take_over and self._first)
            for path, each in sorted(self._files.items()):
                self._follow(each, found.get(path))
                self._reap(each)
            for path in [p for p, each in self._files.items() if p not in found and _gone(each)]:
                self._forget(gone := self._files.pop(path))
                self._show(gone, None)
            for _, each in sorted(self._files.items()):
                self._start(each)
            self._first = False
            if (mark := _mark(self._folder / PROCESS_FILE)) != self._shared:
                self._shared = mark
                log.warning("%s has changed: start serve again to use it", PROCESS_FILE)

    def stop(self) -> None:
        """Ask all runs to stop."""
        with self._lock:
            for each in self._files.values():
                self._stop(each, "the process ends")

    def ended(self, timeout_s: float) -> bool:
        """Wait for the runs to end; True once all have."""
        by = time.monotonic() + timeout_s
        threads = [each.thread for each in self._files.values() if each.thread is not None]
        for thread in threads:
            thread.join(max(0.0, by - time.monotonic()))
        return all(thread.ended for thread in threads)

    def silence_s(self, now: float) -> float:
        """Return the seconds since the last sign of life of the run that is silent longest."""
        threads = [each.thread for each in self._files.values() if each.thread is not None]
        heard = [t.watchdog.heard_s for t in threads if not t.ended]
        return max((now - at for at in heard if at is not None), default=0.0)

    def status(self) -> str:
        """Say in a few words how the runs are."""
        states = [each["state"] for each in self.listing()]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return ", ".join(f"{n} {state}" for state, n in counts.items()) or "no run files yet"

    # -- inside ------------------------------------------------------------------------------

    def _paths(self) -> list[Path]:
        with suppress(OSError):
            found = sorted(self._folder.glob("*.toml"))
            return [p for p in found if p.name != PROCESS_FILE and not p.name.startswith(".")]
        return sorted(self._files)  # the folder cannot be read for a moment: leave all as it is

    def _forget(self, each: RunFile) -> None:
        """Show a run no more."""
        if self.site is not None and each.config is not None and each.started:
            self.site.runs.remove(each.config.task.name)
        each.started = False

    def _show(self, each: RunFile, why: str | None) -> None:
        """Show a run that is down, and why, with those that are served; None: it is not."""
        if self.site is None:
            return
        if why is None:
            self.site.runs.hide_down(each.path.name)
            return
        task = each.path.stem if each.config is None else each.config.task.name
        folder = each.path.parent if each.config is None else each.config.run.folder
        self.site.runs.show_down(each.path.name, task, folder, why)

    def _follow(self, each: RunFile, mark: bytes | None) -> None:
        """Act on a file that is new, has changed or is gone."""
        settled = self._first or mark == each.seen
        each.seen = mark
        if mark is None:
            if settled or each.thread is None:
                self._stop(each, "its file was removed")
                each.taken = None  # should it come back, it is a new one
            return
        if not settled or mark == each.taken:
            return
        if each.thread is not None and not self._runs(each):
            return  # it is stopping: then
        before, each.taken = each.taken, mark
        if self._runs(each) and before is not None and mark[:DIGEST] == each.running:
            each.error = None
            return  # saved again as it was
        try:
            config = read_run(each.path, self._config)
        except (TesseraError, OSError) as error:
            if self._runs(each):
                self._tell(each, f"{error}; the run goes on with the settings from before")
                each.error = str(error)
                return
            self._fail(each, RunStanding.BROKEN, str(error))
            return
        if self._runs(each):
            self._stop(each, "its file has changed; it starts again")
        elif each.config is not None and each.config.task.name != config.task.name:
            self._forget(each)
        each.config, each.error, each.running = config, None, mark[:DIGEST]
        each.failures, each.due_s = 0, self._clock()

    @staticmethod
    def _runs(each: RunFile) -> bool:
        return each.thread is not None and each.standing is not RunStanding.STOPPING

    def _stop(self, each: RunFile, why: str) -> None:
        each.due_s = None
        if each.thread is not None and self._runs(each):
            each.standing = RunStanding.STOPPING
            each.thread.stop()
            self._tell(each, f"stopping: {why}")

    def _reap(self, each: RunFile) -> None:
        """Note how a run is, and how it ended."""
        thread, now = each.thread, self._clock()
        if thread is None:
            self._lengthen(each)
            return
        if not thread.ended:
            if each.standing is RunStanding.STARTING and thread.watchdog.began.is_set():
                each.standing, each.served_s, each.error = RunStanding.SERVED, now, None
            elif each.standing is RunStanding.SERVED and now - each.served_s >= STEADY_S:
                each.failures = 0
            return
        stopping, again = each.standing is RunStanding.STOPPING, each.due_s is not None
        each.thread = None
        if thread.error is not None:
            self._judge(each, thread.error)
        elif thread.end is ServeEnd.COMPLETE:
            each.standing, each.due_s = RunStanding.COMPLETE, None
            self._tell(each, "the run is complete")
            if each.config is not None and kept_facts(each.config.run.folder).get("finished"):
                each.length = _length(each.config.run.folder)  # else rounds were added since
        elif thread.end is ServeEnd.ORDERED:
            each.standing, each.due_s = RunStanding.STOPPED, None
            self._tell(each, f"stopped, as asked; to go on, save {each.path.name} again")
        elif stopping:
            self._tell(each, "stopped")
        else:
            self._pause(each, "it stopped by itself")
        if stopping:  # its file has changed, or is gone
            each.due_s = now if again else None

    def _lengthen(self, each: RunFile) -> None:
        """Let a complete run start again if rounds were added."""
        if each.standing is not RunStanding.COMPLETE or each.due_s is not None:
            return
        if each.config is not None and _length(each.config.run.folder) > each.length:
            each.failures, each.due_s = 0, self._clock()
            self._tell(each, "rounds were added: it goes on")

    def _judge(self, each: RunFile, error: BaseException) -> None:
        """Decide what becomes of a run that failed."""
        match error:
            case FencedError():
                self._fail(each, RunStanding.FENCED, str(error))
            case LinkError() | RunError() | OSError():
                self._pause(each, explain_failure(error))
            case TesseraError():
                self._fail(each, RunStanding.BROKEN, str(error))
            case _:
                log.error("a run failed", exc_info=error)
                self._pause(each, f"{type(error).__name__}: {error}")

    def _pause(self, each: RunFile, error: str) -> None:
        """Let a failed run start again later."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(each.failures, 10))
        each.failures += 1
        each.standing, each.error = RunStanding.FAILED, error
        each.due_s = self._clock() + pause_s
        self._show(each, f"another try, within {pause_s:.0f} s: {error}")
        self._tell(each, f"FAILED: {error}; trying again in {pause_s:.0f} s", logging.ERROR)

    def _fail(self, each: RunFile, standing: RunStanding, error: str) -> None:
        """Leave a run down until its file is saved again."""
        each.standing, each.error, each.due_s = standing, error, None
        self._show(each, f"{each.path.name}, to be saved again ({standing.value}): {error}")
        words = f"{standing.value.upper()}: {error}; save {each.path.name} again to try again"
        self._tell(each, words, logging.ERROR)

    def _start(self, each: RunFile) -> None:
        """Start a run whose time has come."""
        config = each.config
        if each.thread is not None or each.due_s is None or self._clock() < each.due_s:
            return
        if config is None:
            return
        if clash := self._clash(each, config):
            if each.error != clash:
                each.standing, each.error = RunStanding.BROKEN, clash
                self._show(each, f"another name or folder: {clash}")
                self._tell(each, f"BROKEN: {clash}", logging.ERROR)
            return
        take_over, each.take_over = each.take_over, False
        task, site = config.task.name, self.site
        assert site is not None  # noqa: S101  set before the first look

        def work(stop: threading.Event, watchdog: Watchdog) -> ServeEnd:
            with log_scope(task=task):
                return self._work(
                    config, stop, self._saying(task), watchdog, take_over=take_over, site=site
                )

        self._forget(each)
        self._show(each, None)
        each.started, each.length = True, _length(config.run.folder)
        each.standing, each.error, each.due_s = RunStanding.STARTING, None, None
        each.thread = RunThread(work, f"run {task}")
        each.thread.start()

    def _clash(self, each: RunFile, config: ServeConfig) -> str | None:
        """Say which other file has this run's task or folder already; None: none."""
        for other in self._files.values():
            theirs = other.config
            if other is each or theirs is None or other.standing is RunStanding.BROKEN:
                continue
            if other.thread is None and other.due_s is not None and other.path > each.path:
                continue  # it waits for us
            if theirs.task.name == config.task.name:
                return (
                    f"{other.path.name} serves the task {config.task.name!r} already: give one of "
                    "the two another task.name, or remove it"
                )
            if theirs.run.folder.resolve() == config.run.folder.resolve():
                return (
                    f"{other.path.name} has the folder {config.run.folder} already: give one of "
                    "the two another run.folder"
                )
        return None

    def _saying(self, task: str) -> Say:
        return lambda line: self._say(f"{task:12} {line}" if line else "")

    def _tell(self, each: RunFile, words: str, level: int = logging.INFO) -> None:
        name = each.path.stem if each.config is None else each.config.task.name
        with log_scope(task=name):
            log.log(level, "%s", words, extra=fact("run", state=each.standing.value))
        if level < logging.ERROR:
            self._saying(name)(words)


def serve_folder(
    folder: Path,
    config: ProcessConfig,
    stop: threading.Event,
    say: Say,
    watchdog: Watchdog | None = None,
    *,
    take_over: bool = False,
) -> None:
    """Serve the run files of a folder until a stop is requested. Raises `CoordinatorError`."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the one that holds the run files")
    watchdog = Watchdog() if watchdog is None else watchdog
    raise_limits()
    supervisor = Supervisor(folder, config, say, take_over=take_over)
    with open_site(config, supervisor.listing) as site:
        supervisor.site = site
        if site.opened_page is not None:
            for line in site.opened_page.report(links=not is_journal(sys.stdout)):
                say(line)
        said, ready = "", False
        try:
            while not stop.is_set():
                supervisor.look()
                status = supervisor.status()
                if not ready:
                    watchdog.ready(status)
                    ready = True
                if status != said:
                    said = status
                    watchdog.status(status)
                    say(f"{'runs':12} {status}")
                now = time.monotonic()
                if supervisor.silence_s(now) <= watchdog.period_s:
                    watchdog.alive(now)
                stop.wait(min(LOOK_S, watchdog.period_s))
        finally:
            watchdog.stopping()
            supervisor.stop()
            while not supervisor.ended(LOOK_S):
                watchdog.alive(time.monotonic())


def raise_limits() -> None:
    """Let this process open as many files and sockets as the system allows it."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _length(folder: Path) -> int:
    """Return the rounds, or updates, that a run was made to have; 0: it was not served yet."""
    try:
        steered = read_steered(folder)
        return int(steered.value(length_of(steered.file)) or 0)
    except (RunError, OSError):
        return 0  # the next start says what is wrong


def _gone(each: RunFile) -> bool:
    return each.thread is None and each.seen is None


def _mark(path: Path) -> bytes | None:
    """Return what changes when a file is saved; None: there is no such file."""
    try:
        saved = path.stat().st_mtime_ns
        return hashlib.sha256(path.read_bytes()).digest() + saved.to_bytes(16, "big")
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error).encode()
