"""Models the costs of levels on a board from its profile alone. Nothing is run.

    seconds   steps × multiply-accumulates, of three forward passes each, over the profile's speed:
              the same as the emulator's time (`Emulation.step_s`)
    memory    the SDK's estimate for a round before any measurement: `memory_bound`, an upper
              bound, plus what a device program holds before its first round
    joules    the profile's watts with all cores busy × seconds
    bytes     of the movement and of the model's packs, as the cost model counts them

Left out, because no profile has it: the time of a round besides its steps, the overhead of narrow
layers, the bandwidth of memory, heat, the link. Speed is known with one thread and with all cores,
watts only with all cores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import cast

from benchmarks.device.kit import CHUNK_BYTES
from benchmarks.device.results import (
    Amount,
    BackendName,
    Case,
    Config,
    CoreClock,
    Curve,
    Joules,
    LeftOut,
    Machine,
    Results,
    RoundBytes,
    TimeSpread,
)
from benchmarks.device.trial.learning import make_curve
from edge_sdk.decide.costs.model import bytes_down, bytes_up, memory_bound
from edge_sdk.decide.costs.work import batch_bytes, largest_groups, work_at
from edge_sdk.decide.emulation.emulation import MIB, PASSES, Emulation
from edge_sdk.decide.emulation.fleet import FleetMember
from edge_sdk.machine.board import Board, Quantity, SpeedSpec
from edge_sdk.protocol.chunks import HASH_BYTES, Blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.packs.index import ModelIndex, encode_index
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest

Tasks = Mapping[str, tuple[ModelPlan, Manifest]]
"""Plan and manifest of each family."""
Accuracies = Mapping[tuple[str, float], Sequence[float]]
"""Accuracy of a family at a level, after each round of a real training."""

ENCODINGS = ("fp32", "fp16", "int8", "top-k:0.1")
RULE = LocalRule(learning_rate=0.01, momentum=0.9)
HELD_BYTES = Quantity(
    64e6,
    "Python, numpy, onnxruntime and an open session, before any weight: docs/graphs.md; processes "
    "of `tessera-bench costs` had 61 MB before their first round, on x86-64 with Python 3.11",
    "measured",
)
"""Memory of a device program before its first round."""
NOT_RUN = "none: no such device was run"
NO_TORCH = "only the onnx backend is modelled: nobody knows what torch takes on this board"


def board_threads(board: Board) -> tuple[int, ...]:
    """Return the thread counts with known speed: one, and the number of cores."""
    return tuple(sorted({1, board_cores(board)}))


def model_results(
    board: Board,
    tasks: Tasks,
    config: Config,
    started: str,
    *,
    accuracies: Accuracies | None = None,
) -> Results:
    """Model the report of `tessera-bench device` for this board.

    `accuracies`: of each wanted curve, on the data that `config.data` names; its seconds, bytes and
    joules are those of the case with the most threads. Cases that cannot be modelled are left out,
    with the reason.

    Raises `ConfigError` when the profile lacks what an emulator needs, `KeyError` for a family
    missing from `tasks`, `GroupError` for an invalid level, `GraphError` when no gradient graph
    fits.
    """
    made = list(_cases(board, tasks, config))
    cases = tuple(case for case in made if isinstance(case, Case))
    return Results(
        title=board.title,
        provenance="modelled",
        started=started,
        seconds=0.0,
        complete=True,
        machine=_machine(board),
        config=config,
        cases=cases,
        left_out=tuple(case for case in made if isinstance(case, LeftOut)),
        curves=tuple(_curves(cases, accuracies or {}, config.data)),
    )


# -- cases ---------------------------------------------------------------------------------------


def _cases(board: Board, tasks: Tasks, config: Config) -> Iterator[Case | LeftOut]:
    _emulation(board)  # raises for an insufficient profile, whatever the cases are
    for family, level, backend, threads in product(
        config.families, config.levels, config.backends, config.threads
    ):
        made: Case | str = NO_TORCH
        if backend == "onnx":
            made = _case(board, family, *tasks[family], level, threads, config)
        yield (
            made
            if isinstance(made, Case)
            else LeftOut(
                family=family,
                level=level,
                backend=cast(BackendName, backend),
                threads=threads,
                why=made,
            )
        )


def _case(
    board: Board,
    family: str,
    plan: ModelPlan,
    manifest: Manifest,
    level: float,
    threads: int,
    config: Config,
) -> Case | str:
    """Return the case, or why there is none."""
    timed = _timed(board, threads)
    if isinstance(timed, str):
        return timed
    work = work_at(plan, manifest, level, config.batch)
    grown = memory_bound(work, batch_bytes(manifest.data, config.batch), RULE, Encoding())
    peak = HELD_BYTES.value + grown
    room = board.memory.app_mb
    if room is not None and peak > MIB * room.value:
        return (
            f"may take {peak / MIB:.0f} MB, and one process has {room.value:g} MB on this board "
            "(app_mb)"
        )
    macs = PASSES * config.batch * plan.submodel_macs(largest_groups(plan, level))
    step_s = timed.step_s(macs)
    round_s = config.steps * step_s
    return Case(
        family=family,
        level=level,
        backend="onnx",
        threads=threads,
        parameters=plan.cost_at(level).parameters,
        macs=work.macs,
        step_s=_spread(step_s),
        round_s=_spread(round_s),
        train_s=_spread(round_s),
        peak_bytes=Amount(value=peak, provenance="modelled"),
        grown_bytes=Amount(value=grown, provenance="modelled"),
        joules=joules_of(board, round_s) if threads == board_cores(board) else None,
        bytes=tuple(_bytes(plan, level, text) for text in ENCODINGS),
    )


def _timed(board: Board, threads: int) -> Emulation | str:
    """Return the board's emulation with this many threads, or why it is unknown."""
    if threads == board_cores(board):
        return _emulation(board)
    if threads != 1:
        return (
            f"the profile has the speed of one core and of all {board_cores(board)}, "
            f"not of {threads} threads"
        )
    one = board.speed.one_core_ratio
    if one is None:
        return "the profile has no speed.one_core_ratio"
    return _emulation(replace(board, speed=SpeedSpec(speed_ratio=one)))


