"""Vectors of the server's optimiser or rule on disk, beside the checkpoint of the same round.

    checkpoints/<n>.moments    header of 64 bytes: magic, optimiser or rule, parameters, checksum;
                               then every vector (float32, in block order)

The file of a round is complete on disk before the round's checkpoint appears and is never written
to afterwards, so a crash leaves both or a file without a checkpoint, which is written anew.
Values are read through a map and written a piece at a time: they take no RAM of the process.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from coordinator.aggregate.optimizer import KeptVectors, Put
from coordinator.checksums import CHECK_BYTES, DamagedBytes, checksum, mapped
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.folder import CHECKPOINTS, Checkpoint, moments_path
from coordinator.run.lines import PRIVATE
from edge_sdk.program.files import PlacedFile, sync_folder
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.plan import ModelPlan

log = logging.getLogger(__name__)

MAGIC = b"tessera moments 2"
HEADER = struct.Struct("<24s16sq8s8x")
"""The checksum is that of the header with zeros in its place, and of the moments."""
PADDING = 8
ITEM = np.dtype("<f4")


class DiskMoments:
    """Moments in a run's folder."""

    def __init__(
        self, folder: Path, plan: ModelPlan, vectors: KeptVectors, checkpoint: Checkpoint
    ) -> None:
        """Open those of a checkpoint; new ones if it was made without this optimiser or rule.

        Raises `RunError` if the file is missing or damaged.
        """
        self._folder = folder
        self._starts = vectors.starts
        self._parameters = plan.parameters
        self._name = vectors.name
        if checkpoint.optimizer == vectors.name:
            self._moments = self._open(checkpoint.round)
            return
        if checkpoint.committed:
            log.warning(
                "the model of round %d was made with server optimiser %r; %r starts anew",
                checkpoint.round,
                checkpoint.optimizer,
                vectors.name,
            )
        self._moments = [
            np.broadcast_to(np.float32(start), plan.parameters) for start in self._starts
        ]

    @property
    def current(self) -> Sequence[Float32]:
        """See `ServerMoments`."""
        return self._moments

    @contextmanager
    def updated(self, round: int) -> Iterator[tuple[Sequence[Float32], Put]]:
        """See `ServerMoments`."""
        file = PlacedFile(moments_path(self._folder, round), new=False, mode=PRIVATE)

        def put(moment: int, start: int, values: Float32) -> None:
            at = HEADER.size + ITEM.itemsize * (moment * self._parameters + start)
            file.write_at(np.ascontiguousarray(values, ITEM).data, at)

        try:
            file.truncate(self._size)
            yield self._moments, put
            file.write_at(self._header(bytes(CHECK_BYTES)), 0)
            written = mmap(file.fileno(), self._size, access=ACCESS_READ)
            file.write_at(self._header(checksum(memoryview(written))), 0)
            file.sync()
        finally:
            file.close()
        sync_folder(self._folder / CHECKPOINTS)
        self._moments = self._open(round)

    @property
    def _size(self) -> int:
        return HEADER.size + ITEM.itemsize * len(self._starts) * self._parameters

    def _header(self, check: bytes) -> bytes:
        return HEADER.pack(MAGIC, self._name.encode(), self._parameters, check)

    def _open(self, round: int) -> list[Float32]:
        path = moments_path(self._folder, round)
        try:
            read_moments(path, self._header(bytes(CHECK_BYTES)), self._size)
            shape = (len(self._starts), self._parameters)
            return list(np.memmap(path, ITEM, mode="r", offset=HEADER.size, shape=shape))
        except FileNotFoundError as error:
            problem = "is missing, and its checkpoint needs it"
            raise _unusable(path, problem) from error
        except DamagedBytes as error:
            raise _unusable(
                path, f"does not hold the moments of its checkpoint ({error})"
            ) from error


def read_moments(path: Path, header: bytes | None = None, size: int | None = None) -> None:
    """Check a file of moments, and that it has this header (without its checksum) and size.

    None: as the file says. Raises `DamagedBytes` and `OSError`.
    """
    data = mapped(path)
    if len(data) < HEADER.size or len(data) != (len(data) if size is None else size):
        raise DamagedBytes(f"it has {len(data)} bytes")
    magic, optimizer, parameters, check = HEADER.unpack(data[: HEADER.size])
    found = HEADER.pack(magic, optimizer, parameters, bytes(CHECK_BYTES))
    padding = data[HEADER.size - PADDING : HEADER.size]
    if found != (found if header is None else header) or any(padding):
        raise DamagedBytes("it begins otherwise")
    if checksum(found, data[HEADER.size :]) != check:
        raise DamagedBytes("its checksum does not match")


def _unusable(path: Path, problem: str) -> RunError:
    folder = path.parent.parent
    return RunError(
        f"{path} {problem}: roll back to an earlier round (tessera-coordinator rollback), or "
        f"{repair_advice(folder)}"
    )
