"""The tables of docs/levels.md and its plot, from the record of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.report.drawing import PALETTE, panels
from benchmarks.studies.levels.fleets import ALTERNATIVES, FLEETS, NOT_HERE, UPPER_BOUND, WAYS
from benchmarks.studies.levels.settings import SETTINGS
from benchmarks.studies.levels.study import RECOMMENDED, Aims, WayStanding, aims_of, standings
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
    parts.append("### Not run\n\n" + "\n".join(f"- {line}" for line in not_run(outcomes)))
    return "\n\n".join(parts)


def not_run(outcomes: Sequence[TrialOutcome]) -> list[str]:
    """List what the study leaves open."""
    run = {(each.case.setting, each.case.fleet, each.case.way) for each in outcomes}
    lines = [f"{name}: {why}" for name, why in NOT_HERE.items()]
    for setting in SETTINGS:
        if not SETTINGS[setting].folder:
            continue
        missing = [fleet for fleet in FLEETS if not any((setting, fleet, w) in run for w in WAYS)]
        if missing:
            lines.append(f"{setting}: no run with {', '.join(missing)}")
        for fleet in FLEETS:
            ways = [way for way in WAYS if (setting, fleet, way) not in run]
            if fleet not in missing and ways:
                lines.append(f"{setting}, {fleet}: not {', '.join(ways)}")
    seeds = {each.case.seed for each in outcomes}
    lines.append(f"seeds: {', '.join(map(str, sorted(seeds)))}; three are needed to rank finalists")
    return lines


def _aims_table(outcomes: Sequence[TrialOutcome]) -> str:
    rows = [
        [
            f"points, `{RECOMMENDED}`",
            "over the best alternative, equal energy (aim ≥ 0)",
            "under everybody at full level, equal rounds (aim ≤ 3)",
            "25 % submodel over a model of that size (aim ≥ 0)",
        ],
        ["---", "--:", "--:", "--:"],
    ]
    found: list[Aims] = []
    for setting, fleet in pairs_of(outcomes):
        aims = aims_of(standings(outcomes, setting, fleet))
        found.append(aims)
        rows.append([f"{setting}, {fleet}", *map(_points, _values(aims))])
    means = [
        [value for value in column if value is not None]
        for column in zip(*map(_values, found), strict=True)
    ]
    rows.append(["mean", *(_points(mean(each) if each else None) for each in means)])
    return _markdown(rows)


def _values(aims: Aims) -> tuple[float | None, float | None, float | None]:
    return aims.over_alternatives, aims.under_full, aims.smallest_over


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
    shown = [UPPER_BOUND, *ALTERNATIVES, "coverage", "nested", RECOMMENDED, "sandwich"]
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
