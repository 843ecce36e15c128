"""Boards side by side: costs of the same case on each, as ratios to the first.

Rules:
- A case is a family, a level and a backend. Without a number of threads, each board is taken with
  the number that makes it fastest, since that is how it would be used.
- Seconds and joules are per round if all rounds are equal work. If steps differ, they are per step;
  if batches differ, per sample, and memory then has no ratio.
- Seconds of a round are those of its training if all results have them, since a modelled round
  is nothing else; a measured one also reads and writes files.
- What only one of the results has is left out and counted. A ratio with a modelled number counts as
  modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import geometric_mean
from typing import Literal

from benchmarks.device.report.lines import is_modelled
from benchmarks.device.results import BackendName, Case, Results
from benchmarks.device.validity import faults, verdict
from benchmarks.report.figures import Figure
from benchmarks.report.options import UsageError
from benchmarks.report.sheet import (
    DASH,
    Sheet,
    escaped,
    listed,
    number,
    percent,
    without_unknown,
)

WorkUnit = Literal["training", "round", "step", "sample"]
"""Unit of work for seconds and joules; joules of a round's training are those of the round."""
UNITS: dict[WorkUnit, tuple[str, str]] = {
    "training": ("s of training", "J/round"),
    "round": ("s/round", "J/round"),
    "step": ("ms/step", "mJ/step"),
    "sample": ("ms/sample", "mJ/sample"),
}
"""Units of seconds and joules, as shown."""
Name = tuple[str, float, BackendName]
"""Family, level, backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardCost:
    """A number of one board, and its ratio to the first board's; None: that is missing."""

    value: float
    modelled: bool
    ratio: float | None = None
    ratio_modelled: bool = False
    """True if one of the two is modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Costs of one case on one board, counted from 1. None: unknown."""

    family: str
    level: float
    backend: BackendName
    board: int
    threads: int
    seconds: BoardCost
    joules: BoardCost | None
    """Gross joules."""
    peak_bytes: BoardCost


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardComparison:
    """`lines` are ordered by case, then by board."""

    boards: tuple[Results, ...]
    names: tuple[str, ...]
    """Names of the boards, all different: `1 Laptop`."""
    work: WorkUnit
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    """Reasons why the numbers are not fully comparable."""


def compare(boards: Sequence[Results], threads: int | None = None) -> BoardComparison:
    """Compare two or more; `threads` None: each board's fastest number for each case.

    Raises `UsageError` if there are not two different ones, or no case that two of them share.
    """
    if len(boards) < 2:
        raise UsageError("give two or more results; one alone cannot be compared")
    for index, results in enumerate(boards):
        if results in boards[:index]:
            first = boards.index(results) + 1
            raise UsageError(f"number {first} and number {index + 1} are the same results")
    work = _work(boards)
    chosen = [_choose(results, threads, work) for results in boards]
    names = list(dict.fromkeys(name for cases in chosen for name in cases))
    shared = [name for name in names if sum(name in cases for cases in chosen) > 1]
    if not shared:
        raise UsageError(_nothing_shared(boards, threads))
    lines = [line for name in shared for line in _lines(name, boards, chosen, work)]
    alone = len(names) - len(shared)
    notes = tuple(_notes(boards, threads, work, alone))
    return BoardComparison(
        boards=tuple(boards),
        names=tuple(_names(boards)),
        work=work,
        lines=tuple(lines),
        notes=notes,
    )


def _names(boards: Sequence[Results]) -> Iterator[str]:
    """Name the boards; runs of the same board are told apart by their start."""
    times = Counter(results.title for results in boards)
    for board, results in enumerate(boards, start=1):
        began = f", {results.started[:19]}" if times[results.title] > 1 else ""
        yield f"{board} {results.title}{began}"


def _work(boards: Sequence[Results]) -> WorkUnit:
    if len({results.config.batch for results in boards}) > 1:
        return "sample"
    if len({results.config.steps for results in boards}) > 1:
        return "step"
    untimed = any(case.train_s is None for results in boards for case in results.cases)
    return "round" if untimed else "training"


def _choose(results: Results, threads: int | None, work: WorkUnit) -> dict[Name, Case]:
    """Choose the case for each name: families in their order, large levels first."""
    order = list(dict.fromkeys(case.family for case in results.cases))
    cases = sorted(
        (case for case in results.cases if threads in (None, case.threads)),
        key=lambda case: (
            *(order.index(case.family), -case.level, case.backend),
            *(_seconds(case, results, work).value, case.threads),
        ),
    )
    found: dict[Name, Case] = {}
    for case in cases:
        found.setdefault((case.family, case.level, case.backend), case)
    return found


