"""Uploads: bytes from a device to the coordinator that survive whatever the link does.

    device              coordinator
    Offer          ──▶                          at the start, after a reconnect, and after silence
                   ◀──  Credit                  the missing chunks, and how many to send
    chunk, chunk … ──▶
                   ◀──  Credit                  for every four chunks
    chunk, chunk … ──▶  (the SHA-256 is right)
                   ◀──  Credit                  nothing is missing

Rules:
- A credit allows the first `window` of the missing chunks, and replaces the credit before it.
- A sent chunk is not sent again while it may be on its way, however slow the link. It is resent
  only when a chunk sent after it has arrived, when the connection or the coordinator was lost, or
  when no chunk has arrived for a minute.
- Nothing relies on the link: an offer is repeated until a credit answers, at growing intervals.
  Every message may be lost, doubled or late, and each side may restart at any time. So complete is
  not the end: only the receipt is, and until it comes the upload is offered now and then.
- An upload's id follows from its bytes and their purpose: offering them again is harmless.
- A device has few uploads at a time, and all uploads together have a limit on their bytes; further
  ones are told to wait. One that is too large is refused. One that is complete with a wrong SHA-256
  is requested once more, then refused.

No I/O here: both ends are told what arrived, and answer with what to send.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import NamedTuple

from edge_sdk.protocol.chunks import MAX_CHUNK_BYTES
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.transfer import MAX_RANGES, UPLOAD_BYTES, Credit, Offer

WINDOW = 8
"""Most chunks on their way: 2 MiB of chunks of 256 KiB."""
CREDIT_EVERY = 4
RETRY_S = 5.0
MAX_RETRY_S = 60.0
PATIENCE_S = 60.0
"""Seconds without any arriving chunk until missing ones are resent; doubles each time. A chunk of
256 KiB takes a minute at 4 KB/s."""
MAX_PATIENCE_S = 600.0
REMEMBERED = 16
"""Complete or refused uploads of a device whose result is remembered for repeated offers."""

Space = bytearray | mmap
"""Memory in which an upload is assembled: plain, or a mapped file."""


# -- chunks of an upload -------------------------------------------------------------------------


def pack_chunk(upload: bytes, index: int, data: bytes | memoryview) -> bytes:
    """Pack a chunk: the upload's id, its number as uint32 (little-endian), its bytes."""
    return b"".join([upload, index.to_bytes(4, "little"), data])


def parse_chunk(payload: bytes) -> tuple[bytes, int, memoryview]:
    """Return the upload's id, the chunk's number and its bytes. Raises `MessageError`."""
    head = UPLOAD_BYTES + 4
    if not head < len(payload) <= head + MAX_CHUNK_BYTES:
        raise MessageError(f"{len(payload)} bytes are not a chunk of an upload")
    index = int.from_bytes(payload[UPLOAD_BYTES:head], "little")
    return bytes(payload[:UPLOAD_BYTES]), index, memoryview(payload)[head:]


# -- the device's end ----------------------------------------------------------------------------


