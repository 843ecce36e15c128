"""Figures refuse what cannot be compared, and every run's JSON has one form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.report.figures import (
    MOST_NAMED,
    SCHEMA,
    Better,
    Figure,
    FigureError,
    print_figures,
    write_json,
)

GOOD: dict[str, Any] = {"name": "step.cnn.50.over_macs", "value": 1.25, "unit": "×", "target": 1.5}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "step"}, "dotted"),
        ({"name": "step.CNN.50"}, "dotted"),
        ({"name": "step..50"}, "dotted"),
        ({"name": "step.a b"}, "dotted"),
        ({"unit": ""}, "no unit"),
        ({"value": math.nan}, "value is nan"),
        ({"value": math.inf}, "value is inf"),
        ({"target": math.nan}, "target is nan"),
        ({"better": "bigger"}, "lower or higher"),
    ],
)
def test_figure_with_a_fault_is_refused(change: dict[str, Any], complaint: str) -> None:
    Figure(**GOOD)
    with pytest.raises(FigureError, match=complaint):
        Figure(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("value", "target", "better", "met"),
    [
        (1.0, 1.5, "lower", True),
        (1.5, 1.5, "lower", True),
        (1.6, 1.5, "lower", False),
        (1.6, 1.5, "higher", True),
        (1.5, 1.5, "higher", True),
        (1.0, 1.5, "higher", False),
        (1.0, None, "lower", None),
    ],
)
def test_figure_is_met_on_the_better_side_of_its_target(
    value: float, target: float | None, better: Better, met: bool | None
) -> None:
    assert Figure(name="a.b", value=value, unit="s", target=target, better=better).met is met


def test_json_holds_figures_and_data_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, [Figure(**GOOD), Figure(name="a.b", value=2.0, unit="ms")], {"rows": [1]})
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "schema": SCHEMA,
        "figures": [
            {**GOOD, "better": "lower"},
            {"name": "a.b", "value": 2.0, "unit": "ms", "target": None, "better": "lower"},
        ],
        "rows": [1],
    }


@pytest.mark.parametrize(
    ("names", "data", "error", "complaint"),
    [
        (["a.b", "a.c", "a.b"], {}, FigureError, "two figures are called 'a.b'"),
        (["a.b"], {"figures": []}, FigureError, "'figures' belongs"),
        (["a.b"], {"schema": 2}, FigureError, "'schema' belongs"),
        (["a.b"], {"rows": [math.nan]}, ValueError, "JSON"),
    ],
)
def test_json_that_nobody_could_read_back_is_not_written(
    tmp_path: Path,
    names: list[str],
    data: dict[str, Any],
    error: type[Exception],
    complaint: str,
) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(error, match=complaint):
        write_json(path, [Figure(name=name, value=1.0, unit="s") for name in names], data)
    assert not path.exists()


def test_printed_figures_name_few_targets_met_or_not() -> None:
    console = Console(width=40)
    figures = [
        Figure(name="a.missed", value=2.0, unit="MB", target=1.0),
        Figure(name="a.met", value=0.5, unit="MB", target=1.0),
        Figure(name="a.slow", value=2.0, unit="Hz", target=3.0, better="higher"),
        Figure(name="a.free", value=9.0, unit="MB"),
    ]
    with console.capture() as captured:
        print_figures(figures, console)
    assert captured.get().splitlines() == [
        "1 of 3 targets met",
        "  not met: a.missed is 2 MB, target ≤ 1 MB",
        "  met: a.met is 0.5 MB, target ≤ 1 MB",
        "  not met: a.slow is 2 Hz, target ≥ 3 Hz",
    ]


def test_printed_figures_name_only_missed_targets_of_many() -> None:
    console = Console(width=40)
    met = [Figure(name=f"a.n{n}", value=1.0, unit="s", target=1.0) for n in range(MOST_NAMED)]
    missed = Figure(name="a.missed", value=2.0, unit="MB", target=1.0)
    with console.capture() as captured:
        print_figures([*met, missed], console)
    assert captured.get().splitlines() == [
        "6 of 7 targets met",
        "  not met: a.missed is 2 MB, target ≤ 1 MB",
    ]
