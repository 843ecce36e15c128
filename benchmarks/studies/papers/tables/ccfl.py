"""CCFL (Zhang et al.): tables 1 to 4, figures 5, 7 and 10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.study import Study
from benchmarks.studies.papers.cell import (
    CellPlace,
    Outcomes,
    PaperCell,
    PaperClaim,
    PaperTable,
    Ran,
)
from benchmarks.studies.papers.running import run_study_cell, study_of
from benchmarks.studies.papers.tables.shared import settings

PAPER = "CCFL"
BUDGETS = [1.0, 0.5, 0.25, 0.125]
"""Shares of rounds that devices can afford, in equal parts: β = 4."""
PAIRED = [1.0] * 40 + [0.5] * 20 + [0.25] * 20 + [0.125] * 20
"""Budgets of 100 devices in the order of their pairs of classes (`high_skew`)."""
APART = [1.0] * 10 + (BUDGETS * 23)[:90]
"""Budgets of 100 devices, the first ten of which have a pair of classes alone."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"rule.name": "fedavg"},
    "Strategy 1": {"rule.name": "strategy-1"},
    "Strategy 2": {"rule.name": "strategy-2"},
    "CCFL": {
        "rule.name": "ccfl-2",
        "rule.options.absent": "zero",
        "rule.options.horizon": "none",
    },
}
SCHEDULES = ("ad-hoc", "round-robin")
FMNIST = settings(
    data_name="fashion_mnist",
    data_partition="labels",
    data_classes=2,
    model_name="mlp",
    fleet_devices=100,
    run_batch_size=10,
    run_learning_rate=0.01,
    run_steps=200,
    run_rounds=200,
    simulation_evaluate_every=2,
)
CIFAR = settings(
    data_name="cifar10",
    model_name="lenet-32",
    fleet_devices=8,
    run_batch_size=32,
    run_learning_rate=0.01,
    run_steps=60,
    run_rounds=150,
    simulation_evaluate_every=3,
)
QUICK = {"run.rounds": 30, "run.steps": 100}
Printed = Mapping[str, Sequence[tuple[float, float]]]
RANDOM: Printed = {
    "FedAvg": [(78.76, 2.62), (80.52, 1.66)],
    "Strategy 1": [(60.12, 12.51), (74.61, 4.79)],
    "Strategy 2": [(66.58, 3.66), (73.63, 3.86)],
    "CCFL": [(75.78, 2.30), (78.40, 2.50)],
}
SKEWED: Printed = {
    "FedAvg": [(67.78, 7.35), (70.51, 4.68)],
    "Strategy 1": [(55.30, 9.11), (58.59, 8.56)],
    "Strategy 2": [(52.40, 8.29), (60.24, 6.69)],
    "CCFL": [(58.47, 9.86), (66.11, 6.32)],
}
MODERATE: Printed = {
    "FedAvg": [(74.52, 3.63), (80.14, 2.07)],
    "Strategy 1": [(65.64, 5.77), (74.92, 4.40)],
    "Strategy 2": [(59.16, 5.88), (71.26, 4.03)],
    "CCFL": [(70.14, 4.05), (78.40, 2.17)],
}
"""Accuracies and their ± in tables 2, 3 and 4, with 10 and 20 % of the devices a round."""


def _with(method: str, schedule: str, budgets: Sequence[float] = BUDGETS) -> dict[str, Any]:
    found = dict(METHODS[method])
    if method != "FedAvg":
        found |= {"fleet.participation": list(budgets), "fleet.schedule": schedule}
    return found


def _cross_device(
    printed: Printed,
    more: Mapping[str, Any],
    schedules: Sequence[str],
    quick: bool = False,
    budgets: Sequence[float] = BUDGETS,
) -> tuple[PaperCell, ...]:
    cells = []
    for number, drawn in enumerate((10, 20)):
        for schedule in schedules:
            for method in METHODS:
                if method == "FedAvg" and schedule != schedules[0]:
                    continue
                mean, spread = printed[method][number]
                told = schedule == "ad-hoc"
                row = method if told else f"{method}, round-robin"
                cells.append(
                    PaperCell(
                        place=CellPlace("", row, f"{drawn} %"),
                        settings={
                            **FMNIST,
                            **more,
                            **_with(method, schedule, budgets),
                            "round.participants": drawn,
                        },
                        paper=mean if told else None,
                        spread=spread if told else None,
                        quick=QUICK if quick and told and drawn == 10 else None,
                    )
                )
    return tuple(cells)


def _claims(
    columns: Sequence[str], schedules: Sequence[str], part: str = ""
) -> tuple[PaperClaim, ...]:
    found = []
    for column in columns:
        for schedule in schedules:
            more = "" if schedule == "ad-hoc" else ", round-robin"
            short = f"{column.split(',')[0].split(' ')[0]}-{schedule}".lower()
            found += [
                PaperClaim(
                    name=f"{short}.over-{other.replace(' ', '-').lower()}",
                    words=f"{column}{more}: CCFL over {other}",
                    better=CellPlace(part, f"CCFL{more}", column),
                    worse=CellPlace(part, f"{other}{more}", column),
                )
                for other in ("Strategy 1", "Strategy 2")
            ]
            found.append(
                PaperClaim(
                    name=f"{short}.near-fedavg",
                    words=f"{column}{more}: CCFL at most 3 points below FedAvg",
                    better=CellPlace(part, f"CCFL{more}", column),
                    worse=CellPlace(part, "FedAvg", column),
                    within=3.0,
                )
            )
    return tuple(found)


