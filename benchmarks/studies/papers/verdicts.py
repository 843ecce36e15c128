"""Judges the claims of papers by the numbers, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from benchmarks.studies.papers.cell import CellOutcome, Outcomes, PaperClaim, PaperTable

ClaimVerdict = Literal[
    "reproduced", "within the noise", "not reproduced", "as claimed", "not as claimed", "not run"
]
"""With a single seed, a claim is only `as claimed` or not."""
LEAST_POINTS, LEAST_RATIO = 0.1, 0.01
"""Smallest difference that is no noise, however well the seeds agree: it is what a page shows."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim and the numbers about it."""

    claim: PaperClaim
    verdict: ClaimVerdict
    here: float | None = None
    """Difference, or ratio, as the mean over seeds."""
    spread: float | None = None
    """Standard deviation over seeds; None with fewer than two."""
    paper: float | None = None
    """Difference, or ratio, of the paper's values."""
    seeds: int = 0

    @property
    def words(self) -> str:
        """Return a sentence: the claim, the paper's number, ours, and the verdict."""
        if self.here is None:
            return f"{self.claim.words}: not run."
        sign = "" if self.claim.ratio else "+"
        unit = " ×" if self.claim.ratio else ""
        digits = 2 if self.claim.ratio else 1
        paper = "no number" if self.paper is None else f"{self.paper:{sign}.{digits}f}{unit}"
        here = f"{self.here:{sign}.{digits}f}{unit}"
        if self.spread is not None:
            here += f" ± {self.spread:.{digits}f}"
        seeds = f", {self.seeds} seed{'s' * (self.seeds > 1)}" if self.seeds < 3 else ""
        return f"{self.claim.words}: paper {paper}, here {here}{seeds}: **{self.verdict}**."


def judge(table: PaperTable, claim: PaperClaim, done: Outcomes) -> Judged:
    """Compare two cells seed by seed.

    A difference counts if it is larger than its standard deviation over seeds, and than what a page
    shows. One seed cannot reproduce anything: then the verdict tells the direction alone.
    """
    pairs = _pairs(claim, done)
    printed = _printed(table, claim)
    if not pairs:
        return Judged(claim, "not run", paper=printed)
    found = [first / second if claim.ratio else first - second for first, second in pairs]
    mean = fmean(found)
    spread = stdev(found) if len(found) > 1 else None
    if claim.ratio:
        ahead = 1 - mean
    elif claim.within is not None:
        ahead = mean + claim.within
    else:
        ahead = mean
    return Judged(claim, _verdict(claim, ahead, spread), mean, spread, printed, len(found))


def _verdict(claim: PaperClaim, ahead: float, spread: float | None) -> ClaimVerdict:
    """Judge how far the first cell is ahead of where it should at least be."""
    if spread is None:
        return "as claimed" if ahead > 0 else "not as claimed"
    least = LEAST_RATIO if claim.ratio else LEAST_POINTS
    if claim.within is None and abs(ahead) <= max(spread, least):
        return "within the noise"
    return "reproduced" if ahead > 0 else "not reproduced"


def judge_all(table: PaperTable, done: Outcomes) -> list[Judged]:
    """Judge every claim of a table."""
    return [judge(table, claim, done) for claim in table.claims]


def _pairs(claim: PaperClaim, done: Outcomes) -> list[tuple[float, float]]:
    first, second = (_by_seed(done.get(place, ())) for place in (claim.better, claim.worse))
    found = []
    for seed in sorted(first.keys() & second.keys()):
        one, other = (run[seed].values.get(claim.measure) for run in (first, second))
        if one is not None and other is not None and (other or not claim.ratio):
            found.append((one, other))
    return found


def _by_seed(runs: Sequence[CellOutcome]) -> dict[int, CellOutcome]:
    return {each.seed: each for each in runs}


def _printed(table: PaperTable, claim: PaperClaim) -> float | None:
    if claim.paper is not None:
        return claim.paper
    cells = (table.cell(claim.better), table.cell(claim.worse))
    first, second = (None if each is None else each.paper for each in cells)
    if first is None or second is None:
        return None
    return first / second if claim.ratio else first - second
