"""Whether what a device sent can be used: the checks, and what is left when they pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from coordinator.contribution import Contribution
from coordinator.screening import Scale, Usual, scale_of
from edge_sdk.protocol.block_codec import decode_blocks, decode_header
from edge_sdk.protocol.encoding import Encoding
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.messages import Movement
from edge_sdk.protocol.plan import ModelPlan

GroupsByAxis = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A movement that passed: decoded, with the statistics that came with it."""

    contribution: Contribution
    groups: GroupsByAxis
    movement: Movement
    scale: Scale
    """How large it is, for what is usual."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks as they travelled."""
        return len(self.movement.payload)


class Refused(Exception):
    """A movement that cannot be used; the text is the reason, for its sender."""


def check_arrival(
    plan: ModelPlan,
    movement: Movement,
    assigned: GroupsByAxis | None,
    encoding: Encoding,
    learning_rate: float,
    usual: Usual,
    rms_limit: float | None,
) -> Arrival:
    """Decode and check a movement against what its device was assigned in the round it names.

    `assigned` None: nothing was. Raises `Refused`; nothing else is raised for any movement.
    """
    if movement.plan_hash != plan.hash:
        raise Refused(f"it is for plan {movement.plan_hash[:12]}…, this task has {plan.hash[:12]}…")
    if movement.learning_rate != learning_rate:
        # Memory and replays are scaled by it: a wrong one would multiply the movement.
        raise Refused(
            f"it says it was made at learning rate {movement.learning_rate}; "
            f"the round's is {learning_rate}"
        )
    if assigned is None:
        raise Refused(f"no groups were assigned to {movement.device!r} in round {movement.round}")
    try:
        came = decode_header(plan, movement.payload).encoding
        if replace(came, zstd=encoding.zstd) != encoding:
            raise Refused(f"it is encoded as {came}; this task asks for {encoding}")
        groups, blocks = decode_blocks(plan, movement.payload)
        if plan.choose(groups) != plan.choose(assigned):
            raise Refused("it holds other groups than were assigned")
        plan.check_statistics(movement.statistics, groups)
    except ProtocolError as error:
        raise Refused(str(error)) from error
    arrays = (blocks.values, *movement.statistics.values())
    if not all(np.isfinite(array).all() for array in arrays):
        raise Refused("it holds numbers that are not finite")
    level = movement.level
    scale = scale_of(plan, blocks, level=level, learning_rate=learning_rate)
    objection = None if rms_limit is None else usual.objection(plan, scale, rms_limit)
    if objection is not None:
        raise Refused(objection)
    contribution = Contribution(
        device=movement.device,
        made=movement.round,
        blocks=blocks,
        learning_rate=learning_rate,
        level=level,
        samples=movement.samples,
        keeps_copy=movement.keeps_copy,
    )
    return Arrival(contribution, groups, movement, scale)
