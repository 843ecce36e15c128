"""Storage of a run: on disk, so that it survives any stop, or nowhere, for one process.

`RunStore` is the interface that a course uses. `RunOnDisk` stores a served run; that of an
in-process federation only hands on its reports (`coordinator/simulate/ram.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from coordinator.aggregate.memory import MemoryType
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import KeptVectors, RamMoments, ServerMoments
from coordinator.rounds.report import RoundReport
from coordinator.rounds.state import OpenRound
from coordinator.run.folder import Checkpoint, Run
from coordinator.run.journal import Journal, Terms
from coordinator.run.moments import DiskMoments
from coordinator.service.receiving import Receiving, is_kept
from coordinator.task.levels import between_devices
from edge_sdk.program.settings import Count, Example, check_fields
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import Movement, Outcome, Receipt, Replay
from edge_sdk.protocol.messages.transfer import Evaluation, Offer
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)

MAX_REFUSALS = 20
"""Most refused movements that a report gives reasons for."""
MOST_THREADS = 4
"""Threads that aggregate movements if no number is given; more would only wait for memory."""
SAVE_S = 5.0
"""Seconds a receipt waits for the checkpoint with its movement (asynchronous runs)."""


@dataclass(slots=True)
class Tally:
    """Evaluations and outcomes of movements since the last report."""

    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    """Evaluations of the current model by devices."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of arrived movements, by outcome."""
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """The first few movements that did not count, with reasons."""

    def note(self, receipt: Receipt) -> None:
        """Count the outcome of a movement."""
        outcome = receipt.outcome.value
        self.outcomes[outcome] += 1
        if receipt.outcome is not Outcome.COUNTED and len(self.refusals) < MAX_REFUSALS:
            why = {"device": receipt.device, "round": receipt.round, "outcome": outcome}
            self.refusals.append({**why, "reason": receipt.reason})

    def close(self, round: int, counted: Collection[str], refused: Mapping[str, str]) -> None:
        """Count the verdicts on the movements that were kept for a round."""
        self.outcomes[Outcome.COUNTED.value] += len(counted)
        for name, reason in refused.items():
            rejected = Outcome.REJECTED
            self.note(Receipt(device=name, round=round, outcome=rejected, reason=reason))


