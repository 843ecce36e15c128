"""Level or skip: how much of the model this device trains in a round, and why.

    gates ──▶ levels that fit memory and deadline ──▶ energy ──▶ schedule ──▶ level | skip
                                            a second pass a step, if the rule wants it ◀──┘

A pure function of the machine's state, the costs of levels, the energy spent, the owner's policy
and a named random stream. Laws:
- Less battery, memory or time never raises the level, if the device prefers smaller levels to
  rarer rounds; if it prefers rarer rounds, then never the level that it can afford.
- A day's energy is never exceeded by more than the error of one prediction beyond its margin.
- A second, narrower pass a step never changes the level nor the share of rounds: a device makes it
  where memory, deadline and energy leave room for it, and else does without.
- With a constant share `p`, the device trains `p · rounds` of them, give or take one
  (*round-robin*).

The skip rule is CCFL's (docs/algorithms.md): a device whose budget allows a share `p` of all
rounds trains once every `1/p` rounds (*round-robin*), or with probability `p` (*ad-hoc*). With a
common phase, all devices of one share train in the same rounds (CCFL's *synchronization*).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from edge_sdk.decide.budget import Allowance, History, common_turn, take_turn
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.gates import Gate, Limits, check_gates
from edge_sdk.machine.snapshot import Battery, Snapshot
from edge_sdk.program.records import replace
from edge_sdk.program.settings import ConfigError, Count, Example, Share, Within, check_fields
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.streams import stream

Schedule = Literal["round-robin", "ad-hoc"]
Phase = Literal["own", "common"]
Prefer = Literal["smaller", "rarer"]
Code = Literal[
    "full",
    "owner",
    "battery",
    "heat",
    "network",
    "memory-pressure",
    "hours",
    "memory",
    "deadline",
    "energy",
    "schedule",
    "gap",
    "whole",
    "growing",
    "data",
    "plan",
    "failed",
    "paused",
    "task",
]
"""Cause of a decision: of a skip, or of the level not being larger."""

MB = 1e6
ON_MAINS = Snapshot(battery=Battery(present=False))
"""A device of which nothing is known except that it cannot be drained."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A level, or None for a skip, and the reason: in words, and as a code for programs."""

    level: float | None
    reason: str
    code: Code = "full"
    share: float = 1.0
    """Share of rounds in which this level is trained (`p`)."""
    history: History = field(default_factory=History)
    """History to remember."""
    passes: int = 2
    """Most passes a step may make, where the local rule wants two: 2, or 1 if the second does not
    fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits set by the device's owner. Raises `ConfigError`."""

    level: Share = 1.0
    """Largest share of the model that this device trains."""
    levels: tuple[Share, ...] = LEVELS
    """Levels to choose from, as far as `level` allows them."""
    participation: Share = 1.0
    """Largest share of rounds to take part in."""
    schedule: Schedule = "round-robin"
    """Rounds of a smaller share: evenly spread (`round-robin`) or drawn by lot (`ad-hoc`)."""
    phase: Phase = "own"
    """Beginning of round-robin: each device's `own`, so that devices take turns, or `common` to all
    devices with the same share, which then train and skip in the same rounds (for studies)."""
    prefer: Prefer = "smaller"
    """Answer to a shortage of energy: a smaller level, or rarer rounds."""
    max_gap: Annotated[Count | None, Example(10)] = None
    """Train the smallest level at least once in this many rounds, if nothing forbids it."""
    keeps_copy: bool = True
    """Keep the last movement, to resend it when a round is skipped and the rule uses replays."""
    compute: Annotated[float | None, Within(above=0), Example(1e9)] = None
    """Speed of this device in parameters × samples per second, for the coordinator; without it,
    unknown."""
    bytes_per_s: Annotated[float | None, Within(above=0), Example(1e6)] = None
    """Speed of its connection in bytes per second; without it, unknown."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.levels or not all(0 < level <= 1 for level in self.levels):
            raise ConfigError(f"levels = {self.levels!r}: must be shares above 0 and at most 1")

    def offered_levels(self) -> tuple[float, ...]:
        """Return the levels to choose from, largest first, including the largest allowed."""
        return tuple(
            sorted({self.level, *(each for each in self.levels if each < self.level)}, reverse=True)
        )

    def allowance(self, battery: Battery) -> Allowance | None:
        """Return the energy per day; None: on a battery of unknown size."""
        if battery.present is False or battery.charging:
            return Allowance()
        if self.limits.energy_wh_per_day is not None:
            return Allowance(3600 * self.limits.energy_wh_per_day)
        if battery.capacity_wh is None:
            return None
        return Allowance(3600 * self.limits.battery_share * battery.capacity_wh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A device's view of itself when a round opens."""

    snapshot: Snapshot = ON_MAINS
    costs: tuple[Cost, ...] = ()
    """Costs of `Policy.offered_levels` and of the full model; empty: levels are not weighed."""
    deadline_s: float = math.inf
    """Time for fetching, training and sending."""
    rounds_left: int | None = None
    """Rounds left in the run, including this one; None: unknown."""
    whole: bool = False
    """Only the whole model is useful this round."""
    warmup: bool = False
    """Every device that can should train the whole model this round, regardless of `Policy.level`
    and the share of rounds. One that cannot decides as usual, unless it is also `whole`."""
    largest: float = 1.0
    """The largest level that is trained this round."""
    now_s: float = 0.0
    """Seconds of the clock that counts days."""
    minute: int = 0
    """Minute of the local day."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The assessment of one level."""

    level: float
    share: float
    """Share of rounds its energy allows; 0: it cannot be afforded."""
    code: Code
    reason: str
    """Need and supply, such as `needs 412 MB, 300 MB free`."""


