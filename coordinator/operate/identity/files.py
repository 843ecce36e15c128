"""Files that are written completely or not at all, and are on disk when the call returns."""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from coordinator.aggregate.memory.disk.segments import sync_folder
from coordinator.operate.identity.errors import IdentityError

ARCHIVES = (".tar.gz", ".tgz")


@dataclass(frozen=True, slots=True)
class File:
    """A file's content. `private`: readable by its owner only."""

    content: bytes
    private: bool = False

    @property
    def mode(self) -> int:
        """Permissions of the file."""
        return 0o600 if self.private else 0o644


def write_file(path: Path, file: File) -> None:
    """Write a file completely and sync it, replacing an existing one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # Set the permissions before writing the content.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.content)
            stream.flush()
            os.fchmod(descriptor, file.mode)
            os.fsync(descriptor)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.absolute().parent)


def check_free(out: Path) -> None:
    """Raise `IdentityError` if the path exists or its folder does not."""
    if out.exists():
        raise IdentityError(f"{out} already exists: remove it, or name another path with --out")
    if not out.absolute().parent.is_dir():
        raise IdentityError(f"cannot write {out}: {out.absolute().parent} is not a folder")


def folder_in(out: Path) -> str:
    """Return the name of the bundle's folder, or of the folder in its archive."""
    for ending in ARCHIVES:
        if out.name.endswith(ending):
            return out.name.removesuffix(ending)
    return out.name


def write_bundle(out: Path, files: Mapping[str, File]) -> None:
    """Write files into a new folder, or into an archive of one if `out` ends in .tar.gz."""
    folder = folder_in(out)
    if not out.name.endswith(ARCHIVES):
        out.mkdir(mode=0o700)
        for name, file in files.items():
            write_file(out / name, file)
        return
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        root = tarfile.TarInfo(folder)
        root.type, root.mode, root.mtime = tarfile.DIRTYPE, 0o700, time.time()
        archive.addfile(root)
        for name, file in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(file.content), file.mode, time.time()
            archive.addfile(entry, BytesIO(file.content))
    write_file(out, File(buffer.getvalue(), private=True))
