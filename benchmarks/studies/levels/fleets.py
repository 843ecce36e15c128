"""Fleets, by the levels their devices can train, and ways to train one model with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Literal

from coordinator.aggregate.published import PUBLISHED

LEVELS = (1.0, 0.5, 0.25)

Who = Literal["own", "full", "smallest", "median", "strong", "changing"]
"""Levels at which devices take part: `own`, as many as they can; the others are what a user would
do without levels: everybody at full level (the upper bound), everybody at the smallest, everybody
who can at the median, only those that can train everything. `changing`: own, drawn every round."""


@dataclass(frozen=True, slots=True)
class MixedFleet:
    """Shares of the devices that can train at most each level."""

    shares: Mapping[float, float]
    changing: bool = False
    """A device's level is drawn anew every round."""

    def levels(self, devices: int) -> list[float]:
        """Return the level of every device: as many of each as the shares say, at least one."""
        counts = {
            level: max(1, round(share * devices)) if share else 0
            for level, share in self.shares.items()
        }
        most = max(counts, key=lambda level: (counts[level], level))
        counts[most] += devices - sum(counts.values())
        return [level for level in sorted(counts, reverse=True) for _ in range(counts[level])]


FLEETS: dict[str, MixedFleet] = {
    "thirds": MixedFleet({1.0: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3}),
    "mostly-small": MixedFleet({1.0: 0.1, 0.5: 0.3, 0.25: 0.6}),
    "one-full": MixedFleet({1.0: 1e-9, 0.5: 0.5, 0.25: 0.5}),
    "changing": MixedFleet({1.0: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3}, changing=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWay:
    """A way to train: a rule, a mask policy and a local rule, and who takes part."""

    who: Who = "own"
    rule: str = "ra-fed"
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    masks: str = "nested"
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    steps: float = 1.0
    """Local steps, times those of the setting."""
    grow: float = 0.0
    """Share of the rounds in which the model grows (`RoundsConfig.grow`)."""
    saves: bool = False
    """The way gets the rounds of one that does not grow, and so spends less energy."""
    decoupled: bool = False
    """The model has norms of its own for every level (`decouple_norms`)."""

    @property
    def mixes(self) -> bool:
        """True if devices train at their own levels."""
        return self.who == "own"

    def level_of(self, own: Sequence[float]) -> list[float | None]:
        """Return the level at which each device takes part; None: it does not."""
        match self.who:
            case "full":
                return [1.0 for _ in own]
            case "smallest":
                return [min(own) for _ in own]
            case "median":
                middle = median_low(own)
                return [middle if level >= middle else None for level in own]
            case "strong":
                return [level if level == 1 else None for level in own]
            case _:
                return list(own)

    def delivers(self, own: Sequence[float]) -> tuple[float, ...]:
        """Return the levels of the model that the way makes usable."""
        if self.mixes:
            return LEVELS
        return (max(level for level in self.level_of(own) if level is not None),)


_PLAIN = {"rescale": 0.0}
"""A model of one size needs no rescaling."""

_DAMPED = {"damping": 0.8}
"""The memory of the recorded runs of ram-fed, whose default is another one since."""

WAYS: dict[str, TrainingWay] = {
    "all-full": TrainingWay(who="full", local=_PLAIN),
    "all-smallest": TrainingWay(who="smallest", local=_PLAIN),
    "all-median": TrainingWay(who="median", local=_PLAIN),
    "only-strong": TrainingWay(who="strong", local=_PLAIN),
    "coverage": TrainingWay(masks="coverage"),
    "coverage-ram": TrainingWay(rule="ram-fed", rule_options=_DAMPED, masks="coverage"),
    "nested": TrainingWay(local={"rescale": 0.0}),
    "nested-rescaled": TrainingWay(local={"rescale": 0.5}),
    "dropout": TrainingWay(local={"rescale": 0.0, "widths": "ordered-dropout"}),
    "dropout-core": TrainingWay(masks="core", local={"rescale": 0.0, "widths": "ordered-dropout"}),
    "sandwich": TrainingWay(local={"rescale": 0.0, "widths": "sandwich"}),
    "sandwich-core": TrainingWay(masks="core", local={"rescale": 0.0, "widths": "sandwich"}),
}
_VARIED: dict[str, dict[str, Any]] = {
    "sandwich-distilled": {"local": {**WAYS["sandwich"].local, "distillation": 0.5}},
    "sandwich-rescaled": {"local": {**WAYS["sandwich"].local, "rescale": 0.5}},
    "sandwich-ram": {"rule": "ram-fed", "rule_options": _DAMPED},
    "sandwich-ram-undamped": {"rule": "ram-fed", "rule_options": {"damping": 1.0}},
    "sandwich-by-level": {"rule_options": {"weighting": "level"}},
    "sandwich-by-samples": {"rule_options": {"weighting": "samples"}},
    "sandwich-tied": {"mask_options": {"tied": True}},
    "sandwich-momentum": {"optimizer": {"name": "momentum", "beta1": 0.5}},
    "sandwich-yogi": {"optimizer": {"name": "yogi"}},
    "sandwich-half-steps": {"steps": 0.5},
    "masked-logits": {"local": {**WAYS["sandwich"].local, "classes": "own"}},
    "rolling": {"masks": "rolling", "local": _PLAIN},
    "random": {"masks": "random", "local": _PLAIN},
}
WAYS |= {name: replace(WAYS["sandwich"], **change) for name, change in _VARIED.items()}
WAYS |= {
    f"{name}-momentum": replace(WAYS[name], optimizer={"name": "momentum", "beta1": 0.5})
    for name in ("dropout", "all-full", "all-smallest", "all-median", "only-strong")
}
WAYS |= {
    "growing": replace(WAYS["dropout-momentum"], grow=0.9),
    "growing-half": replace(WAYS["dropout-momentum"], grow=0.5),
    "all-median-growing": replace(WAYS["all-median-momentum"], grow=0.9),
    "growing-saves": replace(WAYS["dropout-momentum"], grow=0.9, saves=True),
    "growing-half-saves": replace(WAYS["dropout-momentum"], grow=0.5, saves=True),
    "growing-plain": replace(WAYS["dropout"], grow=0.9),
    "growing-ram": replace(
        WAYS["dropout-momentum"], grow=0.9, rule="ram-fed", rule_options=_DAMPED
    ),
    "growing-sandwich": replace(WAYS["sandwich-momentum"], grow=0.9),
}
WAYS |= {
    name: TrainingWay(
        rule=recipe.rule,
        rule_options=recipe.rule_options,
        masks=recipe.masks,
        mask_options=recipe.mask_options,
        local=recipe.local,
        decoupled=recipe.decoupled,
    )
    for name, recipe in PUBLISHED.items()
    if name in ("heterofl", "fedrolex", "fjord", "fjord-distilled", "nefl", "fiarse")
}
"""Ways by name; the last ones are published recipes."""

ALTERNATIVES = ("all-smallest", "all-median", "only-strong")
UPPER_BOUND = "all-full"