def _emulation(board: Board) -> Emulation:
    percent = None if board.battery is None else 100.0
    return Emulation(FleetMember(name="board", board=board, battery_percent=percent))


def board_cores(board: Board) -> int:
    """Count the cores of all classes."""
    return int(sum(each.count.value for each in board.cores))


def _spread(seconds: float) -> TimeSpread:
    return TimeSpread(median=seconds, p90=seconds, samples=0, provenance="modelled")


def joules_of(board: Board, seconds: float) -> Joules | None:
    """Energy of training with all cores for this long; None: the profile has no watts."""
    busy, idle = board.power.train_w, board.power.idle_w
    if busy is None:
        return None
    watts = [
        f"{key} = {quantity.value:g} W ({quantity.provenance})"
        for key, quantity in (("train_w", busy), ("idle_w", idle))
        if quantity is not None
    ]
    return Joules(
        gross=busy.value * seconds,
        net=None if idle is None else (busy.value - idle.value) * seconds,
        provenance="modelled",
        source=f"profile {board.name}: {', '.join(watts)}",
    )


def _bytes(plan: ModelPlan, level: float, text: str) -> RoundBytes:
    encoding = Encoding.parse(text)
    # The largest values make up most of a movement; of a model they are not enough.
    travels = encoding.kind != "top-k"
    return RoundBytes(
        encoding=text,
        up=bytes_up(plan, level, encoding),
        down=_index_bytes(plan, encoding) + bytes_down(plan, level, encoding) if travels else None,
        provenance="modelled",
    )


def _index_bytes(plan: ModelPlan, encoding: Encoding) -> int:
    """Bytes of the index of a model's chunks; its length does not depend on the hashes."""
    sizes = find_packs(plan).sizes(plan, encoding)
    hashes = [(bytes(HASH_BYTES),) * -(-size // CHUNK_BYTES) for size in sizes]
    blobs = (Blob(size, chunks) for size, chunks in zip(sizes, hashes, strict=True))
    return len(encode_index(plan, ModelIndex(encoding, CHUNK_BYTES, tuple(blobs))))


# -- curves --------------------------------------------------------------------------------------


def _curves(cases: Sequence[Case], accuracies: Accuracies, data: str) -> Iterator[Curve]:
    for (family, level), after_round in accuracies.items():
        own = [case for case in cases if (case.family, case.level) == (family, level)]
        if own:
            yield make_curve(max(own, key=lambda case: case.threads), data, after_round)


# -- the machine ---------------------------------------------------------------------------------


def _machine(board: Board) -> Machine:
    idle = board.power.idle_w
    return Machine(
        model=board.soc,
        board=board.name,
        system=NOT_RUN,
        python=NOT_RUN,
        cores=board_cores(board),
        clocks=tuple(
            CoreClock(
                cores=int(each.count.value),
                max_mhz=None if each.ghz is None else 1e3 * each.ghz.value,
            )
            for each in board.cores
        ),
        memory_bytes=MIB * board.memory.memory_mb.value,
        power_mode=_power_mode(board.title),
        fed_by="mains" if board.battery is None else "battery",
        idle_w=None if idle is None else Amount(value=idle.value, provenance="modelled"),
    )


def _power_mode(title: str) -> str | None:
    """Return the power mode in a title's parentheses: `(8 GB, 15 W mode)`."""
    found = re.search(r"\(([^)]*\bmode\b[^)]*)\)", title)
    if found is None:
        return None
    parts = [part for part in found[1].split(", ") if not re.fullmatch(r"[0-9]+ GB", part)]
    return ", ".join(parts)
