"""Reading what the kernel shows in files, below a root folder that tests and emulation replace.

Nothing here raises: a file that is not there is no news, one that is there and cannot be read or
makes no sense is unknown and logged, once per file.
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
"""Of a file that is looked at; a machine full of containers has long mount tables."""

NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)

PROGRAM_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "data/data/com.termux/files/usr/bin")


class Files:
    """The files below a root. Paths are relative to it, without a leading slash."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.is_machine = root == Path("/")
        """True: this is the machine itself, so that system calls tell of the same machine."""
        self._told: set[str] = set()

    def text(self, path: str) -> str | None:
        """A file's content without space and NULs around it; None: unknown."""
        try:
            with open(self.root / path, "rb") as file:
                data = file.read(MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            self.tell(path, "not readable for this user", level=logging.INFO)
            return None
        except (OSError, ValueError) as error:
            self.tell(path, str(error))
            return None
        return data.decode("utf-8", "replace").strip(" \t\r\n\0")

    def number(self, path: str) -> float | None:
        """The one number in a file; None: unknown."""
        content = self.text(path)
        if content is None:
            return None
        number = to_number(content)
        if number is None:
            self.tell(path, f"{content[:40]!r} is no number")
        return number

    def exists(self, path: str) -> bool:
        """Whether something is there, readable or not."""
        try:
            return (self.root / path).exists()
        except (OSError, ValueError):
            return True

    def names(self, folder: str, pattern: str = "*") -> list[str] | None:
        """Of what a folder holds, `zone2` before `zone10`; None where it cannot be listed."""
        try:
            names = os.listdir(self.root / folder)
        except (OSError, ValueError):
            return None
        return sorted(fnmatch.filter(names, pattern), key=lambda name: (len(name), name))

    def program(self, name: str) -> str | None:
        """Where a program is: on the PATH of the machine itself, in a root's usual folders."""
        if self.is_machine:
            return shutil.which(name)
        folders = (str(self.root / folder) for folder in PROGRAM_FOLDERS)
        return shutil.which(name, path=os.pathsep.join(folders))

    def tell(self, path: str, why: str, *, level: int = logging.WARNING) -> None:
        """Log that a file is of no use, the first time."""
        if path not in self._told:
            self._told.add(path)
            log.log(level, "%s: %s; what it says is unknown", self.root / path, why)


def to_number(text: str) -> float | None:
    """The decimal number that a text is; None: it is none."""
    return float(text) if NUMBER.fullmatch(text) else None
