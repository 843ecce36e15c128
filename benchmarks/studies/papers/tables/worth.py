"""Is it worth it? One week of a fleet, trained in ten ways, as a practitioner would ask.

Not a table of a paper. Devices have batteries, chargers at night, metered hours and a deadline. A
run ends with the week, or after `ROUNDS` rounds. Accuracy is that of the level to deploy: chosen on
validation data, measured on the test.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.fleet.config import make_study
from benchmarks.fleet.study import Study
from benchmarks.studies.papers.cell import (
    CellOutcome,
    CellPlace,
    Outcomes,
    PaperCell,
    PaperTable,
    Ran,
)
from benchmarks.studies.papers.page import DASH, markdown, mean_and_spread
from benchmarks.studies.papers.running import rounded
from coordinator.errors import CoordinatorError
from coordinator.simulate.fleet.body import Body, Nature
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from coordinator.simulate.fleet.simulation import FleetRound
from coordinator.task.levels import best_level
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.gates import Limits
from edge_sdk.machine.board import find_board

WEEK_S = 7 * 86_400.0
ROUNDS = 400
UPDATES = 2400
"""Updates of an asynchronous run: as many as the rounds have trainings."""
LOW_PERCENT = 20.0
NOBODY = "nobody trains"
PHONES, MIXED = "30 phones, UCI HAR", "100 mixed devices, CIFAR-10"

UNGUARDED = Limits(
    battery_floor=0.0,
    energy_wh_per_day=1e6,
    heat_margin_c=0.0,
    memory_share=1.0,
    memory_pressure=100.0,
    allow_metered=True,
)
"""Limits of an owner who has none."""
POLICIES: Mapping[str, Policy] = {
    "none": Policy(levels=(1.0,), limits=UNGUARDED),
    "whole": Policy(levels=(1.0,)),
    "small": Policy(level=0.25, levels=(0.25,)),
    "usual": Policy(),
}
"""Owners' limits: none at all; the usual ones with the whole model or nothing; a quarter of the
model; the usual ones with a level that fits."""

TRAINED = {"none": (1.0,), "whole": (1.0,), "small": (0.25,)}
"""Levels that can be deployed where not all of them are trained."""

_OWN = {"run.widths": "own", "run.grow": 0.0}
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "FedAvg on all": ("none", {"rule.name": "fedavg", **_OWN}),
    "FedAvg on the willing": ("whole", {"rule.name": "fedavg", **_OWN}),
    "everybody small": ("small", {"rule.name": "ra-fed", "mask.name": "static", **_OWN}),
    "HeteroFL": ("usual", {"run.recipe": "heterofl"}),
    "FedRolex": ("usual", {"run.recipe": "fedrolex"}),
    "ra-fed": ("usual", {"rule.name": "ra-fed", "mask.name": "coverage", **_OWN}),
    "ram-fed": ("usual", {"rule.name": "ram-fed", "mask.name": "coverage", **_OWN}),
    "ccfl-2": ("usual", {"rule.name": "ccfl-2", "mask.name": "coverage", **_OWN}),
    "fed-raa": ("usual", {"rule.name": "fed-raa", "mask.name": "gre-raa", **_OWN}),
    "defaults": ("usual", {}),
}
"""Per way, the limits of the owners and the settings of the run; `defaults` has those of a new run:
devices train several widths of a model that grows."""

BASE: Mapping[str, Any] = {
    "rates": [0.02, 0.06],
    "run.momentum": 0.5,
    "run.steps": 10,
    "run.batch_size": 32,
    "run.rounds": ROUNDS,
    "round.min_devices": 1,
    "round.min_participants": 1,
    "round.bid_s": 600.0,
    "round.train_deadline_s": 1500.0,
    "simulation.evaluate_every": ROUNDS,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    PHONES: {
        **BASE,
        "data.name": "uci_har",
        "data.partition": "key",
        "model.name": "sensor-cnn",
        "round.participants": 6,
        "fleet.work": 10_000.0,
        "fleet.counts": {"redmi_7a": 8, "redmi_note_8": 8, "pixel_4": 7, "galaxy_s23": 7},
    },
    MIXED: {
        **BASE,
        "data.name": "cifar10",
        "data.samples": 10_000,
        "data.partition": "dirichlet",
        "data.alpha": 0.3,
        "data.check_samples": 2000,
        "model.name": "cnn",
        "round.participants": 10,
        "fleet.work": 1400.0,
        "fleet.counts": {
            "redmi_7a": 20,
            "redmi_note_8": 20,
            "pixel_4": 15,
            "galaxy_s23": 15,
            "raspberry_pi_4": 15,
            "jetson_nano": 10,
            "jetson_orin_nano": 5,
        },
    },
}
OWN_KEYS = ("rates", "fleet.work", "fleet.counts", "fleet.policy")
"""Settings that are not a study's: the rates to choose from, and what makes the fleet."""
NOT_ASYNCHRONOUS = ("run.rounds", "run.grow", "round.participants", "round.min_participants")
QUICK = {"rates": [0.06], "run.rounds": 40, "simulation.evaluate_every": 40}
QUICK_WAYS = ("FedAvg on all", "everybody small", "ra-fed", "defaults")