class Outgoing:
    """One upload of a device, dropped when its receipt comes. `data` must not change."""

    def __init__(
        self,
        data: bytes | memoryview,
        *,
        device: str,
        run: str,
        round: int,
        answers: int | None,
        chunk_bytes: int,
        sha256: bytes | None = None,
    ) -> None:
        """`answers`: the round that a replay answers. `sha256`: that of the data, if it is known.

        Raises `MessageError` as `Offer` does.
        """
        digest = hashlib.sha256(data).digest() if sha256 is None else sha256
        purpose = f"{device}/{run}/{round}/{answers}/{chunk_bytes}/".encode()
        self.offer = Offer(
            device=device,
            run=run,
            upload=hashlib.sha256(purpose + digest).digest()[:UPLOAD_BYTES],
            round=round,
            answers=answers,
            size=len(data),
            chunk_bytes=chunk_bytes,
            sha256=digest,
        )
        self.complete = False
        """True if everything had arrived when the coordinator last answered."""
        self.refused: str | None = None
        """Reason why the coordinator does not want it; None: it does."""
        self._data = memoryview(data)
        self._sent: dict[int, _Sent] = {}
        self._count = 0
        self._arrived = 0
        self._moved_s = -math.inf
        self._patience_s = PATIENCE_S
        self._wait_s = RETRY_S
        self._due_s = -math.inf

    @property
    def due_s(self) -> float:
        """Time of the next offer, if nothing is heard until then; infinite: never."""
        return math.inf if self.refused is not None else self._due_s

    def make_offer(self, now: float, *, lost: bool = False) -> Offer:
        """Return the offer to send: at the start, at `due_s`, and with `lost` when the link is up
        again or the coordinator has restarted: sent chunks may not have arrived.
        """
        if lost:
            self._sent.clear()
        self.complete = False
        self._due_s = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, MAX_RETRY_S)
        return self.offer

    def credited(self, credit: Credit, now: float) -> list[bytes]:
        """Return the chunks to send, packed. Raises `MessageError` for another upload's credit."""
        if credit.upload != self.offer.upload or credit.device != self.offer.device:
            raise MessageError("a credit for another upload")
        if credit.missing and credit.missing[-1][1] > self.offer.chunk_count:
            raise MessageError(
                f"a credit for chunk {credit.missing[-1][1] - 1} of {self.offer.chunk_count}"
            )
        if self.complete or self.refused is not None:
            return []
        if credit.refused:
            self.refused = credit.reason or "refused without a reason"
        self.complete = credit.complete
        if credit.window:
            self._wait_s = RETRY_S
        elif credit.complete:
            self._wait_s = MAX_RETRY_S
        self._due_s = now + self._wait_s
        return [self._chunk(number, now) for number in self._unsent(credit, now)]

    def _unsent(self, credit: Credit, now: float) -> list[int]:
        """Return the chunks of a credit that were never sent, or are no longer on their way."""
        wanted, arrived = allowed(credit), self._newest_arrived(credit)
        if arrived > self._arrived:
            self._arrived, self._moved_s = arrived, now
        latest_s = now - self._patience_s
        overdue = {
            number
            for number in wanted
            if number in self._sent and max(self._sent[number].at_s, self._moved_s) <= latest_s
        }
        if overdue:
            self._patience_s = min(2 * self._patience_s, MAX_PATIENCE_S)
        return [
            number
            for number in wanted
            if number not in self._sent
            or number in overdue
            or self._sent[number].order < arrived  # a connection keeps the order
        ]

    def _newest_arrived(self, credit: Credit) -> int:
        """Order of the chunk sent last of those that have arrived; 0: none is known to."""
        ends = [behind for _, behind in credit.missing]
        for number, sent in reversed(self._sent.items()):
            at = bisect_right(ends, number)
            if at < len(ends):
                if number < credit.missing[at][0]:
                    return sent.order
            elif len(ends) < MAX_RANGES:  # nothing is known after the 64th range
                return sent.order
        return 0

    def _chunk(self, number: int, now: float) -> bytes:
        self._count += 1
        self._sent.pop(number, None)
        self._sent[number] = _Sent(self._count, now)  # last: the dict keeps the order of sending
        start = number * self.offer.chunk_bytes
        piece = self._data[start : start + self.offer.chunk_bytes]
        return pack_chunk(self.offer.upload, number, piece)


class _Sent(NamedTuple):
    """Last sending of a chunk: its place in the order of all, and the time."""

    order: int
    at_s: float


def allowed(credit: Credit) -> list[int]:
    """Return the chunks that a credit asks for."""
    numbers: list[int] = []
    for first, behind in credit.missing:
        room = credit.window - len(numbers)
        numbers += range(first, min(behind, first + room))
    return numbers


# -- the coordinator's end -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """Limits on what devices may send at a time."""

    max_bytes: int = 2**30
    """Most bytes of one upload; a larger one is refused."""
    max_uploads: int = 2
    """Most uploads of one device at a time; further ones wait."""
    max_open_bytes: int = 2**32
    """Most bytes of all incomplete uploads; further ones wait. A single one always fits."""
    idle_s: float = 600.0
    """Seconds without a new chunk after which an upload is dropped; it may be offered again."""
    window: int = WINDOW
    """Most chunks of one upload on their way."""
    max_flight_bytes: int = 2**25
    """Most bytes of all uploads on their way: with many uploads, windows are narrower. Half of what
    our brokers queue for the coordinator (`max_queued_bytes`): they drop what is beyond."""


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """A complete and correct upload."""

    offer: Offer
    data: Space


