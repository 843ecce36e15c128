"""What the owner is shown: from a folder, in words, and live."""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.device.advice.standing import printable, read_standing, standing_lines, strip
from edge_sdk.device.advice.watching import view_lines, watch
from edge_sdk.device.config import DeviceConfig, DeviceTask
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import Logbook
from edge_sdk.device.stores.movements import device_path
from edge_sdk.machine.probe import StaticProbe
from edge_sdk.machine.snapshot import (
    Battery,
    Cpu,
    Heat,
    MemoryState,
    Power,
    Snapshot,
    Zone,
)
from edge_sdk.protocol.messages.round import Bid, Outcome, Receipt

HOSTILE = "\x1b[31mred\x07\r\n\u202ereversed\u2028\x9b2J 漢字" * 20
PHONE = StaticProbe(
    Snapshot(
        battery=Battery(present=True, percent=24, charging=False, watts=3.1, capacity_wh=10),
        heat=Heat(zones=(Zone(name="cpu", celsius=71),), throttling=True),
        memory=MemoryState(total_bytes=4e9, available_bytes=1e9),
        cpu=Cpu(cores=4, busy=0.5, mhz=1400),
        power=Power(total_watts=4.2),
    )
)


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    tasks = (DeviceTask(task="digits"), DeviceTask(task="sounds"))
    return DeviceConfig(tasks=tasks, name="pi", state_dir=tmp_path)


def book_of(config: DeviceConfig, task: str) -> Logbook:
    folder = device_path(config.state_dir, task, config.name)
    folder.mkdir(parents=True)
    now = count(int(time.time()))
    book = Logbook(task, folder, wall=lambda: next(now))
    book.starts(7, "broker:1883")
    book.takes_part("a" * 16)
    return book


def bid(round: int, level: float | None, code: str, reason: str = "why") -> Bid:
    return Bid(device="pi", round=round, level=level, reason=reason, code=code)


def test_device_that_never_ran_is_told_from_one_that_was_killed_or_ended(
    config: DeviceConfig,
) -> None:
    book_of(config, "digits").bid(bid(1, None, "battery", "skip: battery 20 % < 30 %"))
    text = "\n".join(standing_lines(read_standing(config, None)))
    assert "does not run; this is from its folder" in text
    assert "it crashed, was killed, or lost its power" in text
    assert "round 1: skip: battery 20 % < 30 % [battery]" in text
    assert "never ran here" in text
    book_of(config, "sounds").ends(0, "told to stop")
    assert "told to stop" in "\n".join(standing_lines(read_standing(config, None)))


def test_broker_that_is_away_is_named_once(config: DeviceConfig) -> None:
    book = book_of(config, "digits")
    for reason in ("broker:1883: nothing listens there", "nothing listens there"):
        book.link(connected=False, reason=reason)
        standing = {**read_standing(config, None), "running": True}
        (line,) = (each for each in standing_lines(standing) if "broker:1883" in each)
        assert line.strip() == "broker        broker:1883: nothing listens there; session 7"


def test_movements_pause_energy_and_gates_are_told(config: DeviceConfig) -> None:
    household = Household(config.state_dir, config.name)
    household.pause.begin(3600)
    household.account.heard(1e9)  # an earlier day
    household.account.spent(5)
    folder = device_path(config.state_dir, "sounds", config.name) / "runs/r/movements"
    folder.mkdir(parents=True)
    for name in ("12.movement", "11.copy", "3.movement", "x.movement"):
        (folder / name).write_bytes(b"")
    standing = read_standing(config, PHONE)
    assert [each["waiting"] for each in standing["tasks"]] == [[], [3, 12]]
    assert standing["paused"]["until"] == pytest.approx(standing["time"] + 3600, abs=60)
    assert standing["energy"] == {"spent_j": 0.0, "budget_j": 3600.0}
    assert {gate["name"] for gate in standing["gates"] if not gate["open"]} == {"battery", "heat"}
    json.dumps(standing)
    text = "\n".join(standing_lines(standing))
    assert "0 J of 3600 J spent today (0%)" in text
    assert "battery 24 % < 30 % and not charging" in text


def test_text_of_the_coordinator_reaches_no_terminal_as_it_came(config: DeviceConfig) -> None:
    book = book_of(config, "digits")
    book.bid(bid(1, 1.0, "full", HOSTILE[:500]))
    book.receipt(Receipt(device="pi", round=1, outcome=Outcome.REJECTED, reason=HOSTILE))
    book.error(HOSTILE)
    standing = read_standing(config, PHONE)
    assert all(line.isprintable() for line in standing_lines(standing))
    assert all(line.text.isprintable() for line in view_lines(standing, 80, 24))
    assert printable("a\x00b\x7f\u200bc\ud800") == "a b c"
    assert json.dumps(standing).isprintable()


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 50), (10, 3)])
def test_view_fits_the_terminal(config: DeviceConfig, size: tuple[int, int]) -> None:
    for task in ("digits", "sounds"):
        book = book_of(config, task)
        for round in range(1, 150):
            book.bid(bid(round, 0.5, "memory", HOSTILE[:500]))
        book.error(HOSTILE)
    width, height = size
    lines = view_lines(read_standing(config, PHONE), width, height)
    assert len(lines) < height
    assert all(len(line.text) <= width for line in lines)


def test_view_shows_the_machine_and_the_last_levels(config: DeviceConfig) -> None:
    book = book_of(config, "digits")
    for number, (level, code) in enumerate(
        [(1.0, "full"), (0.5, "memory"), (None, "heat"), (None, "paused"), (0.05, "energy")], 1
    ):
        book.bid(bid(number, level, code))
    text = "\n".join(line.text for line in view_lines(read_standing(config, PHONE), 80, 24))
    for words in (
        "battery  [#####...............]  24%  not charging  4.2 W",
        "heat     cpu 71 °C  SLOWED DOWN",
        "memory   [###############.....]  75%  3.0 of 4.0 GB",
        "cpu      [##########..........]  50%  4 cores 1400 MHz",
        "rounds 94hp1",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("level", "mark"),
    [(1.0, "9"), (0.91, "9"), (0.9, "8"), (0.7, "6"), (0.3, "2"), (0.25, "2"), (0.1, "1")],
)
def test_levels_in_the_strip(level: float, mark: str) -> None:
    assert strip([{"level": level}], 10) == mark


@pytest.mark.parametrize(
    ("row", "mark"),
    [
        ({"level": 1.0, "outcome": "late"}, "l"),
        ({"level": 1.0, "outcome": "rejected"}, "r"),
        ({"level": None, "code": "battery"}, "b"),
        ({"level": None, "code": "task"}, "s"),
        ({"level": None, "code": None}, "s"),
    ],
)
def test_other_marks_in_the_strip(row: dict[str, Any], mark: str) -> None:
    assert strip([row], 10) == mark


def test_watch_without_a_terminal_or_rich_prints_plain_text_and_ends_with_ctrl_c(
    config: DeviceConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = 0

    def read() -> dict[str, Any]:
        nonlocal seen
        seen += 1
        if seen > 2:
            raise KeyboardInterrupt
        return read_standing(config, PHONE)

    watch(read, every_s=0)
    assert capsys.readouterr().out.count("q or Ctrl-C ends") == 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("rich.console", "rich.live", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    seen = 0
    watch(read, every_s=0)
    drawn = capsys.readouterr().out
    assert drawn.count("\x1b[H") == 2
    assert "\x1b[3" not in drawn  # no colours
