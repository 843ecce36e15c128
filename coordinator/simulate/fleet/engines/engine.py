"""An engine trains cohorts somewhere; which one changes no bit of what they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from coordinator.simulate.fleet.hands import Cohort, CohortResult
from coordinator.simulate.fleet.shared import DealtData
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest


class PendingCohort(Protocol):
    """A cohort that is being trained; a `Future` is one."""

    def result(self) -> CohortResult:
        """Wait for the result. Raises `CoordinatorError` if there will be none."""

    def done(self) -> bool:
        """Return True if nobody works on it any more."""


Submit = Callable[[Cohort], PendingCohort]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingKit:
    """All that cohorts of one simulation have in common, wherever they are trained."""

    plan: ModelPlan
    manifest: Manifest
    files: Mapping[str, bytes]
    dealt: DealtData
    seed: int


class TrainingEngine(Protocol):
    """Trains cohorts, in as many places as it has."""

    @property
    def trays(self) -> bool:
        """True if it shares memory with this process, so that movements may lie in trays."""

    def started(self, kit: TrainingKit) -> AbstractContextManager[Submit]:
        """Begin; the value takes cohorts until the context is left, which ends all of it."""
