"""Checks on a movement that a device sent, and the arrival that is left when they pass.

Every value is looked at before a receipt is given, and none is copied: fp32 values are a view of
the upload's map, others stay encoded there (`PackedBlocks`) until their round closes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from coordinator.aggregate.contribution import Contribution, PackedBlocks
from coordinator.aggregate.screening import Scale, Usual, scale_of
from edge_sdk.protocol.encoding.codec import Header, decode_header, decode_payload
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.messages.round import Movement
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.layout import Array, Indices
from edge_sdk.protocol.plan.plan import ModelPlan

GroupsByAxis = Mapping[str, tuple[int, ...]]

MAX_VALUE = 1e9
"""No weight moves this far, and sums over any number of devices stay far from overflow."""

VARIANCE = "running_var"
"""Name of a statistic in torch's normalisation layers that is never below 0."""

PIECE = 2**18
"""Values checked at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A movement that passed the checks, with the statistics that came with it."""

    contribution: Contribution
    groups: GroupsByAxis
    movement: Movement
    scale: Scale
    """Its size, for the record of usual ones."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks on the wire."""
        return len(self.movement.payload)


class MovementRefused(Exception):
    """A movement that cannot be used; the text is the reason, for its sender."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Task of a device in a round; level and samples are those of its bid."""

    groups: GroupsByAxis
    level: float
    samples: int
    limit: float | None = None
    """Longest movement that honest training makes of it (`bound.py`); None: there is no bound."""


def check_arrival(
    plan: ModelPlan,
    movement: Movement,
    expected: Expected | None,
    encoding: Encoding,
    learning_rate: float,
    usual: Usual,
    rms_limit: float | None,
) -> Arrival:
    """Check a movement against the task of its device in the round it names.

    `expected` is None if the device had no task. Level and samples are those of the bid, not of
    the movement, so no device gains weight, or another yardstick, after the fact. Raises
    `MovementRefused`, and nothing else, for any movement that fails.
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
        if came != encoding and replace(came, zstd=came.zstd or encoding.zstd) != encoding:
            raise MovementRefused(f"it is encoded as {came}; this task asks for {encoding}")
        if (chosen := plan.choose(header.groups)) != plan.choose(expected.groups):
            raise MovementRefused("it holds other groups than were assigned")
        ids, sizes = plan.held(chosen).ids, plan.held(chosen).sizes
        blocks = Blocks(ids, _decode(plan, ids, header, movement))
        plan.check_statistics(movement.statistics, header.groups)
    except ProtocolError as error:
        raise MovementRefused(str(error)) from error
    _check_numbers("a value", blocks.values)
    for name, array in movement.statistics.items():
        _check_numbers(f"statistic {name!r}", array)
        if name.endswith(VARIANCE) and (array < 0).any():
            raise MovementRefused(f"statistic {name!r} is a variance below 0")
    scale = scale_of(plan, blocks, level=expected.level, learning_rate=learning_rate)
    length = learning_rate * math.sqrt(float(scale.square @ sizes))
    if expected.limit is not None and not length <= expected.limit:
        raise MovementRefused(
            f"it is {length:.4g} long, and training by this round's rule moves weights by at most "
            f"{expected.limit:.4g} (steps, learning_rate, momentum and clip_norm bound it)"
        )
    objection = None if rms_limit is None else usual.objection(plan, scale, rms_limit)
    if objection is not None:
        raise MovementRefused(objection)
    if came != Encoding():
        blocks = PackedBlocks(ids, partial(_decode, plan, ids, header, movement))
    contribution = Contribution(
        device=movement.device,
        made=movement.round,
        blocks=blocks,
        learning_rate=learning_rate,
        level=expected.level,
        samples=expected.samples,
        keeps_copy=movement.keeps_copy,
    )
    return Arrival(contribution, header.groups, movement, scale)


def _decode(plan: ModelPlan, ids: Indices, header: Header, movement: Movement) -> Float32:
    payload = memoryview(movement.payload)[header.size_bytes :]
    return decode_payload(plan, ids, header.encoding, payload).values


def _check_numbers(what: str, array: Array) -> None:
    flat, largest = array.reshape(-1), 0.0
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        if not piece.flags.aligned:  # numpy copies such at full speed, but compares them slowly
            piece = piece.copy()
        for extreme in (float(np.minimum.reduce(piece)), float(np.maximum.reduce(piece))):
            if not math.isfinite(extreme):  # NaN is both the least and the largest
                raise MovementRefused(f"{what} is not finite")
            largest = max(largest, abs(extreme))
    if largest > MAX_VALUE:
        raise MovementRefused(f"{what} is beyond ±{MAX_VALUE:g}")
