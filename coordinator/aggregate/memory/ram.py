"""Memory in RAM: for simulations and tests. Nothing outlives the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Float64, Made, MemoryConfig, Rounds
from coordinator.aggregate.memory.newest import Memory, pick
from coordinator.aggregate.memory.store import DeviceMemory, Slot, Stored
from coordinator.aggregate.memory.sums import Sums
from coordinator.aggregate.memory.values import VALUE_TYPES, Held, ValueType
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan


class RamMemory(Memory):
    """A memory that lives as long as the process; `commit` has nothing to do."""

    def __init__(self, plan: ModelPlan, config: MemoryConfig) -> None:
        kind = VALUE_TYPES[config.memory_type]
        sums = Sums(plan, kind, totals=config.sums, threads=config.threads)
        super().__init__(plan, config, RamStore(plan, kind), sums)


@dataclass(frozen=True, slots=True, eq=False)
class RamSlot:
    """Room for one movement's values in RAM."""

    values: Held

    def put(self, at: int, values: Held) -> None:
        """See `Slot`."""
        self.values[at : at + len(values)] = values


class RamStore:
    """Movements in a dictionary."""

    def __init__(self, plan: ModelPlan, kind: ValueType) -> None:
        self._sizes = plan.block_sizes
        self._kind = kind
        self._rounds: dict[str, Rounds] = {}
        self._movements: dict[str, dict[int, Stored]] = {}
        self._made: dict[int, set[tuple[str, int]]] = {}
        """By round made: device and key of every movement."""
        self._added = 0

    def kept(self, device: str) -> DeviceMemory:
        """See `Store`."""
        if device not in self._rounds:
            return DeviceMemory(np.zeros(len(self._sizes), dtype=np.int32), ())
        movements = self._movements.get(device, {}).values()
        ordered = sorted(movements, key=lambda stored: (stored.made.round, stored.key))
        return DeviceMemory(self._rounds[device].copy(), ordered)

    def made_before(self, round: int, most: int) -> list[str]:
        """See `Store`."""
        rounds = [made for made in self._made if made < round]
        found = nsmallest(most, ((m, device) for m in rounds for device, _ in self._made[m]))
        return list(dict.fromkeys(device for _, device in found))

    def oldest(self) -> int | None:
        """See `Store`."""
        return min(self._made, default=None)

    def add(self, device: str, made: Made, ids: Indices, scales: Float64, size: int) -> Slot:
        """See `Store`."""
        values = np.empty(size, dtype=self._kind.dtype)
        self._added += 1
        stored = Stored(self._added, made, ids.copy(), values, scales)
        self._movements.setdefault(device, {})[stored.key] = stored
        self._made.setdefault(made.round, set()).add((device, stored.key))
        return RamSlot(values)

    def update(self, device: str, rounds: Rounds, lost: Sequence[tuple[Stored, int, int]]) -> None:
        """See `Store`."""
        self._rounds[device] = rounds.copy()
        movements = self._movements[device]
        for stored, _, left in lost:
            if not left:
                del movements[stored.key]
                self._made[stored.made.round].remove((device, stored.key))
                if not self._made[stored.made.round]:
                    del self._made[stored.made.round]
            elif 2 * left < len(stored.values):
                movements[stored.key] = self._without_dead(stored, rounds)
        if not movements:
            del self._movements[device], self._rounds[device]

    def _without_dead(self, stored: Stored, rounds: Rounds) -> Stored:
        live = stored.live(rounds)
        scales = stored.scales[live] if self._kind.scaled else stored.scales
        values = pick(stored.values, self._sizes[stored.ids], live).copy()
        return Stored(stored.key, stored.made, stored.ids[live], values, scales)

    def prepare(self, sums: Sequence[NDArray[np.generic]]) -> None:
        """See `Store`. There is nothing to make durable."""

    def commit(self, now: int) -> None:
        """See `prepare`."""

    def tidy(self) -> None:
        """See `prepare`."""

    def close(self) -> None:
        """See `Store`."""
        self._rounds.clear()
        self._movements.clear()
        self._made.clear()
