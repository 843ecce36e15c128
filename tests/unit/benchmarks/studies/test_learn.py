"""The phones' study: who has whose data, what is counted, and how rules are compared."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.studies.learn.command
import benchmarks.studies.learn.setting
from benchmarks.cli import main
from benchmarks.data import Dataset, load_data
from benchmarks.studies.learn.config import QUICK, LearnConfig
from benchmarks.studies.learn.plot import curves_of, save_plot
from benchmarks.studies.learn.run import RunPoint, StudyRun, run_rule
from benchmarks.studies.learn.setting import WORK_MACS, Setting, make_setting
from benchmarks.studies.learn.study import (
    SeedSpread,
    accuracy_at,
    compare_runs,
    learn_figures,
    spent_until,
)
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.emulation.fleet import find_fleet
from edge_sdk.machine.board import load_board, shipped_boards


@pytest.fixture(scope="module")
def setting() -> Setting:
    return make_setting(load_data(None))


def owned(people: int) -> Dataset:
    """Sample `10 · person + k` is the person's k-th; person p has p samples."""
    owners = np.repeat(np.arange(1, people + 1), np.arange(1, people + 1))
    numbers = np.concatenate([10 * p + np.arange(p) for p in range(1, people + 1)])
    data = ArrayData((numbers[:, None].astype(np.float32),), numbers)
    return Dataset("people", "uci-har", data, data, 6, owners)


# -- who learns ----------------------------------------------------------------------------------


def test_phones_are_all_that_there_are_profiles_of() -> None:
    boards = [load_board(path) for path in shipped_boards().values()]
    phones = {board.name for board in boards if board.kind == "phone"}
    assert len(phones) == 8
    assert {member.board.name for member in find_fleet("phones")} == phones


def test_every_person_has_a_phone_and_another_one_with_another_seed(setting: Setting) -> None:
    setting = replace(setting, data=owned(5))
    assert setting.devices == 5
    names = tuple("abcde")
    shares = setting.shares(names, 3)
    people = {name: len(share) for name, share in shares.items()}
    assert sorted(people.values()) == [1, 2, 3, 4, 5]
    for name, share in shares.items():
        mine = [10 * people[name] + k for k in range(people[name])]
        assert share.targets.tolist() == share.inputs[0][:, 0].tolist() == mine
    again, other = (
        {name: len(share) for name, share in setting.shares(names, seed).items()} for seed in (3, 4)
    )
    assert again == people
    assert other != people


def test_data_of_nobody_is_dealt_to_thirty_phones(setting: Setting) -> None:
    phones = setting.phones()
    assert setting.devices == len(phones) == 30
    shares = setting.shares(tuple(phones), 0)
    assert sum(map(len, shares.values())) == len(setting.data.train)
    assert len({len(share) for share in shares.values()}) > 10  # unevenly


def test_whole_model_takes_a_phone_as_long_whatever_the_data(setting: Setting) -> None:
    # sensor-cnn by hand: two convolutions of width 5 over 128 and 64 places, two linear layers.
    by_hand = 9 * 32 * 5 * 128 + 32 * 64 * 5 * 64 + 512 * 64 + 64 * 6
    assert by_hand == WORK_MACS
    # The demo's CNN for digits: 3 × 3 over 8 × 8 places twice, pooled, two linear layers.
    digits = 1 * 32 * 9 * 64 + 32 * 64 * 9 * 64 + 1024 * 128 + 128 * 10
    work = find_fleet("phones").work
    assert setting.fleet.work * digits == pytest.approx(work * by_hand)


# -- what a run counts ---------------------------------------------------------------------------


