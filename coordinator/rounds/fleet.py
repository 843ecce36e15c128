"""Facts about devices and blocks from past rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.screening import Scale, Usual
from coordinator.rounds.persistent import PersistentMap
from coordinator.rounds.reputation import (
    Agreements,
    DeviceStanding,
    Standings,
    agreed,
    barred,
    disagreeing,
    released,
)
from edge_sdk.program.records import replace
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import Chosen, Groups, ModelPlan

MIN_CLAIMS = 3
"""Claims of samples that have a median of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class Teachers:
    """Devices that ever trained each block; an immutable record."""

    devices: Indices
    """Per block, the number of devices whose movements ever contained it."""
    samples: Indices
    """Per block, the training samples of those devices, as they last reported them."""
    blocks: PersistentMap[str, bytes] = field(default_factory=PersistentMap)
    """Per device, the blocks that it ever trained: one bit each, as `numpy.packbits` packs them."""
    news: Mapping[str, bytes] = field(default_factory=dict)
    """The entries of `blocks` that are not on disk yet."""

    def joined(self, trained: Mapping[str, bytes], samples: Mapping[str, int]) -> Teachers:
        """Return the record with more blocks of some devices, whose samples are these."""
        alike: dict[tuple[bytes, bytes], list[str]] = {}
        for name, bits in trained.items():
            alike.setdefault((self.blocks.get(name, b""), bits), []).append(name)
        devices, total = self.devices.copy(), self.samples.copy()
        grown: dict[str, bytes] = {}
        for (known, bits), names in alike.items():
            had, got = self._flags(known), self._flags(bits)
            if (more := got & ~had).any():
                devices += more * len(names)
                total += more * sum(samples.get(name, 0) for name in names)
                grown |= dict.fromkeys(names, np.packbits(had | got).tobytes())
        if not grown:
            return self
        return Teachers(devices, total, self.blocks.merging(grown), {**self.news, **grown})

    def resampled(self, changes: Mapping[str, int]) -> Teachers:
        """Return the record after devices reported so many more samples than before, or fewer."""
        total = self.samples.copy()
        for name, more in changes.items():
            if (bits := self.blocks.get(name)) is not None:
                total += self._flags(bits) * more
        return replace(self, samples=total)

    def _flags(self, bits: bytes) -> NDArray[np.bool_]:
        packed = np.frombuffer(bits or bytes(-(-len(self.devices) // 8)), np.uint8)
        return np.unpackbits(packed, count=len(self.devices)).astype(bool)


@dataclass(frozen=True, slots=True, eq=False)
class FleetRecord:
    """An immutable record; its arrays are never changed. Made by `new_fleet`."""

    last_covered: Indices
    """Per block, the round that last covered it; 0 means never."""
    times_covered: Indices
    """Per block, the number of movements that ever contained it."""
    teachers: Teachers
    trained: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """Per device, the last round in which its own fresh movement counted."""
    samples: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """Training samples, as each device last reported them."""
    total_samples: int = 0
    """Training samples of all devices together."""
    usual: Usual = field(default_factory=Usual)
    """Usual size of movements at each level, of those that counted."""
    standings: Standings = field(default_factory=PersistentMap)
    """Devices that were refused or stayed silent."""
    agreements: Agreements = field(default_factory=PersistentMap)
    """Agreement of each device with the others of its rounds, where it is measured."""
    norms: NDArray[np.float64] | None = None
    """Per block, the squared norm of the global weights; None if they are not known."""
    importance: NDArray[np.float64] | None = None
    """Per block, the mean over devices of its squared movement, over γ², in the last round that
    measured it (`MeasuringMasks`); None: none did."""

    def heard(self, bids: Iterable[Bid]) -> FleetRecord:
        """Return the record updated with the facts in a round's bids."""
        known = self.samples
        said = {
            bid.device: bid.samples
            for bid in bids
            if bid.samples and bid.samples != known.get(bid.device)
        }
        more = {name: number - known.get(name, 0) for name, number in said.items()}
        return replace(
            self,
            samples=known.merging(said),
            total_samples=self.total_samples + sum(more.values()),
            teachers=self.teachers.resampled(more),
        )

    def capped(self, bids: Iterable[Bid], factor: float) -> list[Bid]:
        """Return a round's bids with no more samples than `factor` times their median.

        Nobody can check the number that a device claims. Fewer than three claims have no median
        worth the name: then the mean of all devices heard so far is one of them.
        """
        found = list(bids)
        said = [bid.samples for bid in found if bid.samples]
        if len(said) < MIN_CLAIMS and self.total_samples:
            said.append(self.total_samples // len(self.samples))
        if not said:
            return found
        most = math.ceil(factor * sorted(said)[(len(said) - 1) // 2])
        return [replace(bid, samples=most) if bid.samples > most else bid for bid in found]

    def compared(self, round: int, found: Mapping[str, float], limit: float) -> FleetRecord:
        """Return the record once movements of a round were compared with one another.

        Those who lead away from the others are quarantined.
        """
        known = agreed(self.agreements, found)
        away = disagreeing(known, found, limit)
        return replace(self, agreements=known, standings=barred(self.standings, round, away))

    def released(self, device: str) -> FleetRecord:
        """Return the record in which nothing is held against a device."""
        known = self.agreements
        return replace(
            self,
            standings=released(self.standings, device),
            agreements=known.dropping(device) if device in known else known,
        )

    def shut_out(self, device: str, round: int, reason: str) -> FleetRecord:
        """Return the record in which an operator quarantined a device."""
        standing = DeviceStanding(reason=reason, quarantined=round)
        return replace(self, standings=self.standings.putting(device, standing))

    def learned(self, scales: Mapping[str, Scale]) -> FleetRecord:
        """Return the record once these movements counted, whatever their order."""
        return replace(self, usual=self.usual.learn(*(scales[name] for name in sorted(scales))))

    def measured(self, plan: ModelPlan, scales: Mapping[str, Scale]) -> FleetRecord:
        """Return the record after a round that measured, whatever the order of its movements.

        Those of the whole model count. Without any, the earlier measurement stays.
        """
        blocks = len(plan.block_ids(plan.choose(plan.full_groups())))
        whole = [scales[name] for name in sorted(scales) if len(scales[name].ids) == blocks]
        if not whole:
            return self
        total = np.zeros(plan.block_count)
        for scale in whole:
            total[scale.ids] += scale.square
        return replace(self, importance=total * plan.block_sizes / len(whole))

    def covered(self, plan: ModelPlan, round: int, counted: Mapping[str, Groups]) -> FleetRecord:
        """Return the record after a round in which these devices trained these groups."""
        coverage = plan.coverage(counted.values())
        return replace(
            self.taught(plan, counted),
            last_covered=np.where(coverage > 0, round, self.last_covered),
            times_covered=self.times_covered + coverage,
            trained=self.trained.merging(dict.fromkeys(counted, round)),
        )

    def taught(self, plan: ModelPlan, trained: Mapping[str, Groups]) -> FleetRecord:
        """Return the record with these devices among the teachers of these groups."""
        packed: dict[Chosen, bytes] = {}
        found = {}
        for name, groups in trained.items():
            if (chosen := plan.choose(groups)) not in packed:
                packed[chosen] = np.packbits(plan.covers(chosen)).tobytes()
            found[name] = packed[chosen]
        return replace(self, teachers=self.teachers.joined(found, self.samples))

    def settled(self) -> FleetRecord:
        """Return the record once its news are on disk."""
        return replace(self, teachers=replace(self.teachers, news={}))

    def apart(self) -> FleetRecord:
        """Return a copy that shares nothing that changes with this record, for another thread."""
        return replace(
            self,
            teachers=replace(self.teachers, blocks=self.teachers.blocks.apart()),
            trained=self.trained.apart(),
            samples=self.samples.apart(),
            standings=self.standings.apart(),
            agreements=self.agreements.apart(),
        )


def new_fleet(plan: ModelPlan, norms: NDArray[np.float64] | None = None) -> FleetRecord:
    """Make the record of a fleet about which nothing is known."""
    zeros = np.zeros(plan.block_count, dtype=np.int64)
    return FleetRecord(zeros, zeros, Teachers(zeros, zeros), norms=norms)
