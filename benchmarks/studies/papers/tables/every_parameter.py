"""Every Parameter Matters (Zhou et al., NeurIPS 2023): table 1 on MNIST."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.studies.papers.cell import CellPlace, Outcomes, PaperCell, PaperClaim, PaperTable
from benchmarks.studies.papers.running import run_study_cell
from benchmarks.studies.papers.tables.shared import settings

PAPER = "Every Parameter Matters"
LEVELS: Mapping[str, list[float]] = {
    "low": [1.0] * 6 + [0.75] * 4,
    "medium": [1.0] * 4 + [0.75] * 6,
    "high": [1.0] * 3 + [0.75] + [0.5] * 6,
}
"""Of ten devices, the share of the hidden neurons that each trains, by level of reduction."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "pruning, greedy": {"mask.options.masks": "greedy"},
    "pruning, optimised": {"mask.options.masks": "coverage"},
    "subnet, static": {"mask.options.masks": "static"},
    "subnet, optimised": {"mask.options.masks": "disjoint"},
}
SPLITS: Mapping[str, Mapping[str, Any]] = {
    "IID": {"data.partition": "iid"},
    "two labels": {"data.partition": "labels", "data.classes": 2},
}
BASE = settings(
    data_name="mnist",
    model_name="mlp-200",
    fleet_devices=100,
    rule_name="ra-fed",
    round_participants=10,
    run_batch_size=10,
    run_learning_rate=0.01,
    run_momentum=0.5,
    run_steps=300,
    run_rounds=100,
    simulation_evaluate_every=1,
)
QUICK = {"run.rounds": 15, "run.steps": 120}
FULL = "whole models"
PRINTED: Mapping[str, tuple[float, float]] = {
    FULL: (98.08, 93.59),
    "low: pruning, greedy": (98.18, 93.15),
    "low: pruning, optimised": (98.53, 95.85),
    "low: subnet, static": (97.62, 92.33),
    "low: subnet, optimised": (97.76, 93.60),
    "medium: pruning, greedy": (97.51, 91.86),
    "medium: pruning, optimised": (98.39, 95.48),
    "medium: subnet, static": (95.56, 92.05),
    "medium: subnet, optimised": (97.96, 93.36),
    "high: pruning, greedy": (95.01, 76.64),
    "high: pruning, optimised": (95.32, 81.66),
    "high: subnet, static": (95.88, 71.64),
    "high: subnet, optimised": (94.41, 85.82),
}
"""The paper's accuracies, IID and with two labels a device."""


def _cells() -> tuple[PaperCell, ...]:
    rows: dict[str, Mapping[str, Any]] = {FULL: {"rule.name": "fedavg"}}
    for level, shares in LEVELS.items():
        for way, masks in WAYS.items():
            rows[f"{level}: {way}"] = {
                **masks,
                "mask.name": "places",
                "mask.options.levels": shares,
            }
    return tuple(
        PaperCell(
            place=CellPlace("", row, split),
            settings={**BASE, **data, **more},
            paper=PRINTED[row][number],
            quick=QUICK if split == "two labels" and row.startswith("high") else None,
        )
        for row, more in rows.items()
        for number, (split, data) in enumerate(SPLITS.items())
    )


def _claims() -> tuple[PaperClaim, ...]:
    return tuple(
        PaperClaim(
            name=f"{split.replace(' ', '-').lower()}.{level}-{kind}",
            words=f"{split}, {level} reduction: {kind}, optimised over {plain}",
            better=CellPlace("", f"{level}: {kind}, optimised", split),
            worse=CellPlace("", f"{level}: {kind}, {plain}", split),
        )
        for split in SPLITS
        for level in LEVELS
        for kind, plain in (("pruning", "greedy"), ("subnet", "static"))
    )


def _draw(table: PaperTable, done: Outcomes, path: Path) -> None:
    from benchmarks.studies.papers.plots import save_scatter

    save_scatter(
        table,
        done,
        path,
        x=("noise", "model reduction noise δ²"),
        y=("coverage_min", "smallest coverage Γ, mean"),
    )


TABLE_1 = PaperTable(
    name="epm1",
    title="Table 1: MNIST",
    paper=PAPER,
    about="""\
100 devices, 10 drawn for every round, five local epochs (300 steps of 10 images), rate 0.01,
momentum 0.5, 100 rounds, as in the authors' code. *Reduction* is in hidden neurons, as in the
text, of a 784-200-10 perceptron; the code masks single weights of the first layer. Levels
belong to places in the round, as in the code: of the ten devices drawn, 6 train the whole model
and 4 three quarters of it (low), 4 and 6 (medium), or 3, one three quarters and 6 half of it
(high). *Greedy* keeps the neurons of largest norm (the code does not: it takes `argsort` for
ranks), *static* the leading ones. *Optimised* is `coverage` for pruning and, for subnets,
regions dealt out without overlap whatever their norm (`disjoint`). A block that nobody covers
keeps its value (in the code it becomes NaN). L = 5 and the homogeneous rows were left out.""",
    cells=_cells(),
    claims=_claims(),
    run=run_study_cell,
    draw=_draw,
    expected_s=60.0,
    folders=("mnist",),
)

TABLES = (TABLE_1,)
