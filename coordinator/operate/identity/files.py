"""Files of identities with their permissions, one by one or as a bundle."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from coordinator.operate.identity.errors import IdentityError
from edge_sdk.program.files import make_folder, write_whole

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
    write_whole(path, file.content, mode=file.mode)


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
        make_folder(out, mode=0o700)
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
