"""Costs of a round at each level, as a simulated device's own cost model would predict them.

A real device calibrates itself and learns from every round. A simulated one knows its body: its
predictions are the times, joules and bytes that the simulation will charge it, and the bound on
memory that a device uses before it has measured any (`memory_bound`).
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.simulate.fleet.body import Body
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.costs.model import memory_bound
from edge_sdk.decide.costs.work import batch_bytes, largest_groups, narrower_levels, work_at
from edge_sdk.decide.emulation.emulation import PASSES
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest


@dataclass(frozen=True, slots=True)
class _Effort:
    """A round at one level, whoever does it."""

    level: float
    macs: float
    peak_bytes: float
    bytes_down: float
    bytes_up: float


class RoundCosts:
    """Predicts rounds of one task, for any device."""

    def __init__(self, plan: ModelPlan, down: Encoding, manifest: Manifest | None = None) -> None:
        """`down` is the encoding of the model; `manifest`, of compiled graphs, knows activations:
        without it, memory covers the weights alone."""
        self._plan = plan
        self._down = down
        self._manifest = manifest
        self._known: dict[tuple[object, ...], tuple[_Effort, ...]] = {}

    def predict(
        self, body: Body, levels: tuple[float, ...], opened: RoundOpen, samples: int
    ) -> tuple[Cost, ...]:
        """Predict the round's cost at each of these levels."""
        nature = body.nature
        net_w = nature.train_w - nature.idle_w
        down_s, up_s = 1 / nature.down_bytes_s, 1 / nature.up_bytes_s
        down_w, up_w = nature.radio_w
        found = []
        for effort in self._efforts(levels, opened, min(opened.batch_size, samples)):
            train_s = body.train_time_s(effort.macs)
            receive_s, send_s = effort.bytes_down * down_s, effort.bytes_up * up_s
            found.append(
                Cost(
                    level=effort.level,
                    seconds=receive_s + train_s + send_s,
                    joules=net_w * train_s + down_w * receive_s + up_w * send_s,
                    peak_bytes=effort.peak_bytes,
                    bytes_down=effort.bytes_down,
                    bytes_up=effort.bytes_up,
                    energy_from="profile",
                )
            )
        return tuple(found)

    def _efforts(
        self, levels: tuple[float, ...], opened: RoundOpen, batch: int
    ) -> tuple[_Effort, ...]:
        key = (
            *(levels, opened.steps, batch, opened.local_rule, opened.up, opened.levels),
            opened.variates,
        )
        if key not in self._known:
            self._known[key] = tuple(self._effort(level, opened, batch) for level in levels)
        return self._known[key]

    def _effort(self, level: float, opened: RoundOpen, batch: int) -> _Effort:
        plan, rule = self._plan, opened.local_rule
        groups = largest_groups(plan, level)
        own = plan.submodel_macs(groups)
        narrower = [
            plan.submodel_macs(largest_groups(plan, each))
            for each in narrower_levels(opened, level)
        ]
        macs = float(own)
        if narrower and rule.widths == "sandwich":
            macs = own + sum(narrower) / len(narrower)
        elif narrower:
            macs = (own + sum(narrower)) / (1 + len(narrower))
        work = work_at(plan, self._manifest, level, batch)
        data = 0 if self._manifest is None else batch_bytes(self._manifest.data, batch)
        return _Effort(
            level,
            PASSES * (2 if rule.sam_radius > 0 else 1) * opened.steps * batch * macs,
            memory_bound(work, data, rule, opened.up, variates=opened.variates),
            (2 if opened.variates else 1) * encoded_size(plan, groups, self._down),
            encoded_size(plan, groups, opened.up),
        )
