"""Public topics: the task, the current round, models for inference, and the model as chunks.

Every version of the model is published once, and only the chunks that earlier versions did not
have. Chunks that no version in use needs are cleared. Everything is published again when a broker
comes back, because it may have lost it. The chunks that a broker may hold are noted on disk, so a
restarted run can clear leftovers.

If a broker cannot retain enough, only the pointers are published, and devices ask for every chunk
(`Want`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.checksums import DamagedBytes, checksum, open_sealed
from coordinator.run.chunk_store import ChunkStore
from coordinator.run.folder import TaskFiles
from coordinator.service.outgoing.sending import ChunkSending
from edge_sdk.program.files import write_whole
from edge_sdk.protocol.chunks import HASH_BYTES, Blob, split_blob
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.messages.delivery import CHOICES, Choice, ModelNotice
from edge_sdk.protocol.messages.round import RoundClosed, RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Presence, TaskNotice, Want
from edge_sdk.protocol.packs.index import ModelIndex, encode_index, pack_chunks
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan

log = logging.getLogger(__name__)

TASK, STATISTICS, _DRAFT = "task", "statistics", "draft"
MAX_WAITING = 4096
"""Most chunks waiting for the link; beyond that, devices have to ask again."""
MAX_ASKED = 64
"""Most chunks waiting for one device that asked; beyond that, it has to ask again."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the model: its index, and the blob that names the index to devices."""

    version: int
    index: ModelIndex
    blob: Blob

    def needed_bytes(self, plan: ModelPlan, groups: Groups) -> int:
        """Bytes of the model that a device fetches for these groups."""
        needed = find_packs(plan).of_submodel(plan, plan.choose(groups))
        return sum(self.index.packs[number].size for number in needed)


