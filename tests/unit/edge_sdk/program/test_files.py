"""Durable files on a real disk: killed or failing writers leave the old content or the new."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from edge_sdk.program.files import (
    PlacedFile,
    append_line,
    lock_file,
    make_folder,
    move,
    remove,
    remove_folder,
    remove_leftovers,
    whole_folder,
    write_whole,
)

ROOT = Path(__file__).resolve().parents[4]
CALLS = ("open", "write", "fsync", "replace", "close")

KILLED = """
import os, signal, sys
from pathlib import Path
from edge_sdk.program.files import whole_folder, write_whole

what, call, times = sys.argv[2], sys.argv[3], int(sys.argv[4])
real, seen = getattr(os, call), 0

def killed(*arguments, **options):
    global seen
    seen += 1
    if seen == times:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)

setattr(os, call, killed)
if what == "file":
    write_whole(Path(sys.argv[1]), b"new" * 1000)
else:
    with whole_folder(Path(sys.argv[1])) as draft:
        write_whole(draft / "a", b"a")
        write_whole(draft / "b", b"b")
"""


def killed_at(path: Path, what: str, call: str, times: int) -> bool:
    """Whether a process was killed at the `times`-th such call of its `os`, or else did it all."""
    command = [sys.executable, "-c", KILLED, str(path), what, call, str(times)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0


def drafts(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".draft")]


@pytest.mark.parametrize("call", CALLS)
def test_killed_writer_leaves_the_old_file_or_the_new(tmp_path: Path, call: str) -> None:
    path, times = tmp_path / "file", 1
    path.write_bytes(b"old")
    while killed_at(path, "file", call, times):
        assert path.read_bytes() in (b"old", b"new" * 1000)
        remove_leftovers(tmp_path)
        assert os.listdir(tmp_path) == ["file"]
        path.write_bytes(b"old")
        times += 1
    assert times > 1, f"{call} is never called"
    assert path.read_bytes() == b"new" * 1000
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
def test_killed_writer_leaves_a_whole_folder_or_none(tmp_path: Path, call: str) -> None:
    path, times = tmp_path / "folder", 1
    while killed_at(path, "folder", call, times):
        if path.exists():
            assert sorted(os.listdir(path)) == ["a", "b"]
            remove_folder(path)
        times += 1
    assert times > 1, f"{call} is never called"
    assert sorted(os.listdir(path)) == ["a", "b"]
    assert drafts(tmp_path) == []  # whoever makes the folder removes what others began


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("data", [b"new", lambda stream: stream.write(b"new")])
def test_write_that_fails_leaves_the_old_file_and_no_draft(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    data: bytes | Callable[[BinaryIO], object],
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="no space"):
            write_whole(path, data)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwrite = os.write, os.pwrite
    data = bytes(range(256)) * 10
    file = PlacedFile(tmp_path / "placed")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
        patch.setattr(os, "pwrite", lambda handle, data, at: pwrite(handle, data[:7], at))
        write_whole(tmp_path / "whole", data)
        write_whole(tmp_path / "streamed", lambda stream: stream.write(data))
        append_line(tmp_path / "lines", data)
        file.write_at(data, 3)
    file.close()
    for name in ("whole", "streamed", "lines"):
        assert (tmp_path / name).read_bytes() == data
    assert (tmp_path / "placed").read_bytes() == bytes(3) + data


def test_writer_may_seek(tmp_path: Path) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(b"0123456789")
        assert stream.tell() == 10
        stream.seek(2)
        stream.write(b"ab")
        stream.seek(0, io.SEEK_END)
        stream.write(b"!")

    write_whole(tmp_path / "file", write)
    assert (tmp_path / "file").read_bytes() == b"01ab456789!"


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_permissions_do_not_depend_on_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "file", b"", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_private_file_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    write = os.write

    def look(handle: int, data: bytes) -> int:
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return write(handle, data)

    monkeypatch.setattr(os, "write", look)
    write_whole(tmp_path / "key", b"secret", mode=0o600)
    assert seen == [0o600]


def test_line_cut_short_by_a_crash_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, b"one\n")
    append_line(path, b"two\n")
    path.write_bytes(path.read_bytes()[:-2])
    append_line(path, b"three\n")
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_folders_are_made_with_those_they_are_in(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", mode=0o700)
    make_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


def test_folder_that_fails_is_not_there(tmp_path: Path) -> None:
    def fails(_: BinaryIO) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), whole_folder(tmp_path / "new") as draft:
        write_whole(draft / "file", fails)
    assert os.listdir(tmp_path) == []


def test_folders_with_names_alike_can_be_made_at_a_time(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "run") as first, whole_folder(tmp_path / "run.1") as second:
        write_whole(first / "a", b"a")
        write_whole(second / "b", b"b")
        with whole_folder(tmp_path / "ru") as third:
            write_whole(third / "c", b"c")
    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("?")) == [
        "ru/c",
        "run.1/b",
        "run/a",
    ]


def test_folder_takes_the_place_of_an_empty_one_only(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with whole_folder(tmp_path / "empty") as draft:
        write_whole(draft / "file", b"")
    assert os.listdir(tmp_path / "empty") == ["file"]
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "empty"):
        pass
    assert os.listdir(tmp_path / "empty") == ["file"]
    assert os.listdir(tmp_path) == ["empty"]


def test_removal_of_what_is_not_there_is_harmless(tmp_path: Path) -> None:
    remove(tmp_path / "file")
    remove_folder(tmp_path / "folder")


def test_removed_folder_takes_no_target_of_a_link_with_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    make_folder(tmp_path / "gone" / "inner")
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    remove_folder(tmp_path / "gone")
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["file"]


def test_moved_file_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    move(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"]
    assert (tmp_path / "b").read_bytes() == b"a"


def test_leftovers_of_others_stay_while_they_are_young(tmp_path: Path) -> None:
    for name in (".young.01234567.draft", ".old.01234567.draft", ".hidden", "a.draft"):
        (tmp_path / name).touch()
    hour_ago = time.time() - 3600
    os.utime(tmp_path / ".old.01234567.draft", (hour_ago, hour_ago))
    remove_leftovers(tmp_path, older_than_s=1800)
    assert sorted(os.listdir(tmp_path)) == [".hidden", ".young.01234567.draft", "a.draft"]
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "a.draft"]


def test_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    os.close(held)
    os.close(lock_file(tmp_path / "lock"))


def test_new_placed_file_overwrites_nothing(tmp_path: Path) -> None:
    file = PlacedFile(tmp_path / "file")
    file.reserve(10)
    file.write_at(b"abc", 4)
    file.truncate(8)
    file.sync()
    assert file.read_at(100, 3) == b"\0abc\0"
    file.close()
    with pytest.raises(FileExistsError):
        PlacedFile(tmp_path / "file")
    again = PlacedFile(tmp_path / "file", new=False)
    assert again.read_at(3, 4) == b"abc"
    again.close()


# -- nobody else does it -------------------------------------------------------------------------

OPERATIONS = re.compile(
    r"\bos\.(fsync|replace|rename|unlink|remove|mkdir|rmdir|write|pwrite|ftruncate|truncate)\b"
    r"|\.(unlink|rmdir|rename|write_bytes)\(|\b(rmtree|mkstemp|NamedTemporaryFile|flock)\b"
)
EXCEPT = {
    "edge_sdk/program/files.py",
    "coordinator/simulate/fleet/shared.py",
    "coordinator/simulate/fleet/engines/connection.py",
}
"""The module that does it, one that unlinks shared memory, which is no file, and one that clears
away the temporary folder of Ray's own programs."""


@pytest.mark.parametrize("package", ["edge_sdk", "coordinator"])
def test_files_are_changed_in_one_module(package: str) -> None:
    others = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in EXCEPT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OPERATIONS.search(line)
    ]
    assert others == []