def decide(
    policy: Policy,
    sight: Sight | None = None,
    history: History | None = None,
    *,
    device: str,
    round: int,
    seed: int,
) -> Decision:
    """Decide the device's answer to a round. The same arguments give the same answer."""
    sight = Sight() if sight is None else sight
    history = (History() if history is None else history).heard(sight.now_s)
    gate = next((gate for gate in gates(policy, sight) if not gate.open), None)
    if gate is not None:
        skip = replace(history, skipped=history.skipped + 1)
        return Decision(None, f"skip: {gate.reason}", gate_code(gate), 0.0, skip)
    weighed = verdicts(policy, sight, history, until_it_fits=True)
    affordable = [verdict for verdict in weighed if verdict.share > 0]
    if not affordable:
        least, skip = weighed[-1], replace(history, skipped=history.skipped + 1)
        return Decision(None, f"skip: {_name(least.level)} {least.reason}", least.code, 0.0, skip)
    trained = replace(history, skipped=0)
    if sight.warmup and affordable[0].level == 1:
        reason = "full model: this round everybody trains everything"
        return _with_passes(Decision(1.0, reason, "whole", 1.0, trained), policy, sight, history)

    chosen = _choose(policy, affordable)
    share = min(policy.participation, chosen.share)
    turn, after = _takes_part(policy, history, share, device=device, round=round, seed=seed)
    if turn:
        after = replace(after, skipped=0) if after.skipped else after
        code, reason = _why_not_more(weighed, chosen, sight)
        reason = f"{_name(chosen.level)}: {reason}"
        return _with_passes(
            Decision(chosen.level, reason, code, share, after), policy, sight, history
        )
    if policy.max_gap is not None and history.skipped + 1 >= policy.max_gap:
        every = verdicts(policy, sight, history)
        least = [verdict for verdict in every if verdict.share > 0][-1]
        reason = f"{_name(least.level)}: the last {history.skipped} rounds were skipped"
        after = replace(after, skipped=0)
        return _with_passes(
            Decision(least.level, reason, "gap", share, after), policy, sight, history
        )
    after = replace(after, skipped=history.skipped + 1)
    if chosen.share < policy.participation:
        reason = f"skip: {_name(chosen.level)} {chosen.reason}"
        return Decision(None, f"{reason} ({policy.schedule})", "energy", share, after)
    reason = f"skip: the budget allows {share:.0%} of rounds ({policy.schedule})"
    return Decision(None, reason, "schedule", share, after)


def gate_code(gate: Gate) -> Code:
    """Return the cause that a closed gate stands for."""
    return "memory-pressure" if gate.name == "memory" else gate.name


def gates(policy: Policy, sight: Sight) -> list[Gate]:
    """Return all gates as they are now."""
    return check_gates(policy.limits, sight.snapshot, sight.minute)


def verdicts(
    policy: Policy, sight: Sight, history: History, *, until_it_fits: bool = False
) -> list[Verdict]:
    """Assess every offered level, largest first; or only until one fits every round."""
    levels = policy.offered_levels()
    if sight.whole:
        if policy.level < 1 and not sight.warmup:
            return [Verdict(1.0, 0.0, "owner", "is more than this device's owner allows")]
        levels = (1.0,)
    elif sight.warmup:
        levels = (1.0, *(level for level in levels if level < 1))
    # A device that offers nothing so small is given a part of what it offers.
    levels = tuple(level for level in levels if level <= sight.largest) or levels[-1:]
    if not sight.costs:
        return [Verdict(level, 1.0, "owner", "is not weighed") for level in levels[:1]]
    known = {cost.level: cost for cost in sight.costs}
    found = []
    for level in levels:
        found.append(_weigh(policy, sight, history, known[level]))
        if until_it_fits and found[-1].share == 1:
            break
    return found


def forward_objection(policy: Policy, sight: Sight, history: History, cost: Cost) -> str | None:
    """Return why a forward pass of this cost cannot be afforded now; None: it can be.

    The owner's level and share of rounds limit training; a pass is limited by the gates, which are
    not checked here, and by memory, time and energy alone.
    """
    if sight.snapshot.memory.available_bytes is None:
        return f"{_name(cost.level)} is not tried while free memory is not known"
    verdict = _weigh(policy, sight, history, cost)
    return None if verdict.share > 0 else f"{_name(cost.level)} {verdict.reason}"


