"""The engine: parts shared by the courses of synchronous and asynchronous runs.

A course is a state machine together with the performer of its effects (`rounds_course.py`,
`fragments_course.py`). It gets a store for the run, an outlet for the model, and the time with
every event. It returns the messages for devices, in order, and its caller sends them. `serve`
supplies a disk, a broker and the wall clock (`service.py`); the in-process federation supplies RAM,
the model itself and a virtual clock (`coordinator/simulate/federation.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.aggregate.model import GlobalModel
from coordinator.rounds import events
from coordinator.rounds.config import RunConfig
from coordinator.rounds.report import RoundReport
from coordinator.run.folder import Checkpoint
from coordinator.service.outgoing.outlet import ModelOutlet
from coordinator.service.store import RunStore, Tally
from coordinator.task.levels import LevelScores, evaluate_levels
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Outcome, Receipt
from edge_sdk.protocol.messages.transfer import Evaluation, Offer
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.statistics import LevelRuntime
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)

Said = events.Broadcast | events.Send | events.Accept
"""Output for devices; an accepted offer gets a credit."""
Evaluate = Callable[[GlobalModel, LevelScores], LevelScores]
"""Returns the levels of a model with the accuracy and the statistics of each."""


class Evaluator:
    """Measures every level's accuracy on test data, and computes its statistics from the inputs."""

    def __init__(self, runtime: LevelRuntime, data: ArrayData) -> None:
        self._runtime = runtime
        self._data = data

    def __call__(self, model: GlobalModel, levels: LevelScores) -> LevelScores:
        """See `Evaluate`."""
        choices = {each.level: each.groups for each in levels.levels}
        weights, buffers, rescale = model.weights, model.buffers, levels.rescale
        return evaluate_levels(
            self._runtime, weights, buffers, choices, self._data, rescale=rescale
        )


@dataclass(slots=True)
class Parts:
    """Tools of a course."""

    store: RunStore
    model: GlobalModel
    outlet: ModelOutlet
    evaluate: Evaluate | None = None
    surveys: bool = False
    """True if devices can compute statistics and accuracies of levels: without `evaluate`, they
    are asked to."""
    threads: int = 1
    """Threads that a rule may use when a round closes."""
    tally: Tally = field(default_factory=Tally)

    def score(self, config: RunConfig) -> LevelScores:
        """Return the run's levels, evaluated if there is data for it."""
        levels = config.unscored()
        return levels if self.evaluate is None else self.evaluate(self.model, levels)

    @property
    def asks_devices(self) -> bool:
        """True if the levels of some models are surveyed by devices."""
        return self.surveys and self.evaluate is None

    def heard(self, device: str, evaluation: Evaluation) -> None:
        """Remember a device's evaluation of the model for the next report."""
        self.tally.evaluations[device] = evaluation

    def give(
        self, receipt: Receipt, event: object, upload: Upload | None, *, count: bool = True
    ) -> None:
        """Record the receipt that an event produced for the movement in an upload.

        `count` is False if the next report already includes it.
        """
        if self.is_news(receipt, event):
            if count:
                self.tally.note(receipt)
            log_receipt(receipt)
        if upload is not None:
            self.store.settle(upload, receipt)

    def is_news(self, receipt: Receipt, event: object) -> bool:
        """True if the receipt that an event produced was not given before."""
        if receipt.outcome in (Outcome.LATE, Outcome.REJECTED):
            return not (isinstance(event, Offer) and self.store.knows(event))
        return isinstance(event, events.Kept)

    def record(self, report: RoundReport) -> None:
        """Store a report, with the evaluations and outcomes since the last one."""
        tally, self.tally = self.tally, Tally()
        self.store.record(report, tally, self.model)


def upload_of(event: object) -> Upload | None:
    """Return the upload that an event is about; None if there is none."""
    return event.upload if isinstance(event, events.Uploaded) else None


def log_receipt(receipt: Receipt) -> None:
    """Log the outcome of a movement."""
    if not log.isEnabledFor(logging.INFO):
        return
    outcome, reason = receipt.outcome.value, receipt.reason
    facts = {"event": "movement", "device": receipt.device, "round": receipt.round}
    log.info(
        "movement from %s for round %d: %s%s",
        receipt.device,
        receipt.round,
        outcome,
        f" ({reason})" if reason else "",
        extra={"facts": {**facts, "outcome": outcome}},
    )


def make_model(
    plan: ModelPlan, checkpoint: Checkpoint, encoding: Encoding, seed: int
) -> GlobalModel:
    """Make the model stored in a checkpoint."""
    weights, buffers = plan.unflatten(checkpoint.theta), checkpoint.buffers
    model = GlobalModel(plan, weights, buffers, encoding=encoding, seed=seed)
    model.version = checkpoint.version
    return model
