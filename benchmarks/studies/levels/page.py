"""The tables of docs/levels.md and its plot, from the record of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.drawing import PALETTE, panels
from benchmarks.studies.levels.fleets import ALTERNATIVES, FLEETS, UPPER_BOUND, WAYS
from benchmarks.studies.levels.settings import SETTINGS
from benchmarks.studies.levels.study import (
    RECOMMENDED,
    Aims,
    WayStanding,
    aims_of,
    mean_aims,
    standings,
)
from benchmarks.studies.levels.trial import TrialOutcome

BEGIN = "<!-- tessera-bench levels -->"
LEVEL_NAMES = ("0.25", "0.5", "1")


def pairs_of(outcomes: Sequence[TrialOutcome]) -> list[tuple[str, str]]:
    """Return the settings and fleets that have any run, in the order of their tables."""
    run = {(each.case.setting, each.case.fleet) for each in outcomes}
    return [(setting, fleet) for setting in SETTINGS for fleet in FLEETS if (setting, fleet) in run]


def render_tables(outcomes: Sequence[TrialOutcome]) -> str:
    """Return Markdown: the aims, a table for each setting and fleet, and what was not run."""
    parts = [_aims_table(outcomes)]
    for setting, fleet in pairs_of(outcomes):
        parts.append(f"### {setting}, {fleet}\n\n{_table(standings(outcomes, setting, fleet))}")
    if any(SETTINGS[each.case.setting].folder for each in outcomes):
        parts.append(f"### Run, and not run\n\n{not_run(outcomes)}")
    return "\n\n".join(parts)


def not_run(outcomes: Sequence[TrialOutcome]) -> str:
    """Return a table of the ways and seeds that were run, so that it shows what was not."""
    settings = [name for name, each in SETTINGS.items() if each.folder]
    rows = [["ways run, most seeds", *FLEETS], ["---", *("--:" for _ in FLEETS)]]
    for setting in settings:
        cells = []
        for fleet in FLEETS:
            of = [e.case for e in outcomes if (e.case.setting, e.case.fleet) == (setting, fleet)]
            ways, seeds = {case.way for case in of}, {case.seed for case in of}
            cells.append(f"{len(ways)} of {len(WAYS)}, {len(seeds)}" if of else "–")
        rows.append([setting, *cells])
    where = {way: {e.case.setting for e in outcomes if e.case.way == way} for way in WAYS}
    lines = [_markdown(rows), ""]
    for number in (0, 1):
        few = [way for way, found in where.items() if len(found & set(settings)) == number]
        if few:
            told = "Run in one setting only" if number else "Never run"
            lines.append(f"{told}: {', '.join(few)}.")
    return "\n".join(lines)


def _aims_table(outcomes: Sequence[TrialOutcome]) -> str:
    header = [
        f"points, `{RECOMMENDED}`",
        *(f"over `{name}`, equal energy (aim ≥ 0)" for name in ALTERNATIVES),
        "under everybody at full level, equal rounds (aim ≤ 3)",
        "25 % submodel over `all-smallest` (aim ≥ 0)",
    ]
    rows = [header, ["---", *("--:" for _ in header[1:])]]
    found: list[Aims] = []
    for setting, fleet in pairs_of(outcomes):
        aims = aims_of(standings(outcomes, setting, fleet))
        if any(value is not None for value in aims.values):
            found.append(aims)
            rows.append([f"{setting}, {fleet}", *map(_points, aims.values)])
    rows.append(["mean", *map(_points, mean_aims(found))])
    return _markdown(rows)


def _table(found: Sequence[WayStanding]) -> str:
    header = ["way", "25 %", "50 %", "100 %", "deploy", "accuracy", "rate", "rounds", "kJ", "seeds"]
    rows = [header, ["---", *("--:" for _ in header[1:])]]
    for each in found:
        levels = [
            f"{each.by_level[level]:.1f}" if level in each.by_level else "–"
            for level in LEVEL_NAMES
        ]
        spread = "" if each.seeds == 1 else f" ({each.low:.1f}–{each.high:.1f})"
        rows.append(
            [
                f"**{each.way}**" if each.way == RECOMMENDED else each.way,
                *levels,
                f"{float(each.deploy):.0%}".replace("%", " %"),
                f"{each.accuracy:.1f}{spread}",
                f"{each.rate:g}",
                f"{each.rounds:.0f}",
                f"{each.joules / 1e3:.2f}",
                str(each.seeds),
            ]
        )
    return _markdown(rows)


def _points(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def save_levels_plot(outcomes: Sequence[TrialOutcome], path: Path) -> None:
    """Draw a panel for each setting and fleet: accuracy by level, a line for each way."""
    found = pairs_of(outcomes)
    figure, axes = panels(len(found), wide=4.6, high=3.1)
    shown = [UPPER_BOUND, *ALTERNATIVES, "coverage", "nested", "dropout", RECOMMENDED]
    for axis, (setting, fleet) in zip(axes, found, strict=True):
        by = {each.way: each for each in standings(outcomes, setting, fleet)}
        for number, way in enumerate(name for name in shown if name in by):
            levels = [level for level in LEVEL_NAMES if level in by[way].by_level]
            axis.plot(
                [LEVEL_NAMES.index(level) for level in levels],
                [by[way].by_level[level] for level in levels],
                marker="o" if way not in ALTERNATIVES else "x",
                linestyle="-",
                color=PALETTE[number % len(PALETTE)],
                label=way,
            )
        axis.set_xticks(range(3), ["25 %", "50 %", "100 %"])
        axis.set_title(f"{setting}, {fleet}", fontsize=9)
        axis.set_ylabel("test accuracy, %")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.savefig(path, dpi=120)
