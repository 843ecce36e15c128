"""Rate at which rules take in movements, beside `numpy.copyto` of the same bytes in the same turn.

All devices take part in every round, at one level, with newly drawn groups, so a new movement
replaces parts of several older ones. For ram-fed, each device is first remembered in full, so every
new value replaces an old one, as in the long run. A few rounds pass before turns count; by then old
segments have been rewritten, and files and page cache are in a steady state.

`copyto` copies the movements to memory of their size, on one thread; rules use `threads`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.aggregate.rounds import (
    RoundSizes,
    closing_of,
    device_name,
    fill,
    random_groups,
    random_values,
)
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.aggregate.memory import (
    DiskMemory,
    Memory,
    MemoryConfig,
    MemoryType,
    estimate_bytes,
)
from coordinator.aggregate.rules import Rule
from coordinator.aggregate.rules.ra_fed import RaFed
from coordinator.aggregate.rules.ram_fed import RamFed
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.streams import stream

METHOD = (
    "Medians over turns, each of which copies all movements once (numpy.copyto, one thread) and "
    "closes one round. over_copy is copy ÷ move, where move is the rule with all that it reads "
    "from and writes to its memory, through the page cache. over_copy_with_commit also counts "
    "commit, which waits for the disk: all turns together, since a commit now and then rewrites "
    "segments. CPU seconds are those of all threads."
)
TARGETS = {("ra-fed", None): 0.5, ("ram-fed", "fp32"): 0.12, ("ram-fed", "fp16"): 0.08}
TARGET_PLAN = "25m"
"""Plan for which the targets were set."""

CASES: tuple[tuple[str, MemoryType | None], ...] = (
    ("ra-fed", None),
    ("ram-fed", "fp32"),
    ("ram-fed", "fp16"),
)


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig(RoundSizes):
    """Parameters; `turns` are measured after `warm` rounds that are not. Raises `FigureError`."""

    warm: int = 3
    turns: int = 7

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise FigureError(f"turns must be at least 1, not {self.turns}")

    @property
    def disk_bytes(self) -> int:
        """Most bytes on disk at a time."""
        held = estimate_bytes(self.plan, self.devices, "fp32")
        return held + 4 * self.devices * self.plan.parameters  # a commit before it deletes

    @property
    def ticks(self) -> int:
        """Rounds of all cases."""
        return len(CASES) * (self.warm + self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds of one turn."""

    copy_s: float
    move_s: float
    commit_s: float
    copy_cpu_s: float
    move_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """One rule, with its memory if it has one; see `METHOD`. GB are 10⁹ bytes."""

    plan: str
    rule: str
    dtype: MemoryType | None
    received_mb: float
    copy_gb_s: float
    move_gb_s: float
    over_copy: float
    over_copy_with_commit: float
    copy_cpu_s: float
    move_cpu_s: float
    commit_s: float
    longest_commit_s: float


def measure_throughput(config: ThroughputConfig, begin: Begin = silent) -> list[ThroughputRow]:
    """Time every case. `begin` is called with each; all its results together `ticks` times."""
    plan, draws = config.plan, stream(0, "throughput")
    size = plan.submodel_parameters(random_groups(plan, config.level, draws))
    # Every device has separate memory, like movements from a network.
    drawn = random_values(size + 64 * config.devices, draws)
    movements = [
        (device_name(n), drawn[64 * n : 64 * n + size].copy()) for n in range(config.devices)
    ]
    copies = [np.zeros_like(values) for _, values in movements]
    received = sum(array.nbytes for array in copies)
    rows = []
    for name, dtype in CASES:
        with TemporaryDirectory(prefix="tessera-bench-") as folder:
            tick = begin(f"{name} {dtype}" if dtype else name)
            if dtype is None:
                turns = _turns(config, RaFed(), None, movements, copies, draws, tick)
            else:
                rule = RamFed()
                memory = _filled(Path(folder), config, rule, dtype, drawn)
                try:
                    turns = _turns(config, rule, memory, movements, copies, draws, tick)
                finally:
                    memory.close()
        rows.append(throughput_row(config.plan_name, name, dtype, received, turns))
    return rows


