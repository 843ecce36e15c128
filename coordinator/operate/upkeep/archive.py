"""A run in one file, to keep or to move.

    pack     = magic, size of the header as 8 bytes, header, files, digests, digest
    header   = JSON with its checksum: task, run, epoch, … and `files`: [path, size], sorted
    files    = their bytes, one behind the other
    digests  = SHA-256 of every file, in order
    digest   = SHA-256 of all of the pack but the files and itself

Whoever made a pack, reading it is safe: sizes have to add up to the file's before anything is
written; a path is made of plain names, below the folder, and names one regular file; nothing is
compressed, linked or executed. A folder appears once every digest was compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from coordinator.checksums import PIECE, DamagedBytes, open_json, seal_json
from coordinator.errors import ConfigError
from coordinator.run.errors import RunError
from coordinator.run.lines import PRIVATE
from edge_sdk.program.files import make_folder, write_whole

MAGIC = b"tessera-pack-1\n\0"
VERSION = 1
MAX_HEADER_BYTES = 2**26
MAX_FILES = 2**18
MAX_PATH_CHARACTERS = 240
MAX_DEPTH = 8
DIGEST_BYTES = 32

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}")

Advance = Callable[[int], object]
"""Is told of bytes that were read or written, for a progress bar."""


class PackError(RunError):
    """A file is no pack, or it is damaged, or not to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackHeader:
    """Facts of a pack."""

    task: str
    run: str
    round: int
    """Newest round ever opened."""
    epoch: tuple[int, str] | None
    """Epoch of the last coordinator that served the run; None: none did."""
    identity: bool
    """True if keys are among the files."""
    version: str
    """Of the program that made it."""
    files: tuple[tuple[str, int], ...]
    """Path and bytes of every file, sorted."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


def list_files(folder: Path, left_out: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Return path and bytes of the files in a folder, but those `left_out` at its top.

    Drafts and locks are left out, too. Raises `RunError` for what is no regular file.
    """
    found = []
    for place, names, files in os.walk(folder):
        here = Path(place)
        top = here == folder
        names[:] = sorted(name for name in names if not (top and name in left_out))
        for name in sorted(files):
            path = here / name
            if (top and name in left_out) or name == "lock" or name.startswith("."):
                continue
            _check_plain(path)
            found.append((path.relative_to(folder).as_posix(), path.lstat().st_size))
        for name in names:
            _check_plain(here / name)
    return sorted(found)


def _check_plain(path: Path) -> None:
    """Raise `RunError` for a link or a special file."""
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RunError(f"{path} is neither a file nor a folder, and cannot be packed: remove it")


def write_pack(
    out: Path, header: PackHeader, place: Callable[[str], Path], heard: Advance = lambda _: None
) -> None:
    """Write a pack, readable by its owner only; `place` tells where a file is.

    Raises `RunError` if a file is not as long as the header says.
    """
    for path, _ in header.files:
        check_path(path)
    content = seal_json({"format": VERSION, **asdict(header)})

    def write(stream: BinaryIO) -> None:
        start = MAGIC + len(content).to_bytes(8, "little") + content
        stream.write(start)
        whole, digests = hashlib.sha256(start), []
        for path, size in header.files:
            digest, left = hashlib.sha256(), size
            with place(path).open("rb") as file:
                while piece := file.read(min(left + 1, PIECE)):
                    left -= len(piece)
                    if left < 0:
                        break
                    digest.update(piece)
                    stream.write(piece)
                    heard(len(piece))
            if left:
                raise RunError(f"{place(path)} changed while it was packed: stop what writes there")
            digests.append(digest.digest())
        for each in digests:
            whole.update(each)
            stream.write(each)
        stream.write(whole.digest())

    write_whole(out, write, mode=PRIVATE)