def _lines(
    name: Name, boards: Sequence[Results], chosen: Sequence[dict[Name, Case]], work: WorkUnit
) -> Iterator[Line]:
    family, level, backend = name
    first = _costs(chosen[0][name], boards[0], work) if name in chosen[0] else (None, None, None)
    for board, (results, cases) in enumerate(zip(boards, chosen, strict=True), start=1):
        if name not in cases:
            continue
        case = cases[name]
        seconds, joules, peak = _costs(case, results, work)
        yield Line(
            family=family,
            level=level,
            backend=backend,
            board=board,
            threads=case.threads,
            seconds=_over(seconds, first[0]),
            joules=None if joules is None else _over(joules, first[1]),
            # Memory grows with the batch, by an unknown amount.
            peak_bytes=peak if work == "sample" else _over(peak, first[2]),
        )


def _costs(
    case: Case, results: Results, work: WorkUnit
) -> tuple[BoardCost, BoardCost | None, BoardCost]:
    """Seconds, joules and bytes of one case, without ratios."""
    config, joules = results.config, case.joules
    parts = {"step": config.steps, "sample": config.steps * config.batch}.get(work, 1)
    return (
        _seconds(case, results, work),
        None
        if joules is None or joules.gross is None
        else BoardCost(value=joules.gross / parts, modelled=is_modelled(joules)),
        BoardCost(value=case.peak_bytes.value, modelled=is_modelled(case.peak_bytes)),
    )


def _seconds(case: Case, results: Results, work: WorkUnit) -> BoardCost:
    if work == "training":
        spread = case.train_s or case.round_s
    else:
        spread = case.round_s if work == "round" else case.step_s
    parts = results.config.batch if work == "sample" else 1
    return BoardCost(value=spread.median / parts, modelled=is_modelled(spread))


def _over(cost: BoardCost, first: BoardCost | None) -> BoardCost:
    if first is None or not first.value:
        return cost
    return replace(
        cost, ratio=cost.value / first.value, ratio_modelled=cost.modelled or first.modelled
    )


# -- limits of comparability ----------------------------------------------------------------------


def _nothing_shared(boards: Sequence[Results], threads: int | None) -> str:
    have = []
    for board, results in enumerate(boards, start=1):
        families = list(dict.fromkeys(case.family for case in results.cases))
        counts = sorted({case.threads for case in results.cases})
        have.append(
            f"number {board} has {listed(families) or 'no case'}"
            + (f" with {listed(list(map(str, counts)))} threads" if counts else "")
        )
    asked = "" if threads is None else f" with {threads} threads"
    return (
        f"no two of the results have a case{asked} in common: {'; '.join(have)}. "
        "Measure the same families and levels on both"
        + ("" if threads is None else ", or leave --threads out")
    )


def _notes(
    boards: Sequence[Results], threads: int | None, work: WorkUnit, alone: int
) -> Iterator[str]:
    if threads is None:
        yield "Threads: for each case those that make the board fastest."
    else:
        yield f"Threads: {threads} on every board."
    for name in ("batch", "steps"):
        values = [getattr(results.config, name) for results in boards]
        if len(set(values)) > 1:
            yield (
                f"The rounds differ in {name} ({', '.join(map(str, values))}): seconds are of a "
                f"{work}, and joules a round's, divided."
                + (" Memory has no ratio." if work == "sample" else "")
            )
    if work == "training":
        yield (
            "Seconds are of a round's training: its steps, without unpacking the model, encoding "
            "the movement and writing it to disk."
        )
    elif work == "round" and len({results.provenance for results in boards}) > 1:
        yield (
            "Not all results tell the seconds of training: a modelled round is its training "
            "alone, a measured one goes from the model's chunks to the movement on disk."
        )
    if len({board.provenance for board in boards for case in board.cases if case.joules}) > 1:
        yield "Joules are of all of a measured round, but of a modelled one's training alone."
    yield from _said_of(
        [results.provenance == "modelled" for results in boards],
        "is modelled: no such device was run.",
        "are modelled: no such devices were run.",
    )
    yield from _said_of(
        [not results.complete for results in boards], "is incomplete.", "are incomplete."
    )
    yield from _said_of(
        [results.config.quick for results in boards], "is a --quick run.", "are --quick runs."
    )
    for board, results in enumerate(boards, start=1):
        if (invalid := verdict(results)) is not None:
            yield f"{board} is {invalid[0].lower()}{invalid[1:]}"
    yield from _other_versions(boards)
    if alone:
        yield f"Cases that only one has, left out: {alone}."


def _said_of(holds: Sequence[bool], one: str, several: str) -> Iterator[str]:
    """Yield `1 and 3 are …` for the boards to which it applies; nothing if to none."""
    found = [str(board) for board, so in enumerate(holds, start=1) if so]
    if found:
        yield f"{listed(found)} {one if len(found) == 1 else several}"


def _other_versions(boards: Sequence[Results]) -> Iterator[str]:
    measured = [
        (board, results.machine.versions)
        for board, results in enumerate(boards, start=1)
        if results.provenance == "measured"
    ]
    for package in sorted({name for _, versions in measured for name in versions}):
        found = [(board, versions.get(package)) for board, versions in measured]
        known = [(board, version) for board, version in found if version is not None]
        if len({version for _, version in known}) > 1:
            words = ", ".join(f"{board} has {version}" for board, version in known)
            yield f"Versions of {package} differ: {words}."


