"""Memory of a coordinator that closes rounds of large uploads, on the path a run takes.

One process makes the movements and fills the memory; another, fresh one is measured. It receives
every movement in chunks into a mapped file, reads, checks and keeps it, closes the round and
commits. *Idle* is that process with the model and the memory open, before the first movement: the
model (4 bytes a parameter) and, for ram-fed, the running sums (8 bytes) are in it already.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.aggregate.rounds import (
    LEARNING_RATE,
    RoundSizes,
    device_name,
    fill,
    movement_of,
    random_groups,
    random_values,
    rounds_config,
)
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.imports import child_environment
from benchmarks.report.progress import Begin, silent
from coordinator.aggregate.arrivals import Arrival, Expected, check_arrival
from coordinator.aggregate.memory import Memory, MemoryType, estimate_bytes
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules.ra_fed import RaFed
from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.rounds.persistent import PersistentSet
from coordinator.rounds.synchronous import Commit, RoundsConfig, start
from coordinator.service.close import close_round, open_memory, weights_of
from coordinator.service.receiving import Receiving, read_upload
from edge_sdk.program.processes import run_child
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Movement
from edge_sdk.protocol.messages.transfer import Credit
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.uploads import Outgoing, Upload, UploadLimits

METHOD = (
    "A fresh process that opens the model and a filled memory (idle), then for every round "
    "receives all movements in chunks into mapped files, checks and keeps them, closes the round "
    "and commits. RssAnon, RssFile and RssShmem of /proc/self/status are sampled at 100 Hz by a "
    "thread; anonymous is the largest RssAnon less that of idle, mapped the largest RssFile + "
    "RssShmem."
)
TARGET = 2.2
TARGET_PLAN = "25m"
"""The model that the target is for."""

STATUS = Path("/proc/self/status")
MEASURABLE = STATUS.exists()
"""Memory is read from Linux' /proc."""

TIMES = ("receive_s", "close_s", "close_cpu_s", "commit_s")
SAMPLE_S = 0.01
CHUNK_BYTES = 2**18

CASES: tuple[tuple[str, MemoryType | None, str], ...] = (
    ("ra-fed", None, "fp32"),
    ("ra-fed", None, "fp16"),
    ("ram-fed", "fp32", "fp32"),
    ("ram-fed", "fp16", "fp32"),
)
"""Rule, type of its memory, encoding of the movements."""

_CHILD = "import sys; from benchmarks.aggregate.closes import {work}; {work}(*sys.argv[1:])"


