"""Values of a synchronous run: its settings, events, effects and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Expected, GroupsByAxis
from coordinator.aggregate.optimizer import KeptVectors, ServerOptimizer
from coordinator.aggregate.pairings import check_growth, check_variates
from coordinator.aggregate.robust import Robust
from coordinator.aggregate.rules import Rule, Scaffold
from coordinator.aggregate.screening import Scale
from coordinator.errors import ConfigError
from coordinator.masks import MeasuringMasks
from coordinator.rounds.config import UNMEASURED, Best, RunConfig, SettingValue
from coordinator.rounds.events import (
    Accept,
    Barred,
    Broadcast,
    Disowned,
    Joined,
    Keep,
    Kept,
    Left,
    Released,
    RoundsHeld,
    Send,
    Tick,
    Uploaded,
)
from coordinator.rounds.fleet import FleetRecord
from coordinator.rounds.persistent import PersistentMap, PersistentSet
from edge_sdk.program.settings import (
    Count,
    Example,
    Natural,
    Seconds,
    Share,
    Within,
)
from edge_sdk.protocol.messages.round import Bid, Movement, Outcome, Receipt, Replay
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.protocol.plan.plan import Chosen

Selection = Literal["before", "after"]
"""When a round's devices are drawn: before they decide, or after, among their offers."""


ROUNDING = 1e-9
"""Room for rounding: 50 × 1.1 is 55, not 56."""
NEARLY = 0.95
"""Share of the movements of a round after which the rest no longer have all the time; below 20
movements, all of them."""


