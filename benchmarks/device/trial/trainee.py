"""A device with the files of one family of a kit: it takes part in rounds, without a link.

It imports only what a device needs. A round covers what a device does, from the model's chunks to
the movement on its disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.costs.calibration import MachineKey, this_machine
from edge_sdk.decide.costs.work import largest_groups
from edge_sdk.device.stores.movements import FolderMovements
from edge_sdk.machine.snapshot import Snapshot
from edge_sdk.protocol.chunks import Chunks
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Movement, RoundOpen
from edge_sdk.protocol.packs.index import decode_index, unpack_model
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.train.backend import Job

if TYPE_CHECKING:
    from edge_sdk.train.backend import Backend

RULE = LocalRule(learning_rate=1e-4, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one round, in seconds of the given clock."""

    seconds: float
    """Time from the model's chunks to the movement on disk."""
    train_s: float
    step_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Took:
    """One round: its times and its result."""

    times: Times
    moved: Blocks
    movement: Movement


class Trainee:
    """A device with the files of one family."""

    def __init__(
        self,
        folder: Path,
        make_backend: Callable[[Trainee], Backend] | None = None,
        disk: Path | None = None,
    ) -> None:
        """`folder`: the family's, in a kit. `make_backend` None: onnx with one thread. `disk`: a
        folder for movements; None: that of temporary files, which may not be a disk.
        """
        self.folder = folder
        self._disk = disk
        self.plan = decode_plan((folder / "plan").read_bytes())
        self.manifest = decode_manifest((folder / "manifest").read_bytes())
        self.index = decode_index(self.plan, (folder / "index").read_bytes())
        with np.load(folder / "data.npz") as arrays:
            self.data = ArrayData((arrays["x0"],), arrays["targets"])
        self.backend = (make_backend or onnx_backend)(self)

    @property
    def machine(self) -> MachineKey:
        """Return the key of a calibration; sensors play no part here."""
        return this_machine(self.plan, Snapshot())

    def model(self, groups: Groups) -> tuple[Blocks, dict[str, Array]]:
        """Load a submodel's blocks and buffers from the chunks on disk."""
        return unpack_model(self.plan, self.index, groups, _Files(self.folder / "chunks"))

    def opened(self, steps: int, batch: int, rule: LocalRule, encoding: str) -> RoundOpen:
        """Make a round with these parameters."""
        return RoundOpen(
            round=1,
            plan_hash=self.plan.hash,
            local_rule=rule,
            steps=steps,
            batch_size=batch,
            bid_s=1,
            train_deadline_s=1,
            up=Encoding.parse(encoding),
        )

    def check_provider(self, provider: str | None) -> None:
        """Raise `TrainingError` if the graph that ran did so without this execution provider."""
        used = getattr(self.backend, "providers", ())
        if provider is not None and provider not in used:
            raise TrainingError(
                f"onnxruntime has {provider} but did not use it: see its own messages for the "
                "driver or library that is missing"
            )

    def round(
        self, opened: RoundOpen, level: float, clock: Callable[[], float] = time.perf_counter
    ) -> Took:
        """Take part in a round."""
        plan, stamps = self.plan, []

        def timed(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                stamps.append(clock())
                yield batch
            stamps.append(clock())

        started = clock()
        groups = largest_groups(plan, level)
        blocks, buffers = self.model(groups)
        job = Job(
            groups=groups,
            weights=plan.assemble(blocks, groups),
            buffers=buffers,
            rule=opened.local_rule,
            mask_stream=stream(0, "costs", "dropout"),
        )
        batches = self.data.batches(opened.steps, opened.batch_size, stream(0, "costs", "batches"))
        training = clock()
        trained = self.backend.train(job, timed(batches))
        train_s = clock() - training
        moved = plan.scatter(trained.movement, groups)
        movement = Movement(
            device="device",
            round=opened.round,
            plan_hash=plan.hash,
            payload=encode_blocks(plan, groups, moved, opened.up, stream(0, "costs", "up")),
            statistics=trained.statistics,
            learning_rate=opened.local_rule.learning_rate,
            level=level,
            samples=len(self.data),
            loss=trained.metrics.mean_loss,
            train_s=train_s,
            keeps_copy=False,
        )
        with TemporaryDirectory(prefix=".movement-", dir=self._disk) as temporary:
            FolderMovements(Path(temporary)).keep(movement)
        step_s = tuple(after - before for before, after in pairwise(stamps))
        return Took(Times(clock() - started, train_s, step_s), moved, movement)


def onnx_backend(trainee: Trainee, threads: int = 1, provider: str | None = None) -> Backend:
    """Trains the files' graphs; with an execution provider, what it can, and the rest without."""
    from edge_sdk.train.onnx import CPU, OnnxBackend

    files = {path.stem: path.read_bytes() for path in trainee.folder.glob("*.onnx")}
    providers = CPU if provider is None else (provider, *CPU)
    return OnnxBackend(
        trainee.plan, trainee.manifest, files, providers=providers, threads=threads, lean=True
    )


def torch_backend(trainee: Trainee, threads: int = 1) -> Backend:
    """Trains the family's torch module, which is traced again."""
    from benchmarks.device.kit import GROUPS
    from benchmarks.models import FAMILIES
    from coordinator.task.task import make_task
    from edge_sdk.train.torch import TorchBackend

    model = FAMILIES[trainee.folder.name]
    task = make_task(model.model(), model.inputs(2), groups=GROUPS)
    return TorchBackend(task, threads=threads)


class _Files(Chunks):
    """Chunks in a folder, as in a device's cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, hash: bytes, /) -> bytes:
        return (self._folder / hash.hex()).read_bytes()
