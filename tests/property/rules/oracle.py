"""Every server rule once more, block by block, as naive as its definition.

Nothing is summed up or replaced: `past` is a list of all movements that ever entered memory, and a
device's newest one is found by looking through all of it. Numbers are float64. Shares nothing with
`coordinator.aggregate.rules` and `coordinator.aggregate.memory` but the names of the options.

A mean whose weights are all zero hears nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
"""The parameters of one block."""
Weighed = tuple[float, Values]
"""A weight, and what is weighed."""


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """What one device said about some blocks, in a round."""

    device: str
    made: int
    rate: float
    level: float
    samples: int
    keeps_copy: bool
    blocks: Mapping[int, Values]


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """All that is known as a round closes."""

    round: int
    rate: float
    theta: Sequence[Values]
    """The model before the round, block by block."""
    fresh: Sequence[Word]
    replayed: Sequence[Word]
    silent: Sequence[str]
    samples: Mapping[str, int]
    """Of every registered device, as it last said."""

    @property
    def selected(self) -> int:
        return len(self.fresh) + len(self.replayed) + len(self.silent)


@dataclass(slots=True, kw_only=True)
class Oracle:
    """A rule by name with its options, and all that memory was ever given."""

    rule: str
    max_staleness: int = 50
    weighting: str = "uniform"
    server_rate: float = 1.0
    damping: float = 0.8
    correction: str = "coverage"
    population: str = "holders"
    horizon: int | str = 8
    absent: str = "left-out"
    average: Callable[[Sequence[Weighed], Sequence[Values] | None], Values | float] = (
        lambda terms, judged: mean(terms)
    )
    """The mean over the movements of a block that a rule takes, and by what they are judged."""
    left_out: Callable[[], Sequence[int]] = lambda: ()
    """Which of the movements that `average` was last given had no part in it."""
    dropped: set[tuple[str, int]] = field(default_factory=set)
    """Devices and blocks of this round's movements that do not enter memory."""
    past: list[Word] = field(default_factory=list)

    def move(self, heard: Heard) -> list[Values]:
        """How far every block of the model moves."""
        rule = BLOCK_RULES[self.rule]
        self.dropped = set()
        return [
            self.server_rate * rule(self, heard, block) + np.zeros_like(theta)
            for block, theta in enumerate(heard.theta)
        ]

    def remember(self, heard: Heard, late: Sequence[Word]) -> None:
        """Take the movements of a round that has closed, and those that came too late for one."""
        heard = replace(heard, fresh=[self._selected(word) for word in heard.fresh])
        match self.rule:
            case "ram-fed" | "fedvarp" | "ccfl-2":
                self.past += [*heard.fresh, *late]
            case "ccfl-3":
                words = [*heard.fresh, *late]
                self.past += [word for word in words if not word.keeps_copy]
            case "strategy-2":
                self.past += [_as_model(word, heard.theta) for word in heard.fresh]

    def mean(
        self,
        terms: Sequence[Weighed],
        fresh: Sequence[Word],
        block: int,
        judged: Sequence[Values] | None = None,
    ) -> Values | float:
        """The mean over some movements of a block; the fresh ones come first."""
        result = self.average(terms, judged)
        holding = [word.device for word in fresh if block in word.blocks]
        self.dropped |= {(holding[at], block) for at in self.left_out() if at < len(holding)}
        return result

    def _selected(self, word: Word) -> Word:
        kept = {i: x for i, x in word.blocks.items() if (word.device, i) not in self.dropped}
        return replace(word, blocks=kept)

    @property
    def within(self) -> float:
        """The age at which a movement still counts for a skip."""
        return inf if isinstance(self.horizon, str) else self.horizon

    def weight(self, word: Word) -> float:
        return {"uniform": 1.0, "samples": float(word.samples), "level": word.level}[self.weighting]

    def newest(self, device: str, block: int, now: int) -> Word | None:
        """The movement of a block that a device made in the latest round, unless it is stale."""
        found = None
        for word in self.past:
            if word.device != device or block not in word.blocks:
                continue
            stale = self.horizon != "none" and now - word.made > self.max_staleness
            if not stale and (found is None or word.made > found.made):
                found = word
        return found

    def everybody(self, heard: Heard) -> float:
        """`N`, or all samples."""
        samples = heard.samples.values()
        return float(sum(samples) if self.weighting == "samples" else len(samples))


def _as_model(word: Word, theta: Sequence[Values]) -> Word:
    return replace(word, blocks={i: theta[i] + values for i, values in word.blocks.items()})


def share(terms: Sequence[Weighed], of: float) -> Values | float:
    """`Σ w x` as a share of some weight; 0 if that is 0."""
    return sum(weight * values for weight, values in terms) / of if of else 0.0


def mean(terms: Sequence[Weighed]) -> Values | float:
    return share(terms, sum(weight for weight, _ in terms))


