"""Cost of many runs in one coordinator process, beside that of one run alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.network.load.site.broker import RestartedBroker
from benchmarks.network.load.site.files import open_files
from benchmarks.network.load.site.history import HistoryTail
from benchmarks.network.many.folder import run_of, task_names, write_devices, write_runs
from benchmarks.network.stage.processes import cpu_s, peak_resident_bytes, threads_of
from benchmarks.network.stage.programs import Programs, write_bytecode
from benchmarks.network.stage.tasks import PreparedTask, prepare_perceptron
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent
from coordinator.run.folder import HISTORY
from edge_sdk.program.control import NotServedError, ask_run

TARGET = 50
FILES = 40
"""Open files of a device or of a run, with room to spare."""

METHOD = (
    "One `tessera-coordinator serve --runs` with runs of a small perceptron (settings by default, "
    "one step, no TLS, no page) and one Mosquitto as programs; devices on this machine, each a "
    "DeviceService with its own connections and folder, and several to a process. All devices of a "
    "run train in each of its rounds; runs go on at their own pace. Idle: CPU of the coordinator "
    "before devices come, as a share of one core. Measured from the moment at which every run has "
    "closed a round until each has closed the given number more: seconds of a round are that time "
    "by the rounds that a run closed in it, median over runs; CPU is that of the coordinator and "
    "the broker by all rounds closed in it; RSS is VmHWM, the most ever resident. Held: runs that "
    "were served and closed these rounds. MB are 10⁶ bytes. The devices share the machine, so with "
    "many runs they make rounds longer than the coordinator does."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyConfig:
    """Parameters: `rounds` are measured of each of `runs`; `together` devices share a process."""

    runs: int = 50
    devices: int = 2
    """Devices of each run."""
    rounds: int = 10
    together: int = 25
    idle_s: float = 10.0
    widths: tuple[int, ...] = (64, 64, 10)

    @property
    def ticks(self) -> int:
        """Ticks of both measurements."""
        return 1 + 2 * 3


FULL = ManyConfig()
QUICK = ManyConfig(rounds=2, idle_s=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """Results for a number of runs in one process."""

    runs: int
    devices: int
    held: int
    started_s: float
    """Seconds from the start of the process until all runs were served."""
    idle_share: float
    round_s: float
    slowest_round_s: float
    rounds_per_s: float
    """Rounds of all runs together, in a second."""
    coordinator_cpu_s: float
    """CPU seconds of a round."""
    broker_cpu_s: float
    rss_mb: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRows:
    """One run alone, and many."""

    alone: ServedRow
    many: ServedRow


def measure_many(config: ManyConfig, begin: Begin = silent) -> ManyRows:
    """Measure both; the results of `begin` are called `config.ticks` times in all."""
    with TemporaryDirectory(prefix="tessera-bench-") as temporary:
        bytecode = Path(temporary)
        tick = begin("task and programs")
        write_bytecode(bytecode)
        task = prepare_perceptron(config.widths)
        tick()
        return ManyRows(
            alone=_measure(task, config, 1, bytecode, begin),
            many=_measure(task, config, config.runs, bytecode, begin),
        )


def _measure(
    task: PreparedTask, config: ManyConfig, number: int, bytecode: Path, begin: Begin
) -> ServedRow:
    tick = begin(f"{number} run{'s' * (number > 1)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        stack.enter_context(open_files(FILES * (number + config.together + number * 2)))
        broker = stack.enter_context(RestartedBroker(folder / "broker"))
        broker.start()
        runs, settings = folder / "runs", broker.settings
        write_runs(runs, task, number, config.devices, settings)
        paths = write_devices(folder / "devices", task, number, config.devices, settings)
        programs = stack.enter_context(Programs(folder, bytecode))
        began = time.monotonic()
        command = ["-m", "coordinator.cli", "serve", "--runs", str(runs)]
        coordinator = programs.begin("coordinator", command)
        programs.wait_until(
            lambda: _served(runs / "coordinator") == number, f"that {number} runs are served"
        )
        started_s = time.monotonic() - began
        tick()
        idle = cpu_s(coordinator.pid)
        until = time.monotonic() + config.idle_s
        programs.wait_until(lambda: time.monotonic() >= until, "the end of a pause")
        idle_share = (cpu_s(coordinator.pid) - idle) / config.idle_s
        tick()
        for place, at in enumerate(range(0, len(paths), config.together)):
            module = "benchmarks.network.load.site.fleet_process"
            batch = map(str, paths[at : at + config.together])
            programs.begin(f"fleet-{place}", ["-m", module, *batch])
        tails = [HistoryTail(run_of(runs, name) / HISTORY) for name in task_names(number)]

        def closed() -> list[int]:
            return [len(tail.closed()) for tail in tails]

        programs.wait_until(lambda: min(closed()) >= 1, "the first round of every run")
        first, since = closed(), time.monotonic()
        spent = cpu_s(coordinator.pid), cpu_s(broker.pid)
        programs.wait_until(
            lambda: all(
                now - then >= config.rounds for now, then in zip(closed(), first, strict=True)
            ),
            f"{config.rounds} rounds of every run",
        )
        last, passed_s = closed(), time.monotonic() - since
        counts = [now - then for now, then in zip(last, first, strict=True)]
        rounds = sum(counts)
        row = ServedRow(
            runs=number,
            devices=config.devices,
            held=min(_served(runs / "coordinator"), sum(n >= config.rounds for n in counts)),
            started_s=started_s,
            idle_share=idle_share,
            round_s=median(passed_s / count for count in counts),
            slowest_round_s=max(passed_s / count for count in counts),
            rounds_per_s=rounds / passed_s,
            coordinator_cpu_s=(cpu_s(coordinator.pid) - spent[0]) / rounds,
            broker_cpu_s=(cpu_s(broker.pid) - spent[1]) / rounds,
            rss_mb=peak_resident_bytes(coordinator.pid) / 1e6,
            threads=threads_of(coordinator.pid),
        )
        tick()
        return row


def _served(home: Path) -> int:
    """Return the number of runs that a process serves now."""
    try:
        return sum(row["state"] == "served" for row in ask_run(home, "runs.list"))
    except NotServedError:
        return 0


def many_figures(rows: ManyRows) -> Iterator[Figure]:
    """Return the figures; fewer runs than the target have none."""
    for row in (rows.alone, rows.many):
        stem = f"runs.{row.runs}"
        target = TARGET if row.runs >= TARGET else None
        yield Figure(f"{stem}.held", row.held, "runs", target=target, better="higher")
        yield Figure(f"{stem}.started", row.started_s, "s")
        yield Figure(f"{stem}.idle", row.idle_share * 100, "%")
        yield Figure(f"{stem}.round", row.round_s, "s")
        yield Figure(f"{stem}.rounds_per_second", row.rounds_per_s, "1/s", better="higher")
        yield Figure(f"{stem}.coordinator.cpu_per_round", row.coordinator_cpu_s, "s")
        yield Figure(f"{stem}.broker.cpu_per_round", row.broker_cpu_s, "s")
        yield Figure(f"{stem}.coordinator.rss", row.rss_mb, "MB")
        yield Figure(f"{stem}.coordinator.threads", row.threads, "threads")
    if rows.many.runs > 1:
        more = (rows.many.rss_mb - rows.alone.rss_mb) / (rows.many.runs - 1)
        yield Figure(f"runs.{rows.many.runs}.memory_per_run", more, "MB")
