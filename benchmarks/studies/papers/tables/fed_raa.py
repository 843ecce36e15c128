"""Fed-RAA (Zhang et al., 2024): tables 2, 3 and 5, figures 5 and 6, staleness functions.

Seconds of the paper are those of its server; here they are simulated, and only ratios compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.studies.papers.cell import (
    CellOutcome,
    CellPlace,
    Outcomes,
    PaperCell,
    PaperClaim,
    PaperTable,
    Ran,
)
from benchmarks.studies.papers.running import run_study_cell
from benchmarks.studies.papers.tables.shared import RAM_FED, settings

PAPER = "Fed-RAA"
TARGET = 93.0
"""Accuracy, in percent, that the paper measures the time to."""
RATIOS: Mapping[int, list[float]] = {
    2: [0.4, 0.6],
    3: [0.2, 0.3, 0.5],
    4: [0.1, 0.2, 0.3, 0.4],
    5: [0.05, 0.1, 0.2, 0.3, 0.35],
}
"""Sizes of M fragments (the paper's table 4)."""
CAPABILITIES = [1.0, 3.0]
"""Speeds of devices, in turn: half have capability 1, half 3."""
BASE = settings(
    data_name="mnist",
    data_partition="iid",
    model_name="mlp-200",
    fleet_devices=10,
    fleet_speeds=CAPABILITIES,
    run_batch_size=128,
    run_learning_rate=0.005,
    run_momentum=0.5,
    run_steps=235,
    run_rounds=60,
    simulation_evaluate_every=1,
)
UPDATES = 2000
RAA: Mapping[str, Any] = {
    "rule.name": "fed-raa",
    "mask.name": "gre-raa",
    "mask.options.delay_limit_s": 0.1,
    "model.ratios": RATIOS[4],
    "run.updates": UPDATES,
    "simulation.evaluate_every": 2,
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"rule.name": "fedavg"},
    "FedSync (asynchronous, whole models)": {
        "rule.name": "fedasync",
        "run.updates": 600,
    },
    "FedProx": {"rule.name": "fedavg", "run.proximal": 0.01},
    "FedPrun": {
        "rule.name": "ra-fed",
        "mask.name": "prunefl",
        "mask.options.level": 1.0,
        "fleet.levels": [0.25, 0.75],
    },
    "RAM-Fed": {**RAM_FED, "mask.name": "random", "fleet.levels": [0.25, 0.75]},
    "Fed-RAA": RAA,
}
PRINTED: Mapping[str, tuple[float, float]] = {
    "FedAvg": (406.35, 96.35),
    "FedSync (asynchronous, whole models)": (242.46, 96.50),
    "FedProx": (866.40, 96.40),
    "FedPrun": (776.82, 94.13),
    "RAM-Fed": (808.96, 96.55),
    "Fed-RAA": (91.06, 93.86),
}
"""Seconds to 93 % (table 2), and the final accuracy (table 5)."""
ABLATION: Mapping[str, tuple[float, float]] = {
    "Gre-RAA": (69.46, 93.95),
    "random": (78.54, 93.76),
    "least trained (MP-RAA)": (80.73, 93.88),
    "synchronous": (162.71, 93.94),
}
"""Seconds and accuracy (table 3)."""
QUICK = {"run.steps": 100, "run.learning_rate": 0.05}
"""A larger rate, so that few rounds reach the target."""

SHORT = {"FedAvg": {"run.rounds": 12}, "Fed-RAA": {"run.updates": 300}}