@dataclass(frozen=True, kw_only=True)
class ClosesConfig(RoundSizes):
    """Sizes of the model, the fleet and the run. Raises `FigureError` for no rounds."""

    rounds: int = 2

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise FigureError(f"rounds must be at least 1, not {self.rounds}")

    @property
    def disk_bytes(self) -> int:
        """Most bytes on disk at a time: memory, movements, and those of a round once more."""
        round_bytes = 4 * self.devices * self.plan.parameters
        return estimate_bytes(self.plan, self.devices, "fp32") + (self.rounds + 2) * round_bytes

    @property
    def ticks(self) -> int:
        """Processes of all cases."""
        return 2 * len(CASES)

    @property
    def numbers(self) -> range:
        """Numbers of the rounds; memory was filled in round 1."""
        return range(2, self.rounds + 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that take part in every round."""
        return tuple(device_name(number) for number in range(self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosesRow:
    """One rule, memory and encoding; see `METHOD`. Seconds are medians over rounds."""

    plan: str
    rule: str
    dtype: MemoryType | None
    encoding: str
    model_mb: float
    received_mb: float
    idle_mb: float
    anonymous_mb: float
    mapped_mb: float
    receive_s: float
    close_s: float
    close_cpu_s: float
    commit_s: float

    @property
    def over_model(self) -> float:
        """Anonymous memory over idle, in models."""
        return self.anonymous_mb / self.model_mb


def measure_closes(config: ClosesConfig, begin: Begin = silent) -> list[ClosesRow]:
    """Run every case. `begin` is called with each; all its results together `ticks` times."""
    rows = []
    for rule, dtype, encoding in CASES:
        tick = begin(" ".join(filter(None, (rule, dtype, encoding))))
        arguments = (json.dumps(asdict(config)), dtype or "", encoding)
        with TemporaryDirectory(prefix="tessera-bench-") as folder:
            _run("make_movements", *arguments, folder)
            tick()
            answer = json.loads(_run("close_rounds", *arguments, folder))
            tick()
        rows.append(
            ClosesRow(
                plan=config.plan_name,
                rule=rule,
                dtype=dtype,
                encoding=encoding,
                model_mb=4 * config.plan.parameters / 1e6,
                **answer,
            )
        )
    return rows


def closes_figures(rows: Sequence[ClosesRow]) -> list[Figure]:
    """The figures of `measure_closes`."""
    figures = []
    for row in rows:
        stem = ".".join(filter(None, (f"aggregate.{row.plan}", row.rule, row.dtype)))
        stem += "" if row.encoding == "fp32" else f".from_{row.encoding}"
        target = TARGET if row.plan == TARGET_PLAN else None
        figures += [
            Figure(f"{stem}.anonymous_over_model", row.over_model, "×", target=target),
            Figure(f"{stem}.mapped", row.mapped_mb, "MB"),
            Figure(
                f"{stem}.close_rate",
                row.received_mb / 1e3 / (row.close_s + row.commit_s),
                "GB/s",
                better="higher",
            ),
        ]
    return figures


def _run(work: str, *arguments: str) -> str:
    command = [sys.executable, "-c", _CHILD.format(work=work), *arguments]
    done = run_child(command, child_environment(None))
    if done.returncode:
        raise FigureError(f"a process that should {work} failed:\n{done.stderr}")
    return done.stdout


# -- in the processes ----------------------------------------------------------------------------


def make_movements(*arguments: str) -> None:
    """Write every movement of every round to a file, and remember all devices in full."""
    config, rounds, memory, folder = _opened(*arguments)
    plan, draws = config.plan, stream(0, "closes")
    drawn = random_values(plan.parameters, draws)
    if memory is not None:
        fill(memory, range(config.devices), drawn)
        memory.close()
    for round in config.numbers:
        for device in config.names:
            groups = random_groups(plan, config.level, draws)
            level, up = config.level, rounds.up
            movement = movement_of(
                plan, groups, drawn, draws, device=device, round=round, level=level, encoding=up
            )
            path = folder / f"{round}-{device}"
            path.write_bytes(encode_movement(movement))
            path.with_suffix(".json").write_text(json.dumps(groups), encoding="ascii")


def close_rounds(*arguments: str) -> None:
    """Receive and close all rounds; print the fields of a row that were measured."""
    config, rounds, memory, folder = _opened(*arguments)
    plan, names = config.plan, config.names
    model = GlobalModel(plan, plan.unflatten(np.zeros(plan.parameters, dtype=np.float32)), {})
    receiving = Receiving(folder / "uploads", folder / "movements", UploadLimits())
    state = replace(start(rounds), devices=PersistentSet(names))
    arrivals: dict[tuple[str, int], Arrival] = {}
    seconds: dict[str, list[float]] = {name: [] for name in TIMES}
    received = 0
    with _Sampler() as sampler:
        idle = sampler.now()
        for round in config.numbers:
            begun = time.perf_counter()
            for name in names:
                path = folder / f"{round}-{name}"
                upload = _receive(receiving, path, name, round)
                arrival = _check(rounds, path, upload)
                receiving.keep(upload, name, round)
                arrivals[name, round] = arrival
                received += path.stat().st_size
            there, cpu = time.perf_counter(), time.process_time()
            commit = Commit(round, names, (), (), ())
            threads, scratch = config.threads, folder
            weights = weights_of(rounds, state, commit)
            close_round(
                rounds, weights, commit, model, memory, arrivals, threads=threads, scratch=scratch
            )
            closed, cpu = time.perf_counter(), time.process_time() - cpu
            if memory is not None:
                memory.commit()
            ends = there - begun, closed - there, cpu, time.perf_counter() - closed
            for name, took in zip(TIMES, ends, strict=True):
                seconds[name].append(took)
            _ = model.norms, model.noise, model.digest, model.serve()
            arrivals.clear()
            receiving.clear_kept()
    if memory is not None:
        memory.close()
    answer = {
        "received_mb": received / config.rounds / 1e6,
        "idle_mb": idle["RssAnon"] / 1e6,
        "anonymous_mb": (sampler.most["RssAnon"] - idle["RssAnon"]) / 1e6,
        "mapped_mb": sampler.most["mapped"] / 1e6,
        **{name: median(each) for name, each in seconds.items()},
    }
    print(json.dumps(answer))


def _opened(
    config: str, dtype: str, encoding: str, folder: str
) -> tuple[ClosesConfig, RoundsConfig, Memory | None, Path]:
    """Read a case's command line and open its memory, if it has one."""
    fields: dict[str, Any] = json.loads(config)
    settings = ClosesConfig(**{**fields, "widths": tuple(fields["widths"])})
    rule, up = RamFed() if dtype else RaFed(), Encoding.parse(encoding)
    rounds = rounds_config(settings.plan, rule, settings.rounds, min_devices=1, up=up)
    memory = open_memory(
        rounds,
        Path(folder) / "memory",
        memory_type=dtype or "fp32",  # type: ignore[arg-type]
        threads=settings.threads,
        devices=settings.devices,
    )
    return settings, rounds, memory, Path(folder)


def _receive(receiving: Receiving, path: Path, device: str, round: int) -> Upload:
    """Play the device's part of an upload, straight from its file."""
    with path.open("rb") as file:
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    outgoing = Outgoing(
        memoryview(data),
        device=device,
        run="0" * 16,
        round=round,
        answers=None,
        chunk_bytes=CHUNK_BYTES,
    )
    credit = receiving.offered(device, outgoing.make_offer(0.0), 0.0)
    waiting = outgoing.credited(credit, 0.0) if isinstance(credit, Credit) else []
    while waiting:
        progress = receiving.received(device, waiting.pop(0), 0.0)
        if progress.upload is not None:
            return progress.upload
        if progress.credit is not None:
            waiting += outgoing.credited(progress.credit, 0.0)
    raise FigureError(f"the upload of {path} never became complete: {credit}")


def _check(rounds: RoundsConfig, path: Path, upload: Upload) -> Arrival:
    movement = read_upload(upload)
    if not isinstance(movement, Movement):
        raise FigureError(f"{path} was read as a replay")
    groups = json.loads(path.with_suffix(".json").read_text(encoding="ascii"))
    expected = Expected({axis: tuple(each) for axis, each in groups.items()}, movement.level, 1)
    usual = start(rounds).fleet.usual
    return check_arrival(
        rounds.plan, movement, expected, rounds.up, LEARNING_RATE, usual, rounds.rms_limit
    )


class _Sampler:
    """Thread that reads this process's memory at 100 Hz and keeps the largest numbers."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler")

    def __enter__(self) -> _Sampler:
        self.most = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def now(self) -> dict[str, int]:
        """Bytes by kind: RssAnon, and RssFile and RssShmem together as `mapped`."""
        lines = dict(line.split(":", 1) for line in STATUS.read_text("ascii").splitlines())
        anonymous, file, shared = (
            int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")
        )
        return {"RssAnon": anonymous, "mapped": file + shared}

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            for name, size in self.now().items():
                self.most[name] = max(self.most[name], size)