def test_run_is_the_same_for_the_same_seed_and_counts_what_was_done(setting: Setting) -> None:
    six = np.arange(len(setting.data.train)) % 6
    setting = replace(setting, data=replace(setting.data, owners=six))
    ticks: list[None] = []
    run, again = (run_rule(setting, "fedavg", 1, 2, lambda: ticks.append(None)) for _ in range(2))
    assert run == again
    assert len(ticks) == 4
    assert [point.round for point in run.points] == [0, 1, 2]
    start, *done = run.points
    assert (start.joules, start.bytes, start.train_s) == (0, 0, 0)
    parameters = setting.task(1).plan.parameters
    for before, point in zip(run.points, done, strict=False):
        assert point.levels.keys() == {"100"}  # fedavg has no use for less
        assert point.skips == 6 - point.levels["100"] > 0
        # Every phone that trained got the model and sent a movement, of 4 bytes a parameter.
        moved = 2 * 4 * parameters * point.levels["100"]
        assert point.bytes - before.bytes == pytest.approx(moved, rel=1e-3)
        # No phone draws less than 1.7 W or more than 6 W while it trains.
        seconds, joules = point.train_s - before.train_s, point.joules - before.joules
        assert 1.7 * seconds < joules < 6 * seconds
        assert point.waited_s - before.waited_s < seconds


# -- how rules are compared ----------------------------------------------------------------------


def a_run(rule: str, seed: int, *points: tuple[float, float, int]) -> StudyRun:
    """From (accuracy, joules, bytes) after each round; two phones at half, one that skips."""
    start = RunPoint(
        round=0, accuracy=0.1, levels={}, skips=0, joules=0, bytes=0, train_s=0, waited_s=0
    )
    later = [
        RunPoint(
            round=number,
            accuracy=accuracy,
            levels={"100": 1, "50": 1},
            skips=1,
            joules=joules,
            bytes=size,
            train_s=10.0 * number,
            waited_s=5.0 * number,
        )
        for number, (accuracy, joules, size) in enumerate(points, 1)
    ]
    return StudyRun(rule=rule, mask="m", seed=seed, points=(start, *later), model_sha256="")


RUNS = (
    a_run("ra-fed", 0, (0.5, 100, 1000), (0.9, 200, 2000)),
    a_run("fedavg", 0, (0.6, 300, 600), (0.795, 600, 1200)),
    a_run("ra-fed", 1, (0.85, 120, 1000), (0.7, 240, 2000)),
)


def test_rules_are_compared_at_what_all_reached_and_all_spent() -> None:
    comparison = compare_runs(RUNS)
    assert comparison.common_accuracy == 0.79  # 79.5 % is the best of fedavg
    assert comparison.common_joules == 200
    assert comparison.common_bytes == 1200
    ra_fed, fedavg = comparison.summaries
    assert (ra_fed.rule, ra_fed.seeds, fedavg.rule, fedavg.seeds) == ("ra-fed", 2, "fedavg", 1)
    assert ra_fed.accuracy == SeedSpread(0.8, 0.7, 0.9)
    assert ra_fed.joules == SeedSpread(220, 200, 240)
    assert ra_fed.train_s == SeedSpread(20, 20, 20)
    assert ra_fed.joules_to_common == SeedSpread((200 + 120) / 2, 120, 200)
    assert ra_fed.bytes_to_common == SeedSpread((2000 + 1000) / 2, 1000, 2000)
    assert fedavg.joules_to_common == SeedSpread(600, 600, 600)
    # At 200 J: the first run's end, and two thirds of the way from 85 to 70 % of the other.
    other = 0.85 - 0.15 * 80 / 120
    assert ra_fed.accuracy_at_joules.mean == pytest.approx((0.9 + other) / 2)
    assert ra_fed.accuracy_at_joules.least == pytest.approx(other)
    assert fedavg.accuracy_at_joules.mean == pytest.approx(0.1 + 0.5 * 200 / 300)
    assert fedavg.accuracy_at_bytes.mean == pytest.approx(0.795)
    assert ra_fed.trained == pytest.approx(2 / 3)
    assert ra_fed.level == pytest.approx(0.75)


def test_spent_until_is_all_where_an_accuracy_was_not_reached() -> None:
    assert spent_until(RUNS[0], 0.45, "joules") == 100
    assert spent_until(RUNS[0], 0.95, "joules") == 200
    assert accuracy_at(RUNS[0], 10**6, "bytes") == 0.9


def test_curves_end_where_the_shortest_run_does() -> None:
    grid, curves = curves_of([RUNS[0], RUNS[2]], "joules")
    assert (grid[0], grid[-1]) == (0, 200)
    assert curves.shape == (2, len(grid))
    assert curves[:, 0].tolist() == [0.1, 0.1]
    assert curves[0, -1] == pytest.approx(0.9)