# -- for people ----------------------------------------------------------------------------------


def boards_sheet(comparison: BoardComparison) -> Sheet:
    """Return the compared boards and the conditions of their numbers."""
    rows = []
    for name, results in zip(comparison.names, comparison.boards, strict=True):
        sources = dict.fromkeys(case.joules.source for case in results.cases if case.joules)
        rows.append(
            (
                name,
                results.provenance + (", invalid" if faults(results) else ""),
                results.machine.power_mode or DASH,
                results.machine.cooling or DASH,
                "; ".join(sources) or DASH,
            )
        )
    columns = ("board", "numbers", "power mode", "cooling", "joules from")
    sheet = Sheet(title="Boards", columns=columns, rows=tuple(rows), texts=5)
    return without_unknown([sheet])[0]


def case_sheets(comparison: BoardComparison) -> list[Sheet]:
    """For each family, a row for each case on each board."""
    seconds, joules = UNITS[comparison.work]
    scale = shown_scale(comparison.work)
    sheets = [
        Sheet(
            title=f"{family}: seconds, gross joules and memory, and ratios to the first board",
            columns=(
                *("level", "backend", "board", "threads", seconds, "÷ 1"),
                *(joules, "÷ 1", "peak MB", "÷ 1"),
            ),
            rows=tuple(
                (
                    percent(line.level),
                    line.backend,
                    comparison.names[line.board - 1],
                    str(line.threads),
                    *_cells(line.seconds, scale),
                    *_cells(line.joules, scale),
                    *_cells(line.peak_bytes, 1e-6),
                )
                for line in lines
            ),
            texts=3,
        )
        for family, lines in groupby(comparison.lines, key=lambda line: line.family)
    ]
    return without_unknown(sheets)


def shown_scale(work: WorkUnit) -> float:
    """From seconds and joules to the units in which they are shown."""
    return 1e3 if work in ("step", "sample") else 1.0


def _cells(cost: BoardCost | None, scale: float) -> tuple[str, str]:
    if cost is None:
        return DASH, DASH
    value = number(cost.value * scale, modelled=cost.modelled)
    return value, number(cost.ratio, modelled=cost.ratio_modelled)


def means_sheet(comparison: BoardComparison) -> Sheet:
    """Compare each board with the first, over all cases they share."""
    rows = [
        (
            comparison.names[board - 1],
            str(cases),
            *(number(mean, modelled=modelled) for mean, modelled in means),
        )
        for board, cases, means in _means(comparison)
    ]
    sheet = Sheet(
        title="All shared cases: geometric means of the ratios to the first board",
        columns=("board", "cases", "seconds", "joules", "memory"),
        rows=tuple(rows),
    )
    return without_unknown([sheet])[0]


def comparison_markdown(comparison: BoardComparison) -> str:
    """Return everything as one page; equal for equal comparisons."""
    first = escaped(comparison.boards[0].title)
    parts = [
        f"# What a level costs, beside {first}",
        boards_sheet(comparison).markdown(),
        "\n".join(f"- {escaped(note)}" for note in comparison.notes),
        f"`~` modelled, not measured, or a ratio with such a number; `{DASH}` not known.",
    ]
    for sheet in (means_sheet(comparison), *case_sheets(comparison)):
        parts += [f"## {escaped(sheet.title)}", sheet.markdown()]
    return "\n\n".join(parts) + "\n"


# -- as data -------------------------------------------------------------------------------------


def comparison_figures(comparison: BoardComparison) -> list[Figure]:
    """Geometric means of the ratios to the first board, for each other: `compare.2.seconds`."""
    return [
        Figure(f"compare.{board}.{name}", mean, "×")
        for board, _, means in _means(comparison)
        for name, (mean, _) in zip(("seconds", "joules", "memory"), means, strict=True)
        if mean is not None
    ]


def _means(
    comparison: BoardComparison,
) -> Iterator[tuple[int, int, list[tuple[float | None, bool]]]]:
    """(board, cases shared with the first, (mean ratio, modelled) of seconds, joules, memory)."""
    for board in range(2, len(comparison.boards) + 1):
        lines = [line for line in comparison.lines if line.board == board]
        shared = [line for line in lines if line.seconds.ratio is not None]
        means = []
        for costs in (
            [line.seconds for line in shared],
            [line.joules for line in shared],
            [line.peak_bytes for line in shared],
        ):
            known = [cost for cost in costs if cost is not None and cost.ratio]
            ratios = [cost.ratio for cost in known if cost.ratio]
            mean = geometric_mean(ratios) if ratios else None
            means.append((mean, any(cost.ratio_modelled for cost in known)))
        yield board, len(shared), means
