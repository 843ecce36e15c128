"""Reads the kernel's files, below a root folder that tests and emulation replace.

Nothing here raises: a missing file is normal; one that exists but is unreadable or makes no sense
is unknown and logged, once per file.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Most bytes read of a file; a machine full of containers has long mount tables."""

NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)

PROGRAM_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "data/data/com.termux/files/usr/bin")


class Files:
    """The files below a root. Paths are relative to it, without a leading slash."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.is_machine = root == Path("/")
        """True: this is the machine itself, so system calls describe the same machine."""
        self._told: set[str] = set()

    def text(self, path: str) -> str | None:
        """Return a file's content without surrounding space and NULs; None: unknown."""
        try:
            with open(self.root / path, "rb") as file:
                data = file.read(MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            self.tell(path, "not readable by this user", level=logging.INFO)
            return None
        except (OSError, ValueError) as error:
            self.tell(path, str(error))
            return None
        return data.decode("utf-8", "replace").strip(" \t\r\n\0")

    def number(self, path: str) -> float | None:
        """Return the one number in a file; None: unknown."""
        content = self.text(path)
        if content is None:
            return None
        number = to_number(content)
        if number is None:
            self.tell(path, f"{content[:40]!r} is not a number")
        return number

    def exists(self, path: str) -> bool:
        """True if the path exists, readable or not."""
        try:
            return (self.root / path).exists()
        except (OSError, ValueError):
            return True

    def names(self, folder: str, pattern: str = "*") -> list[str] | None:
        """List a folder, `zone2` before `zone10`; None if it cannot be listed."""
        try:
            names = os.listdir(self.root / folder)
        except (OSError, ValueError):
            return None
        return sorted(fnmatch.filter(names, pattern), key=lambda name: (len(name), name))

    def program(self, name: str) -> str | None:
        """Find a program: on the PATH of the machine itself, in the usual folders of a root."""
        if self.is_machine:
            return shutil.which(name)
        folders = (str(self.root / folder) for folder in PROGRAM_FOLDERS)
        return shutil.which(name, path=os.pathsep.join(folders))

    def tell(self, path: str, why: str, *, level: int = logging.WARNING) -> None:
        """Log that a file is unusable, the first time."""
        if path not in self._told:
            self._told.add(path)
            log.log(level, "%s: %s; its value is unknown", self.root / path, why)


def to_number(text: str) -> float | None:
    """Parse a decimal number; None: it is not one."""
    return float(text) if NUMBER.fullmatch(text) else None
