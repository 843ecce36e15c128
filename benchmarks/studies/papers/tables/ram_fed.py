"""RAM-Fed (Wang et al., KDD 2023): tables 2 and 3, figures 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.studies.papers.cell import CellPlace, Outcomes, PaperCell, PaperClaim, PaperTable
from benchmarks.studies.papers.running import run_study_cell
from benchmarks.studies.papers.tables.shared import RAM_FED, settings

PAPER = "RAM-Fed"
LEVELS: Mapping[str, list[float]] = {"L": [0.5], "S": [0.25], "MIX": [0.5, 0.25]}
"""Levels of the devices, in turn: `L` trains half of the regions, `S` a quarter."""
FORCED = {"mask.name": "periodic", "mask.options.every": 10}
"""Random regions, but every tenth round the same ones on all devices, as in the authors' code."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"rule.name": "fedavg"},
    "RA-Fed": {"rule.name": "ra-fed", **FORCED},
    "RAM-Fed": {**RAM_FED, **FORCED},
    "RAM-Fed, 1/N": {**RAM_FED, **FORCED, "rule.options.correction": "population"},
    "RAM-Fed, damped": {"rule.name": "ram-fed", "rule.options.damping": 0.8, **FORCED},
    "RAM-Fed, adaptive": {"rule.name": "ram-fed", "rule.options.damping": "adaptive", **FORCED},
    "PruneFL": {"rule.name": "ra-fed", "mask.name": "prunefl", "mask.options.level": 1.0},
    "IST": {"rule.name": "ra-fed", "mask.name": "disjoint", "mask.options.tied": True},
    "OAP": {"rule.name": "ra-fed", "mask.name": "coverage"},
    "HeteroFL": {
        "measure.level": 0.5,
        "rule.name": "ra-fed",
        "mask.name": "static",
        "mask.options.tied": True,
        "run.rescale": 1.0,
        "run.classes": "own",
    },
    "FedRolex": {
        "rule.name": "ra-fed",
        "mask.name": "rolling",
        "mask.options.tied": True,
        "mask.options.shared": True,
        "run.rescale": 1.0,
        "run.classes": "own",
    },
}
ROWS = (
    ("FedAvg", "full"),
    *((method, level) for method in ("RA-Fed", "RAM-Fed") for level in LEVELS),
    ("RAM-Fed, 1/N", "L"),
    ("RAM-Fed, damped", "L"),
    ("RAM-Fed, adaptive", "L"),
    *(("PruneFL", level) for level in LEVELS),
    ("IST", "S"),
    *(("OAP", level) for level in LEVELS),
    ("HeteroFL", "MIX"),
    ("FedRolex", "MIX"),
)
"""Methods and the levels of their devices. A device of IST trains one of four parts."""

FEWER = (
    *(row for row in ROWS if row[0] in ("FedAvg", "RA-Fed", "RAM-Fed", "IST")),
    ("RAM-Fed, adaptive", "L"),
    ("PruneFL", "L"),
    ("OAP", "L"),
)
"""Rows of models that take long."""

PRINTED: Mapping[str, Mapping[str, tuple[float | None, ...]]] = {
    # MLP-MNIST at 0.1 and 0.15, CNN-CIFAR10 at 0.1, FastText-AGNews at 0.1 and 0.2
    "FedAvg": {"full": (94.2, 96.4, 61.9, 71.8, 82.2)},
    "RA-Fed": {
        "L": (92.8, 95.6, 49.2, 78.1, 84.9),
        "S": (90.5, 94.1, 33.4, 72.9, 84.1),
        "MIX": (91.0, 94.8, 49.6, 77.3, 84.7),
    },
    "RAM-Fed": {
        "L": (95.4, 96.6, 52.7, 86.6, 89.4),
        "S": (94.2, 94.9, 39.5, 85.3, 88.7),
        "MIX": (94.5, 95.7, 50.8, 86.5, 89.2),
    },
    "PruneFL": {
        "L": (91.5, 94.8, 48.7, 72.0, 80.4),
        "S": (86.4, 91.7, 29.5, 59.6, 72.2),
        "MIX": (90.0, 94.2, 38.6, 70.3, 80.3),
    },
    "IST": {"S": (87.0, 91.5, 24.5, 52.3, 62.8)},
    "OAP": {
        "L": (84.9, 92.2, 45.9, 44.1, 53.3),
        "S": (75.9, 84.4, 16.8, None, None),
        "MIX": (80.9, 90.4, 45.5, 39.7, 49.4),
    },
}
"""The paper's accuracies, in percent; its `IST` deals out the neurons among all devices."""