def week_population(settings: Mapping[str, Any]) -> DevicePopulation:
    """Make the fleet of a cell, from nine in the morning on.

    Phones charge at night, are on Wi-Fi at home and a little busy during the day.
    """
    kinds = []
    for name, count in settings["fleet.counts"].items():
        board, policy = find_board(name), POLICIES[settings["fleet.policy"]]
        if board.battery is None:
            kinds.append(DeviceKind(board=board, count=count, policy=policy))
        else:
            kinds.append(_phone(name, count, policy))
    return DevicePopulation(
        kinds=tuple(kinds), starts=9 * 60, work=settings["fleet.work"], price_per_gb=4.0
    )


def _phone(name: str, count: int, policy: Policy) -> DeviceKind:
    return DeviceKind(
        board=find_board(name),
        count=count,
        battery_percent=(40.0, 95.0),
        charging_hours=(23 * 60, 6 * 60 + 30),
        spread_minutes=90,
        background_load=(0.01, 0.05),
        network="mobile",
        wifi_hours=(18 * 60, 8 * 60),
        drop_out=0.02,
        policy=policy,
    )


def run_week(cell: PaperCell, seed: int, data: Path | None) -> Ran:
    """Run one way at each of its rates and return the one that is best on validation data.

    Raises `DatasetError`.
    """
    if cell.place.row == NOBODY:
        lowest = idle_week(week_population(cell.settings), seed)
        return Ran(values=_batteries(lowest))
    ran = [_run_rate(cell, rate, seed, data) for rate in cell.settings["rates"]]
    return max(ran, key=lambda each: each.values.get("validation", 0.0))


def _run_rate(cell: PaperCell, rate: float, seed: int, data: Path | None) -> Ran:
    """Run for a week, or to the last round."""
    settings = {key: value for key, value in cell.settings.items() if key not in OWN_KEYS}
    settings |= {"run.learning_rate": rate, "run.seed": seed}
    config = make_study(settings, label=f"{'; '.join(cell.place)}: ")
    study = Study(config, data, population=week_population(cell.settings))
    last: FleetRound | None = None
    failed = ""
    try:
        for last in study.run():
            if last.time_s >= WEEK_S:
                break
    except CoordinatorError as error:  # nobody is willing any more
        failed = str(error)[:200]
    values: dict[str, float] = {}
    if last is not None and study.simulation is not None:
        outcome = study.outcome()
        trained = TRAINED.get(cell.settings["fleet.policy"], tuple(outcome.validation))
        level = best_level({each: outcome.validation[each] for each in trained})
        values = {
            "rate": rate,
            "validation": 100 * outcome.validation[level],
            "accuracy": 100 * outcome.test[level],
            "level": 100 * level,
            "rounds": last.report.round,
            "hours": last.time_s / 3600,
            "kilojoules": last.joules / 1e3,
            "megabytes": (last.bytes_down + last.bytes_up) / 1e6,
            "money": last.money,
            **_batteries(study.simulation.lowest_percents().values()),
        }
    return Ran(values=rounded(values), more={"failed": failed} if failed else {})


