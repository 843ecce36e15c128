"""TensorBoard's files hold the numbers of every round, as its format says."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import ConfigError
from coordinator.rounds.report import DeviceRound, LevelReport, RoundReport
from coordinator.run.tensorboard import TensorBoardSink, scalars_of

event_pb2 = pytest.importorskip(
    "tensorboardX.proto.event_pb2", reason="the extra `tensorboard` is not installed"
)


def report(round: int) -> RoundReport:
    devices = (
        DeviceRound("a", 1.0, "", loss=2.0, bytes_down=7, bytes_up=5),
        DeviceRound("b", 0.5, "", loss=1.0, bytes_down=3, bytes_up=2),
        DeviceRound("c", None, "skip: battery"),
    )
    return RoundReport(
        round=round,
        devices=devices,
        coverage_min=1,
        coverage_mean=1.5,
        trained_coverage_min=1,
        trained_blocks=4,
        oldest_uncovered=0,
        gap_bound=None,
        oldest_memory=3,
        compression_noise=0.0,
        skip_share=1 / 3,
        longest_skip=2,
        seconds=0.25,
        thin_share=0.5,
        levels=(LevelReport(1.0, 10, 0.5, 1, None), LevelReport(0.5, 4, None, 2, None)),
    )


def events(folder: Path) -> Iterator[Any]:
    """Every event of a folder: records of a length, its checksum, the bytes, theirs."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def test_numbers_of_a_round_are_those_of_its_report() -> None:
    assert scalars_of(report(4)) == {
        "accuracy/level_100": 0.5,
        "devices/trained": 2,
        "devices/skipped": 1,
        "bytes/down": 10,
        "bytes/up": 7,
        "coverage/min": 1,
        "coverage/mean": 1.5,
        "coverage/oldest_uncovered": 0,
        "round/seconds": 0.25,
        "train/loss": 1.5,
        "memory/oldest": 3,
    }


def test_resumed_run_adds_to_the_folder(tmp_path: Path) -> None:
    for round in (1, 2):
        with TensorBoardSink(tmp_path / "new" / "board") as sink:
            sink.write(report(round))
    found = {
        (event.step, value.tag): value.simple_value
        for event in events(tmp_path / "new" / "board")
        for value in event.summary.value
    }
    numbers = scalars_of(report(1)).items()
    assert found == {(round, tag): value for round in (1, 2) for tag, value in numbers}


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'tessera-fl\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
