"""A simulated device: the device's own state machine, and a performer of its effects without I/O.

A device that never acted is a name, a number and its kind. From its first message on it has the
state of the machine, a history of its decisions and a body, which together take less than two
kilobytes; nothing else is kept between rounds but movements that wait for their receipt.

A device that drops out vanishes half-way through its training, and the coordinator sees it leave.
It is back some time later as a program that was started again: what it trained is lost, movements
without a receipt are not, and it answers the round again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np

from coordinator.rounds import events
from coordinator.simulate.engine import Sent, Told
from coordinator.simulate.fleet.body import Body, Nature
from coordinator.simulate.fleet.costs import RoundCosts
from coordinator.simulate.fleet.trace import ALWAYS, Availability
from coordinator.simulate.fleet.training import NO_DRAWS, FleetTraining, GroupsKey, groups_key
from coordinator.simulate.ram import DirectOutlet
from edge_sdk.decide.budget import History
from edge_sdk.decide.decision import Decision, Sight, decide, gate_code
from edge_sdk.decide.emulation.emulation import PASSES
from edge_sdk.device.machine import (
    Decide,
    Decided,
    DeviceState,
    Effect,
    Event,
    Examine,
    Examined,
    Facts,
    Failed,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Found,
    KeepMovement,
    LinkUp,
    Resend,
    SendMessage,
    SendReplay,
    Train,
    handle,
)
from edge_sdk.protocol.errors import TrainingError, TrainingStopped
from edge_sdk.protocol.messages.round import Movement, Outcome, Replay, RoundOpen
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job

NOTHING = Blocks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
"""Stands for the blocks that a device fetched: its training has them."""

T = TypeVar("T")


@dataclass(slots=True)
class Spending:
    """Amounts that all devices together have spent so far."""

    joules: float = 0.0
    """Energy of training and of transfers, above what the devices draw anyway."""
    train_s: float = 0.0
    """Seconds of training, over all devices."""
    bytes_down: int = 0
    bytes_up: int = 0
    metered_bytes: int = 0
    """Bytes of both directions that cost money."""
    trainings: int = 0
    """Trainings that were completed, whether or not they counted."""
    stopped: int = 0
    """Trainings that a closed gate stopped."""
    dropped: int = 0
    """Trainings in which the device vanished."""


@dataclass(slots=True, eq=False)
class Surroundings:
    """Parts that the devices of a fleet share."""

    plan: ModelPlan
    seed: int
    outlet: DirectOutlet
    training: FleetTraining
    costs: RoundCosts
    samples: Sequence[int]
    """Training samples of every device, by its number."""
    availability: Availability | None = None
    spending: Spending = field(default_factory=Spending)
    macs: dict[GroupsKey, int] = field(default_factory=dict)
    """Multiply-accumulates of a submodel's forward pass, per sample."""

    def step_macs(self, groups: Groups) -> int:
        """Return the multiply-accumulates of a step that trains these groups, per sample."""
        key = groups_key(groups)
        if key not in self.macs:
            self.macs[key] = self.plan.submodel_macs(groups)
        return self.macs[key]


