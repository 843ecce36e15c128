"""What the courses of both kinds of run work with (`rounds_course.py`, `fragments_course.py`).

A course is a state machine and what performs its effects on the model and the disk. What is to be
said to devices it returns, in order; saying it is the service's part.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.memory import Dtype
from coordinator.aggregate.model import PLAIN, GlobalModel
from coordinator.rounds import events
from coordinator.rounds.report import RoundReport
from coordinator.run.folder import Checkpoint, Run
from coordinator.service.outgoing.publishing import Published, Publisher
from coordinator.service.receiving import Receiving
from edge_sdk.program.settings import Count, check_fields
from edge_sdk.protocol.chunks import Chunks
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import Outcome, Receipt
from edge_sdk.protocol.messages.transfer import Evaluation, Offer
from edge_sdk.protocol.packs.index import unpack_model
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)

MAX_REFUSALS = 20
"""Movements that did not count of which a report says why."""

Said = events.Broadcast | events.Send
Clock = Callable[[], float]
Evaluate = Callable[[GlobalModel], float | None]
"""How good a model is, as a share; None: it cannot be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What is kept of a run on disk, and how. Raises `ConfigError`."""

    keep_last: Count = 5
    """Newest checkpoints to keep."""
    keep_every: Count = 50
    """Keep also every n-th checkpoint."""
    memory_dtype: Dtype = "fp32"
    """Type in which memory holds its values."""
    threads: Count = 1
    """Threads that put movements together."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(slots=True)
class Parts:
    """What a course works with."""

    run: Run
    model: ServedModel
    publisher: Publisher
    receiving: Receiving
    chunks: Chunks
    keeping: Keeping
    evaluate: Evaluate | None
    upload: Upload | None = None
    """What a movement came in, while the machine looks at it."""
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    """What devices said of the model that they have now."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """What became of the movements that came since the last report."""
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """Which of them did not count, and why: the first few."""

    def keep(self, round: int, arrival: Arrival) -> None:
        """Make what is being looked at durable."""
        if self.upload is None:
            raise StateError(f"a movement of {arrival.contribution.device!r} came in no upload")
        self.receiving.keep(self.upload, arrival.contribution.device, round)

    def note(self, receipt: Receipt) -> None:
        """What became of a movement, for the log and the next report."""
        outcome, reason = receipt.outcome.value, receipt.reason
        self.outcomes[outcome] += 1
        if receipt.outcome is not Outcome.COUNTED and len(self.refusals) < MAX_REFUSALS:
            why = {"device": receipt.device, "round": receipt.round, "outcome": outcome}
            self.refusals.append({**why, "reason": reason})
        self.log(receipt)

    def log(self, receipt: Receipt) -> None:
        """Log what became of a movement."""
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

    def publish(
        self,
        versions: Iterable[int] = (),
        *,
        since: Published | None = None,
        changed: Collection[int] = (),
    ) -> Published:
        """Publish the present model, and clear all but these versions and the last two.

        `since` and `changed` as `Publisher.publish_model` has them.
        """
        model = self.model
        made = self.publisher.publish_model(
            model.plan, model.version, model.serve(), model.buffers, since=since, changed=changed
        )
        self.publisher.keep_models({model.version, model.version - 1, *versions})
        return made

    def prune(self) -> None:
        """Remove checkpoints that are not to be kept."""
        keeping = self.keeping
        self.run.prune(keep_last=keeping.keep_last, keep_every=keeping.keep_every)

    def record(self, report: RoundReport, accuracy: float | None) -> None:
        """Write a report to the history, and log it."""
        heard = _summary(self.evaluations.values())
        self.evaluations.clear()
        outcomes = {each.value: self.outcomes[each.value] for each in Outcome}
        refusals, self.refusals = self.refusals, []
        self.outcomes.clear()
        line = {
            **asdict(report),
            "accuracy": accuracy,
            "movements": outcomes,
            "refusals": refusals,
            "evaluations": heard,
            "digest": self.model.digest,
            "time": round(time.time(), 3),
        }
        self.run.record(line)
        trained = sum(device.level is not None for device in report.devices)
        said = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        for name in (Outcome.MEMORY, Outcome.LATE, Outcome.REJECTED):
            if outcomes[name.value]:
                said += f", {outcomes[name.value]} {name.value}"
        log.info(
            "round %d closed: %d trained of %d, %.1f s%s",
            report.round,
            trained,
            len(report.devices),
            report.seconds,
            said,
            extra={"facts": {"event": "round_closed", **line, "devices": len(report.devices)}},
        )


class ServedModel(GlobalModel):
    """A model of which devices may hold versions that are not the present one."""

    def reserve_from(
        self, device: str, round: int, groups: Groups, published: Published, chunks: Chunks
    ) -> None:
        """As `reserve`, of a version that was published before."""
        blocks, buffers = unpack_model(self.plan, published.index, groups, chunks)
        # Values that were decoded are reserved as they are: fp32 draws nothing at random.
        message = encode_blocks(self.plan, groups, blocks, PLAIN, stream(0, "reserved"))
        self._reserved[device, round] = (message, buffers)

    def reserve_cut(
        self,
        device: str,
        round: int,
        groups: Mapping[str, tuple[int, ...]],
        encoded: EncodedModel,
        buffers: Mapping[str, Array],
    ) -> None:
        """As `reserve`, of a version that is still in memory."""
        cut = encoded.cut(groups), self.plan.cut_buffers(buffers, groups)
        self._reserved[device, round] = cut


def make_model(
    plan: ModelPlan, checkpoint: Checkpoint, encoding: Encoding, seed: int
) -> ServedModel:
    """The model of a checkpoint."""
    weights, buffers = plan.unflatten(checkpoint.theta), checkpoint.buffers
    model = ServedModel(plan, weights, buffers, encoding=encoding, seed=seed)
    model.version = checkpoint.version
    return model


def is_news(event: object, receipt: Receipt) -> bool:
    """Whether a receipt that follows from an event is not one that was given before."""
    return isinstance(event, events.Kept) or receipt.outcome in (Outcome.LATE, Outcome.REJECTED)


def receipt_for(offer: Offer, outcome: Outcome, reason: str = "") -> Receipt:
    """What a device is told of what it offers."""
    round = offer.round if offer.answers is None else offer.answers
    return Receipt(device=offer.device, round=round, outcome=outcome, reason=reason)


def _summary(evaluations: Iterable[Evaluation]) -> dict[str, Any] | None:
    """What devices found, each weighted by its samples; None if none said anything."""
    found = list(evaluations)
    if not found:
        return None
    samples = sum(each.samples for each in found)
    judged = [each for each in found if each.accuracy is not None]
    judged_samples = sum(each.samples for each in judged)
    right = sum(each.samples * (each.accuracy or 0.0) for each in judged)
    return {
        "devices": len(found),
        "samples": samples,
        "loss": sum(each.samples * each.loss for each in found) / samples,
        "accuracy": right / judged_samples if judged else None,
    }
