"""A state machine that a test drives: its clock, its events, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from coordinator.rounds.events import Broadcast, Joined, Send
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from edge_sdk.protocol.messages.round import Assignment, Movement, Outcome, Receipt
from edge_sdk.protocol.messages.transfer import Offer
from tests.messages import make_movement, make_outgoing

Config = TypeVar("Config", bound="RoundsConfig | FragmentsConfig")
State = TypeVar("State")
Event = TypeVar("Event")
Effect = TypeVar("Effect")
Message = TypeVar("Message")


class Driven(Generic[Config, State, Event, Effect]):
    """The machine with a clock that the test turns."""

    def __init__(
        self,
        config: Config,
        state: State,
        handle: Callable[[Config, State, Any, float], tuple[State, list[Effect]]],
        devices: Sequence[str],
    ) -> None:
        self.config = config
        self.state = state
        self._handle = handle
        self.now = 0.0
        self.groups: dict[str, Mapping[str, tuple[int, ...]]] = {}
        for device in devices:
            self._tell(Joined(device))

    def tell(self, *events: Event) -> list[Effect]:
        """Tell it events; the effects of the last."""
        return self._tell(*events)

    def _tell(self, *events: object) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            self.state, effects = self._handle(self.config, self.state, event, self.now)
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.message, Assignment):
                    self.groups[effect.device] = effect.message.groups
        return effects

    def movement_of(self, name: str, value: float, **changes: Any) -> Movement:
        """What a device would send for the groups it was given last."""
        groups = self.groups[name]
        return make_movement(self.config.plan, groups, value, **{"device": name, **changes})


def offer(device: str, round: int, *, answers: int | None = None) -> Offer:
    return make_outgoing(device=device, round=round, answers=answers).offer


def said(kind: type[Message], effects: Sequence[object]) -> Message:
    """The one thing that was said, which is a message of this kind."""
    (effect,) = effects
    assert isinstance(effect, (Broadcast, Send))
    assert isinstance(effect.message, kind)
    return effect.message


def outcome(effects: Sequence[object]) -> Outcome:
    return said(Receipt, effects).outcome


def refusal(effects: Sequence[object]) -> str:
    """Why something was rejected, which is all that was said."""
    receipt = said(Receipt, effects)
    assert receipt.outcome is Outcome.REJECTED
    return receipt.reason
