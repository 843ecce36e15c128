"""The size of a study. Imports nothing heavy, so that `--help` can show it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report.options import UsageError

DEVICES = 30
"""Phones, if the data has no owners."""
RULES = ("ra-fed", "ram-fed", "ccfl-2", "fedavg")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnConfig:
    """Options of the command line. Raises `UsageError`."""

    rules: tuple[str, ...] = RULES
    rounds: int = 48
    seeds: int = 3
    """Seeds 0 to below this."""

    def __post_init__(self) -> None:
        for name in ("rounds", "seeds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, not {getattr(self, name)}")

    @property
    def cases(self) -> tuple[tuple[str, int], ...]:
        """Return (rule, seed) of all runs: all rules with one seed before the next seed."""
        return tuple((rule, seed) for seed in range(self.seeds) for rule in self.rules)


QUICK = LearnConfig(rules=("ram-fed", "fedavg"), rounds=6, seeds=1)