def throughput_row(
    plan: str, rule: str, dtype: MemoryType | None, received: int, turns: Sequence[Turn]
) -> ThroughputRow:
    """Summarise turns, each with `received` bytes."""
    copied = sum(turn.copy_s for turn in turns)
    closed = sum(turn.move_s + turn.commit_s for turn in turns)
    return ThroughputRow(
        plan=plan,
        rule=rule,
        dtype=dtype,
        received_mb=received / 1e6,
        copy_gb_s=received / 1e9 / median(turn.copy_s for turn in turns),
        move_gb_s=received / 1e9 / median(turn.move_s for turn in turns),
        over_copy=median(turn.copy_s / turn.move_s for turn in turns),
        over_copy_with_commit=copied / closed,
        copy_cpu_s=median(turn.copy_cpu_s for turn in turns),
        move_cpu_s=median(turn.move_cpu_s for turn in turns),
        commit_s=median(turn.commit_s for turn in turns),
        longest_commit_s=max(turn.commit_s for turn in turns),
    )


def throughput_figures(rows: Sequence[ThroughputRow]) -> list[Figure]:
    """Return the figures of `measure_throughput`."""
    figures = []
    for row in rows:
        stem = f"aggregate.{row.plan}.{row.rule}" + (f".{row.dtype}" if row.dtype else "")
        target = TARGETS[row.rule, row.dtype] if row.plan == TARGET_PLAN else None
        figures.append(
            Figure(f"{stem}.over_copy", row.over_copy, "×", target=target, better="higher")
        )
        figures.append(Figure(f"{stem}.rate", row.move_gb_s, "GB/s", better="higher"))
        if row.dtype is not None:
            figures.append(
                Figure(
                    f"{stem}.over_copy_with_commit", row.over_copy_with_commit, "×", better="higher"
                )
            )
    return figures


def _filled(
    folder: Path, config: ThroughputConfig, rule: RamFed, dtype: MemoryType, drawn: Float32
) -> Memory:
    settings = MemoryConfig(memory_type=dtype, damping=rule.fading, threads=config.threads)
    memory = DiskMemory(folder / "memory", config.plan, settings, devices=config.devices)
    try:
        fill(memory, range(config.devices), np.resize(drawn, config.plan.parameters))
    except BaseException:
        memory.close()
        raise
    return memory


def _turns(
    config: ThroughputConfig,
    rule: Rule,
    memory: Memory | None,
    movements: Sequence[tuple[str, Float32]],
    copies: Sequence[Float32],
    draws: np.random.Generator,
    tick: Callable[[], None],
) -> list[Turn]:
    turns = []
    for number in range(config.warm + config.turns):
        closing = closing_of(
            config.plan,
            number + 2,  # memory was filled in round 1
            movements,
            config.level,
            draws,
            registered=config.devices,
            memory=memory,
            threads=config.threads,
        )
        copy_s, copy_cpu_s = _timed(partial(_copy, movements, copies))
        move_s, move_cpu_s = _timed(partial(rule.move, closing))
        commit_s = _timed(memory.commit)[0] if memory is not None else 0.0
        if number >= config.warm:
            turns.append(
                Turn(
                    copy_s=copy_s,
                    move_s=move_s,
                    commit_s=commit_s,
                    copy_cpu_s=copy_cpu_s,
                    move_cpu_s=move_cpu_s,
                )
            )
        tick()
    return turns


def _copy(movements: Sequence[tuple[str, Float32]], copies: Sequence[Float32]) -> None:
    for (_, values), target in zip(movements, copies, strict=True):
        np.copyto(target, values)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall-clock and CPU seconds."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu
