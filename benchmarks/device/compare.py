"""Boards side by side: what the same case costs on each, as ratios to the first.

Rules:
- A case is a family, a level and a backend. Without a number of threads, each board is taken with
  the number that makes it fastest there, since that is how it would be used.
- Seconds and joules are of a round where all rounds are equal work. With other steps, they are of
  a step; with other batches, of a sample; the memory of other batches has no ratio.
- What only one of the results has is left out and counted. A ratio of something modelled is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import geometric_mean
from typing import Literal

from benchmarks.device.lines import is_modelled
from benchmarks.device.results import BackendName, Case, Results
from benchmarks.device.sheet import DASH, Sheet, escaped, listed, number, percent
from benchmarks.figures import Figure
from benchmarks.options import UsageError

Work = Literal["round", "step", "sample"]
"""What seconds and joules are counted for."""
Name = tuple[str, float, BackendName]
"""Family, level, backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A number of one board, and what it is of the first board's; None: that is not there."""

    value: float
    modelled: bool
    ratio: float | None = None
    ratio_modelled: bool = False
    """Whether one of the two is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one case costs on one board, which is counted from 1. None: not known."""

    family: str
    level: float
    backend: BackendName
    board: int
    threads: int
    seconds: Cost
    joules: Cost | None
    """Gross."""
    peak_bytes: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`lines` are ordered by case, then by board."""

    boards: tuple[Results, ...]
    work: Work
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    """What keeps the numbers from meaning the same."""


def compare(boards: Sequence[Results], threads: int | None = None) -> Comparison:
    """Line up two or more; `threads` None: each board's fastest number for each case.

    Raises `UsageError` if there are not two different ones, or no case that two of them have.
    """
    if len(boards) < 2:
        raise UsageError("give two results or more; one alone has nothing to be compared with")
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
    return Comparison(boards=tuple(boards), work=work, lines=tuple(lines), notes=notes)


def _work(boards: Sequence[Results]) -> Work:
    if len({results.config.batch for results in boards}) > 1:
        return "sample"
    return "step" if len({results.config.steps for results in boards}) > 1 else "round"


def _choose(results: Results, threads: int | None, work: Work) -> dict[Name, Case]:
    """The case that stands for each name: families in their order, large levels first."""
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
    name: Name, boards: Sequence[Results], chosen: Sequence[dict[Name, Case]], work: Work
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
            # Memory grows with the batch, and nobody knows by how much.
            peak_bytes=peak if work == "sample" else _over(peak, first[2]),
        )


def _costs(case: Case, results: Results, work: Work) -> tuple[Cost, Cost | None, Cost]:
    """Seconds, joules and bytes of one case, without ratios."""
    config, joules = results.config, case.joules
    parts = {"round": 1, "step": config.steps, "sample": config.steps * config.batch}[work]
    return (
        _seconds(case, results, work),
        None
        if joules is None or joules.gross is None
        else Cost(value=joules.gross / parts, modelled=is_modelled(joules)),
        Cost(value=case.peak_bytes.value, modelled=is_modelled(case.peak_bytes)),
    )


def _seconds(case: Case, results: Results, work: Work) -> Cost:
    spread = case.round_s if work == "round" else case.step_s
    parts = results.config.batch if work == "sample" else 1
    return Cost(value=spread.median / parts, modelled=is_modelled(spread))


def _over(cost: Cost, first: Cost | None) -> Cost:
    if first is None or not first.value:
        return cost
    return replace(
        cost, ratio=cost.value / first.value, ratio_modelled=cost.modelled or first.modelled
    )


# -- what keeps the numbers from meaning the same -------------------------------------------------


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


def _notes(boards: Sequence[Results], threads: int | None, work: Work, alone: int) -> Iterator[str]:
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
    for board, results in enumerate(boards, start=1):
        if results.provenance == "modelled":
            yield f"{board} is modelled: no such device was run."
        if not results.complete:
            yield f"{board} is incomplete."
        if results.config.quick:
            yield f"{board} is a --quick run."
    yield from _other_versions(boards)
    if alone:
        yield f"Cases that only one has, left out: {alone}."


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


def boards_sheet(comparison: Comparison) -> Sheet:
    """Who is compared, and what their numbers hold for."""
    rows = []
    for board, results in enumerate(comparison.boards, start=1):
        sources = dict.fromkeys(case.joules.source for case in results.cases if case.joules)
        rows.append(
            (
                f"{board} {results.title}",
                results.provenance,
                results.machine.power_mode or DASH,
                results.machine.cooling or DASH,
                "; ".join(sources) or DASH,
            )
        )
    columns = ("board", "numbers", "power mode", "cooling", "joules from")
    return Sheet(title="Boards", columns=columns, rows=tuple(rows), texts=5)


def case_sheets(comparison: Comparison) -> list[Sheet]:
    """For each family, a row for each case on each board."""
    work = comparison.work
    unit, scale = ("s", 1.0) if work == "round" else ("ms", 1e3)
    energy = ("J", 1.0) if work == "round" else ("mJ", 1e3)
    return [
        Sheet(
            title=f"{family}: seconds, gross joules and memory, and ratios to the first board",
            columns=(
                *("level", "backend", "board", "threads", f"{unit}/{work}", "÷ 1"),
                *(f"{energy[0]}/{work}", "÷ 1", "peak MB", "÷ 1"),
            ),
            rows=tuple(
                (
                    percent(line.level),
                    line.backend,
                    f"{line.board} {comparison.boards[line.board - 1].title}",
                    str(line.threads),
                    *_cells(line.seconds, scale),
                    *_cells(line.joules, energy[1]),
                    *_cells(line.peak_bytes, 1e-6),
                )
                for line in lines
            ),
            texts=3,
        )
        for family, lines in groupby(comparison.lines, key=lambda line: line.family)
    ]


def _cells(cost: Cost | None, scale: float) -> tuple[str, str]:
    if cost is None:
        return DASH, DASH
    value = number(cost.value * scale, modelled=cost.modelled)
    return value, number(cost.ratio, modelled=cost.ratio_modelled)


def means_sheet(comparison: Comparison) -> Sheet:
    """For each board, how it compares over all cases that it shares with the first."""
    rows = [
        (
            f"{board} {comparison.boards[board - 1].title}",
            str(cases),
            *(number(mean, modelled=modelled) for mean, modelled in means),
        )
        for board, cases, means in _means(comparison)
    ]
    return Sheet(
        title="All shared cases: geometric means of the ratios to the first board",
        columns=("board", "cases", "seconds", "joules", "memory"),
        rows=tuple(rows),
    )


def comparison_markdown(comparison: Comparison) -> str:
    """All of it as one page; equal for equal comparisons."""
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


def comparison_figures(comparison: Comparison) -> list[Figure]:
    """Geometric means of the ratios to the first board, for each other: `compare.2.seconds`."""
    return [
        Figure(name=f"compare.{board}.{name}", value=mean, unit="×")
        for board, _, means in _means(comparison)
        for name, (mean, _) in zip(("seconds", "joules", "memory"), means, strict=True)
        if mean is not None
    ]


def _means(
    comparison: Comparison,
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
