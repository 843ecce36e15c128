"""Small disks that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size_kb: int) -> Iterator[bool]:
    """A disk of its own at this folder; False where we may not mount one."""
    folder.mkdir(parents=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(folder)]
    done = subprocess.run(options, check=False, capture_output=True) if os.geteuid() == 0 else None
    mounted = done is not None and done.returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Use up a disk to its last byte."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
