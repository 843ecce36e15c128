"""Bytes of a device in a round, by level and encoding, and the share of pulled bytes it needs.

There is one run for each encoding, with one device at each level. The one that trains the whole
model makes every block new in every round, so that no device finds what it needs in its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.network.stage.files import (
    RunSettings,
    device_names,
    run_folder,
    write_device,
    write_run,
)
from benchmarks.network.stage.forwarder import Forwarder
from benchmarks.network.stage.in_threads import run_in_threads
from benchmarks.network.stage.packets import Packet
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker
from coordinator.run.folder import read_history
from edge_sdk.protocol.messages.topics import TopicKind, parse_topic
from edge_sdk.protocol.plan import LEVELS

AIMED_LEVELS = (0.5, 0.25)
TARGET = 1.05
AIMED_ENCODING = "fp32"
RULE = "ra-fed"
"""A rule without memory, which top-k does not support."""

METHOD = (
    "Bytes in the TCP streams of both connections of a device, counted by a forwarder between it "
    "and the broker, from one opening of a round to the next, acknowledgements and subscriptions "
    "included; means over all rounds but the first, in which the task is fetched. Shares are of 2 "
    "× the fp32 weights of the whole model. Pulled are the payloads of all chunks that came, the "
    "index among them; needed is the size of the packs that hold the submodel's blocks, in the "
    "encoding, as the coordinator's history has it. Coordinator and devices in threads of one "
    "process, one device at each level, one local step."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesConfig:
    """Parameters: `encodings` are pairs, of movements and of the model. `rounds` at least 2."""

    encodings: tuple[tuple[str, str], ...] = (
        ("fp32", "fp32"),
        ("fp16", "fp16"),
        ("int8", "int8"),
        ("int8+zstd", "int8+zstd"),
        ("top-k:0.1", "fp16"),
        ("top-k:0.1+zstd", "fp16+zstd"),
    )
    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesRow:
    """One level and encoding; bytes are means over rounds."""

    model: str
    level: float
    up_encoding: str
    down_encoding: str
    up_bytes: float
    down_bytes: float
    pulled_bytes: float
    needed_bytes: float
    full_bytes: int
    """Bytes of the whole model's weights in fp32."""

    @property
    def share(self) -> float:
        """Share of sending the whole model in fp32 both ways."""
        return (self.up_bytes + self.down_bytes) / (2 * self.full_bytes)

    @property
    def pulled_over_needed(self) -> float:
        """Pulled over needed bytes; 1: nothing was pulled in vain."""
        return self.pulled_bytes / self.needed_bytes


def measure_bytes(task: PreparedTask, config: BytesConfig, begin: Begin = silent) -> list[BytesRow]:
    """Run each encoding; `begin` is called with each, and its result once."""
    rows: list[BytesRow] = []
    for up, down in config.encodings:
        with TemporaryDirectory(prefix="tessera-bench-") as temporary:
            tick = begin(f"{task.name} {up} up, {down} down")
            settings = RunSettings(
                devices=len(LEVELS), rounds=config.rounds, up=up, down=down, rule=RULE
            )
            rows += _measure(Path(temporary), task, settings)
        tick()
    return rows


def _measure(folder: Path, task: PreparedTask, settings: RunSettings) -> Iterator[BytesRow]:
    names = dict(zip(device_names(len(LEVELS)), LEVELS, strict=True))
    with embedded_broker(folder / "broker") as broker, Forwarder(broker, list(names)) as forwarder:
        devices = [
            write_device(folder, name, forwarder.settings(name), level=level)
            for name, level in names.items()
        ]
        run_in_threads(write_run(folder, task, settings, broker), devices)
    history = list(read_history(run_folder(folder)))[1:]
    for name, level in names.items():
        needed = [
            device["bytes_down"]
            for entry in history
            for device in entry["devices"]
            if device["device"] == name
        ]
        yield bytes_row(task, level, settings, split_rounds(forwarder.packets(name))[1:], needed)


def split_rounds(packets: Sequence[Packet], *, up: bool = False) -> list[list[Packet]]:
    """Split packets into rounds: from one message about the current round to the next.

    `up` is the direction of such messages: a device receives them, the coordinator sends them.
    """
    said = sorted(
        packet.at_s
        for packet in packets
        if packet.up is up and packet.payload_size and _kind(packet) is TopicKind.ROUND
    )
    return [
        [packet for packet in packets if start <= packet.at_s < end]
        for start, end in pairwise(said)
    ]


def chunk_bytes(packets: Sequence[Packet], *, up: bool) -> int:
    """Sum the payload of all chunks in one direction."""
    kinds = (TopicKind.CHUNK, TopicKind.DOWN_CHUNK, TopicKind.UP_CHUNK)
    return sum(
        packet.payload_size for packet in packets if packet.up is up and _kind(packet) in kinds
    )


def bytes_row(
    task: PreparedTask,
    level: float,
    settings: RunSettings,
    rounds: Sequence[Sequence[Packet]],
    needed: Sequence[int],
) -> BytesRow:
    """Summarise the rounds of one device. Raises `FigureError` if some are missing."""
    if not rounds or len(rounds) != len(needed):
        raise FigureError(f"{len(rounds)} rounds passed, {len(needed)} are in the history")

    def mean(up: bool) -> float:
        return fmean(sum(p.size for p in packets if p.up is up) for packets in rounds)

    return BytesRow(
        model=task.name,
        level=level,
        up_encoding=settings.up,
        down_encoding=settings.down,
        up_bytes=mean(up=True),
        down_bytes=mean(up=False),
        pulled_bytes=fmean(chunk_bytes(packets, up=False) for packets in rounds),
        needed_bytes=fmean(needed),
        full_bytes=task.full_bytes,
    )


def bytes_figures(rows: Sequence[BytesRow]) -> list[Figure]:
    """Return the figures of `measure_bytes`."""
    figures = []
    for row in rows:
        stem = f"wire.{row.model}.{row.level * 100:.0f}.{encoding_word(row.up_encoding)}"
        figures.append(Figure(f"{stem}.bytes_over_full", row.share, "×"))
        if row.level in AIMED_LEVELS:
            aimed = row.down_encoding == AIMED_ENCODING
            figures.append(
                Figure(
                    f"{stem}.pulled_over_needed",
                    row.pulled_over_needed,
                    "×",
                    target=TARGET if aimed else None,
                )
            )
    return figures


def encoding_word(encoding: str) -> str:
    """Turn an encoding into part of a figure's name: `top-k:0.1+zstd` is `top-k-01_zstd`."""
    return encoding.replace(":", "-").replace(".", "").replace("+", "_")


def _kind(packet: Packet) -> TopicKind | None:
    return None if packet.topic is None else parse_topic(packet.topic).kind
