"""The tables of docs/results.md, from the record of finished runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from benchmarks.studies.papers.cell import CellOutcome, Outcomes, PaperCell, PaperTable
from benchmarks.studies.papers.record import outcomes_of
from benchmarks.studies.papers.verdicts import ClaimVerdict, Judged, judge_all

BEGIN = "<!-- tessera-bench papers -->"
DASH = "–"
VERDICTS: Sequence[ClaimVerdict] = (
    "reproduced",
    "within the noise",
    "not reproduced",
    "as claimed",
    "not as claimed",
    "not run",
)


def plot_name(table: PaperTable) -> str:
    """Return the name of a table's plot, beside the page."""
    return f"results-{table.name}.svg"


def render_page(tables: Sequence[PaperTable], found: Sequence[CellOutcome]) -> str:
    """Return the generated part of the page: a summary, then every table with its verdicts."""
    done = {table.name: outcomes_of(table, found) for table in tables}
    parts = [_summary(tables, done)]
    paper = ""
    for table in tables:
        if table.paper != paper:
            paper = table.paper
            parts.append(f"## {paper}")
        parts.append(render_table(table, done[table.name]))
    return "\n\n".join(parts)


def render_table(table: PaperTable, done: Outcomes, *, plots: bool = True) -> str:
    """Return one table: words, numbers, verdicts, and what was not run."""
    parts = [f"### {table.title}", f"`--table {table.name}`. {table.about}"]
    if done:
        parts.append(table.show(table, done) if table.show else show_parts(table, done))
        if table.draw is not None and plots:
            parts.append(f"![{table.title}]({plot_name(table)})")
        judged = [each for each in judge_all(table, done) if each.verdict != "not run"]
        if judged:
            parts.append("\n".join(f"- {each.words}" for each in judged))
    if table.remarks and done:
        parts.append(table.remarks)
    if gaps := not_run(table, done):
        parts.append(gaps)
    return "\n\n".join(parts)


def show_parts(table: PaperTable, done: Outcomes) -> str:
    """Return a sheet for each part of a table that has any run."""
    sheets = []
    for part in dict.fromkeys(cell.place.part for cell in table.cells):
        cells = [cell for cell in table.cells if cell.place.part == part]
        if any(done.get(cell.place) for cell in cells):
            title = f"**{part}**\n\n" if part else ""
            sheets.append(title + _sheet(table, cells, done))
    return "\n\n".join(sheets)


def not_run(table: PaperTable, done: Outcomes) -> str:
    """Say which cells have no run, or fewer seeds than they should."""
    lines = []
    open_cells = [cell for cell in table.cells if not done.get(cell.place)]
    waiting: dict[str, list[PaperCell]] = {}
    for cell in open_cells:
        waiting.setdefault(cell.missing, []).append(cell)
    if len(open_cells) == len(table.cells) and set(waiting) == {""}:
        return "Not run."
    for reason, cells in waiting.items():
        names = "; ".join(_named(cell) for cell in cells)
        lines.append(f"Not run{f' ({reason})' if reason else ''}: {names}.")
    few = Counter(
        len(done[cell.place])
        for cell in table.cells
        if done.get(cell.place) and len(done[cell.place]) < table.seeds
    )
    if few:
        told = ", ".join(f"{count} with {seeds}" for seeds, count in sorted(few.items()))
        lines.append(f"Cells with fewer than {table.seeds} seeds: {told}.")
    return "\n\n".join(lines)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is words, the others numbers."""
    rule = ["---", *("--:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def mean_and_spread(runs: Sequence[CellOutcome], name: str, digits: int = 1) -> str:
    """Return the mean over seeds and its standard deviation; a dash where nothing is known."""
    known = [each.values[name] for each in runs if name in each.values]
    if not known:
        return DASH
    text = f"{fmean(known):.{digits}f}"
    return f"{text} ± {stdev(known):.{digits}f}" if len(known) > 1 else text


def _sheet(table: PaperTable, cells: Sequence[PaperCell], done: Outcomes) -> str:
    columns = list(dict.fromkeys(cell.place.column for cell in cells))
    deviation = bool(table.more.get("deviation"))
    heads = ["%"]
    for column in columns:
        heads += [f"{column}: last tenth", "best"]
        heads += ["between devices"] if deviation else []
        heads += ["paper"]
    rows = []
    for row in dict.fromkeys(cell.place.row for cell in cells):
        line = [row]
        for column in columns:
            cell = next((c for c in cells if c.place[1:] == (row, column)), None)
            runs = [] if cell is None else done.get(cell.place, [])
            line += [mean_and_spread(runs, "last"), mean_and_spread(runs, "best")]
            line += [mean_and_spread(runs, "deviation")] if deviation else []
            line += [_printed(cell, deviation=deviation)]
        rows.append(line)
    return markdown(heads, rows)


def _printed(cell: PaperCell | None, *, deviation: bool) -> str:
    if cell is None or cell.paper is None:
        return DASH
    if cell.spread is None:
        return f"{cell.paper:g}"
    return f"{cell.paper:g} ({cell.spread:g})" if deviation else f"{cell.paper:g} ± {cell.spread:g}"


def _named(cell: PaperCell) -> str:
    return ", ".join(each for each in cell.place if each)


def _summary(tables: Sequence[PaperTable], done: Mapping[str, Outcomes]) -> str:
    """Count verdicts and runs by table."""
    rows = []
    for table in tables:
        judged: list[Judged] = judge_all(table, done[table.name])
        counts = Counter(each.verdict for each in judged)
        runs = sum(len(each) for each in done[table.name].values())
        wanted = len(table.cells) * table.seeds
        rows.append(
            [
                f"{table.paper}: {table.title}",
                *(str(counts[each]) if counts[each] else DASH for each in VERDICTS),
                f"{runs} of {wanted}",
            ]
        )
    heads = [f"{each}, one seed" if "as claimed" in each else each for each in VERDICTS]
    return markdown(["claims", *heads, "runs"], rows)
