"""A device's uploads that have no receipt yet, over its link.

For the thread that serves the link, and no other. A movement is offered until its receipt, a replay
until its receipt or the next round: it is useful in its round alone.
"""

from __future__ import annotations

import logging
import math
from collections import deque

from edge_sdk.program.logs import fact
from edge_sdk.protocol.messages.round import Outcome, Receipt
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Credit
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.transport.link import Link
from edge_sdk.transport.uploads import Outgoing

log = logging.getLogger(__name__)


class Sending:
    """All uploads of one device. Time comes in with every call, in seconds."""

    def __init__(self, link: Link, topics: Topics, device: str) -> None:
        self._link = link
        self._control = topics.up_control(device)
        self._bulk = topics.up_chunk(device)
        self._uploads: dict[bytes, Outgoing] = {}
        self._backlog: deque[bytes] = deque()
        self._resumed: set[bytes] = set()
        """Uploads whose next credit tells how much had arrived before."""

    @property
    def movements(self) -> int:
        """Movements that have no receipt yet; replays do not count."""
        return sum(upload.offer.answers is None for upload in self._uploads.values())

    @property
    def stages(self) -> tuple[int, int]:
        """Numbers of uploads that have not arrived, and of those that wait for a receipt."""
        arrived = sum(upload.complete for upload in self._uploads.values())
        return len(self._uploads) - arrived, arrived

    @property
    def due_s(self) -> float:
        """Time to call `offer_due`; infinite: nothing is due."""
        return min((upload.due_s for upload in self._uploads.values()), default=math.inf)

    def add(self, upload: Outgoing, now: float) -> None:
        """Offer an upload; it replaces one for the same purpose."""
        new = upload.offer
        if new.upload in self._uploads:
            return  # it is on its way, and is offered again when that is due
        for old in list(self._uploads.values()):
            if (old.offer.round, old.offer.answers) == (new.round, new.answers):
                del self._uploads[old.offer.upload]
        self._uploads[new.upload] = upload
        self._resumed.add(new.upload)
        self._log("offered", "is offered", upload)
        self._offer(upload, now)

    def clear(self) -> None:
        """Drop all uploads: a new run began."""
        self._backlog.clear()
        self._uploads.clear()
        self._resumed.clear()

    def offer_all(self, now: float) -> None:
        """Offer everything again: the link is up again, or the coordinator was restarted."""
        self._backlog.clear()
        for upload in self._uploads.values():
            self._resumed.add(upload.offer.upload)
            self._log("offered_again", "is offered again", upload)
            self._offer(upload, now, lost=True)

    def offer_due(self, now: float) -> None:
        """Offer the uploads without an answer for long.

        If the broker has everything that was sent and the coordinator is still silent, the missing
        chunks are lost: it did not listen when the broker passed them on.
        """
        arrived = not self._backlog and self._link.acknowledged(bulk=True)
        for upload in self._uploads.values():
            if upload.due_s <= now:
                self._offer(upload, now, lost=arrived)

    def credited(self, credit: Credit, now: float) -> Receipt | None:
        """Send the chunks that a credit asks for.

        A movement that it refuses gets no receipt from the coordinator, so one is returned here.
        Raises `MessageError` for a credit that makes no sense.
        """
        upload = self._uploads.get(credit.upload)
        if upload is None:
            return None
        was_complete = upload.complete
        self._backlog.extend(upload.credited(credit, now))
        self._log_progress(upload, credit, was_complete)
        self.flush()
        if upload.refused is None:
            return None
        del self._uploads[credit.upload]
        offer, reason = upload.offer, upload.refused
        log.warning(
            "round %d: the upload is refused: %s",
            offer.round,
            reason,
            extra=fact("upload_refused", round=offer.round),
        )
        if offer.answers is not None:
            return None
        return Receipt(
            device=offer.device,
            round=offer.round,
            outcome=Outcome.REJECTED,
            reason=reason,
            run=offer.run,
        )

    def flush(self) -> None:
        """Send chunks that waited for room on the link."""
        while self._backlog and self._link.publish(self._bulk, self._backlog[0], bulk=True):
            self._backlog.popleft()

    def receipted(self, receipt: Receipt) -> None:
        """Drop the upload that has its receipt: a movement of its round, or a replay for it."""
        for upload in list(self._uploads.values()):
            offer = upload.offer
            answers = offer.round if offer.answers is None else offer.answers
            if answers == receipt.round and offer.run == receipt.run:
                del self._uploads[offer.upload]

    def drop_replays(self, round: int) -> None:
        """Drop replays for rounds before this one, which is open."""
        for upload in list(self._uploads.values()):
            if upload.offer.answers is not None and upload.offer.answers < round:
                del self._uploads[upload.offer.upload]

    def _log_progress(self, upload: Outgoing, credit: Credit, was_complete: bool) -> None:
        offer = upload.offer
        if offer.upload in self._resumed:
            self._resumed.discard(offer.upload)
            missing = sum(behind - first for first, behind in credit.missing)
            if missing == offer.chunk_count:
                return
            log.info(
                "round %d: %d of %d chunks of the upload had arrived",
                offer.round,
                offer.chunk_count - missing,
                offer.chunk_count,
                extra=fact(
                    "resumed",
                    round=offer.round,
                    arrived=offer.chunk_count - missing,
                    chunks=offer.chunk_count,
                ),
            )
        if upload.complete and not was_complete:
            self._log("uploaded", "has arrived; the receipt is awaited", upload)

    def _log(self, event: str, words: str, upload: Outgoing) -> None:
        offer = upload.offer
        log.info(
            "round %d: the upload of %d bytes in %d chunks %s",
            offer.round,
            offer.size,
            offer.chunk_count,
            words,
            extra=fact(event, round=offer.round, bytes=offer.size, chunks=offer.chunk_count),
        )

    def _offer(self, upload: Outgoing, now: float, *, lost: bool = False) -> None:
        self._link.publish(self._control, encode_message(upload.make_offer(now, lost=lost)))