class RunStore:
    """Storage of a run, as its course uses it. When a method returns, its data is stored.

    This one is of a run that is never resumed, so it stores nothing.
    """

    opened: int = 0
    """Number of the newest round ever opened; 0 if none was."""
    save_s: float = 0.0
    """Seconds the receipts of an asynchronous run may wait for a checkpoint."""
    describes: bool = False
    """True if rounds have a line of history, with the digest of their model."""
    scratch: Path | None = None
    """Folder for what is needed only while a round closes; None: that for temporary files."""

    def note_opened(self, round: int) -> None:
        """Mark a round's number as used, before any device hears of it."""
        self.opened = max(self.opened, round)

    def interrupted(self) -> OpenRound | None:
        """Return the round that was open when the run last stopped; None if none was."""
        return None

    def check_terms(self, terms: Terms) -> None:
        """Raise `RunError` if the interrupted round has other terms."""

    def open_round(self, opened: OpenRound, terms: Terms) -> None:  # noqa: ARG002
        """Store the facts needed to resume a round after a stop, before any device hears of it."""
        self.opened = max(self.opened, opened.round)

    def reopen_round(self, opened: OpenRound) -> None:
        """Mark the interrupted round's number as used, as `open_round` would have."""

    def forget_round(self) -> None:
        """Drop those facts: the round is committed or void."""

    def keep(self, upload: Upload | None, device: str, round: int) -> None:
        """Store a device's upload for a round. Raises `OSError` if there is no room."""

    def kept(self) -> Iterable[Movement | Replay]:
        """Return all movements kept for rounds that are not committed."""
        return ()

    def clear_kept(self) -> None:
        """Drop the kept movements: they are in the model or in memory."""

    def knows(self, offer: Offer) -> bool:  # noqa: ARG002  nothing is uploaded here
        """True if a device's offer is already known."""
        return False

    def settle(self, upload: Upload, receipt: Receipt | None) -> None:
        """Remember the receipt for an upload; None means none was given, and an upload that was
        not kept may be sent again."""

    def moments(
        self,
        plan: ModelPlan,
        vectors: KeptVectors,
        checkpoint: Checkpoint,  # noqa: ARG002  every run is new
    ) -> ServerMoments:
        """Return the optimiser's or the rule's vectors as of a checkpoint. Raises `RunError`."""
        return RamMoments(vectors, plan)

    def save(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint."""

    def saving(self, checkpoint: Checkpoint) -> Callable[[], None]:
        """Take what there is to store; any thread then stores it by calling what is returned, while
        the run's records go on changing."""
        return partial(self.save, checkpoint)

    def prune(self, needed: Collection[int] = ()) -> None:
        """Drop old checkpoints but those needed, now that the newest one is complete."""

    def checkpoint(self, round: int) -> Checkpoint | None:  # noqa: ARG002  none is kept
        """Return the checkpoint of a round; None: it is not kept."""
        return None

    def best(self) -> Checkpoint | None:
        """Return the kept checkpoint with the best accuracy; None if no accuracy is known."""
        return None

    def describe(
        self,
        report: RoundReport,  # noqa: ARG002  there is no history
        tally: Tally,  # noqa: ARG002
        model: GlobalModel,  # noqa: ARG002
    ) -> Mapping[str, Any] | None:
        """Return the line of history for the round that made this model, to save with it."""
        return None

    def record(self, report: RoundReport, line: Mapping[str, Any] | None) -> None:
        """Store a report of the newest round, which `describe` made this line of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Storage of a run on disk. Raises `ConfigError`."""

    keep_last: Count = 5
    """Newest checkpoints to keep."""
    keep_every: Count = 50
    """Keep also every n-th checkpoint."""
    memory_type: MemoryType = "fp32"
    """Type in which memory holds its values."""
    threads: Annotated[Count | None, Example(4)] = None
    """Threads that aggregate movements. Without it, one for each core, at most 4."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def workers(self) -> int:
        """Number of threads that aggregate movements."""
        return self.threads or min(MOST_THREADS, _cores())


class RunOnDisk(RunStore):
    """A run in its folder: nothing stored is lost, whenever the process ends."""

    save_s = SAVE_S
    describes = True

    def __init__(self, run: Run, journal: Journal, receiving: Receiving, keeping: Keeping) -> None:
        self._run = run
        self._journal = journal
        self._receiving = receiving
        self._keeping = keeping
        self.opened = run.opened
        self._saved: Checkpoint | None = None
        """The newest checkpoint of this process."""
        # Emptied at every start; the folder for temporary files may be RAM.
        self.scratch = receiving.folder

    def note_opened(self, round: int) -> None:
        """Write the number down."""
        self._run.note_opened(round)
        self.opened = self._run.opened

    def interrupted(self) -> OpenRound | None:
        """Read the journal, unless its round is over. Raises `RunError` if it is damaged."""
        opened = self._journal.read()
        return None if opened is None or self._run.is_over(opened.round) else opened

    def check_terms(self, terms: Terms) -> None:
        """Compare the terms with the journal's."""
        self._journal.check_terms(terms)

    def open_round(self, opened: OpenRound, terms: Terms) -> None:
        """Write the journal, and note that there is one."""
        self._journal.write(opened, terms)
        self.reopen_round(opened)

    def reopen_round(self, opened: OpenRound) -> None:
        """Note that the journal has a round: a crash may have come in between."""
        self._run.note_journal(opened.round)
        self.opened = self._run.opened

    def forget_round(self) -> None:
        """Remove the journal."""
        self._run.note_unassigned()
        self._journal.clear()

    def keep(self, upload: Upload | None, device: str, round: int) -> None:
        """Make an upload durable."""
        if upload is None:
            raise StateError(f"a movement from {device!r} came without an upload")
        self._receiving.keep(upload, device, round)

    def kept(self) -> Iterator[Movement | Replay]:
        """Read the uploads that were made durable."""
        return self._receiving.kept()

    def clear_kept(self) -> None:
        """Delete the kept uploads."""
        self._receiving.clear_kept()

    def knows(self, offer: Offer) -> bool:
        """True if an upload already has room, or needs none."""
        return self._receiving.knows(offer)

    def settle(self, upload: Upload, receipt: Receipt | None) -> None:
        """Remember a receipt for when the same bytes are offered again."""
        if receipt is not None or not is_kept(upload):
            self._receiving.settle(upload, receipt)

    def moments(
        self, plan: ModelPlan, vectors: KeptVectors, checkpoint: Checkpoint
    ) -> ServerMoments:
        """Open the vectors beside the checkpoint."""
        return DiskMoments(self._run.folder, plan, vectors, checkpoint)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint."""
        self._saved = self._run.save(checkpoint)

    def saving(self, checkpoint: Checkpoint) -> Callable[[], None]:
        """Copy what changes, and see where the history ends, which is where its line belongs."""
        return partial(self._save_at, checkpoint.apart(), self._run.history.trim())

    def _save_at(self, checkpoint: Checkpoint, at: int) -> None:
        self._saved = self._run.save(checkpoint, at)

    def prune(self, needed: Collection[int] = ()) -> None:
        """Keep the last few checkpoints, every n-th one, the best, and those needed."""
        keeping = self._keeping
        self._run.prune(keep_last=keeping.keep_last, keep_every=keeping.keep_every, needed=needed)

    def checkpoint(self, round: int) -> Checkpoint | None:
        """Read a checkpoint. Raises `RunError` if it is damaged."""
        return self._run.read(round) if round in self._run.rounds() else None

    def best(self) -> Checkpoint | None:
        """Read the best checkpoint."""
        round = self._run.best_round()
        return None if round is None else self._run.read(round)

    def describe(
        self, report: RoundReport, tally: Tally, model: GlobalModel
    ) -> Mapping[str, Any] | None:
        """Return all that is known of a round."""
        verdicts = [each for each in Outcome if each is not Outcome.KEPT]
        return {
            **asdict(report),
            "accuracy": report.accuracy,
            "movements": {each.value: tally.outcomes[each.value] for each in verdicts},
            "refusals": tally.refusals,
            "evaluations": _summary(tally.evaluations.values()),
            "digest": model.digest,
            "time": round(time.time(), 3),
        }

    def record(self, report: RoundReport, line: Mapping[str, Any] | None) -> None:
        """Append the newest checkpoint's line to the history and log it."""
        if line is None or self._saved is None:
            raise StateError("a report is recorded after its checkpoint was saved")
        self._run.record_line(self._saved)
        outcomes = line["movements"]
        said = "" if report.accuracy is None else f", accuracy {report.accuracy:.2%}"
        if report.best is not None and report.deploy != 1:
            said += f", {report.best:.2%} at level {report.deploy:g}"
        for name in (Outcome.MEMORY, Outcome.LATE, Outcome.REJECTED):
            if outcomes[name.value]:
                said += f", {outcomes[name.value]} {name.value}"
        log.info(
            "round %d closed: %d of %d devices trained, %.1f s%s",
            report.round,
            sum(device.level is not None for device in report.devices),
            len(report.devices),
            report.seconds,
            said,
            extra={"facts": {"event": "round_closed", **line, "devices": len(report.devices)}},
        )


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _summary(evaluations: Iterable[Evaluation]) -> Mapping[str, Any] | None:
    """Mean of the devices' evaluations, weighted by samples; None without evaluations.

    `own_accuracy` and `own_deviation` are over devices, each of which counts once.
    """
    found = list(evaluations)
    if not found:
        return None
    samples = sum(each.samples for each in found)
    judged = [each for each in found if each.accuracy is not None]
    judged_samples = sum(each.samples for each in judged)
    right = sum(each.samples * (each.accuracy or 0.0) for each in judged)
    mean, deviation = between_devices([each.accuracy or 0.0 for each in judged])
    return {
        "devices": len(found),
        "samples": samples,
        "loss": sum(each.samples * each.loss for each in found) / samples,
        "accuracy": right / judged_samples if judged else None,
        "own_accuracy": mean,
        "own_deviation": deviation,
    }
