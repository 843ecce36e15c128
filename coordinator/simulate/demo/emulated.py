"""The demo's devices: emulated members of a fleet, and what each spent in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.errors import ConfigError
from coordinator.rounds.report import RoundReport
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.costs.costing import Costing
from edge_sdk.decide.costs.model import known_of
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import PASSES, Emulation, Moment, emulate
from edge_sdk.decide.emulation.fleet import Fleet, FleetMember
from edge_sdk.decide.gates import closed_gate
from edge_sdk.decide.observer import Observer, local_minute
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Backend


@dataclass(frozen=True, slots=True)
class Lived:
    """One emulated device's round. None means no battery, or unknown."""

    percent: float | None
    """Battery charge at the end, in percent."""
    train_s: float
    """Seconds spent training, calibration included."""
    joules: float | None
    """Energy drawn while training, idle power included."""
    transfer_s: float | None


def choose_members(fleet: Fleet, devices: int) -> dict[str, FleetMember]:
    """Choose this many members, by their names in the run.

    If fewer than the fleet has, they are spread over it; if more, the fleet repeats with numbered
    names. Raises `ConfigError` when such a name is already another member's.
    """
    size = len(fleet)
    if devices <= size:
        return {each.name: each for each in (fleet[i * size // devices] for i in range(devices))}
    chosen = {}
    for number in range(devices):
        turn, index = divmod(number, size)
        name = fleet[index].name + (f"-{turn + 1}" if turn else "")
        if name in chosen:
            raise ConfigError(f"--devices {devices}: two would be called {name!r}; rename a member")
        chosen[name] = fleet[index]
    return chosen


def emulate_all(fleet: Fleet, members: Mapping[str, FleetMember]) -> dict[str, Emulation]:
    """Start the emulation of every member, by its name in the run."""
    return {name: emulate(fleet, member.name) for name, member in members.items()}


def observe(
    emulation: Emulation,
    backend: Backend,
    *,
    manifest: Manifest,
    policy: Policy,
    data: ArrayData,
) -> Observer:
    """Make the observer of an emulated device, as its program would."""
    costs = Costing(
        backend,
        manifest,
        None,
        probe=emulation.probe,
        levels=policy.offered_levels(),
        known=known_of(emulation.board, policy.bytes_per_s),
        samples=len(data),
        memory_share=policy.limits.memory_share,
        may_measure=lambda: (
            closed_gate(policy.limits, emulation.snapshot(), local_minute(emulation.wall())) is None
        ),
        clock=emulation.clock,
    )
    return Observer(policy, emulation.probe, costs, clock=emulation.clock, wall=emulation.wall)


class Chronicle:
    """Tracks what emulated devices spend between two reports."""

    def __init__(self, emulations: Mapping[str, Emulation]) -> None:
        """Takes `emulations` in their initial state."""
        self._emulations = emulations
        self._before = {name: each.moment for name, each in emulations.items()}

    def close(self, report: RoundReport, moments: Mapping[str, Moment]) -> tuple[Lived, ...]:
        """Return each device's round, in the report's order; `moments`: devices at its end."""
        lived = []
        for device in report.devices:
            emulation, before = self._emulations[device.device], self._before[device.device]
            after = moments.get(device.device, before)
            joules = None
            if after.train_j is not None and before.train_j is not None:
                joules = after.train_j - before.train_j
            lived.append(
                Lived(
                    percent=emulation.percent_at(after),
                    train_s=after.train_s - before.train_s,
                    joules=joules,
                    transfer_s=emulation.transfer_s(device.bytes_down, device.bytes_up),
                )
            )
            self._before[device.device] = after
        return tuple(lived)


def moment_of(story: Sequence[Moment], round: int | None) -> Moment | None:
    """Return a round's last moment, or the newest before it; `round` None: the newest of all."""
    told = [moment for moment in story if round is None or moment.round <= round]
    return told[-1] if told else None


def full_round_s(
    emulation: Emulation, plan: ModelPlan, rule: LocalRule, steps: int, batch: int
) -> float:
    """Seconds a device needs to train the whole model for one round."""
    passes = PASSES * (2 if rule.sam_radius > 0 else 1)
    return steps * emulation.step_s(passes * batch * plan.submodel_macs(plan.all_groups()))
