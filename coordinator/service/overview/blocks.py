"""The model as a map of blocks: who covered each one when, its memory, and its last step."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.screening import PIECE, block_squares
from coordinator.rounds.fleet import FleetRecord
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

MOST = 100_000
"""Blocks of the largest model that is drawn block by block."""


def step_squares(
    after: Float32, before: Float32, sizes: Indices, *, piece: int = PIECE
) -> NDArray[np.float64]:
    """Return the squared norm of each block's step, without a copy of the model."""
    ends = np.cumsum(sizes)
    result, first = np.zeros(len(sizes)), 0
    while first < len(sizes):
        start = int(ends[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(ends, start + piece, side="right")))
        end = int(ends[behind - 1])
        result[first:behind] = block_squares(
            after[start:end] - before[start:end], sizes[first:behind]
        )
        first = behind
    return result


class BlockMap:
    """The map of one model. Its parts that never change are made when they are first read.

    A model of more than `MOST` blocks has its tensors alone.
    """

    def __init__(self, plan: ModelPlan) -> None:
        self._plan = plan

    @cached_property
    def _signatures(self) -> list[list[list[Any]]]:
        plan = self._plan
        return [
            [[axis, group] for axis, group in plan.signature(block)]
            for block in range(plan.block_count)
        ]

    def draw(
        self,
        fleet: FleetRecord | None,
        round: int,
        entries: NDArray[np.int64] | None,
        steps: NDArray[np.float64] | None,
    ) -> dict[str, Any]:
        """Return the map after a round; see `Onlooker.model`. `steps` are root mean squares."""
        plan = self._plan
        none = np.zeros(plan.block_count, dtype=np.int64)
        covered = (none if fleet is None else fleet.times_covered).tolist()
        last = (none if fleet is None else fleet.last_covered).tolist()
        held = [0] * plan.block_count if entries is None else entries.tolist()
        moved = [None] * plan.block_count if steps is None else steps.tolist()
        sizes, names = plan.block_sizes.tolist(), plan.block_tensors.tolist()
        tensors: list[dict[str, Any]] = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "parameters": 0,
                "blocks": [],
            }
            for tensor in plan.tensors
        ]
        for block, signature in enumerate(self._signatures if plan.block_count <= MOST else ()):
            age = round - last[block] if last[block] else None
            movement = moved[block]
            tensor = tensors[names[block]]
            tensor["blocks"].append(
                {
                    "id": block,
                    "parameters": sizes[block],
                    "signature": signature,
                    "covered": covered[block],
                    "last_covered": last[block],
                    "age": age,
                    "memory_age": age if held[block] else None,
                    "movement": movement if movement is not None and movement >= 0 else None,
                }
            )
        axes = [{"name": axis.name, "groups": list(axis.groups)} for axis in plan.axes]
        for drawn, whole in zip(tensors, plan.tensors, strict=True):
            drawn["parameters"] = prod(whole.shape)
        return {"round": round, "axes": axes, "tensors": tensors}
