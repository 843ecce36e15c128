"""The energy of a day, shared by the tasks of a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_sdk.decide.account import EnergyAccount
from edge_sdk.decide.budget import DAY_S, Allowance, History


def test_what_one_task_spends_is_missing_for_the_other(tmp_path: Path) -> None:
    account = EnergyAccount(tmp_path / "new" / "energy.json")
    own = History(turn=0.5, skipped=3)
    assert account.complete(own) == own
    account.heard(1_000.0)
    account.spent(70.0)
    other = EnergyAccount(tmp_path / "new" / "energy.json")  # of another process, or after a crash
    other.spent(20.0)
    seen = account.complete(own)
    assert (seen.turn, seen.skipped, seen.spent_j) == (0.5, 3, 90.0)
    assert Allowance(100.0).left_j(seen) == pytest.approx(10.0)


def test_rounds_of_all_tasks_share_the_day(tmp_path: Path) -> None:
    account = EnergyAccount(tmp_path / "energy.json")
    for now in (0.0, 50.0, 100.0):  # two tasks with a round every 100 s each
        account.heard(now)
    assert account.complete(History()).interval_s == 50.0


def test_times_of_rounds_are_written_with_the_energy(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    account = EnergyAccount(path)
    account.heard(0.0)
    before = path.read_bytes()
    account.heard(40.0)
    account.heard(80.0)
    assert path.read_bytes() == before
    assert account.complete(History()).interval_s == 40.0
    account.spent(3.0)
    seen = EnergyAccount(path).complete(History())
    assert (seen.interval_s, seen.opened_s, seen.spent_j) == (40.0, 80.0, 3.0)


def test_times_of_another_process_that_are_newer_hold(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    account, other = EnergyAccount(path), EnergyAccount(path)
    account.heard(0.0)
    account.heard(40.0)
    other.heard(60.0)
    other.spent(1.0)
    assert account.complete(History()).opened_s == 60.0


def test_day_ends(tmp_path: Path) -> None:
    account = EnergyAccount(tmp_path / "energy.json")
    assert account.today_j(0.0) == 0
    account.heard(100.0)
    account.spent(5.0)
    assert account.today_j(100.0 + DAY_S - 1) == 5
    assert account.today_j(100.0 + DAY_S) == 0
    account.heard(100.0 + DAY_S)
    assert account.complete(History()).spent_j == 0


def test_energy_spent_before_there_was_an_account_is_adopted_once(tmp_path: Path) -> None:
    account = EnergyAccount(tmp_path / "energy.json")
    before = History(day_from_s=10.0, spent_j=30.0, opened_s=10.0, turn=0.1)
    account.adopt(before)
    account.adopt(replace(before, spent_j=99.0))
    assert account.complete(History()).spent_j == 30
    assert account.complete(History()).turn is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"day_from_s": 1, "spent_j": null}', "\xff"])
def test_damaged_account_begins_anew(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "energy.json"
    path.write_bytes(text.encode("latin-1"))
    account = EnergyAccount(path)
    account.heard(1.0)
    account.spent(2.0)
    assert EnergyAccount(path).complete(History()).spent_j == 2
    assert "the energy spent is unknown" in caplog.text


def test_full_disk_forgets_nothing_while_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    account = EnergyAccount(tmp_path / "energy.json")
    account.heard(1.0)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edge_sdk.decide.account.write_whole", full)
        account.spent(2.0)
        account.spent(3.0)
        assert account.complete(History()).spent_j == 5
    account.spent(1.0)
    assert EnergyAccount(tmp_path / "energy.json").complete(History()).spent_j == 6
    assert caplog.text.count("is lost if this program stops") == 1