MLP = settings(
    data_name="mnist",
    data_partition="dirichlet",
    data_least=10,
    model_name="mlp-200",
    fleet_devices=10,
    run_batch_size=128,
    run_momentum=0.5,
    run_steps=5,
    run_rounds=200,
    simulation_evaluate_every=2,
)
CNN = {
    **MLP,
    "data.name": "cifar10",
    "model.name": "lenet-32",
    "run.learning_rate": 0.05,
    "run.rounds": 500,
    "simulation.evaluate_every": 10,
}
TEXT = {
    **MLP,
    "data.name": "ag_news",
    "model.name": "news",
    "run.learning_rate": 0.1,
    "run.rounds": 1500,
    "simulation.evaluate_every": 30,
}
BY_TEXT, BY_README, BY_EPOCHS = (
    "MLP-MNIST, rate 0.01 (the text)",
    "MLP-MNIST, rate 0.1 (the README)",
    "MLP-MNIST, 5 epochs a round (the code)",
)
ON_CIFAR = "CNN-CIFAR10"
QUICK = {"run.rounds": 40, "simulation.evaluate_every": 2}
QUICK_CNN = {"run.rounds": 100, "simulation.evaluate_every": 10}
QUICK_TEXT = {"run.rounds": 400, "simulation.evaluate_every": 20}


def _row(method: str, level: str) -> str:
    return f"{method}, {level}"


def _method(method: str, level: str) -> dict[str, Any]:
    found = dict(METHODS[method])
    if level in LEVELS:
        found["fleet.levels"] = LEVELS[level]
    return found


def _cells(
    part: str,
    base: Mapping[str, Any],
    columns: Mapping[float, int],
    quick: tuple[str, ...] = (),
    rows: tuple[tuple[str, str], ...] = ROWS,
    shorter: Mapping[str, Any] = QUICK,
) -> list[PaperCell]:
    """Make the cells of a part; `columns` are values of α, and their places in `PRINTED`."""
    cells = []
    for method, level in rows:
        for alpha, number in columns.items():
            known = PRINTED.get(method, {}).get(level)
            row = _row(method, level)
            first = alpha == next(iter(columns))
            cells.append(
                PaperCell(
                    place=CellPlace(part, row, f"α = {alpha:g}"),
                    settings={**base, "data.alpha": alpha, **_method(method, level)},
                    paper=None if known is None else known[number],
                    quick=shorter if first and row in quick else None,
                )
            )
    return cells


def _epochs() -> list[PaperCell]:
    """Make the cells that follow the authors' README to the letter."""
    base = {**MLP, "run.steps": 235, "run.rounds": 40, "simulation.evaluate_every": 1}
    cells = []
    for method, level, rate in (
        ("FedAvg", "full", 0.1),
        ("RA-Fed", "L", 0.1),
        ("RAM-Fed", "L", 0.1),
        ("RAM-Fed", "L", 0.5),
    ):
        cells.append(
            PaperCell(
                place=CellPlace(BY_EPOCHS, f"{_row(method, level)}, rate {rate:g}", "α = 0.1"),
                settings={
                    **base,
                    "data.alpha": 0.1,
                    "run.learning_rate": rate,
                    **_method(method, level),
                },
                paper=PRINTED[method][level][0],
            )
        )
    return cells


def _over(part: str, column: str, first: str, second: str, level: str) -> PaperClaim:
    short = part.split(",")[-1].split("(")[0].strip().replace(" ", "-").lower()
    name = f"{short}.{column[4:]}.{first}-over-{second}-{level}".replace(".", "_").lower()
    second_level = "full" if second == "FedAvg" else level
    return PaperClaim(
        name=name,
        words=f"{part}, {column}: {first} over {second} at {level}",
        better=CellPlace(part, _row(first, level), column),
        worse=CellPlace(part, _row(second, second_level), column),
    )


def _claims(part: str, columns: tuple[str, ...]) -> list[PaperClaim]:
    return [
        claim
        for column in columns
        for claim in (
            *(_over(part, column, "RAM-Fed", "RA-Fed", level) for level in LEVELS),
            _over(part, column, "RA-Fed", "PruneFL", "L"),
            _over(part, column, "RA-Fed", "OAP", "L"),
        )
    ]


