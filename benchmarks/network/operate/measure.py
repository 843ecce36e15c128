"""Cost of being looked at: the page with one viewer, metrics, and the commands of the socket."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from benchmarks.network.operate.page_process import TASK
from benchmarks.network.stage.programs import WAIT_S, Programs
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from edge_sdk.program.control import ask_run
from edge_sdk.program.processes import ChildProcess

PAGE_TARGET = 2.0
"""Percent of a core that one viewer may cost."""
SETTLE_S = 1.0
"""Seconds before each measurement, in which a viewer gets all that it does not know."""

METHOD = (
    "The overview of a run with its page, metrics and control socket, in a process of its own that "
    "is told by no coordinator but by a thread what so many devices a second would tell it: "
    "charge, heat, an answer to the round. The viewer is another process that reads the page's "
    "stream of events, which comes once a second. Its cost is the CPU time of the process with "
    "it, less that without it, in percent of a core, the median of all repeats. The cost of a "
    "question is the CPU time of the process for many in a row, divided by their number, while "
    "nothing changes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperateConfig:
    """`share`: of the devices that answer in a second, where not all do."""

    devices: int = 2_000
    share: float = 0.05
    seconds: float = 15.0
    """Of each measurement."""
    questions: int = 40
    repeats: int = 3

    @property
    def some(self) -> int:
        """Devices that answer in a second, as in a run."""
        return max(10, round(self.devices * self.share))


FULL = OperateConfig()
QUICK = OperateConfig(seconds=4.0, questions=10, repeats=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRow:
    """The page while so many devices answer every second."""

    changing: int
    alone_percent: float
    """Of a core, without a viewer: the telling itself."""
    watched_percent: float
    kb_per_s: float
    """Kilobytes a second that the viewer got."""

    @property
    def cost_percent(self) -> float:
        """Percent of a core that the viewer costs."""
        return max(0.0, self.watched_percent - self.alone_percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRow:
    """Questions of one kind."""

    name: str
    cpu_ms: float
    kb: float
    """Kilobytes of an answer."""


@dataclass(frozen=True, slots=True)
class OperateRows:
    """All measurements."""

    watched: tuple[WatchedRow, ...]
    questions: tuple[QuestionRow, ...]


class PageProcess:
    """The process that is measured, from its start to `close`."""

    def __init__(self, folder: Path, devices: int, programs: Programs) -> None:
        self.folder = folder
        command = ["-m", "benchmarks.network.operate.page_process", str(folder), str(devices)]
        self._process = programs.begin("page", command, piped=True)
        facts = self._hear()
        self.page, self.by_device = urlsplit(facts["page"]), urlsplit(facts["by_device"])
        self._headers = {"Authorization": f"Bearer {facts['token']}"}

    def change(self, devices: int) -> float:
        """Let so many devices answer every second; returns the CPU seconds until now."""
        pipe = self._process.process.stdin
        if pipe is None:
            raise FigureError("the page has no input")
        pipe.write(b"%d\n" % devices)
        pipe.flush()
        return float(self._hear()["cpu_s"])

    @contextmanager
    def get(self, path: str, *, by_device: bool = False) -> Iterator[http.client.HTTPResponse]:
        """Ask for something, and give the answer for the duration of the context."""
        place = self.by_device if by_device else self.page
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=WAIT_S)
        try:
            connection.request("GET", path, headers=self._headers)
            with connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise FigureError(f"{path} was answered with {answer.status}")
                yield answer
        finally:
            connection.close()

    def _hear(self) -> Any:
        return json.loads(_line(self._process))


def _line(process: ChildProcess) -> bytes:
    """Return the next line. Raises `FigureError` when the process ends without it, or hangs."""
    pipe = process.process.stdout
    timer = threading.Timer(WAIT_S, process.process.kill)
    timer.start()
    try:
        if pipe is None or not (line := pipe.readline()):
            raise FigureError(f"the page failed: {process.last_words()}")
        return line
    finally:
        timer.cancel()


def measure_operate(config: OperateConfig, begin: Begin = silent) -> OperateRows:
    """Measure; the results of `begin` are called `2 * repeats + 1` times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        programs = stack.enter_context(Programs(folder, folder / "bytecode"))
        page = PageProcess(folder, config.devices, programs)
        watched = []
        for changing in (config.some, config.devices):
            found = []
            for _ in range(config.repeats):
                tick = begin(f"{changing} of {config.devices} devices change")
                found.append(_watch(page, changing, config.seconds))
                tick()
            found.sort(key=lambda row: row.cost_percent)
            watched.append(found[len(found) // 2])
        tick = begin("questions")
        questions = tuple(_questions(page, config.questions))
        tick()
        return OperateRows(tuple(watched), questions)


def _watch(page: PageProcess, changing: int, seconds: float) -> WatchedRow:
    def spend() -> float:
        """Percent of a core over some seconds."""
        time.sleep(SETTLE_S)
        before, began = page.change(changing), time.monotonic()
        time.sleep(seconds)
        return 100 * (page.change(changing) - before) / (time.monotonic() - began)

    page.change(changing)
    alone = spend()
    with _viewer(page) as read:
        time.sleep(SETTLE_S)
        before, began = read(), time.monotonic()
        watched = spend()
        got = (read() - before) / (time.monotonic() - began)
    page.change(0)
    return WatchedRow(
        changing=changing, alone_percent=alone, watched_percent=watched, kb_per_s=got / 1e3
    )


@contextmanager
def _viewer(page: PageProcess) -> Iterator[Callable[[], int]]:
    """Read the stream of events; gives what tells how many bytes came."""
    size, over = 0, threading.Event()
    with page.get(f"/api/v1/runs/{TASK}/events") as answer:

        def read() -> None:
            nonlocal size
            while not over.is_set() and (line := answer.readline()):
                size += len(line)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield lambda: size
            if not thread.is_alive():
                raise FigureError("the stream of events ended while it was measured")
        finally:
            over.set()
            thread.join(WAIT_S)


def _questions(page: PageProcess, number: int) -> Iterator[QuestionRow]:
    def metrics(*, by_device: bool) -> int:
        with page.get("/metrics", by_device=by_device) as answer:
            return len(answer.read())

    def asked(command: str) -> int:
        return len(json.dumps(ask_run(page.folder, command)))

    kinds: dict[str, Callable[[], int]] = {
        "status": lambda: asked("status"),
        "devices": lambda: asked("devices"),
        "metrics": lambda: metrics(by_device=False),
        "metrics_by_device": lambda: metrics(by_device=True),
    }
    for name, ask in kinds.items():
        size = ask()  # the first one loads what it needs
        before = page.change(0)
        for _ in range(number):
            ask()
        spent = page.change(0) - before
        yield QuestionRow(name=name, cpu_ms=1e3 * spent / number, kb=size / 1e3)


def operate_figures(config: OperateConfig, rows: OperateRows) -> list[Figure]:
    """Return the figures: percent of a core, and milliseconds of a question."""
    stem = f"operate.{config.devices}"
    names = ("page", "page_all_change")
    return [
        *(
            Figure(f"{stem}.{name}", row.cost_percent, "% of a core", target=PAGE_TARGET)
            for name, row in zip(names, rows.watched, strict=True)
        ),
        *(Figure(f"{stem}.{row.name}", row.cpu_ms, "ms") for row in rows.questions),
    ]