def at_rate(word: Word, block: int, heard: Heard) -> Values:
    """A movement at today's learning rate."""
    return word.blocks[block] * (heard.rate / word.rate)


# -- the rules, for one block ------------------------------------------------------------------


def ra_fed(oracle: Oracle, heard: Heard, block: int) -> Values | float:
    """`Γ = 0`: keep. Else the mean of `D_n` over `N_i`."""
    terms = [
        (oracle.weight(word), word.blocks[block]) for word in heard.fresh if block in word.blocks
    ]
    return oracle.mean(terms, heard.fresh, block)


def ram_fed(oracle: Oracle, heard: Heard, block: int) -> Values | float:
    """`v = ū + (1/Γ) Σ (D_n − u_n)`; `v = ū` where nobody trained the block."""
    entries: dict[str, Weighed] = {}
    for device in heard.samples:
        word = oracle.newest(device, block, heard.round)
        if word is not None:
            faded = oracle.damping ** (heard.round - word.made)
            entries[device] = (oracle.weight(word), faded * at_rate(word, block, heard))
    fallback: Values | float
    if oracle.population == "all":
        memory, fallback = share(list(entries.values()), oracle.everybody(heard)), 0.0
    else:
        memory = fallback = mean(list(entries.values()))
    corrections: list[Weighed] = []
    for word in heard.fresh:
        if block in word.blocks:
            old = entries[word.device][1] if word.device in entries else fallback
            corrections.append((oracle.weight(word), word.blocks[block] - old))
    judged = [word.blocks[block] for word in heard.fresh if block in word.blocks]
    step = oracle.mean(corrections, heard.fresh, block, judged)
    if oracle.correction == "coverage":
        return memory + step
    weight, everybody = sum(weight for weight, _ in corrections), oracle.everybody(heard)
    return memory + (step * weight / everybody if everybody else 0.0)


def ccfl(oracle: Oracle, heard: Heard, block: int) -> Values | float:
    """`(Σ trained D_n + Σ skipped u_n) / c`, with what is heard of a skip named by the variant."""
    trained = [
        (oracle.weight(word), word.blocks[block]) for word in heard.fresh if block in word.blocks
    ]
    spoken_for: list[Word | None] = []
    if oracle.rule in ("ccfl-1", "ccfl-3"):
        spoken_for += [word for word in heard.replayed if block in word.blocks]
    if oracle.rule in ("ccfl-2", "ccfl-3"):
        spoken_for += [oracle.newest(device, block, heard.round) for device in heard.silent]
    skipped = [
        (oracle.weight(word), at_rate(word, block, heard))
        for word in spoken_for
        if word is not None and heard.round - word.made <= oracle.within
    ]
    terms = trained + skipped
    if oracle.absent == "zero":
        # All selected devices, as they are known; robust means are over those that said something.
        names = [word.device for word in (*heard.fresh, *heard.replayed)] + [*heard.silent]
        asked = float(len(names))
        if oracle.weighting == "samples":
            asked = float(sum(heard.samples[name] for name in names))
        result = oracle.mean(terms, heard.fresh, block)
        return result * sum(weight for weight, _ in terms) / asked if asked else 0.0
    result = oracle.mean(terms, heard.fresh, block)
    if trained or not terms:
        return result
    # c is all selected devices. Those of whom nothing is known weigh as the others do on average.
    return result * len(terms) / heard.selected


def strategy_2(oracle: Oracle, heard: Heard, block: int) -> Values | float:
    """Whoever skips is counted with its last model: `w_n − θ` now."""
    terms = [
        (oracle.weight(word), word.blocks[block]) for word in heard.fresh if block in word.blocks
    ]
    for device in heard.silent:
        word = oracle.newest(device, block, heard.round)
        if word is not None:
            away = word.blocks[block] - heard.theta[block]
            terms.append((oracle.weight(word), away))
    return oracle.mean(terms, heard.fresh, block)


BLOCK_RULES: Mapping[str, Callable[[Oracle, Heard, int], Values | float]] = {
    "fedavg": ra_fed,
    "ra-fed": ra_fed,
    "strategy-1": ra_fed,
    "subdismo": ra_fed,
    "ram-fed": ram_fed,
    "fedvarp": ram_fed,
    "ccfl-1": ccfl,
    "ccfl-2": ccfl,
    "ccfl-3": ccfl,
    "strategy-2": strategy_2,
}


# -- asynchronous rules ------------------------------------------------------------------------


def staleness(kind: str, age: float, a: float, b: float) -> float:
    """`s(x)`."""
    if kind == "constant":
        return 1.0
    if kind == "hinge":
        return 1.0 if age <= b else 1 / (a * (age - b) + 1)
    assert kind == "polynomial"
    return float((age + 1) ** -a)


def mixed(now: Values, start: Values, movement: Values, alpha: float) -> Values:
    """`(1 − α_t) θ_j + α_t (θ_j(τ) + D)`."""
    return (1 - alpha) * now + alpha * (start + movement)
