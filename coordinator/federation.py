"""A whole federation in one process: the real state machines over the in-memory link.

There is no second implementation for simulation: what runs here is what runs
over MQTT, with a queue for a broker and a virtual clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator import rounds
from coordinator.errors import ConfigError
from coordinator.model import GlobalModel
from coordinator.rounds import Phase, RoundsConfig, RoundsState
from coordinator.rules import Rule
from edge_sdk.app import DeviceApp
from edge_sdk.decide import Policy
from edge_sdk.protocol.messages import Bid, Message, Movement
from edge_sdk.train.backend import Backend
from edge_sdk.train.data import ArrayData
from edge_sdk.transport.memory import MemoryLink

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Member:
    """A device of the federation."""

    name: str
    policy: Policy
    data: ArrayData


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """What one device did in a round. `level` None is a skip; bytes are uncompressed payload.

    Equal seeds give equal values of everything but `train_s`.
    """

    device: str
    level: float | None
    reason: str
    loss: float | None
    parameters: int
    bytes_down: int
    bytes_up: int
    train_s: float


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A closed round (docs/algorithms.md: what every round reports)."""

    round: int
    devices: tuple[DeviceRound, ...]
    coverage_min: int
    coverage_mean: float
    seconds: float


class Federation:
    """A coordinator and its devices. `run` trains; `model` is the result so far."""

    def __init__(
        self,
        config: RoundsConfig,
        model: GlobalModel,
        rule: Rule,
        backend: Backend,
        members: Sequence[Member],
    ) -> None:
        if config.min_devices > len(members):
            raise ConfigError(
                f"min_devices is {config.min_devices} but there are {len(members)} members"
            )
        self.model = model
        self._config = config
        self._rule = rule
        self._members = members
        self._link: MemoryLink[Message] = MemoryLink()
        self._state = RoundsState()
        self._now = 0.0
        self._movements: dict[str, Movement] = {}
        self._reports: list[RoundReport] = []
        self._started = time.perf_counter()
        self._link.attach(COORDINATOR, self._receive)
        for member in members:
            app = DeviceApp(
                member.name,
                backend=backend,
                data=member.data,
                policy=member.policy,
                source=model,
                send=lambda message: self._link.send(COORDINATOR, message),
                seed=config.seed,
            )
            self._link.attach(member.name, app.receive)  # type: ignore[arg-type]

    def run(self) -> Iterator[RoundReport]:
        """Train to the end, yielding every round as it closes."""
        for member in self._members:
            self._handle(rounds.Joined(member.name))
        while self._state.phase is not Phase.FINISHED:
            if not self._link.deliver():
                # Nobody has anything to say any more: let the deadline come.
                self._now = max(self._now, self._state.deadline or self._now)
                self._handle(rounds.Tick())
            yield from self._reports
            self._reports.clear()

    def _receive(self, message: Message) -> None:
        if isinstance(message, (Bid, Movement)):
            self._handle(message)

    def _handle(self, event: rounds.Event) -> None:
        events = [event]
        while events:
            self._state, effects = rounds.handle(
                self._config, self._state, events.pop(0), self._now
            )
            for effect in effects:
                events += self._perform(effect)

    def _perform(self, effect: rounds.Effect) -> list[rounds.Event]:
        match effect:
            case rounds.Broadcast(message):
                self._link.broadcast(COORDINATOR, message)
            case rounds.Send(device, message):
                self._link.send(device, message)
            case rounds.Keep(movement):
                self._movements[movement.device] = movement
                return [rounds.Kept(movement.device, movement.round)]
            case rounds.Commit(round, devices):
                self._commit(round, devices)
                return [rounds.Committed(round)]
        return []

    def _commit(self, round: int, devices: tuple[str, ...]) -> None:
        movements = [self._movements[device] for device in devices]
        self.model.commit(self._rule, movements)
        coverage = self.model.plan.coverage(movement.groups for movement in movements)
        now = time.perf_counter()
        self._reports.append(
            RoundReport(
                round,
                tuple(self._device_round(bid) for _, bid in sorted(self._state.bids.items())),
                int(coverage.min()),
                float(coverage.mean()),
                now - self._started,
            )
        )
        self._started = now
        self._movements.clear()

    def _device_round(self, bid: Bid) -> DeviceRound:
        movement = self._movements.get(bid.device)
        if movement is None:
            late = f"skip: offered {bid.level or 0:.0%} but no movement came in time"
            reason = bid.reason if bid.level is None else late
            return DeviceRound(bid.device, None, reason, None, 0, 0, 0, 0.0)
        size = movement.blocks.size_bytes
        return DeviceRound(
            device=bid.device,
            level=bid.level,
            reason=bid.reason,
            loss=movement.loss,
            parameters=len(movement.blocks.values),
            bytes_down=size,
            bytes_up=size,
            train_s=movement.train_s,
        )
