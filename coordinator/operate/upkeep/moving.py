"""`tessera-coordinator pack` and `unpack`: a backup of a run, or its way to another machine.

A pack holds all that a run needs to go on, to the same bits: no chunks, uploads or converted data,
which are made again, nothing of an embedded broker, and no tokens of the page. Nor may it bring
them: whoever made it would know them. With `--move`, the folder notes that the
run goes on elsewhere, once the pack is on disk: serve refuses it from then on.

An unpacked folder is a copy to the next start (`serve/charge.py`): it goes on unless another
coordinator of the task is online, and claims the next epoch. Every other copy is older from then
on, and refused by what the broker retains.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError
from edge_sdk.program.command import account

if TYPE_CHECKING:
    from coordinator.operate.upkeep.archive import Advance

IDENTITY = "identity"
MADE_ANEW = (
    *("uploads", "chunks", "evaluation", "root", "broker", "broker.toml", "control.sock"),
    "http",
)
"""Entries of a run's folder that a start makes anew; those in `http` are tokens of the page."""
LEFT_OUT = (*MADE_ANEW, IDENTITY)
"""These, and the authority, which is asked for."""
STOP_S = 600.0
"""Seconds to wait for a served run to stop."""
POLL_S = 0.2


def add_commands(commands: Any) -> None:
    """Add the commands to a parser."""
    pack = commands.add_parser(
        "pack",
        help="write a run into one file, to keep or to move",
        description=(
            "Writes all that a run needs to go on into one file with checksums, readable by its "
            "owner only. The run must be stopped (--stop stops it), and is checked first. The file "
            "is not encrypted: with --identity it holds the keys of the certificate authority. "
            "run.toml, the task's code and test data are yours to copy."
        ),
        epilog=(
            "examples:\n"
            "  tessera-coordinator pack run --out monday.pack            a backup; the run stays\n"
            "  tessera-coordinator pack run --out run.pack --stop --move --identity\n"
            "  tessera-coordinator unpack run.pack --to run              there, then serve"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pack.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    pack.add_argument("--out", type=Path, metavar="FILE", required=True, help="new file to write")
    pack.add_argument(
        "--move",
        action="store_true",
        help="mark this folder: the run goes on elsewhere, and serve refuses it here",
    )
    pack.add_argument(
        "--stop", action="store_true", help="stop the run first, if it is served; its round resumes"
    )
    pack.add_argument(
        "--identity",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="DIR",
        help="with the certificate authority, its keys and open join codes (default: that of the "
        "last start, or identity in the run's folder or beside it)",
    )
    pack.set_defaults(run=_pack)
    unpack = commands.add_parser(
        "unpack",
        help="make a run's folder from a pack",
        description=(
            "Compares everything in a pack with its checksums and makes a run's folder of it, "
            "completely or not at all. Serving it takes charge of the task; other copies are then "
            "refused. The folder [run] folder of run.toml has to name it."
        ),
        epilog="example: tessera-coordinator unpack run.pack --to run",
    )
    unpack.add_argument("file", type=Path, metavar="FILE", help="made by pack")
    unpack.add_argument(
        "--to", type=Path, metavar="DIR", required=True, help="new or empty folder for the run"
    )
    unpack.set_defaults(run=_unpack)


# -- pack ----------------------------------------------------------------------------------------


def pack_run(
    folder: Path,
    out: Path,
    *,
    move: bool = False,
    identity: Path | None = None,
    progress: Callable[[str, int], Advance] = lambda _words, _size: lambda _: None,
) -> int:
    """Pack a run that nobody serves; returns the bytes of the file.

    Raises `ConfigError`, and `RunError` if the run is open elsewhere or damaged.
    """
    from coordinator.operate.joining.codes import FOLDER as JOIN
    from coordinator.operate.upkeep.archive import PackHeader, check_absent, list_files, write_pack
    from coordinator.operate.upkeep.inspection import Inspection
    from coordinator.run.errors import RunError
    from coordinator.run.folder import locked, read_about, read_counters, write_counters
    from edge_sdk import __version__

    check_absent(out)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{out} lies in the run's folder: name a file elsewhere")
    with locked(folder):
        about, _ = read_about(folder)
        for found in Inspection(folder).all():
            if found.condition != "good":
                raise RunError(
                    f"{folder / found.path} is {found.condition}: {found.problem}; see what "
                    f"tessera-coordinator repair {folder} can save, then pack again"
                )
        counters = read_counters(folder)
        left_out = [*LEFT_OUT, *(() if identity else (JOIN,))]
        files = list_files(folder, left_out)
        if identity is not None:
            files += [(f"{IDENTITY}/{path}", size) for path, size in list_files(identity)]
        epoch = counters.epoch
        header = PackHeader(
            task=about.task,
            run=about.run,
            round=counters.opened,
            epoch=None if epoch is None else (epoch.counter, epoch.instance),
            identity=identity is not None,
            version=__version__,
            files=tuple(sorted(files)),
        )

        def place(path: str) -> Path:
            first, _, rest = path.partition("/")
            return identity / rest if identity and first == IDENTITY else folder / path

        _drop_drafts(out)
        write_pack(out, header, place, progress("packs", header.size))
        if move:
            write_counters(folder, replace(counters, moved=round(time.time(), 3)))
    return out.stat().st_size


def _drop_drafts(out: Path) -> None:
    """Remove what a killed pack of this name left."""
    from edge_sdk.program.files import remove

    for draft in out.absolute().parent.glob(f".{out.name}.????????.draft"):
        remove(draft)


def find_identity(folder: Path, named: Path) -> Path:
    """Return the folder of the authority; `named` empty: it is looked for. Raises `ConfigError`."""
    places = [named] if named.name else _usual_places(folder)
    found = _authority_in(places)
    if found is None:
        looked = " nor ".join(map(str, places))
        raise ConfigError(f"there is no certificate authority in {looked}: name its folder")
    return found


def _usual_places(folder: Path) -> list[Path]:
    """Return the places of a run's authority: that of the last start, and those by default."""
    from coordinator.checksums import open_json
    from coordinator.run.folder import START

    places = [folder / IDENTITY, folder.absolute().parent / IDENTITY]
    with suppress(OSError, ValueError, KeyError, TypeError):  # a run does not need that file
        places.insert(0, Path(open_json((folder / START).read_bytes())["authority"]))
    return places


def _authority_in(places: list[Path]) -> Path | None:
    return next((each for each in places if (each / "ca.key").is_file()), None)


def left_behind(folder: Path, *, move: bool) -> str | None:
    """Say which authority a pack without one leaves behind; None: none is known."""
    found = _authority_in(_usual_places(folder))
    if found is None:
        return None
    said = f"warning: the pack is without the certificate authority in {found}"
    if not move:
        return f"{said}: keep a copy of it, or pack with --identity"
    return (
        f"{said}. Without it, serve makes a new one, and no device that has joined can connect: "
        f"copy {found} to the other machine, beside run.toml, or pack with --identity"
    )


def stop_run(folder: Path, *, wait_s: float = STOP_S, move: bool = False) -> None:
    """Let the process that serves a run stop, and wait until it has. Raises `ControlError`."""
    from coordinator.run.errors import RunError
    from coordinator.run.steering.audit import MOVING
    from edge_sdk.program.control import NotServedError, ask_run

    try:
        by = f"{account()} {MOVING}" if move else account()
        ask_run(folder, "stop", when="now", by=by)
    except NotServedError:
        return
    until = time.monotonic() + wait_s
    while not _is_free(folder):
        if time.monotonic() > until:
            raise RunError(f"{folder} did not stop within {wait_s:.0f} s; nothing was packed")
        time.sleep(POLL_S)


def _is_free(folder: Path) -> bool:
    """True if no process has a run open."""
    from coordinator.run.errors import RunError
    from coordinator.run.folder import locked

    try:
        with locked(folder):
            return True
    except RunError:
        return False


# -- unpack --------------------------------------------------------------------------------------


def unpack_run(
    file: Path,
    to: Path,
    *,
    progress: Callable[[str, int], Advance] = lambda _words, _size: lambda _: None,
) -> dict[str, Any]:
    """Make a run's folder from a pack; returns its facts. Raises `ConfigError`, `PackError`."""
    from coordinator.operate.joining.codes import FOLDER as JOIN
    from coordinator.operate.upkeep.archive import PackError, extract, read_header
    from coordinator.run.folder import (
        check_model,
        make_private,
        read_about,
        read_counters,
        write_counters,
    )
    from coordinator.task.saved_model import check_folder_free
    from edge_sdk.program.files import free_bytes, whole_folder

    if not file.is_file():
        raise ConfigError(f"{file} is not a file")
    check_folder_free(to, "unpack the run")
    with file.open("rb") as stream:
        header, start = read_header(stream, str(file))
        for path, _ in header.files:
            first = path.partition("/")[0].casefold()
            if first in MADE_ANEW or (first in (IDENTITY, JOIN) and not header.identity):
                raise PackError(f"{file} holds {path}, which no pack of a run has")
        free = free_bytes(to)
        if free and header.size > free:
            raise ConfigError(f"{to}: {header.size:,} bytes are needed, {free:,} are free")
        with whole_folder(to) as draft:
            draft.chmod(0o700)
            extract(stream, header, start, draft, str(file), progress("unpacks", header.size))
            about, checks = read_about(draft)
            check_model(draft, checks)
            counters = read_counters(draft)
            epoch = counters.epoch
            known = None if epoch is None else (epoch.counter, epoch.instance)
            if (about.task, about.run, known) != (header.task, header.run, header.epoch):
                raise PackError(f"{file} is damaged: its files are of another run than it says")
            if counters.moved is not None:  # it was packed a second time
                write_counters(draft, replace(counters, moved=None))
            _make_lock(draft, counters.place)
            make_private(draft)
    return {
        "folder": str(to),
        "task": header.task,
        "run": header.run,
        "round": header.round,
        "files": len(header.files),
        "size": header.size,
        "identity": header.identity,
        "epoch": None if header.epoch is None else header.epoch[0],
    }


def _make_lock(folder: Path, place: int | None) -> None:
    """Make the lock, at another inode than the one it was packed at: this folder is a copy."""
    from coordinator.run.folder import LOCK
    from coordinator.run.lines import PRIVATE
    from edge_sdk.program.files import move, write_whole

    lock, spare = folder / LOCK, folder / f"{LOCK}-2"
    write_whole(lock, b"", mode=PRIVATE)
    if lock.stat().st_ino == place:
        write_whole(spare, b"", mode=PRIVATE)  # while the first one has the inode
        move(spare, lock)


# -- commands ------------------------------------------------------------------------------------


@contextmanager
def _bar() -> Iterator[Callable[[str, int], Advance]]:
    """Give a progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:

        def begin(words: str, size: int) -> Advance:
            task = bar.add_task(words, total=size)
            return lambda count: bar.advance(task, count)

        yield begin


def _pack(arguments: argparse.Namespace) -> int:
    from edge_sdk.program.control import is_served

    folder, out = arguments.folder, arguments.out
    named: Path | None = arguments.identity
    identity = None if named is None else find_identity(folder, named)
    if arguments.stop:
        stop_run(folder, move=arguments.move)
    elif is_served(folder):
        raise ConfigError(f"{folder} is being served: stop it first, or add --stop")
    with _bar() as progress:
        size = pack_run(folder, out, move=arguments.move, identity=identity, progress=progress)
    print(f"{out}: {size:,} B")
    if identity is not None:
        print(f"it holds the keys of {identity}, unencrypted: whoever reads it can admit devices")
    elif warning := left_behind(folder, move=arguments.move):
        print(warning, file=sys.stderr)
    if arguments.move:
        print(f"{folder}: serve refuses this folder from now on, unless with --take-over")
    return 0


def _unpack(arguments: argparse.Namespace) -> int:
    with _bar() as progress:
        found = unpack_run(arguments.file, arguments.to, progress=progress)
    print(
        f"{found['folder']}: run {found['run']} of task {found['task']}, up to round "
        f"{found['round']}, {found['files']} files, {found['size'] / 1e6:.1f} MB"
    )
    print("to go on: tessera-coordinator serve --config run.toml, with this folder as [run] folder")
    return 0