class RoundPhase(Enum):
    """Phase of a synchronous run."""

    WAITING = "waiting for devices"
    BIDDING = "collecting bids"
    TRAINING = "collecting movements"
    CLOSING = "closing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig(RunConfig):
    """Settings of a synchronous run."""

    rule: Rule
    rounds: Count
    max_staleness: Count = 50
    """Rounds after which a late movement, a replay or an entry of memory is too old."""
    participants: Annotated[Count | None, Example(10)] = None
    """Movements wanted per round; without it, one from every device that offers. A warm-up wants
    one from every device all the same."""
    select: Selection = "before"
    """With participants: "before" draws the round's devices among all that are there and invites
    them alone, so that skips among them are the round's skips; "after" asks all devices and draws
    among those that offer to train. Asynchronous rules select nobody."""
    over_selection: Annotated[float, Within(least=1)] = 1.0
    """Factor by which more devices are drawn than movements are wanted: some never finish."""
    quorum: Annotated[Share | None, Example(0.9)] = None
    """Share of the wanted movements at which a round closes without waiting for the rest. Without
    it, a round of fewer than 20 waits for all until its deadline, and of more it gives the last 5 %
    as much time again as the others took: one in many devices is always slow, out of reach or
    switched off."""
    cohort_limit: Annotated[float | None, Within(above=1)] = 30.0
    """A movement with a block this many times larger than the median of its round is rejected;
    `None` means never. Honest devices with a class or two of ten each stayed below 13, but a person
    whose movements are hard to learn reached 55 times the median: with `robust` set, which clips
    what is too large, 100 refuses nobody honest (docs/attacks.md)."""
    min_participants: Natural = 1
    """Offers below which a round is void: nothing is trained, and it does not count."""
    away_s: Seconds = 10.0
    """Seconds to wait for devices that left, once all others have answered."""
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    """Optimiser that takes the rule's movement as a gradient."""
    robust: Robust = field(default_factory=Robust)
    """Defence against bad devices."""
    grow: Annotated[float, Within(least=0, below=1)] = 0.0
    """Share of the rounds in which the model grows: they train at most a level that rises step by
    step from the smallest of `levels` to the whole model. 0 trains what devices can afford from the
    first round on."""
    planned: Annotated[Count | None, Example(100)] = None
    """Rounds that `grow` is a share of; None: `rounds`. Rounds beyond them train the whole model: a
    run that an operator makes longer does not grow more slowly."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if isinstance(self.rule, Scaffold):
            check_variates(self.rule, self.local_rule, self.server_optimizer, self.robust)
        if self.grow:
            check_growth(self.rule, self.masks, self.plan)
        if self.over_selection > 1 and self.participants is None:
            raise ConfigError("over_selection needs participants, the number of movements wanted")
        if self.server_optimizer.name != "none" and self.rule.server_rate != 1:
            raise ConfigError(
                f"server_rate = {self.rule.server_rate} of the rule would scale the gradient of "
                f"server optimiser {self.server_optimizer.name!r}: set the optimiser's rate instead"
            )
        drawn = self.drawn(self.rule.warmup_rounds + 1)
        if self.select == "before" and drawn is not None and drawn < self.min_participants:
            raise ConfigError(
                f"min_participants = {self.min_participants}: every round would be void, because "
                f"only {drawn} devices are invited (participants × over_selection); lower it, "
                'invite more, or set select = "after"'
            )

    @property
    def vectors(self) -> KeptVectors | None:
        """Vectors that the server keeps from round to round, of the optimiser or of the rule."""
        optimizer = self.server_optimizer
        return self.rule.vectors if optimizer.name == "none" else optimizer

    @property
    def judges_agreement(self) -> bool:
        """True if devices that lead away from the others are quarantined."""
        robust = self.robust
        return robust.active and robust.agreement is not None and self.quarantine_after > 0

    def warms_up(self, round: int) -> bool:
        """True if the rule needs a movement from every device in this round."""
        return round <= self.rule.warmup_rounds

    def measures(self, round: int) -> bool:
        """True if the masks measure the importance of blocks in this round."""
        return isinstance(self.masks, MeasuringMasks) and self.masks.measures(round)

    def drawn(self, round: int) -> int | None:
        """Most devices that are drawn for this round; None means that all take part."""
        if self.participants is None or self.warms_up(round):
            return None
        return math.ceil(self.participants * self.over_selection - ROUNDING)

    def invites(self, round: int) -> bool:
        """True if only devices drawn beforehand take part in this round."""
        return self.select == "before" and self.drawn(round) is not None

    def wants_whole(self, round: int) -> bool:
        """True if only whole models are useful in this round."""
        return self.rule.whole_models or self.warms_up(round)

    def largest(self, number: int) -> float:
        """Return the largest level that the n-th round trains; rounds count from 1.

        The last round that was planned, and every added one, trains the whole model.
        """
        planned = self.planned or self.rounds
        if number >= planned:
            return 1.0
        ends = 0.0
        for level, share in stages(self.levels, self.grow):
            ends += share * planned
            if number - 1 < ends - ROUNDING:
                return level
        return 1.0

    def growth(self, done: int = 0, trained: float = 0.0) -> str:
        """Say up to which round each level is trained; empty if the whole model is.

        `done` rounds are committed; the model never shrinks below a level that was `trained`.
        """
        last: dict[float, int] = {}
        for number in range(done + 1, min(self.planned or self.rounds, self.rounds) + 1):
            last[max(trained, self.largest(number))] = number
        return ", ".join(f"{level:.0%} until round {last[level]}" for level in last if level < 1)

    def is_over(self, committed: int, best: Best) -> bool:
        """True if there is nothing left to do after this many committed rounds."""
        accuracy, since = best
        since = max(
            since, math.ceil(self.grow * (self.planned or self.rounds))
        )  # wider may be better
        return committed >= self.rounds or self.stops_early((accuracy, since), committed)


def stages(levels: Sequence[float], grow: float) -> list[tuple[float, float]]:
    """Return every level, smallest first, and the share of the rounds in which it is the largest.

    A step at level `l` costs about `l²` of the whole model's. So below the whole model a level gets
    rounds in proportion to `1/l²`, and each about the same energy.
    """
    below = [level for level in sorted(levels) if level < 1]
    total = sum(level**-2 for level in below)
    return [*((level, grow * level**-2 / total) for level in below), (1.0, 1 - grow)]


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """The round's new model is in place; `norms` are per block, if the policy uses them.

    `accuracy` is from 0 to 1; None if it is not measured.
    """

    round: int
    norms: NDArray[np.float64] | None = None
    accuracy: float | None = None


Event = (
    Joined
    | Left
    | Bid
    | Offer
    | Movement
    | Replay
    | Uploaded
    | Kept
    | Committed
    | Disowned
    | Released
    | Barred
    | RoundsHeld
    | Tick
)
"""Messages from devices, and local events."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply the rule and answer with `Committed`. All names are sorted.

    `fresh` and `replayed` are the devices whose movement, or replay, counts in this round;
    `silent` devices were selected and sent neither, or it was refused; `late` holds (device, round)
    of movements for memory; `refused` are devices whose kept movement or replay does not count
    beside those of others, with the reason.
    """

    round: int
    fresh: tuple[str, ...]
    replayed: tuple[str, ...]
    silent: tuple[str, ...]
    late: tuple[tuple[str, int], ...]
    refused: Mapping[str, str] = field(default_factory=dict)


Effect = Broadcast | Send | Accept | Keep | Commit


@dataclass(frozen=True, slots=True)
class PastRound:
    """A closed round: the devices' assignments, and the outcomes of their movements."""

    expected: Mapping[str, Expected]
    outcomes: Mapping[str, Outcome]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why movements were rejected."""
    train_by: float | None = None
    """The round's deadline for movements; None if it was in an earlier process."""
    learning_rate: float | None = None
    """Learning rate of the round; None: it is not known, and was that of the settings."""


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Facts needed to resume a round in another process: each device's part."""

    round: int
    selected: Set[str]
    bids: Mapping[str, Bid] = field(default_factory=dict)
    assigned: Mapping[str, GroupsByAxis] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Devices of which a movement was refused, with the reason."""
    closed: bool = False
    """True if the round was closed, and not committed: nothing more counts."""
    bidding: bool = False
    """True if no work was handed out yet: its devices bid again."""
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    """Settings that an operator had changed by the time the round opened."""
    orders: int = 0
    """Number of the newest order of an operator about a device that the round knows."""
    newcomers: Set[str] = frozenset()
    """Devices that joined the run since the last commit: rules may count all that ever joined."""


@dataclass(frozen=True, slots=True)
class RoundsState:
    """Everything the coordinator remembers between events. Made by `start`."""

    fleet: FleetRecord
    phase: RoundPhase = RoundPhase.WAITING
    round: int = 0
    deadline: float | None = None
    """Latest time to send `Tick`; None if there is no deadline."""
    train_by: float | None = None
    """While training: deadline for movements of devices that are present."""
    away_by: float | None = None
    """While only devices that left owe a movement: the deadline for them."""
    rest_by: float | None = None
    """Once almost all movements of many are here: the deadline for the rest."""
    devices: PersistentSet[str] = field(default_factory=PersistentSet)
    """All devices that ever joined."""
    present: PersistentSet[str] = field(default_factory=PersistentSet)
    """Devices that are present now."""
    away: PersistentSet[str] = field(default_factory=PersistentSet)
    """Selected devices that left since the round opened and have not returned."""
    void: int = 0
    """Number of rounds that had too few offers."""
    best: Best = UNMEASURED
    """Best accuracy so far, and the number of rounds it took, without void ones."""
    selected: PersistentSet[str] = field(default_factory=PersistentSet)
    """Devices asked to take part in the current round; invited ones stay in it if they leave."""
    bids: PersistentMap[str, Bid] = field(default_factory=PersistentMap)
    assigned: PersistentMap[str, GroupsByAxis] = field(default_factory=PersistentMap)
    replaying: PersistentSet[str] = field(default_factory=PersistentSet)
    """While training: devices that announced a replay which is not stored yet."""
    spare: frozenset[str] = frozenset()
    """Devices with an assignment that the round does not wait for."""
    keeping: PersistentMap[str, Scale] = field(default_factory=PersistentMap)
    """Movements of this round that are being stored."""
    keeping_replays: PersistentMap[str, Scale] = field(default_factory=PersistentMap)
    keeping_late: PersistentSet[tuple[str, int]] = field(default_factory=PersistentSet)
    """(device, round) of movements of closed rounds that are being stored."""
    kept: PersistentMap[str, Scale] = field(default_factory=PersistentMap)
    """Movements of this round that are stored. Which of them count is decided at the close."""
    replayed: PersistentMap[str, Scale] = field(default_factory=PersistentMap)
    """Replays that are stored, likewise."""
    refused: PersistentMap[str, str] = field(default_factory=PersistentMap)
    """Devices of which a movement was refused since the last commit, with the reason."""
    objections: Mapping[str, str] = field(default_factory=dict)
    """While closing: devices whose kept movement or replay does not count, with the reason."""
    late: PersistentSet[tuple[str, int]] = field(default_factory=PersistentSet)
    """Movements of closed rounds that are stored and enter memory at the next commit."""
    past: Mapping[int, PastRound] = field(default_factory=dict)
    resumed: bool = False
    """True if the current round was open when the previous process stopped."""
    held: bool = False
    """True if no further round is to open."""


Step = tuple[RoundsState, list[Effect]]


def expected_of(config: RoundsConfig, state: RoundsState, device: str) -> Expected | None:
    """A device's work in the current round; None if it has none."""
    groups, bid = state.assigned.get(device), state.bids.get(device)
    if groups is None or bid is None:
        return None
    return config.expected(groups, bid, state.fleet.norms)


def expected_of_all(config: RoundsConfig, state: RoundsState) -> dict[str, Expected]:
    """The work of every device in the current round that has any."""
    limits: dict[Chosen, float | None] = {}
    found: dict[str, Expected] = {}
    for name, groups in state.assigned.items():
        if (chosen := config.plan.choose(groups)) not in limits:
            limits[chosen] = config.limit(groups, state.fleet.norms)
        if (bid := state.bids.get(name)) is not None:
            found[name] = Expected(groups, bid.level or 1.0, bid.samples, limits[chosen])
    return found


def receipt_of(device: str, round: int, outcome: Outcome, reason: str = "") -> Send:
    """Make the receipt that tells a device the outcome of its movement."""
    return Send(device, Receipt(device=device, round=round, outcome=outcome, reason=reason))
