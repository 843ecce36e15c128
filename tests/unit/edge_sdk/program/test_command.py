"""Errors of the system become sentences with the path and the cure; pipes may close."""

from __future__ import annotations

import argparse
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_sdk.program.command import confirm, explain_os_error, run_command
from edge_sdk.program.files import PlacedFile, append_line, write_whole
from edge_sdk.protocol.errors import ConfigError


def run(function: Callable[[], int]) -> int:
    def make_parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog="tessera-trial")
        parser.set_defaults(run=lambda _: function())
        return parser

    return run_command(make_parser, [], "onnx")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "may not do that: change its owner or permissions"),
        (errno.ENOSPC, "the disk is full: make room there"),
        (errno.EROFS, "read-only: name another folder"),
        (errno.ENOENT, "there is no such file or folder"),
    ],
)
def test_error_of_the_system_names_the_path_and_the_cure(
    number: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise OSError(number, os.strerror(number), "/srv/run/history.jsonl")

    assert run(fail) == 1
    said = capsys.readouterr().err
    assert said.startswith("tessera-trial: /srv/run/history.jsonl: ")
    assert words in said
    assert said.count("\n") == 1
    assert "Errno" not in said


def test_unusual_error_keeps_its_own_words() -> None:
    assert explain_os_error(OSError("something else")) == "something else"


@pytest.mark.parametrize("step", ["write", "fsync", "pwrite", "posix_fallocate"])
def test_full_disk_is_said_with_the_path_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    placed = PlacedFile(tmp_path / "file.placed")
    monkeypatch.setattr(os, step, full)
    if step == "pwrite":
        with pytest.raises(OSError, match=r"file\.placed"):
            placed.write_at(b"x", 0)
    elif step == "posix_fallocate":
        with pytest.raises(OSError, match=r"file\.placed"):
            placed.reserve(10)
    else:
        for write in (write_whole, append_line):
            with pytest.raises(OSError, match=f"'{path}'") as caught:
                write(path, b"x\n")
            said = explain_os_error(caught.value)
            assert said.startswith(f"{path}: the disk is full")
            assert f"{0 if step == 'fsync' else 2} bytes are needed" in said
    placed.close()


PRINTER = """\
import argparse, sys
from edge_sdk.program.command import run_command

def run(_):
    for number in range(100_000):
        print("round", number)
    return 0

def make_parser():
    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run)
    return parser

sys.exit(run_command(make_parser, [], "onnx"))
"""


def test_closed_pipe_ends_the_program_quietly() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PRINTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stderr is not None
    with program.stdout, program.stderr:
        assert program.stdout.readline() == b"round 0\n"
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.wait() == 141


def test_nobody_to_ask_means_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match=r"It will be deleted\. Nothing was changed: add --yes"):
        confirm("It will be deleted.", yes=False)
    confirm("It will be deleted.", yes=True)


@pytest.mark.parametrize(("answer", "goes_on"), [("y", True), ("YES", True), ("", False)])
def test_person_is_asked(monkeypatch: pytest.MonkeyPatch, answer: str, goes_on: bool) -> None:
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    if goes_on:
        confirm("It will be deleted.", yes=False)
    else:
        with pytest.raises(ConfigError, match="nothing was changed"):
            confirm("It will be deleted.", yes=False)
