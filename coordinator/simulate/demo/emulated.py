"""The demo's devices: members of a fleet that are emulated, and what each lived through."""

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
    """What a round was for one emulated device. None: it has no battery, or nobody knows."""

    percent: float | None
    """Of its battery, at the end."""
    train_s: float
    """Spent on training, calibration included."""
    joules: float | None
    """Drawn while training, idle included."""
    transfer_s: float | None


def choose_members(fleet: Fleet, devices: int) -> dict[str, FleetMember]:
    """So many members by the name they have in the run.

    Fewer than the fleet has are spread over it; more begin anew, with a number behind the name.
    Raises `ConfigError` when that is a name which another member has.
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
    """The members as they start, by the name they have in the run."""
    return {name: emulate(fleet, member.name) for name, member in members.items()}


def observe(
    emulation: Emulation,
    backend: Backend,
    *,
    manifest: Manifest,
    policy: Policy,
    data: ArrayData,
) -> Observer:
    """What an emulated device sees itself with, as its program has it."""
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
    """What emulated devices lived through between two reports."""

    def __init__(self, emulations: Mapping[str, Emulation]) -> None:
        """`emulations` as they start."""
        self._emulations = emulations
        self._before = {name: each.moment for name, each in emulations.items()}

    def close(self, report: RoundReport, moments: Mapping[str, Moment]) -> tuple[Lived, ...]:
        """What the round was for its devices, in the report's order; `moments`: at its end."""
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
    """The last moment of a round, or the newest before it; `round` None: the newest of all."""
    told = [moment for moment in story if round is None or moment.round <= round]
    return told[-1] if told else None


def full_round_s(
    emulation: Emulation, plan: ModelPlan, rule: LocalRule, steps: int, batch: int
) -> float:
    """How long the whole model takes a device in a round."""
    passes = PASSES * (2 if rule.sam_radius > 0 else 1)
    return steps * emulation.step_s(passes * batch * plan.submodel_macs(plan.all_groups()))