TABLE_2 = PaperTable(
    name="ram2",
    title="Table 2: MLP on MNIST",
    paper=PAPER,
    about="""\
Ten devices, all in every round, data by Dir(α), batches of 128, momentum 0.5, five local steps,
200 rounds. `L` trains two of four neuron regions, `S` one, `MIX` is half of each.

Text and code differ, and more than one reading was run. *Five iterations* are five steps here
(the code makes five epochs; that is the last part, with 235 steps for every device and 40
rounds). The text has rate 0.01 for everything, the README 0.1 for RA-Fed and 0.5 for RAM-Fed.
The text's *two hidden layers* count the output layer, as in its other models: 784-200-10, as in
the code. Regions are neurons with all their weights, as in the text; the code masks single
weights of one layer, which saves a device nothing. Gradients are those of the submodel. Rounds
are not stated; 200 is the README's. RAM-Fed is the printed rule, `ū + (1/Γ) Σ (D − u)`,
undamped, with a first round in which everybody trains everything; `1/N` is what the code
computes, *damped* has a fixed damping of 0.8, and *adaptive* is the default here. The published
logs give the best accuracy of all rounds, on test images of which most are in the training
sets; here no test image is in training, and the number is the mean of the last tenth of the
rounds. HeteroFL and FedRolex are our addition; HeteroFL's number is that of half the model,
because nobody trains the other half. IST gives a device one of four parts, not one of ten.""",
    cells=(
        *_cells(
            BY_README,
            {**MLP, "run.learning_rate": 0.1},
            {0.1: 0, 0.15: 1},
            ("FedAvg, full", "RA-Fed, L", "RAM-Fed, L", "RA-Fed, S", "RAM-Fed, S"),
        ),
        *_cells(BY_TEXT, {**MLP, "run.learning_rate": 0.01}, {0.1: 0, 0.15: 1}),
        *_epochs(),
    ),
    claims=(
        *_claims(BY_TEXT, ("α = 0.1", "α = 0.15")),
        *_claims(BY_README, ("α = 0.1", "α = 0.15")),
        PaperClaim(
            name="epochs_ram-over-ra-l",
            words="5 epochs a round, the README's rates: RAM-Fed (0.5) over RA-Fed (0.1) at L",
            better=CellPlace(BY_EPOCHS, "RAM-Fed, L, rate 0.5", "α = 0.1"),
            worse=CellPlace(BY_EPOCHS, "RA-Fed, L, rate 0.1", "α = 0.1"),
        ),
    ),
    remarks="""\
The gain of RAM-Fed over RA-Fed shows where training is slow, at the text's rate, for `L` and
`S`, and is about as large for the variants of its rule. At the README's rate all methods that
reach every neuron are within about a point of FedAvg, and there is little left to gain; at that
rate and with five epochs, the README's larger rate for RAM-Fed gains nothing. Neither reading
comes near a lead of 8 points of RA-Fed over OAP: covering all regions evenly is no worse than
drawing them. The text's rate is too small for the printed accuracies in 200 rounds of five
steps. What is left to explain the printed numbers are the test images in the authors' training
sets and the faults of their code (one memory for all devices, complements of the wrong
regions); neither was run.""",
    run=run_study_cell,
    expected_s=15.0,
    folders=("mnist",),
)

TABLE_2_CIFAR = PaperTable(
    name="ram2-cifar",
    title="Table 2: CNN on CIFAR-10",
    paper=PAPER,
    about="""\
As above, with the LeNet of the code (62,006 weights), rate 0.05 and 500 rounds. The code has no
program for this model.""",
    cells=tuple(
        _cells(
            ON_CIFAR, CNN, {0.1: 2}, ("FedAvg, full", "RA-Fed, L", "RAM-Fed, L"), FEWER, QUICK_CNN
        )
    ),
    claims=tuple(_claims(ON_CIFAR, ("α = 0.1",))),
    run=run_study_cell,
    expected_s=130.0,
    folders=("cifar10",),
)

