"""Delivery: a committed model that devices may keep for inference.

Retained on `pub/latest` for the newest model, and on `pub/best` for the one with the best accuracy.
With canary delivery, a new model is first on `pub/canary` alone, for the devices whose draw is
below its `canary`, and they answer with an `Evaluation`; the other topics name promoted models.

A notice names only levels that are ready to use: those of a model with BatchNorm have statistics of
their own, which the notice names too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import MAX_LEVELS
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.transfer import check_run
from edge_sdk.protocol.streams import stream

Choice = Literal["latest", "best", "canary"]
"""Which model: the newest, the one with the best accuracy, or one that some devices try."""
CHOICES: tuple[Choice, ...] = ("latest", "best", "canary")

BATCH = 32
"""Samples at a time in a device's own evaluation of a model."""
FETCH_S = 3600.0
"""Seconds that fetching and running a delivered model may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotice:
    """A model that a round made, ready for inference at some levels."""

    round: int
    plan_hash: str
    levels: tuple[float, ...]
    """Shares of the model, largest first."""
    groups: tuple[Mapping[str, tuple[int, ...]], ...]
    """The groups that each level means."""
    accuracies: tuple[float | None, ...]
    """Share of correct answers of each level; None: not measured."""
    rescale: float
    """See `LocalRule`: that of the levels' training."""
    run: str
    model: Blob
    """The index of the model (`packs/index.py`)."""
    statistics: Blob | None = None
    """BatchNorm statistics of the levels (`survey.py`); None: the model has no BatchNorm."""
    canary: float | None = None
    """Devices whose draw is below this try the model; None: it is for all."""
    decided: int = 0
    """Models of rounds up to this one are not tried any more; 0: none was."""

    def __post_init__(self) -> None:
        check_run(self.run)
        if any(not 0 < level <= 1 for level in self.levels) or list(self.levels) != sorted(
            set(self.levels), reverse=True
        ):
            raise MessageError(f"levels are shares in (0, 1], largest first, not {self.levels}")
        if not 1 <= len(self.levels) <= MAX_LEVELS:
            raise MessageError(f"a model of {len(self.levels)} levels")
        if not len(self.levels) == len(self.groups) == len(self.accuracies):
            raise MessageError("a model needs groups and an accuracy for each of its levels")
        if any(each is not None and not 0 <= each <= 1 for each in self.accuracies):
            raise MessageError(f"an accuracy is a share in [0, 1], not {self.accuracies}")
        if self.round < 1:
            raise MessageError(f"a model of round {self.round}")
        if not (math.isfinite(self.rescale) and self.rescale >= 0):
            raise MessageError(f"rescale must not be below 0: {self.rescale!r}")
        if self.canary is not None and not 0 < self.canary <= 1:
            raise MessageError(f"canary is a share in (0, 1], not {self.canary!r}")

    def as_survey(self, samples: int) -> Survey:
        """Return the evaluation of this model on so many samples, as if it were asked for."""
        return Survey(
            round=self.round,
            plan_hash=self.plan_hash,
            wants="evaluation",
            levels=self.levels,
            groups=self.groups,
            rescale=self.rescale,
            samples=samples,
            batch_size=BATCH,
            wait_s=FETCH_S,
            run=self.run,
            model=self.model,
            statistics=self.statistics,
        )


def canary_draw(run: str, device: str, round: int) -> float:
    """Return a device's draw for the model of a round, in [0, 1); it tries it if it is low."""
    return float(stream(int(run, 16), device, round, "canary").random())
