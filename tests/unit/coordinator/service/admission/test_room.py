"""Time without room on the disk: said at once, and not counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.service.admission.room import LOG_S, Room
from edge_sdk.program.files import DiskFull


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_full_disk_is_said_at_once_and_then_from_time_to_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    room = Room(clock)
    full = DiskFull(tmp_path / "file", 5000, 12)
    for seconds in (0, 1, LOG_S - 1, 1):
        clock.now += seconds
        room.lacks(full)
    said = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.getMessage().split(";")[0] for each in said] == [
        f"the disk is full: {tmp_path / 'file'} needs 5,000 bytes, and 12 are free"
    ] * 2


def test_time_without_room_is_not_counted(tmp_path: Path) -> None:
    clock = Clock()
    room = Room(clock)
    room.found()
    assert (room.lost_s, room.full) == (0.0, None)
    room.lacks(DiskFull(tmp_path / "file", 10**18, 12))
    clock.now += 7
    room.look()  # nobody has so much room
    assert room.lost_s == 7
    room.lacks(DiskFull(tmp_path / "file", 10, 0))
    clock.now += 2
    room.look()
    clock.now += 50
    assert (room.lost_s, room.full) == (9.0, None)
