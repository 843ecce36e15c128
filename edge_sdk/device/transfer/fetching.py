"""Pulling chunks: a few at a time, checked by their names, kept on disk.

A chunk comes from the broker's retained topic, or from the coordinator, which answers a `Want`
directly. A chunk that does not come within RETRY_S is requested both ways, again and again, but not
while bytes come in: on a slow link, repeated requests would delay each other. Once the coordinator
had to answer, it is asked first for the next chunks; once a topic brings a chunk, topics come first
again.

At most WINDOW chunks are under way, or up to four times as many small ones. This is the flow
control: nothing queues on the broker. More are asked for when half of the window is free, together:
a message for each costs more than a small chunk.

A fetch ends early when its chunks are useless by now, and when the topic of an awaited chunk is
cleared: then its version is gone, and the coordinator will not answer.

`Pull` is the logic, without I/O or threads. `Fetcher.fetch` blocks the thread that trains; the
thread that serves the link calls `Fetcher.arrived`, which only hands over.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import TypeVar

from edge_sdk.device.transfer.chunk_cache import ChunkCache
from edge_sdk.program.logs import Seldom
from edge_sdk.protocol.chunks import Blob, chunk_hash, join_blob
from edge_sdk.protocol.errors import MessageError, TesseraError
from edge_sdk.protocol.messages.round import Assignment, RoundOpen
from edge_sdk.protocol.messages.survey import MAX_STATISTICS_BYTES, Survey, decode_statistics
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Want
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.protocol.packs.index import (
    MAX_INDEX_BYTES,
    ModelIndex,
    Unpacking,
    decode_index,
)
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array, Raw
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.transport.link import Link

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW = 8
WHOLE_BYTES = 2**18
"""Size from which a chunk counts as one of the window."""
LEAST_SHARE = 0.25
"""Least that a small one counts."""
RETRY_S = 4.0
IDLE_S = 60.0
"""Seconds without a chunk after which a fetch fails."""


class FetchError(TesseraError):
    """Chunks did not come, or have the wrong content."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The next steps of a pull, in this order: drop topics, subscribe to topics, send a `Want`.

    All are hashes of chunks.
    """

    drop: list[bytes] = field(default_factory=list)
    subscribe: list[bytes] = field(default_factory=list)
    want: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Awaited:
    due_s: float
    subscribed: bool
    share: float
    """Part of the window that it takes, in chunks."""


class Pull:
    """Decides which chunks to ask for, when and how. Time comes in with every call, in seconds."""

    def __init__(
        self,
        hashes: Iterable[bytes],
        now: float,
        *,
        direct: bool = False,
        window: int = WINDOW,
        sizes: Mapping[bytes, int] | None = None,
    ) -> None:
        """`direct`: ask the coordinator first, not the retained topics. `sizes`: bytes of chunks,
        as far as they are known.
        """
        self.direct = direct
        self._sizes = sizes or {}
        self._taken = 0.0
        self.moved_s = now
        """Time at which the last chunk came."""
        self._waiting = deque(dict.fromkeys(hashes))
        self._awaited: OrderedDict[bytes, _Awaited] = OrderedDict()
        self._done: list[bytes] = []
        self._window = window

    @property
    def left(self) -> int:
        """Number of chunks that have not come."""
        return len(self._waiting) + len(self._awaited)

    @property
    def due_s(self) -> float:
        """Time to call `ask` next, if nothing arrives."""
        return min((each.due_s for each in self._awaited.values()), default=self.moved_s)

    def arrived(self, hash: bytes, now: float, *, direct: bool) -> bool:
        """Take a chunk that was checked; return True if it was awaited."""
        awaited = self._awaited.pop(hash, None)
        if awaited is None:
            return False
        self._taken -= awaited.share
        if awaited.subscribed:
            self._done.append(hash)
        self.direct = direct
        self.moved_s = now
        return True

    def cleared(self, hash: bytes) -> bool:
        """Tell if a chunk whose topic was cleared is awaited from there."""
        awaited = self._awaited.get(hash)
        return awaited is not None and awaited.subscribed

    def ask(self, now: float, silence_s: float = math.inf) -> Ask:
        """Ask for chunks that there is room for, and for those that are overdue.

        `silence_s`: seconds since anything came over the link, be it a part of a chunk.
        """
        ask = Ask()
        for hash, awaited in self._awaited.items():
            if awaited.due_s <= now and silence_s < RETRY_S:
                awaited.due_s = now + RETRY_S - silence_s
            elif awaited.due_s <= now:
                awaited.due_s, awaited.subscribed = now + RETRY_S, True
                ask.subscribe.append(hash)
                ask.want.append(hash)
        # Topics whose chunks came are dropped together, to make room for others or in the end.
        if self._waiting and (self._taken <= self._window / 2 or not self._awaited):
            ask.drop.extend(self._done)
            self._done.clear()
            while self._waiting:
                size = self._sizes.get(self._waiting[0], WHOLE_BYTES)
                share = min(1.0, max(LEAST_SHARE, size / WHOLE_BYTES))
                if self._awaited and self._taken + share > self._window:
                    break
                hash = self._waiting.popleft()
                self._taken += share
                self._awaited[hash] = _Awaited(now + RETRY_S, not self.direct, share)
                (ask.want if self.direct else ask.subscribe).append(hash)
        return ask

    def give_up(self) -> Ask:
        """Drop all topics that are still subscribed to."""
        return Ask(drop=[*self._done, *(h for h, each in self._awaited.items() if each.subscribed)])


class Fetcher:
    """Chunks over a link, for one device."""

    def __init__(
        self,
        link: Link,
        topics: Topics,
        device: str,
        cache: ChunkCache,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._topics = topics
        self._device = device
        self._cache = cache
        self._should_stop = should_stop
        self._clock = clock
        self._changed = Condition()
        self._arrivals: deque[tuple[bytes, bytes, bool]] = deque()
        self._awaiting = False
        self._direct = False
        self._wrong = Seldom()

    def arrived(self, hash: bytes, payload: bytes, *, direct: bool) -> None:
        """Hand over a chunk that came directly or on its topic; an empty one clears the topic."""
        with self._changed:
            if self._awaiting and (payload or not direct):
                self._arrivals.append((hash, payload, direct))
                self._changed.notify_all()

    def wake(self) -> None:
        """Let a fetch look at `should_stop`."""
        with self._changed:
            self._changed.notify_all()

    def fetch(
        self,
        hashes: Sequence[bytes],
        *,
        overtaken: Callable[[], bool] = lambda: False,
        sizes: Mapping[bytes, int] | None = None,
        take: Callable[[bytes, bytes], object] | None = None,
    ) -> ChunkCache:
        """Get these chunks, which stay in the cache until the next fetch. `sizes`: see `Pull`.

        `take` is given every chunk, checked, as it comes, those of the cache first.
        `overtaken` tells if they are useless by now; `wake` lets the fetch ask it.
        Raises `FetchError` when none came for IDLE_S, when one is gone for good, or when it is
        told to stop.
        """
        self._cache.use(hashes)
        now = self._clock()
        missing = [
            hash
            for hash in dict.fromkeys(hashes)
            if hash not in self._cache or not (take is None or self._give(hash, take))
        ]
        pull = Pull(missing, now, direct=self._direct, sizes=sizes)
        with self._changed:
            self._arrivals.clear()
            self._awaiting = True
        try:
            while pull.left:
                self._perform(pull.ask(self._clock(), self._link.silence_s(bulk=True)))
                self._wait(pull, pull.moved_s + IDLE_S)
                self._take(pull, take)
                if self._should_stop():
                    raise FetchError("the device is stopping")
                if pull.left and overtaken():
                    raise FetchError("something newer came during the fetch")
                idle = self._clock() >= pull.moved_s + IDLE_S
                if pull.left and idle and self._link.silence_s(bulk=True) >= RETRY_S:
                    raise FetchError(
                        f"{pull.left} of {len(missing)} chunks did not come: none within "
                        f"{IDLE_S:g} s, neither from the broker nor from the coordinator"
                    )
        finally:
            self._direct = pull.direct
            with self._changed:
                self._awaiting = False
                self._arrivals.clear()
            self._perform(pull.give_up())
            self._cache.rest()
        return self._cache

    def _give(self, hash: bytes, take: Callable[[bytes, bytes], object]) -> bool:
        """Give a chunk of the cache to `take`; one that is damaged is dropped, to be pulled."""
        try:
            chunk = self._cache[hash]
        except KeyError:
            return False
        if chunk_hash(chunk) != hash:
            log.warning("chunk %s on this device's disk is damaged: pulled again", hash.hex())
            self._cache.drop([hash])
            return False
        take(hash, chunk)
        return True

    def fetch_blob(
        self,
        blob: Blob,
        max_bytes: int,
        what: str,
        overtaken: Callable[[], bool] = lambda: False,
    ) -> bytes:
        """Get the bytes of a blob. Raises `FetchError`, also for one that is too large."""
        if blob.size > max_bytes:
            raise FetchError(f"{what} has {blob.size} bytes; at most {max_bytes} are fetched")
        return self.read(blob.chunks, lambda chunks: join_blob(blob, chunks), overtaken)

    def read(
        self,
        hashes: Sequence[bytes],
        work: Callable[[ChunkCache], T],
        overtaken: Callable[[], bool] = lambda: False,
    ) -> T:
        """Do some work with these chunks; if it fails, they are pulled again next time."""
        chunks = self.fetch(hashes, overtaken=overtaken)
        try:
            return work(chunks)
        except MessageError as error:
            # A damaged file must not fail every later round.
            self._cache.drop(hashes)
            raise FetchError(f"chunks on this device's disk are damaged: {error}") from error

    def _wait(self, pull: Pull, deadline_s: float) -> None:
        now = self._clock()
        until = pull.due_s if now >= deadline_s else min(pull.due_s, deadline_s)
        with self._changed:
            if not self._arrivals and not self._should_stop():
                self._changed.wait(max(0.0, until - now))

    def _take(self, pull: Pull, take: Callable[[bytes, bytes], object] | None) -> None:
        while True:
            with self._changed:
                if not self._arrivals:
                    return
                hash, chunk, direct = self._arrivals.popleft()
            if not chunk:
                if pull.cleared(hash):
                    raise FetchError("its version was replaced during the fetch")
            elif chunk_hash(chunk) != hash:
                if number := self._wrong.note():
                    log.warning(
                        "%d chunk(s), the last %s, came with other bytes than the hash says",
                        number,
                        hash.hex(),
                    )
            elif pull.arrived(hash, self._clock(), direct=direct):
                self._cache.put(hash, chunk)
                if take is not None:
                    take(hash, chunk)

    def _perform(self, ask: Ask) -> None:
        for hash in ask.drop:
            self._link.unsubscribe(self._topics.chunk(hash), bulk=True)
        for hash in ask.subscribe:
            self._link.subscribe(self._topics.chunk(hash), bulk=True)
        if ask.want:
            want = Want(device=self._device, chunks=tuple(ask.want))
            self._link.publish(self._topics.up_control(self._device), encode_message(want))


class PulledModel:
    """Weights of a task's rounds, pulled chunk by chunk; an `edge_sdk.device.app.ModelSource`."""

    def __init__(
        self,
        plan: ModelPlan,
        fetcher: Fetcher,
        *,
        overtaken: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`overtaken` tells if the model of a round is useless by now."""
        self._plan = plan
        self._overtaken = overtaken
        self._fetcher = fetcher
        self._indices: dict[str, tuple[Blob, ModelIndex]] = {}
        """The index of the model, and of the global variate, fetched last, and its blob."""

    def until(self, stopped: Callable[[], bool]) -> PulledModel:
        """Return the same model, whose fetches end when `stopped` says so."""
        return PulledModel(self._plan, self._fetcher, overtaken=lambda _: stopped())

    def fetch_blob(self, blob: Blob, max_bytes: int, what: str) -> bytes:
        """Get a blob that belongs to no round. Raises as `Fetcher.fetch_blob`."""
        return self._fetcher.fetch_blob(blob, max_bytes, what, lambda: self._overtaken(0))

    def fetch(self, assignment: Assignment, opened: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        """See `ModelSource`. Raises `FetchError` and what `Unpacking` raises."""
        unpacking = self._unpacked(opened, "model", opened.model, assignment.groups)
        blocks, buffers = unpacking.result()
        return replace(blocks, room=unpacking.room), buffers

    def fetch_again(self, assignment: Assignment, opened: RoundOpen, room: Raw | None) -> Blocks:
        """See `RereadSource`. Raises as `fetch`."""
        groups = assignment.groups
        return self._unpacked(opened, "model", opened.model, groups, room).result()[0]

    def fetch_control(self, assignment: Assignment, opened: RoundOpen) -> Blocks:
        """See `ModelSource`. Raises as `fetch`."""
        return self._read(opened, "global variate", opened.control, assignment.groups)[0]

    def fetch_level(self, survey: Survey, number: int) -> tuple[Blocks, dict[str, Array]]:
        """See `LevelSource`. Raises as `fetch`."""
        groups = survey.groups[number]
        blocks, buffers = self.fetch_groups(survey, groups)
        if survey.wants == "evaluation":
            known = dict(zip(survey.levels, survey.groups, strict=True))
            buffers |= self.fetch_statistics(survey, known).get(survey.levels[number], {})
        return blocks, buffers

    def fetch_statistics(
        self, opened: RoundOpen | Survey, groups: Mapping[float, Groups]
    ) -> dict[float, dict[str, Array]]:
        """Return the statistics of levels that mean these groups; none if none are named.

        Raises `FetchError`, also for statistics of another model.
        """
        if opened.statistics is None:
            return {}
        data = self._fetcher.fetch_blob(
            opened.statistics,
            MAX_STATISTICS_BYTES,
            "the statistics",
            lambda: self._overtaken(opened.round),
        )
        try:
            return decode_statistics(self._plan, groups, data)
        except MessageError as error:
            raise FetchError(str(error)) from error

    def fetch_groups(
        self, opened: RoundOpen | Survey, groups: Groups
    ) -> tuple[Blocks, dict[str, Array]]:
        """Return the blocks and buffers of these groups, as of this round."""
        return self._read(opened, "model", opened.model, groups)

    def _read(
        self, opened: RoundOpen | Survey, what: str, blob: Blob | None, groups: Groups
    ) -> tuple[Blocks, dict[str, Array]]:
        return self._unpacked(opened, what, blob, groups).result()

    def _unpacked(
        self,
        opened: RoundOpen | Survey,
        what: str,
        blob: Blob | None,
        groups: Groups,
        room: Raw | None = None,
    ) -> Unpacking:
        index = self._index_of(opened, what, blob)
        unpacking = Unpacking(self._plan, index, groups, room)
        self._fetcher.fetch(
            unpacking.needed,
            overtaken=lambda: self._overtaken(opened.round),
            sizes=index.chunk_sizes,
            take=unpacking.take,
        )
        return unpacking

    def _index_of(self, opened: RoundOpen | Survey, what: str, blob: Blob | None) -> ModelIndex:
        if blob is None:
            raise FetchError(f"round {opened.round} does not say where its {what} is")
        if what not in self._indices or self._indices[what][0] != blob:
            data = self._fetcher.fetch_blob(
                blob,
                MAX_INDEX_BYTES,
                f"the {what}'s index",
                lambda: self._overtaken(opened.round),
            )
            self._indices[what] = blob, decode_index(self._plan, data)
        return self._indices[what][1]