def _settings(more: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a cell; an asynchronous one has updates instead of rounds."""
    left_out = "run.rounds"
    if "run.rounds" in more or "run.updates" not in more:
        left_out = "run.updates"
    return {name: value for name, value in {**BASE, **more}.items() if name != left_out}


def run_timed(cell: PaperCell, seed: int, data: Path | None) -> Ran:
    """Run a cell, and note the simulated seconds until it first reaches the target."""
    return run_study_cell(cell, seed, data, target=TARGET)


def _mean(runs: Sequence[CellOutcome], name: str) -> float | None:
    known = [each.values[name] for each in runs if name in each.values]
    return fmean(known) if known and len(known) == len(runs) else None


def show_times(table: PaperTable, done: Outcomes) -> str:
    """Return a table of times to the target, as multiples of the first row's, and accuracies."""
    from benchmarks.studies.papers.page import DASH, markdown, mean_and_spread

    printed: Mapping[str, tuple[float, float]] = table.more.get("printed", {})
    first = table.cells[0].place
    base = _mean(done.get(first, ()), "time_s")
    rows = []
    for cell in table.cells:
        runs = done.get(cell.place)
        if not runs:
            continue
        row = cell.place.row
        reached = _mean(runs, "time_s")
        ratio = DASH if not base or reached is None else f"{reached / base:.2f}"
        count = sum("time_s" in each.values for each in runs)
        time_s = mean_and_spread(runs, "time_s") if count else "never"
        if 0 < count < len(runs):
            time_s += f" ({count} of {len(runs)})"
        paper = printed.get(row)
        told = [DASH, DASH]
        if paper is not None:
            told = [f"{paper[0] / printed[first.row][0]:.2f}", f"{paper[1]:g}"]
        shares = [mean_and_spread(runs, "last"), mean_and_spread(runs, "best")]
        rows.append([row, time_s, ratio, told[0], *shares, told[1]])
    heads = ["", f"simulated s to {TARGET:g} %", f"over {first.row}", "paper"]
    return markdown([*heads, "accuracy, last tenth, %", "best", "paper"], rows)


def _curves(table: PaperTable, done: Outcomes, path: Path) -> None:
    from benchmarks.studies.papers.plots import save_curves

    save_curves(
        table, done, path, against=1, label="simulated seconds", panel=lambda _: table.title
    )


def _faster(first: str, second: str, words: str = "") -> PaperClaim:
    names = (re.sub(r"[^a-z0-9]+", "-", each.lower()).strip("-") for each in (first, second))
    return PaperClaim(
        name="-faster-than-".join(names),
        words=words or f"{first} reaches {TARGET:g} % before {second}",
        better=CellPlace("", first, "MNIST"),
        worse=CellPlace("", second, "MNIST"),
        measure="time_s",
        ratio=True,
        paper=_paper_ratio(first, second),
    )


def _paper_ratio(first: str, second: str) -> float | None:
    for printed in (PRINTED, ABLATION):
        if first in printed and second in printed:
            return printed[first][0] / printed[second][0]
    return None


ABOUT = """\
Ten devices with equal shares of MNIST (the partition is not stated), a perceptron with 200
hidden neurons, batches of 128, momentum 0.5, five epochs (235 steps) of local training at rate
0.005. Times are simulated: a Raspberry Pi 5's for capability 1, and three times as fast for 3,
half of the devices each (the paper's capabilities are not stated; these are its figure 5's).
Neither are α, the staleness function, the delay limit nor the number of fragments: FedAsync's
0.6 and `(x + 1)^−½`, a limit that lets a slow device train a fragment of 20 % and a fast one
all, and four fragments of 10, 20, 30 and 40 %. The paper's times contradict each other by a
factor of three between its tables; ratios within a table do not."""

TABLE_2 = PaperTable(
    name="fedraa2",
    title="Tables 2 and 5: time to 93 %, and accuracy",
    paper=PAPER,
    about=ABOUT
    + """

*FedPrun* is PruneFL with a quarter of the neurons on slow devices and three quarters on fast
ones, as for RAM-Fed; FedProx's strength is 0.01. SplitFed is another kind of system and left
out.""",
    cells=tuple(
        PaperCell(
            place=CellPlace("", method, "MNIST"),
            settings=_settings(more),
            paper=PRINTED[method][1],
            quick={**QUICK, **SHORT[method]} if method in SHORT else None,
        )
        for method, more in METHODS.items()
    ),
    claims=tuple(_faster("Fed-RAA", other) for other in METHODS if other != "Fed-RAA"),
    run=run_timed,
    show=show_times,
    draw=_curves,
    expected_s=60.0,
    folders=("mnist",),
    remarks="""\
Asynchronous training of whole models is as much faster than FedAvg as the paper says.
Synchronous submodels are faster still here: a slow device that trains a quarter of the neurons
no longer holds up a round, while the paper's are slower than FedAvg, for reasons that it does
not give. Fed-RAA is faster than FedAvg, by less than the paper says and by less than whole
models: at the mixing rate of FedAsync, an update that is ten updates old moves its fragment by
a fifth. The largest α and the delay limit decide this, and the paper states neither.""",
    more={"printed": PRINTED},
)

UNLIMITED = {name: value for name, value in RAA.items() if name != "mask.options.delay_limit_s"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "Gre-RAA": RAA,
    "random": {**UNLIMITED, "mask.options.assign": "random"},
    "least trained (MP-RAA)": {**UNLIMITED, "mask.options.assign": "least-trained"},
    "synchronous": {
        **RAA,
        "rule.name": "ra-fed",
        "run.rounds": UPDATES // 10,
        "simulation.evaluate_every": 2,
    },
}
TABLE_3 = PaperTable(
    name="fedraa3",
    title="Table 3: ways to assign fragments",
    paper=PAPER,
    about="""\
As above. *Random* assigns any fragment, *least trained* the one trained least, whatever the
delay; *synchronous* is Gre-RAA in rounds, averaged over the devices that trained a fragment.
All have 2,000 movements.""",
    cells=tuple(
        PaperCell(
            place=CellPlace("", variant, "MNIST"),
            settings=_settings(more),
            paper=ABLATION[variant][1],
        )
        for variant, more in VARIANTS.items()
    ),
    claims=tuple(_faster("Gre-RAA", other) for other in VARIANTS if other != "Gre-RAA"),
    run=run_timed,
    show=show_times,
    draw=_curves,
    expected_s=60.0,
    folders=("mnist",),
    remarks="""\
Which fragment a device gets makes hardly a difference, in the paper and here. Rounds do: the
same fragments averaged in rounds need fewer simulated seconds, where the paper says twice as
many, because a mean over a round moves the model by all of a movement and an arrival by a fifth
of it.""",
    more={"printed": ABLATION},
)


def _slow_share(share: int) -> list[float]:
    """Return the speeds of ten devices, so many of them slow."""
    return [1.0] * share + [3.0] * (10 - share)


SWEEPS = PaperTable(
    name="fedraa-sweeps",
    title="Figures 5 and 6, and staleness: β, M and s(·)",
    paper=PAPER,
    about="""\
One thing changed at a time. β is the share of devices of capability 1, M the number of
fragments (sizes of the paper's table 4), and s the staleness function: `hinge` with a = 0.5, b
= 4.""",
    cells=(
        *(
            PaperCell(
                place=CellPlace("", f"β = {share / 10:g}", "MNIST"),
                settings=_settings({**RAA, "fleet.speeds": _slow_share(share)}),
            )
            for share in (1, 5, 9)
        ),
        *(
            PaperCell(
                place=CellPlace("", f"M = {count}", "MNIST"),
                settings=_settings({**RAA, "model.ratios": ratios}),
            )
            for count, ratios in RATIOS.items()
            if count != 4
        ),
        *(
            PaperCell(
                place=CellPlace("", f"s {kind}", "MNIST"),
                settings=_settings({**RAA, "rule.options.staleness": kind}),
            )
            for kind in ("constant", "hinge")
        ),
    ),
    claims=(
        _faster("β = 0.1", "β = 0.9", "Fewer slow devices, 10 against 90 %"),
        _faster("M = 2", "M = 5", "Fewer fragments, two against five"),
    ),
    run=run_timed,
    show=show_times,
    draw=_curves,
    expected_s=60.0,
    folders=("mnist",),
)
TABLES = (TABLE_2, TABLE_3, SWEEPS)
