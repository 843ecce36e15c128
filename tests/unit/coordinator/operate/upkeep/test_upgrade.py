"""A run of the version before, as that version left it when it was killed in round 3."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from coordinator.aggregate.memory import DiskMemory
from coordinator.aggregate.memory.disk.index import MemoryIndex
from coordinator.aggregate.memory.disk.memory import memory_config
from coordinator.cli import main
from coordinator.operate.upkeep import upgrade
from coordinator.run.folder import MEMORY, MOVEMENTS, ROUND, Run, RunError, read_history
from coordinator.run.journal import Journal
from coordinator.run.moments import read_moments
from coordinator.service.courses.parts import make_model
from coordinator.service.receiving import read_kept
from edge_sdk.protocol.encoding.encoding import Encoding


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("run-format-1.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_run_without_checksums_is_refused_and_repair_adds_them(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="repair adds them"):
        Run(old)
    assert main(["verify", str(old)]) == 2
    assert main(["repair", str(old), "--yes"]) == 0
    assert "nothing is lost" in capsys.readouterr().out
    assert main(["verify", str(old)]) == 0
    assert_is_the_run(old)


def assert_is_the_run(folder: Path) -> None:
    lines = list(read_history(folder))
    assert [line["round"] for line in lines] == [1, 2]
    with Run(folder) as run:
        newest = run.latest()
        assert make_model(run.plan, newest, Encoding(), 7).digest == lines[-1]["digest"]
        assert set(newest.fleet.teachers.blocks) == {"a", "b", "slow"}
        run.check_journal(newest.round)
        index = MemoryIndex(folder / MEMORY / "index.sqlite", run.plan.block_count)
        config = memory_config(index)
        index.close()
        memory = DiskMemory(folder / MEMORY, run.plan, config, reserve_bytes=0)
        assert memory.now == 2
        assert memory.recall("slow")
        kept = memory.total.copy()
        memory.recount(["a", "b", "slow"])
        assert memory.total == pytest.approx(kept)
        memory.close()
    opened = Journal(folder / ROUND).read()
    assert opened is not None
    assert opened.round == 3
    assert len([read_kept(path) for path in (folder / MOVEMENTS).iterdir()]) == 2
    read_moments(folder / "checkpoints" / "00000002.moments")


@pytest.mark.parametrize(
    "where", ["_seal_checkpoints", "_seal_bytes", "_seal_memory", "_seal_sums", "write_about"]
)
def test_upgrade_that_was_cut_short_is_taken_up_again(
    old: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def ends(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(upgrade, where, ends)
        with pytest.raises(KeyboardInterrupt):
            upgrade.add_checksums(old)
    assert upgrade.needs_checksums(old)
    upgrade.add_checksums(old)
    assert main(["verify", str(old)]) == 0
    assert_is_the_run(old)
