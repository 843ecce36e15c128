"""Uploads from devices: written to disk as they arrive, checked, kept until their round commits.

    uploads/<n>.part               an upload in progress; deleted when the process ends
    movements/<round>-<device>     a movement kept for a round, and its checksum; deleted when the
                                   round commits. A replay is kept under the round that it answers
    movements.jsonl                the names of those files, so that none is lost unnoticed

Movements are read in place, through a mapping of their file; none is copied into memory. A receipt
tells a device the outcome of an upload. The last few receipts are remembered, because a device that
missed one offers the same bytes again.
"""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from math import prod
from mmap import mmap
from pathlib import Path

from coordinator.checksums import DamagedBytes, checksum, mapped, open_json, open_sealed, seal_json
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.lines import PRIVATE
from edge_sdk.program.files import (
    DiskFull,
    PlacedFile,
    append_line,
    make_folder,
    move,
    remove,
    remove_folder,
    sync_folder,
    waiting_for_room,
)
from edge_sdk.protocol.encoding.codec import part_specs
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.movement import MAX_HEADER_BYTES, decode_movement
from edge_sdk.protocol.messages.round import Movement, Receipt, Replay
from edge_sdk.protocol.messages.transfer import Credit, Offer
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.uploads import Progress, Upload, UploadLimits, Uploads

log = logging.getLogger(__name__)

REMEMBERED = 16
"""Receipts remembered per device."""
OPEN_FILES = 2**16
"""Files that may be open at a time, if the system allows it: each map holds one."""
HEADER_BYTES = 2**16
"""More bytes than the header of any payload of blocks."""


def largest_movement(plan: ModelPlan, encoding: Encoding) -> int:
    """Return the most bytes that a movement of this plan can have."""
    blocks = sum(spec.size_bytes for spec in part_specs(plan.block_sizes, encoding))
    statistics = 8 * sum(prod(buffer.shape) for buffer in plan.buffers if buffer.statistic)
    return blocks + statistics + HEADER_BYTES + 4 + MAX_HEADER_BYTES


class UploadFile(mmap):
    """A mapped file in which an upload is assembled; deleted with the mapping unless kept."""

    path: Path | None

    def __new__(cls, path: Path, size: int) -> UploadFile:
        """Create a file of `size` bytes. Raises `OSError` if the disk has no room."""
        file = PlacedFile(path, mode=0o600)
        try:
            # Reserved now, because a disk that fills up later would kill the process (SIGBUS).
            file.reserve(size)
            made = super().__new__(cls, file.fileno(), size)
        except BaseException:
            remove(path)
            raise
        finally:
            file.close()
        made.path = path
        return made

    def __del__(self) -> None:
        path = getattr(self, "path", None)
        if path is not None:
            with suppress(OSError):  # the next start removes it
                remove(path)

    def keep(self, path: Path) -> None:
        """Make the bytes durable under this name, with their checksum behind them."""
        if self.path is None:
            return
        self.flush()
        file = PlacedFile(self.path, new=False)
        try:
            file.write_at(checksum(memoryview(self)), len(self))
            file.sync()
        finally:
            file.close()
        move(self.path, path)
        self.path = None


