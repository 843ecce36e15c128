"""Bytes of the coordinator in a round, by the number of devices: the model should leave it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.network.stage.files import RunSettings, device_names, write_device, write_run
from benchmarks.network.stage.forwarder import Forwarder
from benchmarks.network.stage.in_threads import run_in_threads
from benchmarks.network.stage.packets import Packet
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.network.wire.cases.bytes_by_level import RULE, chunk_bytes, split_rounds
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from coordinator.operate.broker.embedded import embedded_broker

COORDINATOR = "coordinator"
TARGET = 1.05

METHOD = (
    "Bytes that the coordinator sends, counted by a forwarder between it and the broker. Model: "
    "the payloads of all chunks of the run, those of plan, manifest and graphs taken off, for each "
    "version of the model (one more than rounds; chunks may leave a little after the opening of "
    "their round, so they are not told apart by rounds). Control: all other bytes (messages, "
    "topics, acknowledgements) from one opening of a round to the next, mean over all rounds but "
    "the first. Every device trains the whole model, so that all of it is new in every round. "
    "Coordinator and devices in threads of one process, one local step."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutConfig:
    """`fleets` ascending, in devices. `rounds` at least 2."""

    fleets: tuple[int, ...] = (1, 8, 32)
    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutRow:
    """Bytes the coordinator sends in a round; `model_ratio` is to the smallest fleet's."""

    devices: int
    model_bytes: float
    control_bytes: float
    model_ratio: float


def measure_fan_out(
    task: PreparedTask, config: FanOutConfig, begin: Begin = silent
) -> list[FanOutRow]:
    """Run each fleet; `begin` is called with each, and its result once."""
    sent = []
    for devices in config.fleets:
        with TemporaryDirectory(prefix="tessera-bench-") as temporary:
            tick = begin(f"{devices} devices")
            packets = _packets(Path(temporary), task, devices, config.rounds)
            sent.append(sent_in_a_round(packets, config.rounds, task.file_bytes))
        tick()
    return [
        FanOutRow(
            devices=devices,
            model_bytes=model,
            control_bytes=control,
            model_ratio=model / sent[0][0],
        )
        for devices, (model, control) in zip(config.fleets, sent, strict=True)
    ]


def _packets(folder: Path, task: PreparedTask, devices: int, rounds: int) -> list[Packet]:
    settings = RunSettings(devices=devices, rounds=rounds, rule=RULE)
    with (
        embedded_broker(folder / "broker") as broker,
        Forwarder(broker, [COORDINATOR]) as forwarder,
    ):
        paths = [write_device(folder, name, broker) for name in device_names(devices)]
        run_in_threads(write_run(folder, task, settings, forwarder.settings(COORDINATOR)), paths)
        return forwarder.packets(COORDINATOR)


def sent_in_a_round(packets: Sequence[Packet], rounds: int, task_bytes: int) -> tuple[float, float]:
    """Count bytes of the model, and all others, that the coordinator sends in a round.

    `task_bytes` are those of plan, manifest and graphs. Raises `FigureError` unless there were this
    many rounds.
    """
    found = split_rounds(packets, up=True)
    if len(found) != rounds:
        raise FigureError(f"the coordinator opened {len(found)} of {rounds} rounds")
    model = (chunk_bytes(packets, up=True) - task_bytes) / (rounds + 1)
    control = fmean(
        sum(packet.size for packet in each if packet.up) - chunk_bytes(each, up=True)
        for each in found[1:]
    )
    return model, control


def fan_out_figures(rows: Sequence[FanOutRow]) -> list[Figure]:
    """Return the figures of `measure_fan_out`."""
    first, last = rows[0], rows[-1]
    figures = [
        Figure(
            f"wire.coordinator.{row.devices}.model_over_{first.devices}",
            row.model_ratio,
            "×",
            target=TARGET,
        )
        for row in rows[1:]
    ]
    if len(rows) > 1:
        more = (last.control_bytes - first.control_bytes) / (last.devices - first.devices)
        name = "wire.coordinator.control_per_further_device"
        figures.append(Figure(name, more, "B"))
    return figures
