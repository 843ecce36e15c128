"""Where a run is kept: on disk, so that any stop is harmless, or in RAM, for one process.

`RunStore` is what a course needs of it. `RunOnDisk` is that of a served run; the in-process
federation has one of its own, which costs nothing and vanishes (`coordinator/simulate/ram.py`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from coordinator.aggregate.memory import MemoryType
from coordinator.aggregate.model import GlobalModel
from coordinator.rounds.report import RoundReport
from coordinator.rounds.state import OpenRound
from coordinator.run.folder import Checkpoint, Run
from coordinator.run.journal import Journal, Terms
from coordinator.service.receiving import Receiving, is_kept
from edge_sdk.program.settings import Count, check_fields
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import Movement, Outcome, Receipt, Replay
from edge_sdk.protocol.messages.transfer import Evaluation, Offer
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)

MAX_REFUSALS = 20
"""Movements that did not count of which a report says why."""
SAVE_S = 5.0
"""Seconds that a receipt waits for the checkpoint that has its movement (asynchronous runs)."""


@dataclass(slots=True)
class Tally:
    """Messages and traffic of devices since the last report."""

    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    """Evaluations of the current model by devices."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes of the movements that arrived."""
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """Which of them did not count, and why: the first few."""

    def note(self, receipt: Receipt) -> None:
        """Count what became of a movement."""
        outcome = receipt.outcome.value
        self.outcomes[outcome] += 1
        if receipt.outcome is not Outcome.COUNTED and len(self.refusals) < MAX_REFUSALS:
            why = {"device": receipt.device, "round": receipt.round, "outcome": outcome}
            self.refusals.append({**why, "reason": receipt.reason})


class RunStore(Protocol):
    """A run as its course keeps it. What a method returns from is kept, as far as anything is."""

    @property
    def opened(self) -> int:
        """The newest round that was ever opened; 0: none was."""

    @property
    def save_s(self) -> float:
        """Seconds that the receipts of an asynchronous run may wait for a checkpoint."""

    @property
    def scratch(self) -> Path | None:
        """Folder for what is needed only while a round closes; None: that for temporary files."""

    def note_opened(self, round: int) -> None:
        """Mark a round's number as used, before anybody hears of it."""

    def interrupted(self) -> OpenRound | None:
        """The round that was open when the run was last stopped; None: none was."""

    def check_terms(self, terms: Terms) -> None:
        """Raise `RunError` if the round that was interrupted has other terms."""

    def open_round(self, opened: OpenRound, terms: Terms) -> None:
        """Keep what must be known of a round to go on with it after a stop."""

    def forget_round(self) -> None:
        """Drop that: the round is committed, or void."""

    def keep(self, upload: Upload | None, device: str, round: int) -> None:
        """Keep what a device sent for a round. Raises `OSError` when there is no room."""

    def kept(self) -> Iterable[Movement | Replay]:
        """All that was kept for rounds that are not committed."""

    def clear_kept(self) -> None:
        """Drop what was kept: it is in the model, or in memory."""

    def knows(self, offer: Offer) -> bool:
        """True if a device's offer is already known."""

    def settle(self, upload: Upload, receipt: Receipt | None) -> None:
        """Remember what a device was told of an upload; None: nothing, and unless it was kept, it
        may be sent again."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint."""

    def prune(self) -> None:
        """Drop checkpoints that need not be kept: the newest one is whole."""

    def record(
        self, report: RoundReport, tally: Tally, model: GlobalModel, accuracy: float | None
    ) -> None:
        """Keep a report, with how good the model is that came of the round; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Storage of a run on disk. Raises `ConfigError`."""

    keep_last: Count = 5
    """Newest checkpoints to keep."""
    keep_every: Count = 50
    """Keep also every n-th checkpoint."""
    memory_type: MemoryType = "fp32"
    """Type in which memory holds its values."""
    threads: Count = 1
    """Threads that put movements together."""

    def __post_init__(self) -> None:
        check_fields(self)


class RunOnDisk:
    """A run in its folder: nothing that was kept is lost, whenever the process ends."""

    save_s = SAVE_S

    def __init__(self, run: Run, journal: Journal, receiving: Receiving, keeping: Keeping) -> None:
        self._run = run
        self._journal = journal
        self._receiving = receiving
        self._keeping = keeping

    @property
    def opened(self) -> int:
        """The newest round that was ever opened."""
        return self._run.opened

    @property
    def scratch(self) -> Path:
        """The folder of uploads, emptied at every start: that for temporary files may be RAM."""
        return self._receiving.folder

    def note_opened(self, round: int) -> None:
        """Write the number down."""
        self._run.note_opened(round)

    def interrupted(self) -> OpenRound | None:
        """Read the journal. Raises `RunError` if it is damaged."""
        return self._journal.read()

    def check_terms(self, terms: Terms) -> None:
        """Compare with the journal."""
        self._journal.check_terms(terms)

    def open_round(self, opened: OpenRound, terms: Terms) -> None:
        """Write the journal."""
        self._journal.write(opened, terms)

    def forget_round(self) -> None:
        """Remove the journal."""
        self._journal.clear()

    def keep(self, upload: Upload | None, device: str, round: int) -> None:
        """Make an upload durable."""
        if upload is None:
            raise StateError(f"a movement of {device!r} came in no upload")
        self._receiving.keep(upload, device, round)

    def kept(self) -> Iterator[Movement | Replay]:
        """Read what uploads were made durable."""
        return self._receiving.kept()

    def clear_kept(self) -> None:
        """Delete them."""
        self._receiving.clear_kept()

    def knows(self, offer: Offer) -> bool:
        """True if room for an upload was made, or none is needed."""
        return self._receiving.knows(offer)

    def settle(self, upload: Upload, receipt: Receipt | None) -> None:
        """Remember a receipt for when the same bytes are offered again."""
        if receipt is not None or not is_kept(upload):
            self._receiving.settle(upload, receipt)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint."""
        self._run.save(checkpoint)

    def prune(self) -> None:
        """Keep the last few checkpoints and every n-th one."""
        keeping = self._keeping
        self._run.prune(keep_last=keeping.keep_last, keep_every=keeping.keep_every)

    def record(
        self, report: RoundReport, tally: Tally, model: GlobalModel, accuracy: float | None
    ) -> None:
        """Append a line to the history, and log it."""
        outcomes = {each.value: tally.outcomes[each.value] for each in Outcome}
        line = {
            **asdict(report),
            "accuracy": accuracy,
            "movements": outcomes,
            "refusals": tally.refusals,
            "evaluations": _summary(tally.evaluations.values()),
            "digest": model.digest,
            "time": round(time.time(), 3),
        }
        self._run.record(line)
        said = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        for name in (Outcome.MEMORY, Outcome.LATE, Outcome.REJECTED):
            if outcomes[name.value]:
                said += f", {outcomes[name.value]} {name.value}"
        log.info(
            "round %d closed: %d trained of %d, %.1f s%s",
            report.round,
            sum(device.level is not None for device in report.devices),
            len(report.devices),
            report.seconds,
            said,
            extra={"facts": {"event": "round_closed", **line, "devices": len(report.devices)}},
        )


def _summary(evaluations: Iterable[Evaluation]) -> Mapping[str, Any] | None:
    """Mean of the devices' evaluations, weighted by samples; None if there is none."""
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
