"""The faulty disk itself: what a cut leaves, and what a full disk refuses."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from benchmarks.aggregate.durability.disk import Fault, FaultyDisk, Killed
from edge_sdk.program.files import (
    DiskFull,
    PlacedFile,
    append_line,
    remove,
    waiting_for_room,
    write_whole,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old").write_bytes(b"old")
    return tmp_path / "run"


def cut(folder: Path, how: str, work: object = None) -> dict[str, bytes]:
    """What a cut at the end leaves of a run in which a file is written, and another only begun."""
    left = folder.with_name(f"left-{how}")
    with FaultyDisk(folder, left) as disk:
        write_whole(folder / "whole", b"whole")
        file = PlacedFile(folder / "placed")
        file.write_at(b"placed", 0)
        remove(folder / "old")
        with pytest.raises(Killed):
            disk.die(cut=how)
        file.close()
    return {path.name: path.read_bytes() for path in left.iterdir()}


def test_cut_leaves_what_was_synced_and_may_leave_more(folder: Path) -> None:
    def again(how: str) -> dict[str, bytes]:
        for path in folder.iterdir():
            path.unlink()
        (folder / "old").write_bytes(b"old")
        return cut(folder, how)

    assert again("nothing") == {"whole": b"whole", "old": b"old"}
    assert again("empty") == {"whole": b"whole", "placed": b""}
    assert again("zeros") == {"whole": b"whole", "placed": bytes(6)}
    assert again("unnamed") == {"whole": b"whole", "old": b"old"}
    for number in (1, 2, 3):
        left = again(f"mixed-{number}")
        assert left.pop("whole") == b"whole"
        assert left.pop("old", b"old") == b"old"
        assert left.pop("placed", b"") in (b"", bytes(6), b"placed", b"pla")
        assert not left


def test_process_that_ended_changes_nothing_more(folder: Path) -> None:
    left = folder.with_name("left")
    with FaultyDisk(folder, left, Fault(1, "kill")) as disk:
        with pytest.raises(Killed):
            write_whole(folder / "whole", b"whole")
        with pytest.raises(Killed):
            write_whole(folder / "other", b"other")
        remove(folder / "old")
    assert [str(step) for step in disk.steps] == ["open .whole.draft", "write .whole.draft"]
    assert (left / "old").exists()


def test_torn_line_is_half_a_line(folder: Path) -> None:
    left = folder.with_name("left")
    with FaultyDisk(folder, left, Fault(1, "torn")), pytest.raises(Killed):
        append_line(folder / "lines", b"0123456789\n")
    assert (left / "lines").read_bytes() == b"01234"


def test_full_disk_is_named_with_its_bytes_and_waited_for(folder: Path) -> None:
    with FaultyDisk(folder, folder.with_name("left"), Fault(1, "full")) as disk:
        with pytest.raises(DiskFull, match="5 bytes are needed, 0 are free") as caught:
            write_whole(folder / "whole", b"whole")
        assert (caught.value.path, caught.value.needed) == (folder / "whole", 5)
        assert caught.value.errno == errno.ENOSPC
        disk.full = True
        waits: list[int] = []

        def wait(full: DiskFull) -> None:
            waits.append(full.needed)
            if len(waits) == 2:
                disk.make_room()

        with waiting_for_room(wait):
            write_whole(folder / "whole", b"whole")
        assert waits == [0, 0]
    assert (folder / "whole").read_bytes() == b"whole"


def test_commits_of_sqlite_are_steps(folder: Path) -> None:
    left = folder.with_name("left")
    with FaultyDisk(folder, left) as disk:
        base = sqlite3.connect(folder / "base.sqlite", isolation_level=None)
        base.execute("PRAGMA journal_mode = WAL")
        base.executescript("BEGIN; CREATE TABLE t (n); COMMIT;")
        for number in range(3):
            base.execute("BEGIN")
            base.execute("INSERT INTO t VALUES (?)", (number,))
            if number == 2:
                with pytest.raises(Killed):
                    disk.die(cut="nothing")
                break
            base.execute("COMMIT")
        base.close()
    assert [str(step) for step in disk.steps] == ["commit base.sqlite"] * 3
    with sqlite3.connect(left / "base.sqlite") as found:
        assert found.execute("SELECT n FROM t").fetchall() == [(0,), (1,)]
    found.close()
