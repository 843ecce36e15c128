"""Whether what a device sent can be used: the checks, and what is left when they pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.screening import Scale, Usual, scale_of
from edge_sdk.protocol.encoding.codec import decode_blocks, decode_header
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.messages.round import Movement
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan

GroupsByAxis = Mapping[str, tuple[int, ...]]

MAX_VALUE = 1e9
"""No weight moves this far, and sums over any number of devices stay far from overflow."""

VARIANCE = "running_var"
"""How torch's normalisation layers call a statistic that is never below 0."""


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


class MovementRefused(Exception):
    """A movement that cannot be used; the text is the reason, for its sender."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a device was to do in a round; level and samples are those of its bid."""

    groups: GroupsByAxis
    level: float
    samples: int


def check_arrival(
    plan: ModelPlan,
    movement: Movement,
    expected: Expected | None,
    encoding: Encoding,
    learning_rate: float,
    usual: Usual,
    rms_limit: float | None,
) -> Arrival:
    """Decode and check a movement against what its device was to do in the round it names.

    `expected` None: nothing. What the movement says of level and samples is not used: the bid's
    count, so nobody gains weight, or another yardstick, after the fact. Raises
    `MovementRefused`, and nothing else, for any movement.
    """
    if movement.plan_hash != plan.hash:
        raise MovementRefused(
            f"it is for plan {movement.plan_hash[:12]}…, this task has {plan.hash[:12]}…"
        )
    if movement.learning_rate != learning_rate:
        # Memory and replays are scaled by it: a wrong one would multiply the movement.
        raise MovementRefused(
            f"it says it was made at learning rate {movement.learning_rate}; "
            f"the round's is {learning_rate}"
        )
    if expected is None:
        raise MovementRefused(
            f"{movement.device!r} has no assignment of round {movement.round}: it got none, "
            "withdrew, or was rejected before"
        )
    try:
        header = decode_header(plan, movement.payload)
        came = header.encoding
        if replace(came, zstd=came.zstd or encoding.zstd) != encoding:
            raise MovementRefused(f"it is encoded as {came}; this task asks for {encoding}")
        if plan.choose(header.groups) != plan.choose(expected.groups):
            raise MovementRefused("it holds other groups than were assigned")
        groups, blocks = decode_blocks(plan, movement.payload)
        plan.check_statistics(movement.statistics, groups)
    except ProtocolError as error:
        raise MovementRefused(str(error)) from error
    _check_numbers("a value", blocks.values)
    for name, array in movement.statistics.items():
        _check_numbers(f"statistic {name!r}", array)
        if name.endswith(VARIANCE) and (array < 0).any():
            raise MovementRefused(f"statistic {name!r} is a variance below 0")
    scale = scale_of(plan, blocks, level=expected.level, learning_rate=learning_rate)
    objection = None if rms_limit is None else usual.objection(plan, scale, rms_limit)
    if objection is not None:
        raise MovementRefused(objection)
    contribution = Contribution(
        device=movement.device,
        made=movement.round,
        blocks=blocks,
        learning_rate=learning_rate,
        level=expected.level,
        samples=expected.samples,
        keeps_copy=movement.keeps_copy,
    )
    return Arrival(contribution, groups, movement, scale)


def _check_numbers(what: str, array: Array) -> None:
    if not np.isfinite(array).all():
        raise MovementRefused(f"{what} is not finite")
    if array.size and max(-float(array.min()), float(array.max())) > MAX_VALUE:
        raise MovementRefused(f"{what} is beyond ±{MAX_VALUE:g}")
