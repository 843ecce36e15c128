"""Messages outside the rounds: the task, presence, and transfers.

TaskNotice                       the task to train, and where its plan and graphs are
Presence                         a program comes or goes
    Offer ▶ Credit ▶ chunks ▶ Credit …   an upload (`edge_sdk.transport.uploads`)
Want ▶ chunks                    chunks that the retained topics did not deliver
Evaluation                       the model's quality on a device's own data
Complaint                        why the coordinator drops a device's messages
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edge_sdk.protocol.chunks import (
    HASH_BYTES,
    MAX_BLOB_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Blob,
    chunk_count,
)
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import MAX_SAMPLES

UPLOAD_BYTES = 16
"""Bytes of an upload's id."""
MAX_RANGES = 64
"""Most ranges of missing chunks in one `Credit`."""
MAX_WINDOW = 1024
"""Most chunks that a `Credit` may ask for at a time."""
MAX_WANTED = 64
"""Most chunks of one `Want`."""
MAX_LOSS = 1e9
"""Largest loss of an evaluation; sums over a fleet must stay finite."""

_RUN = re.compile(r"[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_run(run: str) -> str:
    """Return the run if it is 16 lower-case hex digits. Raises `MessageError`."""
    if not _RUN.fullmatch(run):
        raise MessageError(f"a run's name is 16 hex digits, not {run[:80]!r}")
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNotice:
    """The task being trained. Training from scratch starts a new run; rounds of different runs
    are unrelated.
    """

    task: str
    run: str
    plan: Blob
    manifest: Blob
    """Manifest of the graphs (`task/codec.py`)."""
    graphs: Mapping[str, Blob]
    """Each graph of the manifest, by its SHA-256 in hex digits."""
    chunk_bytes: int
    """Size of chunks in both directions."""

    def __post_init__(self) -> None:
        check_run(self.run)
        _check_chunk_bytes(self.chunk_bytes)
        for name in self.graphs:
            if not _SHA256.fullmatch(name):
                raise MessageError(f"a graph's name is 64 hex digits, not {name[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """A program is online or offline. Session numbers count up at every start.

    A program's last will is an offline `Presence` of its session. A presence with an older session
    than the newest known one is stale and must be ignored.
    """

    name: str
    session: int
    online: bool
    reason: str = ""
    """Why the program is gone, in words; empty: not known, or it is there."""
    exit_code: int | None = None
    """Exit code of the program; None: it is there, or could not tell."""

    def __post_init__(self) -> None:
        if self.session < 0:
            raise MessageError(f"a session must not be negative: {self.session}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Announces or resumes an upload of a movement's bytes (`movement.py`)."""

    device: str
    run: str
    upload: bytes
    """16 bytes, the same whenever the same bytes are offered for the same purpose."""
    round: int
    """The round of the movement."""
    answers: int | None
    """Round that this movement answers as a replay; None: it is not a replay."""
    size: int
    chunk_bytes: int
    sha256: bytes
    """SHA-256 of all bytes: 32 bytes."""

    def __post_init__(self) -> None:
        check_run(self.run)
        _check_upload(self.upload)
        _check_chunk_bytes(self.chunk_bytes)
        if self.round < 1 or (self.answers is not None and self.answers <= self.round):
            raise MessageError(
                f"a movement of round {self.round} cannot be offered for round {self.answers}"
            )
        if not 1 <= self.size <= MAX_BLOB_BYTES:
            raise MessageError(f"an upload has 1 to {MAX_BLOB_BYTES} bytes, not {self.size}")
        if len(self.sha256) != 32:
            raise MessageError(f"a SHA-256 has 32 bytes, not {len(self.sha256)}")

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the upload."""
        return chunk_count(self.size, self.chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Chunks of an upload to send now: the first `window` of the missing ones.

    | missing | window | |
    |---|---|---|
    | some | above 0 | send |
    | some | 0 | wait, and offer the upload again later; `reason` says why |
    | none | 0 | everything has arrived |

    `refused` means that the upload is not wanted at all, and `reason` says why.
    """

    device: str
    upload: bytes
    missing: tuple[tuple[int, int], ...]
    """Half-open ranges of chunk numbers, ascending; at most the first 64."""
    window: int
    refused: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        _check_upload(self.upload)
        if len(self.missing) > MAX_RANGES:
            raise MessageError(f"{len(self.missing)} ranges of chunks; at most {MAX_RANGES}")
        end = 0
        for number, (first, behind) in enumerate(self.missing):
            if first < end + (number > 0) or behind <= first:
                raise MessageError(f"ranges of chunks are not ascending: {self.missing}")
            end = behind
        if not 0 <= self.window <= MAX_WINDOW:
            raise MessageError(f"a window is 0 to {MAX_WINDOW} chunks, not {self.window}")
        if self.window and (self.refused or not self.missing):
            raise MessageError("a credit asks for chunks, but none is missing")

    @property
    def complete(self) -> bool:
        """True if everything has arrived."""
        return not self.missing and not self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Asks the coordinator to send these chunks to the device directly."""

    device: str
    chunks: tuple[bytes, ...]
    """Hashes of the chunks: 1 to 64."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.chunks) <= MAX_WANTED:
            raise MessageError(f"ask for 1 to {MAX_WANTED} chunks, not {len(self.chunks)}")
        if any(len(each) != HASH_BYTES for each in self.chunks):
            raise MessageError(f"the hash of a chunk has {HASH_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The quality of the round's model on one device's data."""

    device: str
    run: str
    round: int
    samples: int
    loss: float
    """Mean over the samples."""
    accuracy: float | None
    """Share of correct answers; None: the task has no such notion."""
    canary: bool = False
    """True if it is of the model that the device tries for inference."""
    before_loss: float | None = None
    """That of the model that the device had before, on the same samples; None: it had none."""
    before_accuracy: float | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        check_run(self.run)
        if self.before_loss is not None and not abs(self.before_loss) <= MAX_LOSS:
            raise MessageError(f"a loss is at most {MAX_LOSS:g}, not {self.before_loss!r}")
        if self.before_accuracy is not None and not 0 <= self.before_accuracy <= 1:
            raise MessageError(f"an accuracy is a share in [0, 1], not {self.before_accuracy!r}")
        if self.round < 1 or not 1 <= self.samples <= MAX_SAMPLES:
            raise MessageError(f"an evaluation of {self.samples} samples in round {self.round}")
        if not abs(self.loss) <= MAX_LOSS:  # also catches nan
            raise MessageError(f"a loss is at most {MAX_LOSS:g}, not {self.loss!r}")
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise MessageError(f"an accuracy is a share in [0, 1], not {self.accuracy!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """Tells a device that its messages are dropped. Sent now and then, not for every message."""

    device: str
    reason: str


def _check_upload(upload: bytes) -> None:
    if len(upload) != UPLOAD_BYTES:
        raise MessageError(f"the id of an upload has {UPLOAD_BYTES} bytes, not {len(upload)}")


def _check_chunk_bytes(chunk_bytes: int) -> None:
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise MessageError(
            f"a chunk has {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes, not {chunk_bytes}"
        )
