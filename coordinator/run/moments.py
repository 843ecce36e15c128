"""Moments of the server's optimiser on disk, beside the checkpoint of the same round.

    checkpoints/<n>.moments    header of 64 bytes: magic, optimiser, parameters; then every moment
                               (float32, in block order)

The file of a round is complete on disk before the round's checkpoint appears and is never written
to afterwards, so a crash leaves both or a file without a checkpoint, which is written anew.
Values are read through a map and written a piece at a time: they take no RAM of the process.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from coordinator.aggregate.optimizer import Put, ServerOptimizer
from coordinator.run.folder import CHECKPOINTS, Checkpoint, RunError, moments_path
from edge_sdk.program.files import PlacedFile, sync_folder
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.plan import ModelPlan

log = logging.getLogger(__name__)

MAGIC = b"tessera moments 1"
HEADER = struct.Struct("<24s16sq16x")
ITEM = np.dtype("<f4")


class DiskMoments:
    """Moments in a run's folder."""

    def __init__(
        self, folder: Path, plan: ModelPlan, optimizer: ServerOptimizer, checkpoint: Checkpoint
    ) -> None:
        """Open those of a checkpoint; new ones if it was made without this optimiser.

        Raises `RunError` if the file is missing or damaged.
        """
        self._folder = folder
        self._starts = optimizer.starts
        self._parameters = plan.parameters
        self._header = HEADER.pack(MAGIC, optimizer.name.encode(), plan.parameters)
        if checkpoint.optimizer == optimizer.name:
            self._moments = self._open(checkpoint.round)
            return
        if checkpoint.committed:
            log.warning(
                "the model of round %d was made with server optimiser %r; %r starts anew",
                checkpoint.round,
                checkpoint.optimizer,
                optimizer.name,
            )
        self._moments = [
            np.broadcast_to(np.float32(start), plan.parameters) for start in self._starts
        ]

    @contextmanager
    def updated(self, round: int) -> Iterator[tuple[Sequence[Float32], Put]]:
        """See `ServerMoments`."""
        file = PlacedFile(moments_path(self._folder, round), new=False)

        def put(moment: int, start: int, values: Float32) -> None:
            at = HEADER.size + ITEM.itemsize * (moment * self._parameters + start)
            file.write_at(np.ascontiguousarray(values, ITEM).data, at)

        try:
            file.truncate(self._size)
            file.write_at(self._header, 0)
            yield self._moments, put
            file.sync()
        finally:
            file.close()
        sync_folder(self._folder / CHECKPOINTS)
        self._moments = self._open(round)

    @property
    def _size(self) -> int:
        return HEADER.size + ITEM.itemsize * len(self._starts) * self._parameters

    def _open(self, round: int) -> list[Float32]:
        path = moments_path(self._folder, round)
        try:
            with path.open("rb") as file:
                header, size = file.read(HEADER.size), path.stat().st_size
            if header != self._header or size != self._size:
                raise RunError(
                    f"{path} does not hold the moments of its checkpoint: roll back to an earlier "
                    "round"
                )
            shape = (len(self._starts), self._parameters)
            return list(np.memmap(path, ITEM, mode="r", offset=HEADER.size, shape=shape))
        except FileNotFoundError as error:
            raise RunError(
                f"{path} is missing, and the checkpoint of round {round} needs it: roll back to an "
                "earlier round"
            ) from error
