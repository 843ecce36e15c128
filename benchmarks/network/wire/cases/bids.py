"""Latency of a bid while bulk moves: control must not wait behind chunks.

A separate process is the device (`bidding_process.py`); this one receives as a coordinator does:
one loop for both connections, uploads assembled as they come.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.network.stage.programs import Programs, check
from benchmarks.network.wire.cases.bidding_process import BUSY, DEVICE, OVER, QUIET, TASK
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.program.processes import ChildProcess
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import TopicKind, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Credit, Offer
from edge_sdk.protocol.messages.wire import decode_received, encode_message
from edge_sdk.transport.link import Connected, Link, LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from edge_sdk.transport.uploads import UploadLimits, Uploads

METHOD = (
    "A process publishes bids over a link, one every few milliseconds, first alone and then while "
    "it uploads over the same link, in chunks of 256 KiB with credits, to a receiver in this "
    "process. A bid's way is from the call that publishes it to when the receiver's loop has "
    "decoded it, on the clock that both share. Bids published before the first chunk arrived or "
    "after the last one do not count as beside traffic."
)
WAIT_S = 60.0
"""Limit for the other side's next message."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BidsConfig:
    """Parameters: a number of uploads of this size, one after the other; a bid every `every_s`."""

    upload_bytes: int = 50_000_000
    uploads: int = 10
    every_s: float = 0.005
    quiet_bids: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class BidsRow:
    """Latencies of bids in milliseconds, and the traffic beside them."""

    moved_mb: float
    seconds: float
    """Time over which the bids were published."""
    bids: int
    p50_ms: float
    p95_ms: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Way:
    """Times at which a bid was published and received."""

    sent_s: float
    received_s: float


@dataclass(slots=True)
class Heard:
    """Messages at the receiver: bids by phase, and times of chunks."""

    ways: dict[int, list[Way]] = field(default_factory=lambda: {QUIET: [], BUSY: []})
    chunks_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0


def measure_bids(config: BidsConfig, bytecode: Path, begin: Begin = silent) -> list[BidsRow]:
    """Measure without and with traffic. `begin` is called once, its result once for each upload."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        tick = begin(f"beside {config.uploads} × {config.upload_bytes / 1e6:.0f} MB")
        broker = stack.enter_context(embedded_broker(folder / "broker"))
        programs = stack.enter_context(Programs(folder, bytecode))
        events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        link = open_link(broker, name="receiver", deliver=events.put)
        stack.callback(link.close)
        topics = Topics(TASK)
        link.subscribe(topics.up_controls)
        link.subscribe(topics.up_chunks, bulk=True)
        while not isinstance(events.get(timeout=WAIT_S), Connected):
            pass
        path = folder / "settings.json"
        path.write_text(json.dumps({"broker": _reach(broker), **asdict(config)}))
        program = programs.begin(
            "bidder", ["-m", "benchmarks.network.wire.cases.bidding_process", str(path)]
        )
        heard = _Receiver(link, topics, config, tick).listen(events, program)
    return [bids_row(heard.ways[QUIET]), busy_row(heard)]


class _Receiver:
    """The coordinator's part: takes bids, answers offers and chunks with credits."""

    def __init__(
        self, link: Link, topics: Topics, config: BidsConfig, tick: Callable[[], None]
    ) -> None:
        self._link = link
        self._topics = topics
        self._tick = tick
        self._uploads = Uploads(UploadLimits(max_bytes=config.upload_bytes))
        self._heard = Heard()

    def listen(self, events: queue.SimpleQueue[LinkEvent], program: ChildProcess) -> Heard:
        """Receive everything until the end. Raises `FigureError` when nothing comes any more."""
        by = time.monotonic() + WAIT_S
        while True:
            try:
                event = events.get(timeout=POLL_S)
            except queue.Empty:
                check(program)
                if time.monotonic() >= by:
                    raise FigureError(f"no bid came within {WAIT_S:.0f} s") from None
                continue
            by = time.monotonic() + WAIT_S
            if isinstance(event, Received) and self._is_over(event):
                return self._heard

    def _is_over(self, event: Received) -> bool:
        topic = parse_topic(event.topic)
        if topic.kind is TopicKind.UP_CHUNK:
            self._on_chunk(event.payload)
            return False
        match decode_received(topic, event.payload):
            case Bid(round=phase, reason=sent) if phase != OVER:
                self._heard.ways[phase].append(Way(float(sent), time.monotonic()))
            case Bid():
                return True
            case Offer() as offer:
                self._tell(self._uploads.offered(DEVICE, offer, time.monotonic()))
        return False

    def _on_chunk(self, payload: bytes) -> None:
        now = time.monotonic()
        self._heard.chunks_s.append(now)
        self._heard.moved_bytes += len(payload)
        progress = self._uploads.received(DEVICE, payload, now)
        if progress.credit is not None:
            self._tell(progress.credit)
        if progress.upload is not None:
            self._tick()

    def _tell(self, credit: Credit) -> None:
        self._link.publish(self._topics.down_control(DEVICE), encode_message(credit))


def busy_row(heard: Heard) -> BidsRow:
    """Summarise bids beside traffic. Raises `FigureError` if there was none."""
    if not heard.chunks_s:
        raise FigureError("no chunk came: bids had nothing beside them")
    first, last = heard.chunks_s[0], heard.chunks_s[-1]
    ways = [way for way in heard.ways[BUSY] if first <= way.sent_s <= last]
    return bids_row(ways, moved_bytes=heard.moved_bytes)


def bids_row(ways: Sequence[Way], *, moved_bytes: int = 0) -> BidsRow:
    """Summarise the latencies of bids. Raises `FigureError` if there are none."""
    if not ways:
        raise FigureError("no bid was received")
    took_ms = np.array([way.received_s - way.sent_s for way in ways]) * 1e3
    p50, p95 = np.percentile(took_ms, [50, 95])
    return BidsRow(
        moved_mb=moved_bytes / 1e6,
        seconds=ways[-1].sent_s - ways[0].sent_s,
        bids=len(ways),
        p50_ms=float(p50),
        p95_ms=float(p95),
        longest_ms=float(took_ms.max()),
    )


def bids_figures(rows: Sequence[BidsRow]) -> list[Figure]:
    """Return the figures of `measure_bids`."""
    quiet, busy = rows
    return [
        Figure("wire.bid.quiet.p95", quiet.p95_ms, "ms"),
        Figure("wire.bid.busy.p50", busy.p50_ms, "ms"),
        Figure("wire.bid.busy.p95", busy.p95_ms, "ms"),
    ]


def _reach(broker: BrokerSettings) -> Mapping[str, object]:
    return {
        "host": broker.host,
        "port": broker.port,
        "username": broker.username,
        "password": broker.password,
    }
