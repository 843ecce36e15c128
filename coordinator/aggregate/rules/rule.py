"""The shape of a rule: its input, its result, and its demands on the rounds around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution, Weighting
from coordinator.aggregate.memory import Memory
from coordinator.aggregate.memory.newest import pick
from coordinator.aggregate.robust import Robust, Weighed, robust_mean
from coordinator.aggregate.robust.scratch import spool
from coordinator.errors import ConfigError
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Closing:
    """A round about to close, as a rule sees it."""

    plan: ModelPlan
    round: int
    theta: Float32
    """The global model before the round, in block order; not to be changed."""
    learning_rate: float
    """γ of this round; memory made at another rate is scaled to it."""
    fresh: Sequence[Contribution] = ()
    """Movements made in this round, in device-name order."""
    replayed: Sequence[Contribution] = ()
    """Older movements that skipping devices sent again, in device-name order."""
    silent: Sequence[str] = ()
    """Selected devices that sent nothing, sorted."""
    registered: float = 0.0
    """All devices ever known: their number, or with `weighting = "samples"` their samples. (With
    `"level"` each counts as a whole model would.)"""
    asked: float = 0.0
    """The selected devices: their number, or their samples, as above."""
    memory: Memory | None = None
    robust: Robust = field(default_factory=Robust)
    """Replaces a rule's mean over devices. Movements are clipped already."""
    threads: int = 1
    scratch: Path | None = None
    """Folder for what takes too much RAM; None means the folder for temporary files."""

    @property
    def selected(self) -> int:
        """Number of devices that were asked."""
        return len(self.fresh) + len(self.replayed) + len(self.silent)

    def judge(self, weighed: Sequence[Weighed]) -> tuple[Float32, Sequence[Contribution]]:
        """Average each block over those that hold it, as the robust choice says.

        Returns the mean, and the fresh movements for memory: without the blocks for which they
        were not selected. The first of `weighed` are of the fresh movements, in their order.
        """
        mean = robust_mean(self.plan, weighed, self.robust, threads=self.threads)
        left_out, sizes = mean.left_out[: len(self.fresh)], self.plan.block_sizes
        cut = [number for number, marks in enumerate(left_out) if marks.any()]
        kept = {number: ~left_out[number][self.fresh[number].blocks.ids] for number in cut}
        held = {number: self.fresh[number].blocks for number in cut}
        values = spool(
            (pick(held[each].values, sizes[held[each].ids], kept[each]) for each in cut),
            self.scratch,
        )
        fresh = list(self.fresh)
        for number, left in zip(cut, values, strict=True):
            blocks = Blocks(held[number].ids[kept[number]], left)
            fresh[number] = replace(fresh[number], blocks=blocks)
        return mean.values, fresh

    @property
    def needed_memory(self) -> Memory:
        """The memory. Raises `StateError` if the round has none."""
        if self.memory is None:
            raise StateError("this rule needs a memory, and the round has none")
        return self.memory


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A synchronous rule: movements and memory in, movement of θ out.

    A rule is a value with its options. `move` is deterministic; one that remembers has advanced
    the memory to this round and written the fresh movements to it when it returns.
    """

    whole_models: ClassVar[bool] = False
    """A level below 1 counts as a skip."""
    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "nothing"
    """Kind of entries in memory. Late movements enter it only where it holds movements."""
    sums: ClassVar[bool] = False
    """The memory keeps running sums."""

    weighting: Weighting = "uniform"
    server_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ConfigError(f"weighting is one of {get_args(Weighting)}, not {self.weighting!r}")
        if not (math.isfinite(self.server_rate) and self.server_rate > 0):
            raise ConfigError(f"server_rate must be above 0, not {self.server_rate!r}")

    @property
    def replay_within(self) -> int:
        """Rounds after which a movement can no longer be sent again; 0 means no replays."""
        return 0

    @property
    def counts_within(self) -> int | None:
        """Rounds after which a skipping device's last movement no longer counts; None: no such."""
        return None

    @property
    def ageless(self) -> bool:
        """True if no movement is ever too old for memory or a replay, whatever `max_staleness`."""
        return False

    @property
    def warmup_rounds(self) -> int:
        """Rounds at the start in which every device trains everything."""
        return 0

    @property
    def damping(self) -> float:
        """Factor that memory fades by with every round of age."""
        return 1.0

    def takes(self, part: Contribution) -> bool:
        """Return True if memory should hold this movement."""
        return bool(part.blocks.ids.size)

    def move(self, closing: Closing) -> Float32:
        """Compute the movement of the whole model, in block order; the caller owns the result."""
        raise NotImplementedError

    def moved(self, closing: Closing) -> NDArray[np.bool_]:
        """Mark the blocks that anybody had a say about; asked after `move`."""
        marks = np.zeros(closing.plan.block_count, dtype=np.bool_)
        for blocks in [*(part.blocks for part in closing.fresh), *self.spoken_for(closing)]:
            marks[blocks.ids] = True
        return marks

    def spoken_for(self, closing: Closing) -> Sequence[Blocks]:  # noqa: ARG002
        """Return the older movements that count for devices that skipped."""
        return ()

    def weight(self, part: Contribution) -> float:
        """Weight of a movement."""
        return part.weight(self.weighting)

    def total_weight(self, devices: int, samples: int) -> float:
        """Weight of this many devices that have this many samples together."""
        return float(samples if self.weighting == "samples" else devices)