class Publisher:
    """Publishes, and remembers what it published in order to publish it again."""

    def __init__(
        self,
        sending: ChunkSending,
        topics: Topics,
        store: ChunkStore,
        noted: Path,
        *,
        chunk_bytes: int,
        retained: bool = True,
    ) -> None:
        """`noted` is the file that names the chunks a broker may hold. `retained` is True if the
        broker keeps chunks; otherwise the coordinator sends those that devices ask for.
        """
        self._sending = sending
        self._topics = topics
        self._store = store
        self._noted = noted
        self._chunk_bytes = chunk_bytes
        self._retained = retained
        self._notice: TaskNotice | None = None
        self._round: RoundOpen | RoundClosed | Survey | None = None
        self._presence: Presence | None = None
        self._models: dict[Choice, ModelNotice | None] = {}
        """Models for inference that were announced."""
        self._left_over = _read_hashes(noted)
        """Chunks from an earlier process that a broker may still hold."""

    @property
    def drained(self) -> bool:
        """True if the link has accepted everything public.

        Chunks that single devices asked for may still wait: they must not delay a round.
        """
        return not self._sending.waiting_for("")

    def publish_task(self, files: TaskFiles, task: str, run: str) -> None:
        """Publish the plan, the manifest, the graphs, and the notice that names them."""
        chunks: dict[bytes, bytes] = {}

        def blob_of(data: bytes) -> Blob:
            blob, pieces = split_blob(data, self._chunk_bytes)
            chunks.update(pieces)
            return blob

        notice = TaskNotice(
            task=task,
            run=run,
            plan=blob_of(files.plan.encoded),
            manifest=blob_of(files.manifest.encoded),
            graphs={
                entry.sha256: blob_of(files.files[entry.sha256]) for entry in files.manifest.graphs
            },
            chunk_bytes=self._chunk_bytes,
        )
        self._publish(self._store.add(TASK, chunks.items()))
        self._notice = notice
        self._sending.say(self._topics.task, notice, retain=True)

    def publish_model(
        self, plan: ModelPlan, version: int, encoded: EncodedModel, buffers: dict[str, Array]
    ) -> Published:
        """Publish a version of the model."""
        published, new = self.pack_model(plan, version, encoded, buffers)
        self.send(new)
        return published

    def pack_model(
        self,
        plan: ModelPlan,
        version: int,
        encoded: EncodedModel,
        buffers: dict[str, Array],
        *,
        since: Published | None = None,
        changed: Collection[int] = (),
        control: bool = False,
    ) -> tuple[Published, list[bytes]]:
        """Store a version of the model, or with `control` the global variate that goes with it, in
        any thread. Returns it, and the new chunks, to be sent.

        `since` is an earlier version that is still stored; only the packs numbered in `changed`
        differ from it.
        """
        blobs = {} if since is None else dict(enumerate(since.index.packs))
        here = [n for number, blob in blobs.items() if number not in changed for n in blob.chunks]
        name = _name(version, control=control)
        made: list[Published] = []

        def chunks() -> Iterator[tuple[bytes, bytes]]:
            numbers = None if since is None else sorted(changed)
            size = self._chunk_bytes
            yield from pack_chunks(plan, encoded, buffers, size, blobs, numbers)
            index = ModelIndex(encoded.encoding, size, tuple(blobs.values()))
            blob, pieces = split_blob(encode_index(plan, index), size)
            made.append(Published(version, index, blob))
            yield from pieces.items()

        new = self._store.add(name, chunks(), here)
        self._note()
        return made[0], new

    def send(self, hashes: Iterable[bytes]) -> None:
        """Send new chunks, which were noted."""
        if not self._retained:
            return
        for hash in hashes:
            self._sending.chunk(self._topics.chunk(hash), hash, retain=True)
        self._sending.pump()

    def publish_statistics(self, data: bytes, name: str = STATISTICS) -> Blob:
        """Publish statistics of a version's levels, in place of the last ones of this name."""
        blob, chunks = split_blob(data, self._chunk_bytes)
        new = self._store.add(_DRAFT, chunks.items())
        gone = self._store.drop(name) if name in self._store.names() else []
        self._store.relabel(_DRAFT, name)
        self._publish(new)
        self.clear([hash for hash in gone if hash not in self._store])
        return blob

    def keep_models(self, versions: Iterable[int]) -> list[bytes]:
        """Drop the chunks that none of these versions needs; returns those to be cleared."""
        wanted = {TASK, STATISTICS, *CHOICES}
        for version in versions:
            wanted |= {_name(version), _name(version, control=True)}
        gone: list[bytes] = []
        for name in self._store.names():
            if name not in wanted:
                gone += self._store.drop(name)
        stale = [hash for hash in (*gone, *self._left_over) if hash not in self._store]
        self._left_over = []
        return stale

    def clear(self, stale: Sequence[bytes]) -> None:
        """Clear the topics of chunks that nobody needs."""
        if not stale:
            return
        if self._retained:  # the next note leaves them out
            for hash in stale:
                self._sending.chunk(self._topics.chunk(hash), None, retain=True)
        self._sending.pump()

    def say_round(self, message: RoundOpen | RoundClosed | Survey | None) -> None:
        """Announce the current round, or a survey between two; None means there is none."""
        self._round = message
        self._sending.say(self._topics.round, message, retain=True)

    def say_model(self, choice: Choice, notice: ModelNotice | None) -> None:
        """Announce a model for inference; None means there is none."""
        self._models[choice] = notice
        self._sending.say(self._topics.model(choice), notice, retain=True)

    def say_presence(self, presence: Presence) -> None:
        """Announce the coordinator's presence."""
        self._presence = presence
        self._sending.say(self._topics.coordinator, presence, retain=True)

    def say_presence_again(self) -> None:
        """Announce the coordinator's presence again, if it was announced."""
        if self._presence is not None:
            self._sending.say(self._topics.coordinator, self._presence, retain=True)

    def say_again(self) -> None:
        """Publish everything current again: the broker is back, perhaps empty."""
        self.say_presence_again()
        if self._notice is not None:
            self._sending.say(self._topics.task, self._notice, retain=True)
        self._sending.say(self._topics.round, self._round, retain=True)
        for choice, model in self._models.items():
            self._sending.say(self._topics.model(choice), model, retain=True)
        if self._retained:
            for hash in self._store:
                self._sending.chunk(self._topics.chunk(hash), hash, retain=True)
        self._sending.pump()

    def answer(self, want: Want) -> None:
        """Send a device the chunks it asks for; ignores those that are gone."""
        if self._sending.waiting > MAX_WAITING:
            return  # it will ask again, unless the chunks being published are the ones it needs
        for hash in want.chunks:
            if self._sending.waiting_for(want.device) >= MAX_ASKED:
                break
            if hash in self._store:
                topic = self._topics.down_chunk(want.device, hash)
                self._sending.chunk(topic, hash, asked_by=want.device)
        self._sending.pump()

    def _publish(self, hashes: Iterable[bytes]) -> None:
        self._note()
        self.send(hashes)

    def _note(self) -> None:
        """Note the chunks that a broker may hold, before it gets them."""
        if not self._retained:
            return
        hashes = b"".join({*self._store, *self._left_over})
        write_whole(self._noted, hashes + checksum(hashes), mode=0o600)


def _name(version: int, *, control: bool = False) -> str:
    return f"control {version}" if control else f"model {version}"


def _read_hashes(path: Path) -> list[bytes]:
    if not path.is_file():
        return []
    try:
        data = bytes(open_sealed(path.read_bytes()))
    except DamagedBytes as error:
        log.warning("%s: %s; the broker may keep chunks that nobody needs", path, error)
        return []
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