ABOUT = """\
Fashion-MNIST, 100 devices with two classes each, 10 or 20 of them drawn for every round, 200
local steps. Devices can afford 1, ½, ¼ or ⅛ of the rounds (β = 4, read as `p_i = (½)^⌊β·i/N⌋`;
the printed exponent gives probabilities above 1). FedAvg has no such limits. The paper's 400
rounds are 200 here. It states neither rate, batch nor widths: rate 0.01 (that of its CIFAR-10
runs), batches of 10, no momentum, 784-200-200-10. CCFL is the printed rule: the sum is divided
by all devices drawn, a device that never trained counts as zero, and no movement is too old
(`absent = "zero"`, `horizon = "none"`). What the paper's ± is over is not stated; here it is
over three seeds."""

TABLE_2 = PaperTable(
    name="ccfl2",
    title="Table 2: classes spread at random over the budgets",
    paper=PAPER,
    about=ABOUT,
    cells=_cross_device(RANDOM, {}, SCHEDULES, quick=True),
    claims=_claims(("10 %", "20 %"), SCHEDULES),
    remarks="""\
The order of the paper shows: CCFL before both strategies, near FedAvg, which trains twice as
often. Strategy 1 is better here than printed and Strategy 2 worse. Curves of all methods jump
by ten points from round to round, so *best* is far above the mean of the last tenth, and single
seeds say little.""",
    run=run_study_cell,
    expected_s=110.0,
    folders=("fashion_mnist",),
)
TABLE_3 = PaperTable(
    name="ccfl3",
    title="Table 3: devices with the same classes have the same budget",
    paper=PAPER,
    about="""\
As table 2, but classes go in five pairs, each on 20 devices, and all devices of a pair have the
same budget: two pairs 1, and one each ½, ¼ and ⅛.""",
    cells=_cross_device(SKEWED, {"data.partition": "pairs"}, ("ad-hoc",), budgets=PAIRED),
    claims=_claims(("10 %", "20 %"), ("ad-hoc",)),
    run=run_study_cell,
    expected_s=45.0,
    folders=("fashion_mnist",),
)
TABLE_4 = PaperTable(
    name="ccfl4",
    title="Table 4: a tenth of the devices as in table 3",
    paper=PAPER,
    about="""\
As table 2, but a tenth of the devices, which can afford all rounds, have two classes that
nobody else has.""",
    cells=_cross_device(MODERATE, {"data.partition": "pair-apart"}, ("ad-hoc",), budgets=APART),
    claims=_claims(("10 %", "20 %"), ("ad-hoc",)),
    run=run_study_cell,
    expected_s=45.0,
    folders=("fashion_mnist",),
)

CROSS_SILO: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "totally non-IID": {
        "FedAvg": (56.82, 56.82),
        "Strategy 1": (39.45, 30.79),
        "Strategy 2": (48.75, 51.45),
        "CCFL": (55.94, 56.28),
    },
    "IID": {
        "FedAvg": (72.88, 72.88),
        "Strategy 1": (71.95, 69.46),
        "Strategy 2": (66.35, 67.35),
        "CCFL": (72.53, 72.43),
    },
}
"""Table 1, ad-hoc and round-robin."""


def _cross_silo() -> tuple[PaperCell, ...]:
    cells = []
    for column, printed in CROSS_SILO.items():
        iid = column == "IID"
        data = {"data.partition": "iid"} if iid else {"data.partition": "shards", "data.shards": 1}
        for number, schedule in enumerate(SCHEDULES):
            for method in METHODS:
                if method == "FedAvg" and number:
                    continue
                row = method if schedule == "ad-hoc" else f"{method}, round-robin"
                cells.append(
                    PaperCell(
                        place=CellPlace("", row, column),
                        settings={**CIFAR, **data, **_with(method, schedule)},
                        paper=printed[method][number],
                    )
                )
    return tuple(cells)


TABLE_1 = PaperTable(
    name="ccfl1",
    title="Table 1: eight devices on CIFAR-10",
    paper=PAPER,
    about="""\
Only the ordering can be compared: 150 rounds of 60 steps of 32 images instead of 400 rounds of
three epochs. LeNet, rate 0.01, two devices for each of four budgets. *Totally non-IID* sorts
the images by class and gives every device one eighth. The columns between (80 and 90 % non-IID)
were left out.""",
    cells=_cross_silo(),
    claims=_claims(tuple(CROSS_SILO), SCHEDULES),
    run=run_study_cell,
    expected_s=85.0,
    folders=("cifar10",),
)

WINDOWS = (2, 4, 8, 16)
ROUNDS = 160


