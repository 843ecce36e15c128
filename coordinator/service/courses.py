"""The one engine: what the courses of both kinds of run work with.

A course is a state machine and what performs its effects (`rounds_course.py`,
`fragments_course.py`). It is given a store for the run, an outlet for the model, and the time with
every event; it returns what is to be said to devices, in order, and its caller says it. `serve`
gives it a disk, a broker and the wall clock (`service.py`), the in-process federation RAM, the
model itself and a virtual clock (`coordinator/simulate/federation.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.aggregate.model import GlobalModel
from coordinator.rounds import events
from coordinator.rounds.report import RoundReport
from coordinator.run.folder import Checkpoint
from coordinator.service.outgoing.outlet import ModelOutlet
from coordinator.service.store import RunStore, Tally
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Outcome, Receipt
from edge_sdk.protocol.messages.transfer import Evaluation, Offer
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)

Said = events.Broadcast | events.Send | events.Accept
"""To be said to devices; offers that are accepted get a credit."""
Evaluate = Callable[[GlobalModel], float | None]
"""Returns the accuracy of a model, as a share; None: unknown."""


@dataclass(slots=True)
class Parts:
    """Tools of a course."""

    store: RunStore
    model: GlobalModel
    outlet: ModelOutlet
    evaluate: Evaluate | None = None
    threads: int = 1
    """That a rule may use as a round closes."""
    tally: Tally = field(default_factory=Tally)

    def heard(self, device: str, evaluation: Evaluation) -> None:
        """Remember what a device says of the model, for the next report."""
        self.tally.evaluations[device] = evaluation

    def give(
        self, receipt: Receipt, event: object, upload: Upload | None, *, count: bool = True
    ) -> None:
        """Note a receipt that follows from an event, for the movement that came in an upload.

        `count`: False if the next report has it already.
        """
        if self.is_news(receipt, event):
            if count:
                self.tally.note(receipt)
            log_receipt(receipt)
        if upload is not None:
            self.store.settle(upload, receipt)

    def is_news(self, receipt: Receipt, event: object) -> bool:
        """True if a receipt that follows from an event was not given before."""
        if receipt.outcome in (Outcome.LATE, Outcome.REJECTED):
            return not (isinstance(event, Offer) and self.store.knows(event))
        return isinstance(event, events.Kept)

    def record(self, report: RoundReport, accuracy: float | None) -> None:
        """Keep a report, with what was heard since the last one."""
        tally, self.tally = self.tally, Tally()
        self.store.record(report, tally, self.model, accuracy)


def upload_of(event: object) -> Upload | None:
    """The upload that an event is about."""
    return event.upload if isinstance(event, events.Uploaded) else None


def log_receipt(receipt: Receipt) -> None:
    """Log what became of a movement."""
    if not log.isEnabledFor(logging.INFO):
        return
    outcome, reason = receipt.outcome.value, receipt.reason
    facts = {"event": "movement", "device": receipt.device, "round": receipt.round}
    log.info(
        "movement of %s for round %d: %s%s",
        receipt.device,
        receipt.round,
        outcome,
        f" ({reason})" if reason else "",
        extra={"facts": {**facts, "outcome": outcome}},
    )


def make_model(
    plan: ModelPlan, checkpoint: Checkpoint, encoding: Encoding, seed: int
) -> GlobalModel:
    """The model of a checkpoint."""
    weights, buffers = plan.unflatten(checkpoint.theta), checkpoint.buffers
    model = GlobalModel(plan, weights, buffers, encoding=encoding, seed=seed)
    model.version = checkpoint.version
    return model
