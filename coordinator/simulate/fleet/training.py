"""The content of movements: what devices send when their training is simulated, not done.

A study of systems asks when and how much devices train, fetch and send, not what they learn. Then a
movement is zeros, or drawn noise where it is compressed and zeros would be too small: the bytes of
its blocks in the right encoding, made once for each submodel. The coordinator checks, counts and
adds them as any others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from coordinator.simulate.ram import DirectOutlet
from edge_sdk.device.machine import Train
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding, available_encodings
from edge_sdk.protocol.messages.round import Assignment, RoundOpen
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.streams import stream

NOISE = 1e-3
"""Standard deviation of drawn values: about what a few steps move a weight by."""
KEPT_BYTES = 64 * 2**20
"""Most bytes of movements that are kept to be sent again."""

NO_DRAWS = stream(0, "nothing")
"""Stands for a stream from which nothing is drawn."""

GroupsKey = tuple[tuple[str, tuple[int, ...]], ...]


def groups_key(groups: Groups) -> GroupsKey:
    """Return a choice of groups as a key of dictionaries."""
    return tuple((axis, tuple(chosen)) for axis, chosen in groups.items())


@dataclass(frozen=True, slots=True, eq=False)
class MadeMovement:
    """The content of a movement."""

    payload: bytes
    loss: float = 0.0
    statistics: Mapping[str, Array] = field(default_factory=dict)


class FleetTraining(Protocol):
    """Gives devices the model, and the movements that they send."""

    def fetch(self, opened: RoundOpen, assignment: Assignment, outlet: DirectOutlet) -> int:
        """Take the model that an assignment is about; return its bytes on the wire."""

    def make(self, work: Train) -> MadeMovement:
        """Return the movement of a device that finished its training.

        Raises `TrainingError` if this device's training failed, `CoordinatorError` if nothing can
        be trained any more.
        """

    def settle(self, device: str, round: int, *, used: bool) -> None:
        """Note the verdict on a device's movement."""


class HollowTraining:
    """A `FleetTraining` without a trainer: movements of the right size, and nothing in them."""

    def __init__(
        self, plan: ModelPlan, buffers: Mapping[str, Array] | None = None, *, seed: int = 0
    ) -> None:
        """`buffers` are the model's; their statistics are sent back as they are."""
        self._plan = plan
        self._buffers = {} if buffers is None else buffers
        self._seed = seed
        self._made: OrderedDict[tuple[GroupsKey, Encoding], MadeMovement] = OrderedDict()
        self._bytes = 0
        self._statistics = [buffer.name for buffer in plan.buffers if buffer.statistic]

    def fetch(
        self,
        opened: RoundOpen,  # noqa: ARG002  as `FleetTraining` has it
        assignment: Assignment,
        outlet: DirectOutlet,
    ) -> int:
        """See `FleetTraining`; nothing is copied."""
        return outlet.pass_by(assignment)

    def make(self, work: Train) -> MadeMovement:
        """See `FleetTraining`."""
        groups = work.assignment.groups
        key = groups_key(groups), work.opened.up
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._encoded(groups, work.opened.up)
            self._bytes += len(made.payload)
            while self._bytes > KEPT_BYTES and len(self._made) > 1:
                self._bytes -= len(self._made.popitem(last=False)[1].payload)
        return made

    def settle(self, device: str, round: int, *, used: bool) -> None:
        """See `FleetTraining`; nothing depends on it."""

    def _encoded(self, groups: Groups, up: Encoding) -> MadeMovement:
        plan, random = self._plan, stream(self._seed, "hollow")
        ids = plan.block_ids(plan.choose(groups))
        count = int(plan.block_sizes[ids].sum())
        values = np.zeros(count, dtype=np.float32)
        if up.zstd or up.kind == "top-k":
            values = NOISE * random.standard_normal(count, dtype=np.float32)
        encoding = up.agreed(available_encodings())
        payload = encode_blocks(plan, groups, Blocks(ids, values), encoding, random)
        cut = plan.cut_buffers(self._buffers, groups) if self._statistics else {}
        return MadeMovement(payload, statistics={name: cut[name] for name in self._statistics})