def _efficiency() -> tuple[PaperCell, ...]:
    base = {**FMNIST, "round.participants": 20, "simulation.evaluate_every": 1}
    cells = []
    for window in WINDOWS:
        rounds = ROUNDS // window
        skipping = {**base, "run.rounds": ROUNDS, "fleet.participation": [1 / window]}
        rows = {
            "CCFL (r = 1)": {
                **skipping,
                **METHODS["CCFL"],
                "fleet.schedule": "ad-hoc",
                "simulation.evaluate_every": 2,
            },
            "CCFL, synchronised": {
                **skipping,
                **METHODS["CCFL"],
                "fleet.schedule": "round-robin",
                "fleet.phase": "common",
                "simulation.evaluate_every": 2,
            },
            "FedAvg": {**base, **METHODS["FedAvg"], "run.rounds": rounds},
        }
        cells += [
            PaperCell(place=CellPlace("", row, f"W = {window}"), settings=each)
            for row, each in rows.items()
        ]
    return tuple(cells)


def _draw_windows(table: PaperTable, done: Outcomes, path: Path) -> None:
    from benchmarks.studies.papers.plots import save_by_value

    save_by_value(table, done, path)


FIGURE_5 = PaperTable(
    name="ccfl-fig5",
    title="Figures 5 and 10: everybody skips (r = 1), equal computation",
    paper=PAPER,
    about=f"""\
20 of 100 devices a round, each training with probability 1/W; {ROUNDS} rounds of CCFL beside
{ROUNDS}/W rounds of FedAvg, so that all train as often. *Synchronised*: all devices train in
the same rounds (figure 10). The figures have no numbers.""",
    cells=_efficiency(),
    claims=tuple(
        claim
        for window in WINDOWS
        for claim in (
            PaperClaim(
                name=f"w{window}.over-fedavg",
                words=f"W = {window}: CCFL (r = 1) over FedAvg of equal computation"
                + (" (the paper: not for large W)" if window == 16 else ""),
                better=CellPlace("", "CCFL (r = 1)", f"W = {window}"),
                worse=CellPlace("", "FedAvg", f"W = {window}"),
            ),
            PaperClaim(
                name=f"w{window}.over-synchronised",
                words=f"W = {window}: CCFL (r = 1) over CCFL, synchronised",
                better=CellPlace("", "CCFL (r = 1)", f"W = {window}"),
                worse=CellPlace("", "CCFL, synchronised", f"W = {window}"),
            ),
        )
    ),
    run=run_study_cell,
    draw=_draw_windows,
    expected_s=40.0,
    folders=("fashion_mnist",),
)


def _watch_participation(cell: PaperCell, seed: int, _data: Path | None) -> Ran:
    """Simulate the rounds without training, and note who trains in which."""
    study = Study(study_of(cell, seed))
    names = [name for name, _ in study.population.devices()]
    trained: dict[str, list[str]] = {name: [] for name in names}
    for each in study.run():
        took_part = {device.device for device in each.report.devices if device.level is not None}
        for name in names:
            trained[name].append("1" if name in took_part else "0")
    rows = ["".join(trained[name]) for name in names]
    share = sum(row.count("1") for row in rows) / sum(map(len, rows))
    return Ran(values={"trained": 100 * share}, more={"participation": rows})


def _show_participation(table: PaperTable, done: Outcomes) -> str:
    from benchmarks.studies.papers.page import markdown, mean_and_spread

    columns = list(dict.fromkeys(cell.place.column for cell in table.cells))
    rows = [
        [
            row,
            *(
                mean_and_spread(done.get(CellPlace("", row, each), ()), "trained")
                for each in columns
            ),
        ]
        for row in dict.fromkeys(cell.place.row for cell in table.cells)
    ]
    return markdown(["% of device-rounds that train", *columns], rows)


def _draw_participation(table: PaperTable, done: Outcomes, path: Path) -> None:
    from benchmarks.studies.papers.plots import save_grids

    del table
    save_grids(
        {", ".join(place[1:]): runs[0].more["participation"] for place, runs in done.items()},
        path,
        x="round",
        y="device",
    )


FIGURE_7 = PaperTable(
    name="ccfl-fig7",
    title="Figure 7: who takes part",
    paper=PAPER,
    about="""\
The rounds of table 2, simulated without training. Devices are in the order of their budgets:
every fourth has 1, ½, ¼ and ⅛. A dark point is a device that trains in that round.""",
    cells=tuple(
        PaperCell(
            place=CellPlace("", row, f"{drawn} %"),
            settings={
                **FMNIST,
                **_with(method, schedule),
                "round.participants": drawn,
                "simulation.train": False,
            },
            quick={},
        )
        for drawn in (10, 20)
        for row, method, schedule in (
            ("FedAvg", "FedAvg", "ad-hoc"),
            ("CCFL", "CCFL", "ad-hoc"),
            ("CCFL, round-robin", "CCFL", "round-robin"),
        )
    ),
    run=_watch_participation,
    show=_show_participation,
    draw=_draw_participation,
    seeds=1,
    expected_s=5.0,
)

TABLES = (TABLE_1, TABLE_2, TABLE_3, TABLE_4, FIGURE_5, FIGURE_7)