class Receiving:
    """All uploads from devices. Of an earlier process's files, only kept movements remain."""

    def __init__(self, uploads: Path, movements: Path, limits: UploadLimits) -> None:
        _allow_open_files()
        remove_folder(uploads)
        for folder in (uploads, movements):
            make_folder(folder, mode=0o700)
        self.folder = uploads
        """Files that are gone with this process."""
        self.full: DiskFull | None = None
        """Why the last offer found no room; None: it found some, or needed none."""
        self._movements = movements
        self._names = movements.with_name(movements.name + ".jsonl")
        self._numbers = count(1)
        self._uploads = Uploads(limits, allocate=self._allocate)
        self._receipts: dict[str, OrderedDict[bytes, Receipt]] = {}

    def offered(self, device: str, offer: Offer, now: float) -> Credit | Receipt:
        """Answer an offer with a credit, or with the receipt of an upload seen before.

        Raises `MessageError` if the offer contradicts itself or names another device.
        """
        known = self._receipts.get(device, OrderedDict()).get(offer.upload)
        if known is not None and offer.device == device:
            return known
        self.full = None
        try:
            return self._uploads.offered(device, offer, now)
        except OSError as error:
            self.full = error if isinstance(error, DiskFull) else None
            return Credit(
                device=device,
                upload=offer.upload,
                missing=((0, offer.chunk_count),),
                window=0,
                reason=f"the coordinator cannot store it: {error.strerror or error}",
            )

    def knows(self, offer: Offer) -> bool:
        """Return True if an upload was offered before and so needs no new room."""
        known = offer.upload in self._receipts.get(offer.device, ())
        return known or self._uploads.knows(offer)

    def expects(self, device: str, payload: bytes) -> bool:
        """Return True if a chunk belongs to an upload in progress. Any thread may ask."""
        return self._uploads.expects(device, payload)

    def received(self, device: str, payload: bytes, now: float) -> Progress:
        """Take a chunk. Raises `MessageError`."""
        return self._uploads.received(device, payload, now)

    def keep(self, upload: Upload, device: str, round: int) -> None:
        """Make an upload durable, as a device's movement for this round."""
        if not isinstance(upload.data, UploadFile):
            raise TypeError("this upload is not in a file of this folder")
        path = self._movements / f"{round:08}-{device}"
        upload.data.keep(path)
        # Neither synced nor needed: the movement is safe. A name that is lost only lets the loss of
        # its file go unnoticed.
        try:
            append_line(self._names, seal_json({"file": path.name}), mode=PRIVATE, synced=False)
        except OSError as error:
            log.warning("cannot note that %s was kept: %s", path, error)

    def settle(self, upload: Upload, receipt: Receipt | None) -> None:
        """Remember the receipt for an upload; None means none, and it may be sent again."""
        device, name = upload.offer.device, upload.offer.upload
        if receipt is None:
            self._uploads.forget(device, name)
            return
        receipts = self._receipts.setdefault(device, OrderedDict())
        receipts[name] = receipt
        if len(receipts) > REMEMBERED:
            receipts.popitem(last=False)

    def kept(self) -> Iterator[Movement | Replay]:
        """Read the kept movements, by round and device. Raises `RunError` for a damaged one.

        Devices keep theirs until the verdict, but a late one, which has its verdict, exists nowhere
        else.
        """
        paths = sorted(self._movements.iterdir())
        if gone := kept_names(self._names) - {path.name for path in paths}:
            raise _lost(self._movements / min(gone), "is missing")
        yield from map(read_kept, paths)

    def clear_kept(self) -> None:
        """Delete the kept movements: they are in the model, or in memory."""
        if self._names.is_file():
            remove(self._names)
            sync_folder(self._names.parent)  # no name may come back without its file
        for path in self._movements.iterdir():
            remove(path)

    def drop_idle(self, now: float) -> list[Offer]:
        """Drop stalled uploads."""
        return self._uploads.drop_idle(now)

    def _allocate(self, size: int) -> UploadFile:
        with waiting_for_room(None):  # the device waits instead, which holds up nobody else
            return UploadFile(self.folder / f"{next(self._numbers)}.part", size)


def _allow_open_files() -> None:
    """Raise the soft limit, often 1024: all movements of a round are mapped until it closes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_kept(path: Path) -> Movement | Replay:
    """Read a kept movement. Raises `RunError` if it is damaged."""
    try:
        movement = decode_movement(open_sealed(mapped(path)))
        number, _, device = path.name.partition("-")
        if movement.device != device:
            raise MessageError(f"it is a movement of {movement.device!r}")
        answered = int(number)
    except (MessageError, ValueError) as error:
        raise _lost(path, f"is damaged ({error})") from error
    return movement if answered == movement.round else Replay(round=answered, movement=movement)


def kept_names(path: Path) -> set[str]:
    """Read the names of the kept movements; lines that cannot be read are logged."""
    if not path.is_file():
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    return {name for line in lines if (name := _name_in(line, path)) is not None}


def _name_in(line: bytes, path: Path) -> str | None:
    try:
        return str(open_json(line)["file"])
    except (DamagedBytes, KeyError) as error:
        log.warning("%s: a line cannot be read (%s)", path, error)
        return None


def _lost(path: Path, problem: str) -> RunError:
    return RunError(f"{path} {problem}: {repair_advice(path.parent.parent)}")


def is_kept(upload: Upload) -> bool:
    """Return True if an upload was made durable."""
    return isinstance(upload.data, UploadFile) and upload.data.path is None


def read_upload(upload: Upload) -> Movement | Replay:
    """Read an upload's movement in place. Raises `MessageError` if it is not the one offered."""
    offer = upload.offer
    movement = decode_movement(upload.data)
    if movement.device != offer.device:
        raise MessageError(f"{offer.device!r} sent a movement of {movement.device!r}")
    if movement.round != offer.round:
        raise MessageError(
            f"the movement is for round {movement.round}, but was offered for {offer.round}"
        )
    return movement if offer.answers is None else Replay(round=offer.answers, movement=movement)
