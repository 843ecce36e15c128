"""The files of a source, and their kind by the ends of their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from edge_sdk.data.errors import DataError

FileKind = Literal["arrays", "table", "parquet", "images", "sound"]

SUFFIXES: dict[FileKind, tuple[str, ...]] = {
    "arrays": (".npz", ".npy"),
    "table": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"),
    "sound": (".wav",),
}
_KINDS: dict[str, FileKind] = {
    suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes
}
IN_CLASSES: tuple[FileKind, ...] = ("images", "sound")
"""Kinds that have one folder per class."""
READABLE = (
    ".npz or .npy arrays, a .csv, .tsv or .parquet table, or one folder per class with images or "
    ".wav files"
)


class FoundFile(NamedTuple):
    """A file, and the class that its folder stands for; None: it lies in no class folder."""

    path: Path
    label: str | None


class FoundFiles(NamedTuple):
    """The files of one source, in the order of their names."""

    root: Path
    kind: FileKind
    files: tuple[FoundFile, ...]

    def name_of(self, path: Path) -> str:
        """Return a file's name, below the source's folder, for messages."""
        return path.name if path == self.root else str(path.relative_to(self.root.parent))


def find_files(root: Path) -> FoundFiles:
    """Find the files of a source and recognise their kind. Raises `DataError`."""
    if not root.exists():
        raise DataError(
            f"no data: {root} is not there; data is a folder or a file ({READABLE}), or "
            "file.py:function"
        )
    try:
        found = list(_listed(root))
    except OSError as error:
        raise DataError(f"no data: {root} cannot be read: {error.strerror or error}") from error
    kinds = {_KINDS[each.path.suffix.lower()] for each in found}
    if not kinds:
        what = f"{root.name} is not" if root.is_file() else f"{root} has no file that is"
        raise DataError(f"no data: {what} one of those that can be read: {READABLE}")
    if len(kinds) > 1:
        first = {kind: _first(found, kind) for kind in sorted(kinds)}
        raise DataError(
            f"{root} has files of different kinds, such as "
            f"{' and '.join(path.name for path in first.values())}: keep one kind"
        )
    (kind,) = kinds
    if kind not in IN_CLASSES:
        found = [each for each in found if each.label is None]
        if not found:
            raise DataError(f"no data: {root} has {kind} files only in folders below it")
    elif len({each.label is None for each in found}) > 1:
        loose = next(each.path for each in found if each.label is None)
        raise DataError(f"{loose} lies beside the class folders: move it into one of them")
    return FoundFiles(root, kind, tuple(sorted(found)))


def _listed(root: Path) -> Iterator[FoundFile]:
    if root.is_file():
        if root.suffix.lower() in _KINDS:
            yield FoundFile(root, None)
        return
    for entry in sorted(root.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            for each in entry.iterdir():
                if not each.name.startswith(".") and _readable(each):
                    yield FoundFile(each, entry.name)
        elif _readable(entry):
            yield FoundFile(entry, None)


def _readable(path: Path) -> bool:
    return path.suffix.lower() in _KINDS and path.is_file()


def _first(found: list[FoundFile], kind: FileKind) -> Path:
    return next(each.path for each in found if _KINDS[each.path.suffix.lower()] == kind)
