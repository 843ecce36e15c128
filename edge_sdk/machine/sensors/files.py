"""Reads the kernel's files, below a root folder that tests and emulation replace.

Nothing here raises: a missing file is normal; one that exists but is unreadable or makes no sense
is unknown and logged, once per file.

Sensors are read every second, so this is kept short: no buffers, no path objects. What describes
the machine rather than its state (`lasting`) is read once a minute.
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Most bytes read of a file; a machine full of containers has long mount tables."""

LASTING_S = 60.0
"""Seconds after which what describes the machine is read again."""

MAX_LASTING = 2**12
"""Most descriptions that are kept."""

NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)

PROGRAM_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "data/data/com.termux/files/usr/bin")


_BINARY = getattr(os, "O_BINARY", 0)
_PIECE_BYTES = 1 << 14
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})

T = TypeVar("T")


class Files:
    """The files below a root. Paths are relative to it, without a leading slash."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._prefix = os.path.join(root, "")
        self._clock = clock
        self._lasting: dict[Hashable, tuple[float, object]] = {}
        self.is_machine = root == Path("/")
        """True: this is the machine itself, so system calls describe the same machine."""
        self._told: set[str] = set()

    def text(self, path: str) -> str | None:
        """Return a file's content without surrounding space and NULs; None: unknown."""
        try:
            data = _read(self._prefix + path)
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
            os.stat(self._prefix + path)
        except OSError as error:
            return error.errno not in _ABSENT
        except ValueError:
            return False
        return True

    def names(self, folder: str, pattern: str = "*") -> list[str] | None:
        """List a folder, `zone2` before `zone10`; None if it cannot be listed."""
        try:
            names = os.listdir(self._prefix + folder)
        except (OSError, ValueError):
            return None
        if not names:
            return names
        return sorted(fnmatch.filter(names, pattern), key=lambda name: (len(name), name))

    def lasting(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return what `read` tells: it describes the machine, and so is kept for `LASTING_S`.

        Whatever `read` depends on is part of the key.
        """
        now, found = self._clock(), self._lasting.get(key)
        if found is None or not 0 <= now - found[0] < LASTING_S:
            if len(self._lasting) >= MAX_LASTING:
                self._lasting.clear()
            found = self._lasting[key] = now, read()
        return found[1]  # type: ignore[return-value]

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


def _read(path: str) -> bytes:
    """Return the first `MAX_BYTES` of a file. The kernel gives its own files piece by piece."""
    handle = os.open(path, os.O_RDONLY | _BINARY)
    try:
        data = piece = os.read(handle, _PIECE_BYTES)
        while piece and len(data) < MAX_BYTES:
            piece = os.read(handle, min(_PIECE_BYTES, MAX_BYTES - len(data)))
            data += piece
    finally:
        os.close(handle)
    return data


def to_number(text: str) -> float | None:
    """Parse a decimal number; None: it is not one."""
    return float(text) if NUMBER.fullmatch(text) else None
