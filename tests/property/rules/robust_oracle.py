"""Every robust choice once more, as naive as its definition: loops over blocks and single numbers.

Shares nothing with `coordinator.aggregate.robust` but the names and numbers of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_sdk.protocol.plan.plan import ModelPlan
from tests.property.rules.oracle import Heard, Values, Weighed, Word, mean


class TieError(Exception):
    """The definition leaves open which device is selected."""


@dataclass(slots=True)
class NaiveRobust:
    """A choice by name with its numbers."""

    plan: ModelPlan
    name: str
    norm: float = 1.0
    factor: float = 1.0
    hostile: float = 0.2
    out: Sequence[int] = ()
    """Which of the last terms were not selected."""

    # -- clipping ------------------------------------------------------------------------------

    def clip(self, heard: Heard, late: Sequence[Word]) -> tuple[Heard, list[Word]]:
        """What is left of the movements of a round, and of those that came too late for one."""
        if self.name == "none":
            return heard, list(late)
        limits = self.yardsticks([*heard.fresh, *heard.replayed])

        def cut(words: Sequence[Word]) -> list[Word]:
            return [self._cut(word, limits) for word in words]

        return replace(heard, fresh=cut(heard.fresh), replayed=cut(heard.replayed)), cut(late)

    def _cut(self, word: Word, limits: Sequence[float]) -> Word:
        if self.name == "clip":
            length = math.sqrt(sum(float((x**2).sum()) for x in word.blocks.values()))
            shares = dict.fromkeys(word.blocks, min(1.0, self.norm / length) if length else 1.0)
        else:
            shares = {}
            for block, values in word.blocks.items():
                length = math.sqrt(float((values**2).sum())) / word.rate
                limit = self.factor * limits[block]
                shares[block] = limit / length if length > limit else 1.0
        return replace(word, blocks={i: shares[i] * x for i, x in word.blocks.items()})

    def yardsticks(self, cohort: Sequence[Word]) -> list[float]:
        """The norm per unit of learning rate that each block may have."""
        cohort = [word for word in cohort if word.blocks]
        tensors = self.plan.block_tensors.tolist()
        if len(cohort) < 3:
            return [math.inf] * len(tensors)
        usual = lower_median([rms(word, list(word.blocks)) for word in cohort])
        of_tensor = {}
        for tensor in set(tensors):
            parts = [[each for each in word.blocks if tensors[each] == tensor] for word in cohort]
            found = [rms(word, part) for word, part in zip(cohort, parts, strict=True) if part]
            of_tensor[tensor] = max(0.1 * usual, lower_median(found)) if len(found) > 2 else usual
        limits = []
        for block, tensor in enumerate(tensors):
            norms = [rms(word, [block]) for word in cohort if block in word.blocks]
            least = of_tensor[tensor]
            per_root = least if len(norms) <= 2 else max(lower_median(norms), 0.1 * least)
            limits.append(per_root * math.sqrt(int(self.plan.block_sizes[block])))
        return limits

    # -- means ---------------------------------------------------------------------------------

    def mean(
        self, terms: Sequence[Weighed], judged: Sequence[Values] | None = None
    ) -> Values | float:
        """The mean of one block over devices, who are selected by what is judged."""
        judged = [values for _, values in terms] if judged is None else judged
        self.out, places = (), [at for at, term in enumerate(terms) if term[0] > 0]
        terms = [terms[at] for at in places]
        if len(terms) <= 2:
            return mean(terms)
        match self.name:
            case "median":
                return np.median([values for _, values in terms], axis=0)
            case "trimmed-mean":
                return self._trimmed([values for _, values in terms])
            case "geometric-median":
                return geometric_median(terms)
            case "multi-krum":
                chosen = self._krum([judged[at] for at in places])
                self.out = [at for number, at in enumerate(places) if number not in chosen]
                return mean([terms[number] for number in chosen])
            case _:
                return mean(terms)

    def bad(self, count: int) -> int:
        return min(max(1, math.ceil(self.hostile * count - 1e-9)), (count - 1) // 2)

    def _trimmed(self, vectors: Sequence[Values]) -> Values:
        cut, result = self.bad(len(vectors)), np.zeros_like(vectors[0])
        for place in range(len(result)):
            ordered = sorted(float(vector[place]) for vector in vectors)
            kept = ordered[cut : len(ordered) - cut]
            result[place] = sum(kept) / len(kept)
        return result

    def _krum(self, vectors: Sequence[Values]) -> Sequence[int]:
        count, bad = len(vectors), self.bad(len(vectors))
        scores = []
        for number, one in enumerate(vectors):
            others = [x for other, x in enumerate(vectors) if other != number]
            apart = sorted(float(((one - x) ** 2).sum()) for x in others)
            scores.append(sum(apart[: max(1, count - bad - 2)]))
        order = sorted(range(count), key=lambda number: scores[number])
        best, next_best = order[: count - bad], order[count - bad]
        if scores[next_best] - scores[best[-1]] <= 1e-4 * max(scores):
            raise TieError  # rounding decides
        return best


def lower_median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def rms(word: Word, blocks: Sequence[int]) -> float:
    """Per unit of learning rate."""
    total = sum(float((word.blocks[each] ** 2).sum()) for each in blocks)
    return math.sqrt(total / sum(len(word.blocks[each]) for each in blocks)) / word.rate


def geometric_median(terms: Sequence[Weighed]) -> Values:
    """Weiszfeld's algorithm on the vectors themselves."""
    vectors = np.array([values for _, values in terms])
    weights = np.array([weight for weight, _ in terms])
    shares, least = weights / weights.sum(), None
    for _ in range(200):
        apart = np.linalg.norm(vectors - shares @ vectors, axis=1)
        least = 1e-6 * float(shares @ apart) if least is None else least
        if not least:
            break
        before, shares = shares, weights / np.maximum(apart, least)
        shares /= shares.sum()
        if np.abs(shares - before).max() <= 1e-7:
            break
    return np.asarray(shares @ vectors)
