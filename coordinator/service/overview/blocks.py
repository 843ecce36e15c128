"""The model as a map of blocks: who covered each one when, its memory, and its last step."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.fleet import FleetRecord
from edge_sdk.protocol.plan.plan import ModelPlan


class BlockMap:
    """The map of one model. Its parts that never change are made when they are first read."""

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
        for block, signature in enumerate(self._signatures):
            age = round - last[block] if last[block] else None
            movement = moved[block]
            tensor = tensors[names[block]]
            tensor["parameters"] += sizes[block]
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
        return {"round": round, "axes": axes, "tensors": tensors}