TABLE_3 = PaperTable(
    name="ram3",
    title="Table 3: text on AG News",
    paper=PAPER,
    about="""\
**Not comparable with the paper's values.** The data set here is a quarter of the paper's
training rows, with a vocabulary of 5,000 words and vectors of 64 numbers, where the paper has
120,000 rows, and its code 98,635 words and 128 numbers. Rate 0.1, five steps, 1,500 rounds.""",
    cells=tuple(
        _cells(
            "FastText-AGNews",
            TEXT,
            {0.1: 3},
            ("FedAvg, full", "RA-Fed, L", "RAM-Fed, L"),
            FEWER,
            QUICK_TEXT,
        )
    ),
    claims=tuple(_claims("FastText-AGNews", ("α = 0.1",))),
    run=run_study_cell,
    expected_s=65.0,
    folders=("ag_news",),
)


def _figure(
    base: Mapping[str, Any], rule: Mapping[str, Any], combinations: Mapping[str, Mapping[str, Any]]
) -> tuple[PaperCell, ...]:
    """Make a cell for each combination of Γ*, S* and τ, at `S` and α = 0.15."""
    return tuple(
        PaperCell(
            place=CellPlace("", row, "α = 0.15"),
            settings={
                **base,
                **rule,
                "data.alpha": 0.15,
                "fleet.levels": LEVELS["S"],
                "mask.name": "scheduled",
                **{f"mask.options.{name}": value for name, value in options.items()},
            },
            quick=QUICK,
        )
        for row, options in combinations.items()
    )


def _draw(table: PaperTable, done: Outcomes, path: Path) -> None:
    from benchmarks.studies.papers.plots import save_curves

    save_curves(table, done, path)


def _better(name: str, first: str, second: str) -> PaperClaim:
    return PaperClaim(
        name=name,
        words=f"{first} over {second}",
        better=CellPlace("", first, "α = 0.15"),
        worse=CellPlace("", second, "α = 0.15"),
    )


FIGURE_3 = PaperTable(
    name="ram-fig3",
    title="Figure 3: Γ* and S* of RA-Fed",
    paper=PAPER,
    about="""\
MLP-MNIST at `S` and α = 0.15, rate 0.1, otherwise as table 2, with regions dealt out as the
figure says (`scheduled` masks). Regions move on by one every round. The figure has no numbers.""",
    cells=_figure(
        {**MLP, "run.learning_rate": 0.1},
        {"rule.name": "ra-fed"},
        {
            "Γ* = 1, S* = 4": {"coverage": 1, "regions": 4},
            "Γ* = 2, S* = 4": {"coverage": 2, "regions": 4},
            "Γ* = 10, S* = 1": {"coverage": 10, "regions": 1},
        },
    ),
    claims=(
        _better("gamma-2-over-1", "Γ* = 2, S* = 4", "Γ* = 1, S* = 4"),
        _better("s-4-over-1", "Γ* = 1, S* = 4", "Γ* = 10, S* = 1"),
    ),
    run=run_study_cell,
    draw=_draw,
    remarks="""\
A region that nobody trains in three of four rounds costs several points, as the paper says.
Twice the coverage of the rarest region is worth little.""",
    expected_s=10.0,
    folders=("mnist",),
)
FIGURE_4 = PaperTable(
    name="ram-fig4",
    title="Figure 4: Γ* and τ of RAM-Fed",
    paper=PAPER,
    about="""\
As figure 3, with the printed RAM-Fed. With τ = 4 a device has trained every region after four
rounds; with τ = 200 it keeps its region all run long, after a first round of everything.""",
    cells=_figure(
        {**MLP, "run.learning_rate": 0.1},
        RAM_FED,
        {
            f"Γ* = {coverage}, τ = {told}": {"coverage": coverage, "staleness": staleness}
            for told, staleness in ((200, "none"), (4, 4))
            for coverage in (1, 2)
        },
    ),
    claims=(
        *(
            _better(f"tau-4-over-200-gamma-{each}", f"Γ* = {each}, τ = 4", f"Γ* = {each}, τ = 200")
            for each in (1, 2)
        ),
        *(
            _better(f"gamma-2-over-1-tau-{each}", f"Γ* = 2, τ = {each}", f"Γ* = 1, τ = {each}")
            for each in (4, 200)
        ),
    ),
    run=run_study_cell,
    draw=_draw,
    remarks="""\
Devices that never leave their region push the others for ever with what they did in the first
round: this is where an undamped memory fails, and more coverage does not mend it.""",
    expected_s=10.0,
    folders=("mnist",),
)
TABLES = (TABLE_2, TABLE_2_CIFAR, TABLE_3, FIGURE_3, FIGURE_4)
