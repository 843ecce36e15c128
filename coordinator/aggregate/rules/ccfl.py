"""`ccfl-1`, `ccfl-2`, `ccfl-3`: a skipping device counts with its last movement; `strategy-2`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import NO_LIMIT, Memory, Piece
from coordinator.aggregate.robust import Weighed
from coordinator.aggregate.robust.sums import Float64, Term, block_sums, divide, sum_terms
from coordinator.aggregate.rules.rule import Closing, Rule
from coordinator.errors import ConfigError
from edge_sdk.program.settings import Spelling
from edge_sdk.protocol.plan.blocks import Blocks, Float32, select_blocks

Absent = Literal["left-out", "zero"]


WORDS = 'a whole number of rounds, or "none" for no limit'


def _read_horizon(value: Any, _: Path) -> Any:
    if value != "none" and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError
    return value


Horizon = Annotated[int | Literal["none"], Spelling(_read_horizon, WORDS)]


@dataclass(frozen=True, kw_only=True)
class Ccfl(Rule):
    """Base of CCFL's rules: their terms and their divisor.

    `θ_i += η · Σ terms / c_i`. The terms are fresh movements and, for devices that skipped, their
    last ones, at most `horizon` rounds old ("none" is the paper's: however old) and scaled
    to today's learning rate. `absent` says what becomes of a selected device that says
    nothing about `i`:

    - "left-out": `c_i` is the number of terms, or of all selected devices where nobody trained `i`,
      so a lone old movement does not move θ by its full length;
    - "zero", the paper's: it counts as a movement of 0, so `c_i = |S_t|`, all selected devices.
    """

    horizon: Horizon = 8
    absent: Absent = "left-out"

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if not (self.horizon == "none" or isinstance(self.horizon, int)):
            raise ConfigError(f"horizon = {self.horizon!r}: must be {WORDS}")
        if self.horizon != "none" and self.horizon < 1:
            raise ConfigError(f"horizon must be at least 1 round, not {self.horizon}")
        if self.absent not in get_args(Absent):
            raise ConfigError(f"absent is one of {get_args(Absent)}, not {self.absent!r}")

    @property
    def counts_within(self) -> int | None:
        """See `Rule`."""
        return None if self.horizon == "none" else self.horizon

    @property
    def ageless(self) -> bool:
        """See `Rule`."""
        return self.horizon == "none"

    def move(self, closing: Closing) -> Float32:
        """Average the fresh movements and those of devices that skipped."""
        return self._judge(closing)[0]

    def _judge(self, closing: Closing) -> tuple[Float32, Sequence[Contribution]]:
        """Return the movement of the model, and the fresh movements for memory."""
        plan, spoken_for = closing.plan, self._old_terms(closing)
        fresh = [(part.blocks, self.weight(part)) for part in closing.fresh]
        weighed = [*fresh, *((blocks, weight) for blocks, weight, _ in spoken_for)]
        weights = block_sums(plan, weighed)
        more = self._more(closing, weights, fresh, weighed)
        if closing.robust.combines:
            old = [Weighed(*term) for term in spoken_for]
            mean, entering = closing.judge([*(Weighed(*pair) for pair in fresh), *old])
            return divide(plan, mean, more / self.server_rate), entering
        terms = [Term(blocks, weight) for blocks, weight in fresh]
        terms += [Term(blocks, weight * factor) for blocks, weight, factor in spoken_for]
        total = sum_terms(plan, terms, threads=closing.threads)
        return divide(plan, total, weights * more / self.server_rate), closing.fresh

    def _more(
        self,
        closing: Closing,
        weights: Float64,
        fresh: Sequence[tuple[Blocks, float]],
        weighed: Sequence[tuple[Blocks, float]],
    ) -> Float64:
        """Return, per block, the factor by which `c_i` exceeds the weight of the terms."""
        if self.absent == "zero":
            return np.divide(closing.asked, weights, out=np.ones_like(weights), where=weights > 0)
        trained = block_sums(closing.plan, [(blocks, 1.0) for blocks, _ in fresh])
        speaking = block_sums(closing.plan, [(blocks, 1.0) for blocks, _ in weighed])
        # Where nobody trained a block, its sum is divided by all that were asked.
        return np.where(trained > 0, 1.0, closing.selected / np.maximum(speaking, 1))

    def spoken_for(self, closing: Closing) -> list[Blocks]:
        """See `Rule`."""
        return [blocks for blocks, _, _ in self._old_terms(closing)]

    def _old_terms(self, closing: Closing) -> list[tuple[Blocks, float, float]]:
        """Return the (blocks, weight, factor) of devices that skipped."""
        raise NotImplementedError

    def _replays(self, closing: Closing) -> list[tuple[Blocks, float, float]]:
        return [
            (part.blocks, self.weight(part), closing.learning_rate / part.learning_rate)
            for part in closing.replayed
            if self._counts(closing.round - part.made)
        ]

    def _remembered(self, closing: Closing) -> list[tuple[Blocks, float, float]]:
        return [
            (piece.blocks, piece.made.weight, closing.learning_rate / piece.made.learning_rate)
            for piece in _recalled(closing)
            if self._counts(closing.round - piece.made.round)
        ]

    def _counts(self, age: int) -> bool:
        """Tell if a movement of this age, in rounds, still counts."""
        return self.horizon == "none" or age <= self.horizon


@dataclass(frozen=True, kw_only=True)
class Ccfl1(Ccfl):
    """A device that skips sends its own last movement again; no memory here (CCFL, option 1)."""

    @property
    def replay_within(self) -> int:
        """See `Rule`."""
        return NO_LIMIT if self.horizon == "none" else self.horizon

    def _old_terms(self, closing: Closing) -> list[tuple[Blocks, float, float]]:
        return self._replays(closing)


@dataclass(frozen=True, kw_only=True)
class Ccfl2(Ccfl):
    """A device that skips counts with its last movement in the coordinator's memory (CCFL)."""

    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "movements"

    def move(self, closing: Closing) -> Float32:
        """See `Ccfl`."""
        memory = _memory(closing)
        result, entering = self._judge(closing)
        memory.write(entering)
        return result

    def _old_terms(self, closing: Closing) -> list[tuple[Blocks, float, float]]:
        return self._remembered(closing)


@dataclass(frozen=True, kw_only=True)
class Ccfl3(Ccfl1):
    """A device that skips sends its copy if it keeps one; memory serves the others (CCFL)."""

    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "movements"

    def move(self, closing: Closing) -> Float32:
        """See `Ccfl`."""
        memory = _memory(closing)
        result, entering = self._judge(closing)
        memory.write([part for part in entering if self.takes(part)])
        return result

    def _old_terms(self, closing: Closing) -> list[tuple[Blocks, float, float]]:
        return [*self._replays(closing), *self._remembered(closing)]

    def takes(self, part: Contribution) -> bool:
        """See `Rule`; a device that keeps a copy sends it again itself."""
        return not part.keeps_copy


@dataclass(frozen=True, kw_only=True)
class Strategy2(Rule):
    """CCFL's second baseline: a device that skips counts with its last model, however stale."""

    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "models"

    def move(self, closing: Closing) -> Float32:
        """Average `D_n,i` of devices that trained and `w_n,i − θ_i` of those that did not."""
        plan, memory = closing.plan, _memory(closing)
        weighed = [(part.blocks, self.weight(part)) for part in closing.fresh]
        for piece in _recalled(closing):
            now = select_blocks(closing.theta, piece.blocks.ids, plan.block_offsets)
            stale = Blocks(piece.blocks.ids, piece.blocks.values - now.values)
            weighed.append((stale, piece.made.weight))
        if closing.robust.combines:
            mean, entering = closing.judge([Weighed(*pair) for pair in weighed])
            memory.write([_as_model(closing, part) for part in entering])
            mean *= np.float32(self.server_rate)
            return mean
        total = sum_terms(plan, [Term(*pair) for pair in weighed], threads=closing.threads)
        memory.write([_as_model(closing, part) for part in closing.fresh])
        return divide(plan, total, block_sums(plan, weighed) / self.server_rate)

    def spoken_for(self, closing: Closing) -> list[Blocks]:
        """See `Rule`."""
        return [piece.blocks for piece in _recalled(closing)]


def _as_model(closing: Closing, part: Contribution) -> Contribution:
    start = select_blocks(closing.theta, part.blocks.ids, closing.plan.block_offsets)
    return replace(part, blocks=Blocks(part.blocks.ids, start.values + part.blocks.values))


def _recalled(closing: Closing) -> list[Piece]:
    """Return the entries of the devices that skipped."""
    memory = closing.needed_memory
    return [piece for device in closing.silent for piece in memory.recall(device)]


def _memory(closing: Closing) -> Memory:
    closing.needed_memory.advance(closing.round)
    return closing.needed_memory
