"""The run's folder: what is written is read again, whole, by one process at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.arrivals import Expected
from coordinator.aggregate.screening import Scale, Usual
from coordinator.checksums import open_json, seal_json
from coordinator.cli import main
from coordinator.errors import ConfigError
from coordinator.operate.serve.serving import explain_failure
from coordinator.rounds.fleet import FleetRecord, new_fleet
from coordinator.rounds.persistent import PersistentMap
from coordinator.rounds.reputation import Agreed, DeviceStanding
from coordinator.rounds.synchronous import PastRound
from coordinator.run import folder as runs
from coordinator.run.folder import (
    CHECKPOINTS,
    HISTORY,
    MEMORY,
    MOVEMENTS,
    ROUND,
    TEACHERS,
    About,
    Checkpoint,
    Run,
    RunError,
    create_run,
    read_history,
    read_result,
)
from coordinator.task.levels import LevelScore, LevelScores
from edge_sdk.program.files import sync_folder
from edge_sdk.protocol.messages.round import Outcome
from tests.unit.coordinator.service.service_world import PLAN, saved_model

ABOUT = About(task="tiny", run="0123456789abcdef", source="t.py:f", batch_size=4)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    create_run(tmp_path / "run", ABOUT, saved_model())
    with Run(tmp_path / "run") as made:
        yield made


SCALE = Scale(
    0.5, PLAN.block_count, np.arange(PLAN.block_count), np.linspace(0.1, 1, PLAN.block_count) / 3
)


def checkpoint(round: int, value: float = 0.5) -> Checkpoint:
    blocks = np.arange(PLAN.block_count, dtype=np.int64)
    return Checkpoint(
        round=round,
        committed=round,
        version=round,
        theta=np.full(PLAN.parameters, value, dtype=np.float32),
        buffers={"mean": np.full(6, value, dtype=np.float32)},
        fleet=FleetRecord(
            blocks,
            2 * blocks,
            new_fleet(PLAN).teachers,
            trained=PersistentMap({"a": round}),
            samples=PersistentMap({"a": 7, "b": 9}),
            total_samples=16,
            usual=Usual().learn(SCALE).learn(replace(SCALE, level=0.25)),
            agreements=PersistentMap({"a": Agreed(0.7, 1.9), "b": Agreed(-0.3, 1.0)}),
            standings=PersistentMap({"b": DeviceStanding(3, "too large", quarantined=4)}),
        ),
        best=(0.75, 3),
        devices=frozenset({"a", "b"}),
        past={
            4: PastRound(
                {
                    "a": Expected({"hidden": (0, 2)}, 0.5, 7),
                    "b": Expected({"hidden": (1,)}, 0.25, 9, 12.5),
                },
                {"a": Outcome.MEMORY, "b": Outcome.REJECTED},
                {"b": "too large"},
            )
        },
        counted={"a": 11},
    )


def test_new_run_starts_from_the_task(run: Run) -> None:
    first = run.latest()
    assert (first.round, first.committed, first.version, run.opened) == (0, 0, 0, 0)
    assert np.array_equal(first.theta, PLAN.flatten(saved_model().weights))
    assert first.best == (-math.inf, 0)
    assert run.about == ABOUT
    assert run.task.manifest == saved_model().manifest


def test_checkpoint_is_read_as_it_was_written(run: Run) -> None:
    written = checkpoint(5)
    run.save(written)
    run.prune(keep_last=3, keep_every=50)
    read = run.latest()
    for name in ("round", "committed", "version", "best", "devices", "counted"):
        assert getattr(read, name) == getattr(written, name)
    assert read.past == written.past
    assert np.array_equal(read.theta, written.theta)
    assert np.array_equal(read.buffers["mean"], written.buffers["mean"])
    assert np.array_equal(read.fleet.last_covered, written.fleet.last_covered)
    assert np.array_equal(read.fleet.times_covered, written.fleet.times_covered)
    fleet = read.fleet
    assert (dict(fleet.trained), dict(fleet.samples)) == ({"a": 5}, {"a": 7, "b": 9})
    assert fleet.total_samples == 16
    assert fleet.standings == written.fleet.standings
    assert fleet.agreements == written.fleet.agreements
    assert fleet.usual.levels.keys() == {0.5, 0.25}
    for level, seen in fleet.usual.levels.items():
        before = written.fleet.usual.levels[level]
        assert np.array_equal(seen.square, before.square)
        assert np.array_equal(seen.times, before.times)


def test_checkpoint_of_a_large_fleet_does_not_fill_the_files_header(run: Run) -> None:
    groups = {f"axis-{n}": tuple(range(64)) for n in range(50)}
    past = {4: PastRound({f"d{n}": Expected(groups, 0.5, 7) for n in range(200)}, {})}
    written = replace(checkpoint(5), past=past)
    run.save(written)
    assert run.latest().past == past
    path = run.folder / CHECKPOINTS / "00000005.safetensors"
    assert int.from_bytes(path.read_bytes()[:8], "little") < 10_000


def taught(round: int, *devices: str) -> Checkpoint:
    fleet = new_fleet(PLAN).taught(PLAN, dict.fromkeys(devices, PLAN.all_groups()))
    return replace(checkpoint(round), fleet=fleet)


def test_teachers_of_a_round_that_never_committed_are_forgotten(run: Run) -> None:
    run.save(taught(1, "a"))
    run.save(taught(2, "b"))
    path = run.folder / TEACHERS
    torn = path.read_bytes()[:-20]
    path.write_bytes(path.read_bytes() + torn.splitlines()[-1])  # a crash cut it short
    assert set(run.latest().fleet.teachers.devices) == {2}
    run.drop_latest()
    fleet = run.latest().fleet
    assert dict(fleet.teachers.blocks).keys() == {"a"}
    assert set(fleet.teachers.devices) == {1}
    assert not fleet.teachers.news
    run.save(taught(3, "c"))
    assert dict(run.latest().fleet.teachers.blocks).keys() == {"a", "c"}


def test_levels_are_read_as_they_were_written(run: Run) -> None:
    groups = {"hidden": (1, 2)}
    small = LevelScore(0.5, groups, 0.75, {"mean": np.full(3, 0.25, dtype=np.float32)})
    levels = LevelScores((LevelScore(1.0, PLAN.all_groups(), 0.7), small), 0.5)
    run.save(replace(checkpoint(5), levels=levels))
    for read in (run.latest().levels, read_result(run.folder).levels):
        assert (read.rescale, read.deploy, read.best) == (0.5, 0.5, 0.75)
        assert read.accuracies == {1.0: 0.7, 0.5: 0.75}
        assert read.by_level[0.5].groups == groups
        assert np.array_equal(read.by_level[0.5].statistics["mean"], small.statistics["mean"])
        assert not read.by_level[1.0].statistics


def test_checkpoints_kept_are_the_last_and_every_fourth(run: Run) -> None:
    for round in range(1, 12):
        run.save(checkpoint(round))
        run.prune(keep_last=2, keep_every=4)
    assert run.rounds() == [0, 4, 8, 10, 11]


def scored(round: int, accuracy: float | None) -> Checkpoint:
    levels = LevelScores((LevelScore(1.0, PLAN.all_groups(), accuracy),))
    return replace(checkpoint(round, value=round), levels=levels)


def test_best_checkpoint_is_kept_and_can_be_read(run: Run) -> None:
    accuracies = [0.2, 0.6, None, 0.6, 0.9, 0.8, 0.7, 0.9, 0.1]
    for round, accuracy in enumerate(accuracies, 1):
        run.save(scored(round, accuracy))
        run.prune(keep_last=2, keep_every=50)
    assert run.rounds() == [0, 5, 8, 9]
    for which, round in (("best", 5), ("last", 9), (8, 8)):
        result = read_result(run.folder, which)  # type: ignore[arg-type]
        assert result.origin is not None
        assert (result.origin.run, result.origin.round) == (ABOUT.run, round)
        assert {value for each in result.weights.values() for value in each.flat} == {round}
    with pytest.raises(ConfigError, match=r"round 4 has no checkpoint; there are 0, 5, 8, 9"):
        read_result(run.folder, 4)
    run.close()
    with Run(run.folder) as again:  # which has no accuracies in memory
        again.save(scored(10, 0.3))
        again.prune(keep_last=1, keep_every=50)
        assert again.rounds() == [0, 5, 10]
        again.rollback(0)
    with pytest.raises(ConfigError, match=r"no best round.*--round last"):
        read_result(run.folder, "best")


def test_export_of_a_run_refuses_weights_that_nobody_trained(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.folder.parent / "m.safetensors"
    options = ["--format", "safetensors", "--out", str(out)]
    folder, model = str(run.folder), str(run.folder / "model")
    levels = LevelScores((LevelScore(1.0, PLAN.all_groups()), LevelScore(0.5, {"hidden": (2, 3)})))
    for command, says in (
        (["export", folder], "no device has trained this model"),
        (["export", model], "weights that the run started with"),
        (["evaluate", model], "weights that the run started with"),
        (["export", folder, "--round", "nine"], "neither a round's number, best nor last"),
        (["evaluate", folder], "the run measured no accuracy"),
    ):
        with suppress(SystemExit):
            assert main([*command, *(options if command[0] == "export" else [])]) == 2
        assert says in capsys.readouterr().err
        assert not out.exists()
    assert main(["export", model, *options, "--untrained"]) == 0
    half = replace(new_fleet(PLAN), last_covered=PLAN.covers(PLAN.choose({"hidden": (2, 3)})) * 1)
    run.save(replace(checkpoint(1), fleet=half, levels=levels))
    assert main(["export", folder, *options, "--force", "--level", "1"]) == 2
    said = capsys.readouterr().err
    assert "no device ever trained" in said
    assert "(--level 0.5)" in said
    for more in (["--level", "0.5"], ["--untrained"]):
        assert main(["export", folder, *options, "--force", *more]) == 0


def test_second_process_is_refused(run: Run) -> None:
    with pytest.raises(RunError, match="open in another process") as refusal:
        Run(run.folder)
    assert explain_failure(refusal.value) == str(refusal.value)  # without an errno


def test_opened_rounds_and_sessions_only_go_up(run: Run, tmp_path: Path) -> None:
    run.note_opened(3)
    run.note_opened(2)
    assert run.next_session(10.5) == 10
    assert run.next_session(10.5) == 11
    run.close()
    with Run(tmp_path / "run") as again:
        assert again.opened == 3
        assert again.next_session(0.0) == 12


def test_rollback_makes_an_earlier_checkpoint_the_newest(run: Run) -> None:
    for round in range(1, 4):
        run.save(checkpoint(round, value=round))
        run.prune(keep_last=5, keep_every=50)
    run.note_opened(4)
    (run.folder / MEMORY).mkdir()
    run.rollback(2)
    assert run.latest().round == 2
    assert run.latest().theta[0] == 2
    assert run.opened == 4
    assert not (run.folder / MEMORY).exists()
    assert list(read_history(run.folder)) == [{"rolled_back": {"from": 3, "to": 2}}]
    with pytest.raises(ConfigError, match="there are 0, 1, 2"):
        run.rollback(3)


class Crash(Exception):
    """The process ends here."""


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_rollback_that_a_crash_cuts_short_leaves_no_open_round_to_an_older_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    for round in range(1, 4):
        run.save(checkpoint(round))
    (run.folder / ROUND).write_text("{}")
    for name in (MEMORY, MOVEMENTS):
        (run.folder / name).mkdir()
        (run.folder / name / "file").write_text("here")
    synced: list[tuple[Path, set[str], list[int]]] = []
    unlink = os.unlink

    def sync(folder: Path) -> None:
        sync_folder(folder)
        synced.append((folder, {path.name for path in run.folder.iterdir()}, run.rounds()))

    def unlink_some(path: Path) -> None:
        if path.parent.name == CHECKPOINTS and len(run.rounds()) == 4 - removed:
            raise Crash
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "sync_folder", sync)
        patch.setattr(os, "unlink", unlink_some)
        with pytest.raises(Crash):
            run.rollback(0)
    assert run.rounds() == list(range(4 - removed))
    ((folder, left, rounds),) = synced
    assert folder == run.folder
    assert not left & {ROUND, MEMORY, MOVEMENTS}
    assert rounds == [0, 1, 2, 3]
    run.rollback(0)
    assert run.rounds() == [0]


def test_damaged_checkpoint_is_named(run: Run) -> None:
    run.save(checkpoint(1))
    run.prune(keep_last=5, keep_every=50)
    path = run.folder / CHECKPOINTS / "00000001.safetensors"
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(RunError, match="00000001"):
            run.latest()


def test_history_survives_a_line_that_was_cut_short(run: Run) -> None:
    run.record({"round": 1})
    with (run.folder / HISTORY).open("ab") as file:
        file.write(b'{"round": 2, "dev')
    run.record({"round": 3})
    assert [entry["round"] for entry in read_history(run.folder)] == [1, 3]


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run's folder"):
        Run(tmp_path)
    with pytest.raises(ConfigError, match="not a run's folder"):
        list(read_history(tmp_path))
    (tmp_path / "file").write_text("here")
    with pytest.raises(ConfigError, match="not empty"):
        create_run(tmp_path, ABOUT, saved_model())


def test_run_is_private_and_leftovers_are_removed(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(taught(1, "a"))
    run.record({"round": 1})
    run.close()
    assert open_to_others(run.folder) == []
    (run.folder / "broker").mkdir(mode=0o755)  # nobody else can look into the run's own folder
    with Run(run.folder):
        assert caplog.text == ""
    assert open_to_others(run.folder) == []
    run.folder.chmod(0o755)
    (run.folder / HISTORY).chmod(0o644)
    leftover = run.folder / CHECKPOINTS / ".00000002.safetensors.0123abcd.draft"
    leftover.write_bytes(b"half")
    with Run(run.folder):
        assert "2 files and folders could be read by other accounts" in caplog.text
    assert open_to_others(run.folder) == []
    assert not leftover.exists()


def open_to_others(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


def test_newest_checkpoint_that_is_missing_is_noticed(run: Run) -> None:
    for round in (1, 2, 3):
        line = {"round": round, "digest": "…"}
        run.record_line(run.save(replace(checkpoint(round), line=line)))
    run.latest()
    path = run.folder / CHECKPOINTS / "00000003.safetensors"
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(RunError, match=r"round 2, but .* tells of round 3, .* rollback"):
        run.latest()
    path.write_bytes(whole)
    run.rollback(1)  # now it is meant to be missing
    assert run.latest().round == 1
    run.record_line(run.save(replace(checkpoint(4), line={"round": 4, "digest": "…"})))
    assert run.latest().round == 4
    assert [line.get("round") for line in read_history(run.folder)] == [1, 2, 3, None, 4]


def test_best_checkpoint_that_is_missing_is_said(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    scores = [LevelScores((LevelScore(1.0, PLAN.all_groups(), share),)) for share in (0.9, 0.8)]
    for round, levels in enumerate(scores, 1):
        run.save(replace(checkpoint(round), levels=levels, best=(0.9, 1)))
    run.warn_of_best(run.latest())
    assert not caplog.records
    run.close()
    (run.folder / CHECKPOINTS / "00000001.safetensors").unlink()
    with Run(run.folder) as again:
        again.warn_of_best(again.latest())
    assert "best accuracy, 90.00%, is missing" in caplog.text


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_line_of_a_checkpoint_is_completed_once(run: Run, cut: int) -> None:
    run.record_line(run.save(replace(checkpoint(1), line={"round": 1, "digest": "…"})))
    second = run.save(replace(checkpoint(2), line={"round": 2, "digest": "…"}))
    path = run.folder / HISTORY
    before = path.read_bytes()
    run.record_line(second)
    line = path.read_bytes()[len(before) :]
    path.write_bytes(before + line[:cut])  # a crash
    for _ in range(2):
        run.record_line(run.latest())
        assert path.read_bytes() == before + line
    for lost in (bytes(len(line)), bytes(7), line[:5] + b"!" + line[6:]):  # a power cut
        path.write_bytes(before + lost)
        run.record_line(run.latest())
        assert path.read_bytes() == before + line
    news = seal_json({"other": "news"})
    for left in (b"", line[:9]):  # appended before the line was
        path.write_bytes(before + news + left)
        run.record_line(run.latest())
        run.record_line(run.latest())
        assert path.read_bytes() == before + news + line
    path.write_bytes(before + line[:5] + b"!" + line[6:] + news)
    with pytest.raises(RunError, match="repair"):
        run.record_line(run.latest())


def test_run_of_another_format_is_refused(run: Run) -> None:
    path = run.folder / "run.json"
    content = open_json(path.read_bytes())
    run.close()
    path.write_bytes(seal_json({**content, "format": 3}))
    with pytest.raises(RunError, match="format 3"):
        Run(run.folder)
    path.write_text(json.dumps({**content, "format": 1}))
    with pytest.raises(RunError, match="repair adds them"):
        Run(run.folder)
    path.write_text("{}")
    with pytest.raises(RunError, match="damaged"):
        Run(run.folder)
    path.write_bytes(seal_json({"format": 2, "task": "t", "run": "r", "source": "s"}))
    with pytest.raises(RunError, match="batch_size"):
        Run(run.folder)
