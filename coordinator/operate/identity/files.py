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
    """What a file holds. `private`: for its owner's eyes alone."""

    content: bytes
    private: bool = False

    @property
    def mode(self) -> int:
        """Its permissions."""
        return 0o600 if self.private else 0o644


def write_file(path: Path, file: File) -> None:
    """Put a file in its place, whole and synced; one that is there is replaced."""
    write_whole(path, file.content, mode=file.mode)


def check_free(out: Path) -> None:
    """Raise `IdentityError` if something is there already, or its folder is not."""
    if out.exists():
        raise IdentityError(f"{out} is there already: remove it, or name another place with --out")
    if not out.absolute().parent.is_dir():
        raise IdentityError(f"cannot write {out}: {out.absolute().parent} is no folder")


def folder_in(out: Path) -> str:
    """The name of the folder that a bundle is, or holds if it is an archive."""
    for ending in ARCHIVES:
        if out.name.endswith(ending):
            return out.name.removesuffix(ending)
    return out.name


def write_bundle(out: Path, files: Mapping[str, File]) -> None:
    """Write files into a new folder; as an archive of one if `out` ends so."""
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
