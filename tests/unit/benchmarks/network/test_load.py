"""What `tessera-bench load` makes of what it saw, and how it ends."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.cli import main
from benchmarks.network.load.held import HeldConfig, HeldRow, MemoryUse, held_figures, held_row
from benchmarks.network.load.measure import FULL, QUICK, LoadConfig, load_figures, measure_load
from benchmarks.network.load.recovery import (
    RecoveryConfig,
    RecoveryRow,
    recovery_figures,
    recovery_row,
)
from benchmarks.network.load.site.files import open_files, participants_of
from benchmarks.network.load.site.history import ClosedRound, HistoryTail
from benchmarks.network.load.site.presences import Count, least_between, reached_at
from benchmarks.network.load.site.site import CpuSpent
from benchmarks.report.figures import Figure, FigureError
from coordinator.operate.broker.embedded import find_mosquitto
from tests.unit.benchmarks.interruption import interrupted
from tests.waiting import until

needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="needs mosquitto")


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


# -- who was there -------------------------------------------------------------------------------

COUNTS = [(10.0, 0), (11.0, 1), (12.0, 2), (13.0, 3), (15.0, 2), (16.0, 3), (20.0, 1)]


@pytest.mark.parametrize(("number", "at"), [(0, 10.0), (1, 11.0), (2, 12.0), (3, 13.0), (4, None)])
def test_number_is_reached_when_it_first_was(number: int, at: float | None) -> None:
    assert reached_at(COUNTS, number) == at


@pytest.mark.parametrize(
    ("since", "until", "least"),
    [
        (13.0, 14.9, 3),  # nobody came or left meanwhile
        (13.5, 15.0, 2),
        (15.5, 19.0, 2),  # what was true before still is
        (16.0, 19.9, 3),
        (13.0, 30.0, 1),
        (1.0, 2.0, 0),  # nobody was counted yet
    ],
)
def test_least_is_the_fewest_at_any_time_in_between(since: float, until: float, least: int) -> None:
    assert least_between(COUNTS, since, until) == least


def line(round: int, at_s: float, counted: int) -> bytes:
    entry = {"round": round, "time": at_s, "movements": {"counted": counted, "late": 7}}
    return json.dumps(entry).encode() + b"\n"


def test_history_that_grows_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = HistoryTail(path)
    assert history.closed() == []
    first, second, third = line(1, 5.5, 2), line(2, 6.5, 3), line(4, 7.5, 0)
    path.write_bytes(first + second[:9])
    assert history.closed() == [ClosedRound(1, 5.5, 2)]
    assert history.closed() == [ClosedRound(1, 5.5, 2)]
    path.write_bytes(first + second + third)
    assert history.closed() == [
        ClosedRound(1, 5.5, 2),
        ClosedRound(2, 6.5, 3),
        ClosedRound(4, 7.5, 0),
    ]


# -- rows and figures ----------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "picked"), [(1, 1), (4, 1), (6, 2), (80, 16), (500, 100)])
def test_a_fifth_is_picked(devices: int, picked: int) -> None:
    assert participants_of(devices) == picked


CLOSED = [
    ClosedRound(1, 100.0, 1),  # not measured, and not whole
    ClosedRound(2, 101.0, 2),
    ClosedRound(3, 104.0, 2),
    ClosedRound(4, 106.0, 2),
]
SEEN: list[Count] = [(90.0, 0), (92.0, 10), (105.0, 9), (105.5, 10), (107.0, 3)]


def row_of(closed: list[ClosedRound], seen: list[Count] = SEEN) -> HeldRow:
    return held_row(
        10,
        91.5,
        closed,
        seen,
        (CpuSpent(1.0, 0.5, 10.0), CpuSpent(1.6, 0.8, 40.0)),
        coordinator=MemoryUse(before=50_000_000, after=50_200_000, peak=70_000_000),
        broker=MemoryUse(before=1_000_000, after=1_050_000, peak=9_000_000),
        devices_bytes=80_000_000,
    )


def test_what_devices_cost_is_of_the_measured_rounds() -> None:
    row = row_of(CLOSED)
    assert (row.devices, row.held, row.participants, row.rounds) == (10, 9, 2, 3)
    assert row.joined_s == 0.5
    assert (row.round_s, row.longest_round_s) == (2.0, 3.0)
    assert row.coordinator.cpu_s == pytest.approx(0.2)
    assert row.coordinator.rss_mb == 70.0
    assert row.coordinator.kb_per_device == 20.0
    assert row.broker.cpu_s == pytest.approx(0.1)
    assert row.broker.kb_per_device == 5.0
    assert row.devices_cpu_s == pytest.approx(10.0)
    assert row.devices_mb == 80.0


def test_no_device_is_held_when_a_round_lacks_movements() -> None:
    assert row_of([*CLOSED[:2], replace(CLOSED[2], movements=1), CLOSED[3]]).held == 0


def test_devices_are_counted_once_all_were_seen() -> None:
    # The word of the last one came behind the first round, which had waited for it.
    assert row_of(CLOSED, [(90.0, 0), (92.0, 9), (100.5, 10)]).held == 10
    with pytest.raises(FigureError, match="10 devices were never there"):
        row_of(CLOSED, [(90.0, 0), (92.0, 9)])


def test_figures_of_many_devices_have_a_target() -> None:
    row = row_of(CLOSED)
    figures = by_name(held_figures(row))
    assert {name: (f.value, f.unit) for name, f in figures.items()} == {
        "load.10.held": (9, "devices"),
        "load.10.joined": (0.5, "s"),
        "load.10.round": (2.0, "s"),
        "load.10.coordinator.cpu_per_round": (pytest.approx(0.2), "s"),
        "load.10.coordinator.cpu_per_device": (pytest.approx(20.0), "ms"),
        "load.10.coordinator.rss": (70.0, "MB"),
        "load.10.coordinator.memory_per_device": (20.0, "kB"),
        "load.10.broker.cpu_per_round": (pytest.approx(0.1), "s"),
        "load.10.broker.cpu_per_device": (pytest.approx(10.0), "ms"),
        "load.10.broker.rss": (9.0, "MB"),
        "load.10.broker.memory_per_device": (5.0, "kB"),
    }
    assert all(figure.target is None for figure in figures.values())
    many = by_name(held_figures(replace(row, devices=500, held=499)))
    assert (many["load.500.held"].target, many["load.500.held"].met) == (500, False)
    more = by_name(held_figures(replace(row, devices=600, held=500)))
    assert more["load.600.held"].met is True


def test_recovery_counts_from_the_return_of_the_broker() -> None:
    config = RecoveryConfig(devices=3, away_s=4.0)
    closed = [ClosedRound(1, 11.0, 1), ClosedRound(2, 17.5, 1), ClosedRound(3, 18.0, 1)]
    row = recovery_row(config, 11.0, closed, COUNTS)
    assert row == RecoveryRow(devices=3, away_s=4.0, round_s=6.5, half_s=1.0, all_s=2.0)
    assert [(f.name, f.value, f.target) for f in recovery_figures(row)] == [
        ("load.recovery.3.first_round", 6.5, None),
        ("load.recovery.3.all_present", 2.0, None),
    ]
    with pytest.raises(FigureError, match="did not come back"):
        recovery_row(config, 11.0, closed[:1], COUNTS)
    with pytest.raises(FigureError, match="did not come back"):
        recovery_row(replace(config, devices=4), 11.0, closed, COUNTS)


# -- the machine ---------------------------------------------------------------------------------


def test_open_files_are_raised_for_a_while_and_refused_beyond_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        with open_files(400):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400, hard)
            with open_files(350):
                assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(FigureError, match="raise the limit"), open_files(hard + 1):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_mosquitto
def test_few_devices_are_held_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = LoadConfig(
        widths=(8, 8, 4),
        held=HeldConfig(devices=4, rounds=2, together=3),
        recovery=RecoveryConfig(devices=2, together=2, settle_s=0.0, away_s=0.0),
    )
    begun: list[str] = []
    ticks: list[None] = []

    def begin(name: str) -> Any:
        begun.append(name)
        return lambda: ticks.append(None)

    before = set(psutil.Process().children(recursive=True))
    rows = measure_load(config, begin)
    assert (len(begun), len(ticks)) == (3, config.ticks)
    assert (rows.held.held, rows.held.participants, rows.held.rounds) == (4, 1, 2)
    assert rows.held.coordinator.rss_mb > 20
    assert rows.held.broker.rss_mb < rows.held.coordinator.rss_mb
    assert 0 < rows.recovery.half_s <= rows.recovery.all_s
    assert rows.recovery.round_s > 0
    assert "load.4.held" in by_name(list(load_figures(rows)))
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(tmp_path.glob("tessera-bench-*")) == []


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--devices", "0"], "--devices 0: from 1 to 10000"),
        (["--devices", "10001"], "--devices 10001: from 1 to 10000"),
    ],
)
def test_load_refuses_nonsense_before_it_measures(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", *arguments]) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert "load task" not in printed.err


def test_number_of_devices_bounds_those_that_see_the_broker_restarted() -> None:
    assert (FULL.held.devices, FULL.recovery.devices) == (500, 100)
    assert QUICK.ticks < FULL.ticks
    few, many = FULL.with_devices(7), FULL.with_devices(2000)
    assert (few.held.devices, few.recovery.devices) == (7, 7)
    assert (many.held.devices, many.recovery.devices) == (2000, 100)
    assert (few.held.together, many.held.together) == (125, 250)  # never many processes


@needs_mosquitto
def test_load_that_is_terminated_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    children: set[psutil.Process] = set()

    def all_there(process: psutil.Process) -> None:
        def seen() -> bool:
            children.clear()
            children.update(process.children(recursive=True))
            return len(children) >= 3  # broker, coordinator, devices

        until(seen)

    arguments = ["load", "--quick", "--devices", "3"]
    said = interrupted(arguments, "load 3 devices", tmp_path, all_there, by=signal.SIGTERM)
    assert said[-1] == "tessera-bench: interrupted"
    assert list(tmp_path.glob("tessera-bench-*")) == []
    until(lambda: not any(child.is_running() for child in children))