class FleetDevice:
    """One device of a simulated fleet; a `VirtualDevice`."""

    __slots__ = (
        "_absence",
        "_around",
        "_body",
        "_decided",
        "_dropped",
        "_history",
        "_kept",
        "_nature",
        "_reopened",
        "_state",
        "name",
        "number",
    )

    def __init__(self, number: int, name: str, nature: Nature, around: Surroundings) -> None:
        self.number = number
        self.name = name
        self._nature = nature
        self._around = around
        self._state: DeviceState | None = None
        self._body: Body | None = None
        self._history: History | None = None
        self._decided: tuple[int, Decision] | None = None
        """The round decided on last, and the decision: asked again, it says the same."""
        self._kept: dict[int, Movement] | None = None
        """Movements without a receipt, and the copy for replays."""
        self._absence: tuple[float, float] = (0.0, 0.0)
        """When it vanished last, and when it was back."""
        self._dropped = 0
        """The round in which it vanished last."""
        self._reopened: RoundOpen | None = None
        """The round that it was in when it vanished, until it is back."""

    # -- as the engine sees it ----------------------------------------------------------------

    @property
    def awake(self) -> bool:
        """See `VirtualDevice`, and the like below."""
        return self._state is not None

    @property
    def latency_s(self) -> float:
        """Latency of a message, in seconds."""
        return self._nature.kind.latency_s

    @property
    def busy_until_s(self) -> float:
        """Time when the device can process a message."""
        return 0.0 if self._body is None else self._body.now_s

    @property
    def body(self) -> Body:
        """The device's body, made on the first call."""
        if self._body is None:
            self._body = Body(self._nature, self.name, self._around.seed)
        return self._body

    def intervals(self) -> Iterable[tuple[float, float]]:
        """Times when the device is present."""
        trace = self._around.availability
        return ALWAYS if trace is None else trace.intervals(self.number)

    def wake(self) -> DeviceState:
        """Return the state of the device's machine, made on the first call."""
        if self._state is None:
            self._state = DeviceState(self.name, self._around.plan.hash)
            self._history = History()
        return self._state

    def receive(self, message: Told, now_s: float) -> list[Sent]:
        """Process a message that arrives now and return the messages it sends."""
        self.body.wait_until(now_s)
        return self._handle(message)

    def connected(self, now_s: float) -> list[Sent]:
        """Return what the device sends when it is back, perhaps as a program started again."""
        self.body.wait_until(now_s)
        sent = self._handle(LinkUp())
        if self._reopened is not None:
            opened, self._reopened = self._reopened, None
            sent += self._handle(opened)
        return sent

    def arrival_s(self, message: Sent, now_s: float) -> float:
        """Time when a message from the device reaches the coordinator."""
        match message:
            case events.Left():
                return self._absence[0]
            case events.Joined():
                return max(now_s, self._absence[1])
            case Movement():
                size = len(message.payload)
            case Replay():
                size = len(message.movement.payload)
            case _:
                return self.body.now_s + self.latency_s
        self._around.spending.bytes_up += size
        return self.body.now_s + self.latency_s + self._transfer(size, self.body.sending_s)

    # -- effects ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Sent]:
        pending, sent = [event], list[Sent]()
        while pending:
            self._state, effects = handle(self.wake(), pending.pop(0))
            for effect in effects:
                match effect:
                    case SendMessage(message):
                        sent.append(message)
                    case Resend(round):
                        sent += [] if self._kept is None else [self._kept[round]]
                    case SendReplay(round, made):
                        sent += self._replay(round, made)
                    case Train() if self._drops_out(effect):
                        return [*sent, *self._vanish(effect)]
                    case _:
                        answer = self._perform(effect)
                        if answer is not None:
                            pending.append(answer)
        return sent

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case Decide(opened):
                policy = self._nature.kind.policy
                samples = self._around.samples[self.number]
                facts = Facts(samples, policy.compute, policy.bytes_per_s)
                return Decided(opened.round, self._decide(opened), facts)
            case Fetch(opened, assignment):
                if self._kept is not None and assignment.round in self._kept:
                    return Found()
                size = self._around.training.fetch(opened, assignment, self._around.outlet)
                self._around.spending.bytes_down += size
                self._transfer(size, self.body.receive)
                return Fetched(NOTHING, {})
            case Train():
                return self._train(effect)
            case Examine():
                return Examined(())
            case KeepMovement(movement):
                copy = self.wake().copy
                kept = {} if self._kept is None else self._kept
                waiting = self.wake().unreceipted
                self._kept = {each: kept[each] for each in kept if each in waiting or each == copy}
                self._kept[movement.round] = movement
            case Forget(round, outcome):
                used = outcome in (Outcome.COUNTED, Outcome.MEMORY)
                self._around.training.settle(self.name, round, used=used)
                if self._kept is not None and not (
                    round == self.wake().copy and outcome is not Outcome.REJECTED
                ):
                    self._kept.pop(round, None)
                    self._kept = self._kept or None
        return None

    def _decide(self, opened: RoundOpen) -> Decision:
        if self._decided is not None and self._decided[0] == opened.round:
            return self._decided[1]
        around, body, policy = self._around, self.body, self._nature.kind.policy
        levels = self._nature.levels
        sight = Sight(
            snapshot=body.snapshot(),
            costs=around.costs.predict(body, levels, opened, around.samples[self.number]),
            deadline_s=opened.train_deadline_s,
            rounds_left=opened.rounds_left,
            whole=opened.whole,
            warmup=opened.warmup,
            largest=opened.largest,
            now_s=body.now_s,
            minute=body.minute,
        )
        decision = decide(
            policy, sight, self._history, device=self.name, round=opened.round, seed=around.seed
        )
        self._history = decision.history
        self._decided = opened.round, decision
        return decision

    def _train(self, work: Train) -> Finished | Failed:
        opened, around, body = work.opened, self._around, self.body
        on_battery, joules, began_s = self._is_on_battery(), body.train_j, body.train_s
        done = body.train(self._macs(work), opened.steps)
        around.spending.joules += body.train_j - joules
        around.spending.train_s += body.train_s - began_s
        if self._history is not None and (on_battery or self._is_on_battery()):
            self._history = self._history.spent(body.train_j - joules)
        if done < opened.steps:
            gate = body.gate()
            around.spending.stopped += 1
            reason = "stopped" if gate is None else gate.reason
            code = "failed" if gate is None else gate_code(gate)
            return Failed(f"skip: {reason}; {TrainingStopped(done)}", code)
        try:
            made = around.training.make(work)
        except TrainingError as error:
            return Failed(f"skip: {error}")
        around.spending.trainings += 1
        keeps = self._nature.kind.policy.keeps_copy and opened.replay_within > 0
        return Finished(
            Movement(
                device=self.name,
                round=opened.round,
                plan_hash=around.plan.hash,
                payload=made.payload,
                statistics=made.statistics,
                learning_rate=opened.local_rule.learning_rate,
                level=work.level,
                samples=around.samples[self.number],
                loss=made.loss,
                train_s=body.train_s - began_s,
                keeps_copy=keeps,
            )
        )

    def _macs(self, work: Train) -> float:
        """Multiply-accumulates of the whole training."""
        opened, around, assignment = work.opened, self._around, work.assignment
        if assignment.widths and opened.local_rule.widths != "own":
            job = Job(
                groups=assignment.groups,
                weights={},
                buffers={},
                rule=opened.local_rule,
                mask_stream=NO_DRAWS,
                widths=assignment.widths,
                width_stream=stream(around.seed, self.name, opened.round, "widths"),
                passes=work.passes,
            )
            macs = sum(islice(job.step_macs(around.plan), opened.steps))
        else:
            macs = opened.steps * around.step_macs(assignment.groups)
        batch = min(opened.batch_size, around.samples[self.number])
        return PASSES * (2 if opened.local_rule.sam_radius > 0 else 1) * batch * macs

    # -- coming and going ---------------------------------------------------------------------

    def _drops_out(self, work: Train) -> bool:
        share, round = self._nature.kind.drop_out, work.opened.round
        if share == 0 or self._dropped == round:
            return False
        return bool(stream(self._around.seed, self.name, round, "drop-out").random() < share)

    def _vanish(self, work: Train) -> list[Sent]:
        """End in the middle of a training; return what the coordinator sees of it."""
        body, around, spending = self.body, self._around, self._around.spending
        joules, began_s, opened = body.train_j, body.train_s, work.opened
        body.train(self._macs(work) / 2, opened.steps)
        spending.joules += body.train_j - joules
        spending.train_s += body.train_s - began_s
        spending.dropped += 1
        self._dropped, self._reopened = opened.round, opened
        kept = frozenset(() if self._kept is None else self._kept)
        copy = self.wake().copy
        self._state = DeviceState(self.name, around.plan.hash, unreceipted=kept - {copy}, copy=copy)
        back_s = body.now_s + self._nature.kind.back_s
        self._absence = body.now_s, back_s
        returns = any(start <= back_s < end for start, end in self._later(body.now_s, back_s))
        left: list[Sent] = [events.Left(self.name)]
        return [*left, events.Joined(self.name)] if returns else left

    def _later(self, from_s: float, to_s: float) -> Iterable[tuple[float, float]]:
        """Yield the intervals of its presence that reach into this time."""
        for start, end in self.intervals():
            if start > to_s:
                return
            if end > from_s:
                yield start, end

    def _transfer(self, size: int, move: Callable[[float], T]) -> T:
        """Move bytes, and book what that takes."""
        spending, body = self._around.spending, self.body
        joules = body.train_j
        if body.metered:
            spending.metered_bytes += size
        result = move(size)
        spending.joules += body.train_j - joules
        return result

    def _is_on_battery(self) -> bool:
        body = self.body
        return body.battery_j is not None and not body.charging

    def _replay(self, round: int, made: int) -> list[Sent]:
        movement = None if self._kept is None else self._kept.get(made)
        return [] if movement is None else [Replay(round=round, movement=movement)]