def idle_week(population: DevicePopulation, seed: int) -> list[float]:
    """Return the lowest charge of every battery in a week without training, in percent."""
    lowest = []
    for name, kind in population.devices():
        body = Body(Nature(kind, population), name, seed)
        body.wait_until(WEEK_S)
        if (percent := body.lowest_percent) is not None:
            lowest.append(percent)
    return lowest


def _batteries(lowest: Collection[float]) -> dict[str, float]:
    return {
        "low": sum(percent < LOW_PERCENT for percent in lowest),
        "empty": sum(percent <= 0 for percent in lowest),
    }


def show_week(table: PaperTable, done: Outcomes) -> str:
    """Print a table for each fleet."""
    parts = []
    for part in SETTINGS:
        rows = [
            _line(cell.place.row, done[cell.place])
            for cell in table.cells
            if cell.place.part == part and done.get(cell.place)
        ]
        if rows:
            parts.append(f"**{part}**\n\n{markdown(HEAD, rows)}")
    return "\n\n".join(parts)


HEAD = (
    "way",
    "accuracy, %",
    "level to deploy, %",
    "hours",
    "kJ",
    "MB",
    "price of traffic",
    "phones ever below 20 %",
    "ever empty",
)


def _line(way: str, runs: Sequence[CellOutcome]) -> list[str]:
    def mean(name: str, digits: int = 0) -> str:
        known = [each.values[name] for each in runs if name in each.values]
        return f"{fmean(known):,.{digits}f}" if known else DASH

    levels = sorted({each.values["level"] for each in runs if "level" in each.values})
    return [
        way,
        mean_and_spread(runs, "accuracy"),
        ", ".join(f"{level:g}" for level in levels) or DASH,
        mean("hours"),
        mean("kilojoules"),
        mean("megabytes"),
        mean("money", 2),
        mean("low", 1),
        mean("empty", 1),
    ]


def _cells() -> list[PaperCell]:
    cells = []
    for part, settings in SETTINGS.items():
        for way, (policy, more) in {**WAYS, NOBODY: ("usual", {})}.items():
            quick = QUICK if part == PHONES and way in QUICK_WAYS else None
            cells.append(
                PaperCell(
                    place=CellPlace(part, way, ""),
                    settings=_cell_settings({**settings, "fleet.policy": policy}, more),
                    quick=quick,
                )
            )
    return cells


def _cell_settings(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a cell; an asynchronous run counts updates instead of rounds."""
    found = {**settings, **more}
    if more.get("rule.name") == "fed-raa":
        for key in NOT_ASYNCHRONOUS:
            found.pop(key, None)
        found["run.updates"] = UPDATES
    return found


ABOUT = f"""\
A week from nine in the morning on. Phones charge from about 23:00 to 06:30, have unmetered Wi-Fi
from 18:00 to 8:00, are a little busy, and vanish in 2 % of trainings. A round draws 6 of the 30
phones (10 of the 100 devices) and waits 25 minutes for them; a step stands for so many of a real
model's that the whole model takes a Redmi 7A longer than that. A run ends with the week or after
{ROUNDS} rounds ({UPDATES:,} updates of `fed-raa`). Each way has the better of two learning rates,
0.02 and 0.06, on validation data; momentum is 0.5. *FedAvg on all* trains whatever battery, heat
and tariff say; the others obey the usual limits of owners. The level to deploy is the one that is
most accurate on validation data, and its accuracy is that on the test. A phone is simulated as if
it went on when it is empty, which flatters *FedAvg on all*. Joules are those of training and radio,
modelled."""

TABLES = (
    PaperTable(
        name="worth",
        title="A week of a fleet, trained in ten ways",
        paper="Is it worth it?",
        about=ABOUT.replace("\n", " "),
        cells=tuple(_cells()),
        run=run_week,
        show=show_week,
        expected_s=120.0,
        folders=("uci_har", "cifar10"),
    ),
)