def _weigh(policy: Policy, sight: Sight, history: History, cost: Cost) -> Verdict:
    level, available = cost.level, sight.snapshot.memory.available_bytes
    if available is None and level != min(policy.offered_levels()):
        return Verdict(level, 0.0, "memory", "is not tried while free memory is not known")
    if available is not None:
        room = policy.limits.memory_share * available
        if cost.peak_bytes > room:
            need, free = _apart(cost.peak_bytes / MB, room / MB)
            return Verdict(level, 0.0, "memory", f"needs {need} MB, {free} MB free")
    if cost.seconds > sight.deadline_s:
        seen = f"needs {cost.seconds:.3g} s, the round has {sight.deadline_s:.3g} s"
        return Verdict(level, 0.0, "deadline", seen)
    return _afford(policy, sight, history, cost)


def _afford(policy: Policy, sight: Sight, history: History, cost: Cost) -> Verdict:
    allowance = policy.allowance(sight.snapshot.battery)
    if allowance is None:
        seen = "is on battery, and its size is not known: set board, or energy_wh_per_day"
        return Verdict(cost.level, 0.0, "energy", seen)
    if allowance.joules_per_day is None:
        return Verdict(cost.level, 1.0, "full", "fits")
    if cost.joules is None:
        seen = "is on battery, and what it draws is not known: set board"
        return Verdict(cost.level, 0.0, "energy", seen)
    share = allowance.share(cost.joules, history, sight.rounds_left)
    if share == 0:
        left = allowance.left_j(history)
        seen = f"needs {cost.joules:.3g} J, {left:.3g} J are left today"
    elif share < 1:
        seen = f"needs {cost.joules:.3g} J, the budget allows it in {share:.0%} of rounds"
    else:
        seen = "fits"
    return Verdict(cost.level, share, "full" if share == 1 else "energy", seen)


def _with_passes(decision: Decision, policy: Policy, sight: Sight, history: History) -> Decision:
    """Return the decision with the passes that its steps may make, if the rule wants two."""
    cost = next((each for each in sight.costs if each.level == decision.level), None)
    if cost is None or cost.second_s <= 0:
        return decision
    lacking = _lacks(policy, sight, history, cost, decision.share)
    told = "fits" if lacking is None else f"does not fit: {lacking}"
    reason = f"{decision.reason}; a second, narrower pass a step {told}"
    return replace(decision, reason=reason, passes=2 if lacking is None else 1)


def _lacks(policy: Policy, sight: Sight, history: History, cost: Cost, share: float) -> str | None:
    """Return what a second pass a step needs and the device lacks; None: it fits."""
    available = sight.snapshot.memory.available_bytes
    if available is None:
        return "free memory is not known"
    room = policy.limits.memory_share * available
    if cost.peak_bytes + cost.second_bytes > room:
        need, free = _apart(cost.second_bytes / MB, (room - cost.peak_bytes) / MB)
        return f"needs {need} MB more, {free} MB are left"
    if cost.seconds + cost.second_s > sight.deadline_s:
        left = sight.deadline_s - cost.seconds
        return f"needs {cost.second_s:.3g} s more, {left:.3g} s are left"
    allowance = policy.allowance(sight.snapshot.battery)
    if allowance is None or allowance.joules_per_day is None:
        return None
    if cost.joules is None or cost.second_j is None:
        return "what it draws is not known"
    if allowance.share(cost.joules + cost.second_j, history, sight.rounds_left) < share:
        return f"needs {cost.second_j:.3g} J more"
    return None


def _choose(policy: Policy, affordable: list[Verdict]) -> Verdict:
    """Choose the level to train from those that can be afforded now and then, largest first."""
    if policy.prefer == "rarer":
        return affordable[0]
    return next((verdict for verdict in affordable if verdict.share == 1), affordable[-1])


def _why_not_more(weighed: Iterable[Verdict], chosen: Verdict, sight: Sight) -> tuple[Code, str]:
    """Explain why the level is not larger: the objection to the next larger one."""
    above = [verdict for verdict in weighed if verdict.level > chosen.level]
    if above:
        return above[-1].code, f"{_short(above[-1].level)} {above[-1].reason}"
    if sight.largest < 1:
        return "growing", f"the model grows, this round to {_short(sight.largest)}"
    if chosen.level == 1 and chosen.code != "owner":
        return "full", "all of it fits"
    return "owner", "the most this device's owner allows"


def _takes_part(
    policy: Policy, history: History, p: float, *, device: str, round: int, seed: int
) -> tuple[bool, History]:
    if policy.schedule == "ad-hoc":
        return bool(stream(seed, device, round, "skip").random() < p), history
    if policy.phase == "common":
        return common_turn(round, p), history
    phase = stream(seed, device, "phase").random() if history.turn is None else 0.0
    return take_turn(history, p, phase)


def _apart(more: float, less: float) -> tuple[str, str]:
    """Format two numbers with enough digits to tell them apart."""
    for digits in range(4):
        texts = f"{more:.{digits}f}", f"{less:.{digits}f}"
        if texts[0] != texts[1]:
            break
    return texts


def _name(level: float) -> str:
    return "full model" if level == 1 else f"level {level:.0%}".replace("%", " %")


def _short(level: float) -> str:
    return "full" if level == 1 else f"{level:.0%}".replace("%", " %")