@dataclass(frozen=True, slots=True)
class Progress:
    """The consequence of a chunk: a credit to send, and an upload to process; None: nothing."""

    credit: Credit | None = None
    upload: Upload | None = None
    new: bool = True
    """False: nobody waits for the arrived chunk."""


@dataclass(slots=True, eq=False)
class _Incoming:
    """An upload in progress. `there` has a byte for every chunk: 1 if it has arrived."""

    offer: Offer
    space: Space
    there: bytearray
    heard_s: float
    """Time of its first offer or newest chunk: offers alone hold no room."""
    arrived: int = 0
    lowest: int = 0
    """No chunk below this number is missing."""
    since_credit: int = 0
    window: int = 1
    """Window of the last credit."""
    failures: int = 0

    def put(self, index: int, data: memoryview) -> bool:
        """Store a chunk; True if it is new. Raises `MessageError` for one of another upload."""
        if index >= len(self.there):
            raise MessageError(f"chunk {index} of an upload of {len(self.there)} chunks")
        start = index * self.offer.chunk_bytes
        end = min(start + self.offer.chunk_bytes, self.offer.size)
        if len(data) != end - start:
            raise MessageError(f"chunk {index} has {len(data)} bytes, not {end - start}")
        if self.there[index]:
            return False
        self.space[start:end] = data
        self.there[index] = 1
        self.arrived += 1
        return True

    def restart(self) -> None:
        """Forget all arrived chunks."""
        self.there, self.arrived, self.lowest = bytearray(len(self.there)), 0, 0

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Return the first ranges of chunks that have not arrived."""
        ranges: list[tuple[int, int]] = []
        first = self.lowest = self.there.find(0, self.lowest)
        while first >= 0 and len(ranges) < MAX_RANGES:
            behind = self.there.find(1, first)
            ranges.append((first, len(self.there) if behind < 0 else behind))
            first = -1 if behind < 0 else self.there.find(0, behind)
        return tuple(ranges)


@dataclass(slots=True, eq=False)
class _Sender:
    """Uploads of one device, and the end of its last ones: None, or why they were refused."""

    open: dict[bytes, _Incoming] = field(default_factory=dict)
    ended: OrderedDict[bytes, str | None] = field(default_factory=OrderedDict)


class Uploads:
    """All uploads in progress to the coordinator."""

    def __init__(
        self,
        limits: UploadLimits | None = None,
        *,
        allocate: Callable[[int], Space] = bytearray,
    ) -> None:
        """`allocate` makes room for this many bytes: in memory, or a mapped file."""
        self._limits = limits or UploadLimits()
        self._allocate = allocate
        self._senders: dict[str, _Sender] = {}
        self._open: dict[tuple[str, bytes], _Incoming] = {}
        """The incomplete uploads of all devices, by device and upload."""

    @property
    def open_bytes(self) -> int:
        """Bytes of all incomplete uploads."""
        return sum(incoming.offer.size for incoming in self._open.values())

    def offered(self, device: str, offer: Offer, now: float) -> Credit:
        """Answer an offer that came on this device's topic.

        Raises `MessageError` if the offer names another device. An offer for the same purpose with
        different bytes replaces the previous one.
        """
        if offer.device != device:
            raise MessageError(f"an offer of {offer.device!r} on the topic of {device!r}")
        sender = self._senders.setdefault(device, _Sender())
        if offer.upload in sender.ended:
            return _ended(offer, sender.ended[offer.upload])
        incoming = sender.open.get(offer.upload)
        if incoming is not None and incoming.offer != offer:
            raise MessageError("two different offers have the same upload id")
        if incoming is None:
            if offer.size > self._limits.max_bytes:
                return self._end(
                    sender,
                    offer,
                    f"{offer.size} bytes are too many: at most {self._limits.max_bytes}",
                )
            for other in [each for each in sender.open.values() if _same_purpose(each, offer)]:
                self._close(other.offer)
            if reason := self._full(sender, offer):
                return Credit(
                    device=device,
                    upload=offer.upload,
                    missing=((0, offer.chunk_count),),
                    window=0,
                    reason=reason,
                )
            space = self._allocate(offer.size)
            incoming = _Incoming(offer, space, bytearray(offer.chunk_count), now)
            sender.open[offer.upload] = self._open[device, offer.upload] = incoming
        return self._credit(incoming)

    def received(self, device: str, payload: bytes, now: float) -> Progress:
        """Process a chunk that came on this device's topic.

        A chunk of an unknown upload is ignored: its device offers again when it hears nothing.
        Raises `MessageError` for bytes that are not a chunk of the upload they name.
        """
        upload, index, data = parse_chunk(payload)
        sender = self._senders.get(device)
        incoming = None if sender is None else sender.open.get(upload)
        if sender is None or incoming is None:
            return Progress(new=False)
        if not incoming.put(index, data):
            return Progress(new=False)
        incoming.heard_s = now
        incoming.since_credit += 1
        if incoming.arrived < len(incoming.there):
            due = incoming.since_credit >= min(CREDIT_EVERY, incoming.window)
            return Progress(self._credit(incoming)) if due else Progress()
        return self._finish(sender, incoming)

    def expects(self, device: str, payload: bytes) -> bool:
        """True if a chunk names an upload of this device in progress. Any thread may ask."""
        return (device, payload[:UPLOAD_BYTES]) in self._open

    def knows(self, offer: Offer) -> bool:
        """True if an upload is in progress, or its end is known."""
        sender = self._senders.get(offer.device)
        return sender is not None and (offer.upload in sender.open or offer.upload in sender.ended)

    def forget(self, device: str, upload: bytes) -> None:
        """Allow a complete or refused upload to be uploaded again when offered."""
        if (sender := self._senders.get(device)) is not None:
            sender.ended.pop(upload, None)

    def drop_idle(self, now: float) -> list[Offer]:
        """Drop and return the uploads without a new chunk for too long."""
        idle = [
            incoming.offer
            for incoming in self._open.values()
            if now - incoming.heard_s > self._limits.idle_s
        ]
        for offer in idle:
            self._close(offer)
        return idle

    def _credit(self, incoming: _Incoming) -> Credit:
        incoming.since_credit = 0
        share = self._limits.max_flight_bytes // (len(self._open) * incoming.offer.chunk_bytes)
        incoming.window = max(1, min(self._limits.window, share))
        return Credit(
            device=incoming.offer.device,
            upload=incoming.offer.upload,
            missing=incoming.missing(),
            window=incoming.window,
        )

    def _finish(self, sender: _Sender, incoming: _Incoming) -> Progress:
        offer = incoming.offer
        if hashlib.sha256(incoming.space).digest() == offer.sha256:
            return Progress(self._end(sender, offer, None), Upload(offer, incoming.space))
        incoming.failures += 1
        if incoming.failures > 1:
            return Progress(self._end(sender, offer, "the bytes do not match the offered SHA-256"))
        incoming.restart()
        return Progress(self._credit(incoming))

    def _end(self, sender: _Sender, offer: Offer, refused: str | None) -> Credit:
        self._close(offer)
        sender.ended[offer.upload] = refused
        if len(sender.ended) > REMEMBERED:
            sender.ended.popitem(last=False)
        return _ended(offer, refused)

    def _close(self, offer: Offer) -> None:
        self._senders[offer.device].open.pop(offer.upload, None)
        self._open.pop((offer.device, offer.upload), None)

    def _full(self, sender: _Sender, offer: Offer) -> str:
        """Explain why there is no room for one more upload; empty if there is."""
        if len(sender.open) >= self._limits.max_uploads:
            return f"at most {self._limits.max_uploads} uploads at a time"
        taken = self.open_bytes
        if taken and taken + offer.size > self._limits.max_open_bytes:
            return "the coordinator cannot hold any more at the moment"
        return ""


def _same_purpose(incoming: _Incoming, offer: Offer) -> bool:
    old = incoming.offer
    return (old.run, old.round, old.answers) == (offer.run, offer.round, offer.answers)


def _ended(offer: Offer, refused: str | None) -> Credit:
    return Credit(
        device=offer.device,
        upload=offer.upload,
        missing=(),
        window=0,
        refused=refused is not None,
        reason=refused or "",
    )
