"""Growth of a round's cost with the number of registered devices. It should not grow.

Every registered device is remembered in full, on disk; a few of them take part in a round, drawn
from as many devices as the smallest fleet has. So a device takes part equally often in every fleet,
and its memory lies in equally many pieces: only the number of other devices differs.

One process fills a memory and another opens it and closes rounds on request. The processes of all
fleets take turns, and none contains leftovers of the filling.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

from benchmarks.aggregate.rounds import RoundSizes, closing_of, device_name, fill, random_values
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.imports import child_environment
from benchmarks.report.progress import Begin, silent
from coordinator.aggregate.memory import DiskMemory, MemoryConfig, MemoryType, estimate_bytes
from coordinator.aggregate.rules.ram_fed import RamFed
from edge_sdk.program.processes import start_piped
from edge_sdk.protocol.streams import stream

METHOD = (
    "Fresh processes, one for each fleet, that open a filled memory and close rounds of ram-fed in "
    "turn, page cache warm. Time is that of the rule and of commit; ratios are medians of ratios "
    "within a turn. Memory is the most anonymous memory (/proc/self/smaps_rollup) after any round: "
    "all that is not the page cache's."
)
TARGET = 1.2
SMAPS = Path("/proc/self/smaps_rollup")
MEASURABLE = SMAPS.exists()
"""True if anonymous memory can be read from Linux' /proc."""