@pytest.mark.parametrize(("rounds", "lowest", "marks"), [(11, 0.0, 12), (12, 55.0, 0)])
def test_short_run_is_shown_whole_with_its_rounds_marked(
    rounds: int, lowest: float, marks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    run = a_run("fedavg", 0, *((0.8, 10 * number, number) for number in range(1, rounds + 1)))
    figures: list[Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    save_plot([run], tmp_path / "learn.png", "title")
    monkeypatch.undo()
    [figure] = figures
    plt.close(figure)
    for axes in figure.axes:
        assert axes.get_ylim()[0] == pytest.approx(lowest)
        marked = [np.size(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
        assert sum(marked) == marks


def test_figures_are_named_by_rule() -> None:
    figures = {figure.name: figure for figure in learn_figures(compare_runs(RUNS))}
    assert figures["learn.ra-fed.accuracy"].better == "higher"
    assert figures["learn.ra-fed.joules"].value == 220
    assert "modelled" in figures["learn.ra-fed.joules"].unit
    assert figures["learn.fedavg.bytes"].value == 1200
    assert figures["learn.common_accuracy"].value == 0.79
    assert all(figure.target is None for figure in figures.values())


def test_seeds_come_one_after_the_other_with_all_rules() -> None:
    config = LearnConfig(rules=("ra-fed", "fedavg"), seeds=2)
    assert config.cases == (("ra-fed", 0), ("fedavg", 0), ("ra-fed", 1), ("fedavg", 1))
    assert len(QUICK.rules) == 2
    assert QUICK.seeds == 1


# -- the command ---------------------------------------------------------------------------------


def learn(tmp_path: Path, *arguments: str) -> tuple[int, Path, Path]:
    table, plot = tmp_path / "learn.json", tmp_path / "learn.png"
    return main(["learn", *arguments, "--json", str(table), "--plot", str(plot)]), table, plot


def test_interrupted_study_keeps_the_runs_that_are_done(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: Setting,
) -> None:
    begun: list[str] = []

    @contextmanager
    def impatient(what: str, ticks: int) -> Iterator[Callable[[str], Callable[[], None]]]:
        """Ctrl-C in the second run."""

        def tick() -> None:
            if len(begun) == 2:
                signal.raise_signal(signal.SIGINT)

        def begin(name: str) -> Callable[[], None]:
            begun.append(name)
            return tick

        yield begin

    monkeypatch.setattr(benchmarks.studies.learn.command, "progress", impatient)
    # What it would make itself; graphs take seconds to compile.
    monkeypatch.setattr(benchmarks.studies.learn.setting, "make_setting", lambda _data: setting)
    rules = ("--rule", "ra-fed,fedavg", "--rounds", "1", "--seeds", "2")
    code, table, plot = learn(tmp_path, *rules)
    assert code == 130
    assert begun == ["ra-fed, seed 0", "fedavg, seed 0"]
    written: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
    (run,) = written["runs"]
    assert (run["rule"], run["seed"], len(run["points"])) == ("ra-fed", 0, 2)
    assert sum(run["points"][1]["levels"].values()) + run["points"][1]["skips"] == 30
    assert written["command"] == "learn"
    assert written["config"]["rules"] == ["ra-fed", "fedavg"]
    assert written["data"]["format"] == "digits"
    figures = {figure["name"]: figure["value"] for figure in written["figures"]}
    assert figures["learn.ra-fed.joules"] == run["points"][-1]["joules"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.startswith("digits: 1,437 samples to train, dealt unevenly")
    assert "rounds: 1, too short to rank rules; give --rounds 12 or more" in printed
    assert "modelled" in printed
    assert "interrupted: 1 of 4 runs are done and kept" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rule", "ra-fad"], "unknown rule 'ra-fad'; choose from fedavg, ra-fed"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--plot", "learn.txt"], "--plot must end in one of .png"),
        (["--plot", "no/such/directory/learn.png"], "directory that exists"),
        (["--data", "no/such/data"], "is not a directory that can be read"),
    ],
)
def test_learn_refuses_nonsense_before_it_trains(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", "--quick", *arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "seed 0" not in printed.err