def read_header(stream: BinaryIO, name: str) -> tuple[PackHeader, bytes]:
    """Read the header of a pack, and the bytes up to its end. Raises `PackError`."""
    start = stream.read(len(MAGIC) + 8)
    if len(start) < len(MAGIC) + 8 or not start.startswith(MAGIC):
        raise PackError(
            f"{name} is not a pack of this version (tessera-coordinator pack makes one)"
        )
    size = int.from_bytes(start[len(MAGIC) :], "little")
    if size > MAX_HEADER_BYTES:
        raise PackError(f"{name} is damaged: a header of {size} bytes")
    content = stream.read(size)
    try:
        found = open_json(content)
        if found["format"] != VERSION:
            raise PackError(f"{name} has format {found['format']!r}; this version reads {VERSION}")
        header = _header(found)
    except PackError:
        raise
    except (DamagedBytes, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PackError(f"{name} is damaged: its header cannot be read ({error})") from error
    _check_paths(header, name)
    behind = stream.seek(0, os.SEEK_END)
    expected = len(start) + size + header.size + DIGEST_BYTES * (len(header.files) + 1)
    if behind != expected:
        raise PackError(f"{name} is damaged: it has {behind} bytes, not {expected}")
    stream.seek(len(start) + size)
    return header, start + content


def _header(found: dict[str, object]) -> PackHeader:
    files, epoch = found["files"], found["epoch"]
    texts = [found[key] for key in ("task", "run", "version")]
    if not isinstance(files, list) or len(files) > MAX_FILES:
        raise TypeError("files is no list, or too long")
    if not all(isinstance(each, str) and len(each) <= 200 for each in texts):
        raise TypeError("a text is none, or too long")
    rows = []
    for path, size in files:
        if not isinstance(path, str) or type(size) is not int or not 0 <= size < 2**56:
            raise TypeError(f"{path!r:.80} of {size!r:.40} bytes is no file")
        rows.append((path, size))
    known: tuple[int, str] | None = None
    if epoch is not None:
        if not isinstance(epoch, list) or len(epoch) != 2:
            raise TypeError("the epoch is none")
        counter, instance = epoch
        if type(counter) is not int or not isinstance(instance, str):
            raise TypeError("the epoch is none")
        known = counter, instance
    number, identity = found["round"], found["identity"]
    if type(number) is not int or type(identity) is not bool:
        raise TypeError("round or identity is wrong")
    task, run, version = map(str, texts)
    return PackHeader(
        task=task,
        run=run,
        round=number,
        epoch=known,
        identity=identity,
        version=version,
        files=tuple(rows),
    )


def check_path(path: str) -> None:
    """Raise `PackError` unless this names a file below a folder, on every system."""
    parts = path.split("/")
    plain = all(_NAME.fullmatch(part) for part in parts)
    if not plain or len(parts) > MAX_DEPTH or len(path) > MAX_PATH_CHARACTERS:
        raise PackError(f"{path!r:.120} is not a name that a pack may hold")


def _check_paths(header: PackHeader, name: str) -> None:
    """Raise `PackError` for paths that are not plain, or that get in each other's way."""
    seen: set[str] = set()
    folders: set[str] = set()
    for path, _ in header.files:
        check_path(path)
        if path == "lock" or path.endswith("/lock"):
            raise PackError(f"{name}: {path} is made anew, and not in a pack")
        folded = path.casefold()  # some file systems do not tell them apart
        if folded in seen:
            raise PackError(f"{name} holds {path} twice")
        seen.add(folded)
        parts = folded.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    if both := seen & folders:
        raise PackError(f"{name} holds {min(both)} as a file and as a folder")


def extract(
    stream: BinaryIO,
    header: PackHeader,
    start: bytes,
    draft: Path,
    name: str,
    heard: Advance = lambda _: None,
) -> None:
    """Write the files of a pack into a new folder, and compare all digests. Raises `PackError`."""
    whole, digests = hashlib.sha256(start), []
    for path, size in header.files:
        place, digest = draft / path, hashlib.sha256()
        make_folder(place.parent, mode=0o700)

        def write(file: BinaryIO, size: int = size, digest: hashlib._Hash = digest) -> None:
            for piece in _pieces(stream, size, name):
                digest.update(piece)
                file.write(piece)
                heard(len(piece))

        write_whole(place, write, mode=PRIVATE)
        digests.append(digest.digest())
    for own, (path, _) in zip(digests, header.files, strict=True):
        if stream.read(DIGEST_BYTES) != own:
            raise PackError(f"{name} is damaged: {path} is not as it was packed")
        whole.update(own)
    if stream.read(DIGEST_BYTES + 1) != whole.digest():
        raise PackError(f"{name} is damaged: its digest does not match")


def _pieces(stream: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    while size:
        piece = stream.read(min(size, PIECE))
        if not piece:
            raise PackError(f"{name} was cut short")
        size -= len(piece)
        yield piece


def check_absent(path: Path) -> None:
    """Raise `ConfigError` unless a new file can be made there."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} already exists: name another file, nothing is overwritten")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist")