_CHILD = "import sys; from benchmarks.aggregate.scale import {work}; {work}(*sys.argv[1:])"


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(RoundSizes):
    """Parameters; `fleets` ascending, in devices; `turns` are measured after `warm` that are not.

    Raises `FigureError` for a fleet that is smaller than a round.
    """

    fleets: tuple[int, ...] = (100, 1_000, 10_000)
    inputs: int = 128
    widths: tuple[int, ...] = (256, 256)
    outputs: int = 10
    dtype: MemoryType = "fp16"
    batch: int = 500
    """Devices of one commit while a memory is filled."""
    warm: int = 5
    turns: int = 40

    def __post_init__(self) -> None:
        if min(self.fleets) < self.devices:
            raise FigureError(
                f"{self.devices} devices take part, and a fleet has {min(self.fleets)}"
            )

    @property
    def disk_bytes(self) -> int:
        """Most bytes all memories may grow to."""
        return sum(estimate_bytes(self.plan, fleet, self.dtype) for fleet in self.fleets)

    @property
    def ticks(self) -> int:
        """Batches to fill, and turns."""
        return sum(-(-fleet // self.batch) for fleet in self.fleets) + self.warm + self.turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """Results of one fleet; ratios are to the smallest. Medians, MB are 10⁶ bytes."""

    devices: int
    round_ms: float
    move_ms: float
    commit_ms: float
    anonymous_mb: float
    time_ratio: float
    move_ratio: float
    memory_ratio: float
    disk_mb: float


def measure_scale(config: ScaleConfig, begin: Begin = silent) -> list[ScaleRow]:
    """Fill memories and close rounds. `begin`'s results are called `config.ticks` times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        for fleet in config.fleets:
            tick = begin(f"fill {fleet} devices")
            with _Child("fill_memory", config, folder, fleet) as child:
                for _ in range(-(-fleet // config.batch)):
                    child.answer()
                    tick()
        tick = begin("rounds")
        children = [
            stack.enter_context(_Child("close_rounds", config, folder, fleet))
            for fleet in config.fleets
        ]
        turns = []
        for number in range(config.warm + config.turns):
            turn = [child.ask() for child in children]
            if number >= config.warm:
                turns.append(turn)
            tick()
        sizes = [
            sum(path.stat().st_size for path in (folder / str(fleet)).iterdir())
            for fleet in config.fleets
        ]
    return [
        scale_row(fleet, [turn[n] for turn in turns], [turn[0] for turn in turns], sizes[n])
        for n, fleet in enumerate(config.fleets)
    ]


def scale_row(
    fleet: int,
    rounds: Sequence[dict[str, float]],
    smallest: Sequence[dict[str, float]],
    size_bytes: int,
) -> ScaleRow:
    """Summarise rounds beside those of the smallest fleet in the same turns."""

    def total(one: dict[str, float]) -> float:
        return one["move_s"] + one["commit_s"]

    pairs = list(zip(rounds, smallest, strict=True))
    anonymous = [max(one["anonymous_bytes"] for one in case) for case in (rounds, smallest)]
    return ScaleRow(
        devices=fleet,
        round_ms=1e3 * median(total(one) for one in rounds),
        move_ms=1e3 * median(one["move_s"] for one in rounds),
        commit_ms=1e3 * median(one["commit_s"] for one in rounds),
        anonymous_mb=anonymous[0] / 1e6,
        time_ratio=median(total(one) / total(base) for one, base in pairs),
        move_ratio=median(one["move_s"] / base["move_s"] for one, base in pairs),
        memory_ratio=anonymous[0] / anonymous[1],
        disk_mb=size_bytes / 1e6,
    )


def scale_figures(rows: Sequence[ScaleRow]) -> list[Figure]:
    """Return the figures of `measure_scale`."""
    figures = []
    smallest = rows[0].devices if rows else 0
    for row in rows:
        stem = f"aggregate.devices.{row.devices}"
        figures += [
            Figure(f"{stem}.round", row.round_ms, "ms"),
            Figure(f"{stem}.anonymous", row.anonymous_mb, "MB"),
        ]
        if row.devices != smallest:
            figures += [
                Figure(f"{stem}.{what}_over_{smallest}", value, "×", target=TARGET)
                for what, value in (("round", row.time_ratio), ("anonymous", row.memory_ratio))
            ]
    return figures


class _Child:
    """A process that answers in lines; it ends when its input does."""

    def __init__(self, work: str, config: ScaleConfig, folder: Path, fleet: int) -> None:
        self._what = f"a process with {fleet} devices ({work})"
        command = [sys.executable, "-c", _CHILD.format(work=work)]
        command += [json.dumps(asdict(config)), str(folder), str(fleet)]
        self._process = start_piped(command, child_environment(None))
        self._stdin = cast("IO[str]", self._process.stdin)
        self._stdout = cast("IO[str]", self._process.stdout)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exception: object) -> None:
        failed = any(exception)
        if failed:
            self._process.kill()
        _, errors = self._process.communicate()
        if self._process.returncode and not failed:
            raise FigureError(f"{self._what} did not end well:\n{errors}")

    def ask(self) -> dict[str, float]:
        """Send an empty line and return the answer."""
        with suppress(BrokenPipeError):  # it has ended; the missing answer says why
            self._stdin.write("\n")
            self._stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        """Read its next line. Raises `FigureError` if it has ended."""
        line = self._stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            raise FigureError(f"{self._what} has ended:\n{errors}")
        answer: dict[str, float] = json.loads(line)
        return answer


# -- in the processes ----------------------------------------------------------------------------


def fill_memory(config: str, folder: str, fleet: str) -> None:
    """Remember all devices of a fleet in full; print a line for each batch."""
    settings, memory = _open(config, folder, fleet)
    values = random_values(settings.plan.parameters, stream(0, "scale", "fill"))
    for first in range(0, int(fleet), settings.batch):
        fill(memory, range(first, min(first + settings.batch, int(fleet))), values)
        print("{}", flush=True)
    memory.close()


def close_rounds(config: str, folder: str, fleet: str) -> None:
    """Close a round for every line of input; answer with seconds and bytes."""
    settings, memory = _open(config, folder, fleet)
    plan, rule, draws = settings.plan, RamFed(), stream(0, "scale", "rounds")
    values = random_values(plan.parameters, draws)
    for _ in sys.stdin:
        drawn = draws.choice(settings.fleets[0], settings.devices, replace=False)
        names = sorted((drawn * (int(fleet) // settings.fleets[0])).tolist())
        closing = closing_of(
            plan,
            memory.now + 1,
            [(device_name(number), values) for number in names],
            settings.level,
            draws,
            registered=int(fleet),
            memory=memory,
            threads=settings.threads,
        )
        start = time.perf_counter()
        rule.move(closing)
        moved = time.perf_counter()
        memory.commit()
        answer = {
            "move_s": moved - start,
            "commit_s": time.perf_counter() - moved,
            "anonymous_bytes": anonymous_bytes(),
        }
        print(json.dumps(answer), flush=True)
    memory.close()


def anonymous_bytes() -> int:
    """Bytes of this process's memory that belong to no file."""
    with SMAPS.open(encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def _open(config: str, folder: str, fleet: str) -> tuple[ScaleConfig, DiskMemory]:
    fields: dict[str, Any] = json.loads(config)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    settings = replace(ScaleConfig(), **{**fields, **lists})
    held = MemoryConfig(
        memory_type=settings.dtype, damping=RamFed().fading, threads=settings.threads
    )
    return settings, DiskMemory(Path(folder) / fleet, settings.plan, held, devices=int(fleet))
