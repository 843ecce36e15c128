"""A file of lines, each a JSON mapping with its checksum, to which lines are only ever appended.

A line without its end was cut short by a crash: readers leave it out, and whoever writes next
removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.checksums import DamagedBytes, open_json, seal_json
from coordinator.run.errors import RunError, repair_advice
from edge_sdk.program.files import PlacedFile, append_line

PRIVATE = 0o600
"""Permissions of a run's files."""
TAIL_BYTES = 1 << 16
"""Bytes that are read at a time to find the last line."""


class Lines:
    """The file, as the only process sees it that writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if there is none."""
        try:
            return os.stat(self.path).st_size
        except FileNotFoundError:
            return 0

    def append(self, entry: Mapping[str, Any]) -> bytes:
        """Append a line, which is returned as it was written."""
        self.trim()
        line = seal_json(entry)
        append_line(self.path, line, mode=PRIVATE)
        return line

    def trim(self) -> int:
        """Remove a line that was cut short; returns the bytes that are left."""
        size = whole_size(self.path)
        self.cut(size)
        return size

    def cut(self, size: int) -> None:
        """Remove everything behind so many bytes."""
        if self.size > size:
            file = PlacedFile(self.path, new=False)
            try:
                file.truncate(size)
                file.sync()
            finally:
                file.close()

    def read(self, start: int, size: int) -> bytes:
        """Read bytes, fewer at the end of the file."""
        if not size or not self.path.is_file():
            return b""
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    def entries(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Read the lines from a place on. Raises `RunError`, which names the damaged line."""
        return read_lines(self.path, start)


def read_lines(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Read a file's lines from a place on. Raises `RunError`, which names the damaged line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        at = start
        for line in file:
            try:
                yield open_json(line)
            except DamagedBytes as error:
                if not line.endswith(b"\n"):
                    return  # cut short by a crash, or not written yet
                raise RunError(
                    f"{path} is damaged in the line at byte {at} ({error}): "
                    f"{repair_advice(path.parent)}"
                ) from error
            at += len(line)


def whole_size(path: Path) -> int:
    """Return the bytes of a file's whole lines; 0 if there is no file."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
