"""A sample of all crash points; `bash scripts/crash` tries every one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks.aggregate.durability import disk
from benchmarks.aggregate.durability.disk import Fault
from benchmarks.aggregate.durability.enumeration import (
    act_out,
    all_points,
    parse_point,
    sampled,
    scratch,
    try_point,
    undisturbed,
)
from benchmarks.aggregate.durability.site import ASYNCHRONOUS, CASES, CrashSite, quiet

PER_KIND = {"kill": 3, "unsent": 2, "torn": 1, "short": 1, "error": 2, "full": 2, "lost": 5}
"""Points of every kind of fault in every case."""


@pytest.mark.parametrize("case", CASES)
def test_sample_of_the_points_survives(case: str) -> None:
    points = all_points([case], distinct=False)
    for kind, number in PER_KIND.items():
        sample = sampled([point for point in points if point.fault.kind == kind], number)
        assert len(sample) == number
        assert [each for each in map(try_point, sample) if not each.survived] == []


@pytest.mark.parametrize("case", CASES)
def test_every_operation_and_message_is_a_step(case: str) -> None:
    _, steps = undisturbed(case)
    operations = {step.operation for step in steps}
    assert operations >= {"open", "write", "pwrite", "fsync", "rename", "remove", "send", "reserve"}
    assert ("commit" in operations) is (case not in ASYNCHRONOUS)
    with quiet(), scratch() as folder:
        site = CrashSite(case, folder)
        site.run()
        assert [str(step) for step in site.steps] == [str(step) for step in steps]


def test_disk_that_never_syncs_does_not_survive_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration can fail: here nothing ever gets to the disk."""

    def lies(self: Any, handle: int) -> None:
        self._disk.step("fsync", "")
        os.fsync(handle)

    monkeypatch.setattr(disk._FaultyOs, "fsync", lies)
    outcome = try_point(parse_point("ram-fed:250:lost:nothing"))
    assert not outcome.survived


def test_devices_are_told_to_wait_while_the_disk_is_full() -> None:
    _, steps = undisturbed("ram-fed")
    reserves = next(step for step in steps if step.operation == "reserve")
    with quiet(), scratch() as folder:
        site = CrashSite("ram-fed", folder, faults=(Fault(reserves.number, "full"),))
        result = site.run()
    told = [reason for device in site.devices for reason in device.waits]
    assert told
    assert "bytes are needed, 0 are free" in told[0]
    assert site.deaths == []
    assert result == undisturbed("ram-fed")[0]


@pytest.mark.parametrize("place", ["counters.json", "round.json", "00000001.safetensors"])
def test_run_waits_in_mid_round_while_the_disk_is_full(place: str) -> None:
    _, steps = undisturbed("ram-fed")
    writes = [each for each in steps if each.writes and place in each.subject]
    with quiet(), scratch() as folder:
        site = CrashSite("ram-fed", folder, faults=(Fault(writes[-1].number, "full"),))
        result = site.run()
    assert site.disks[0].refusals == disk.PATIENCE
    assert site.deaths == []
    assert result == undisturbed("ram-fed")[0]


@pytest.mark.parametrize(
    "text", ["ram-fed:3", "x:3:kill", "ram-fed:3:kill:zeros", "ram-fed:3:lost", "ram-fed:3:lost:x"]
)
def test_point_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_point(text)


def test_outcome_says_the_operation_and_how_processes_ended() -> None:
    with quiet():
        outcome, deaths = act_out(parse_point("ccfl-2:40:kill"))
    assert outcome.survived
    assert outcome.operation in deaths[0]
