"""A run whose memory is full of devices, and the process that takes it up again.

    python -m benchmarks.aggregate.durability.recovering FOLDER MEGABYTES

prints `answered` and its CPU seconds when the first bid was answered with an assignment, and ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.aggregate.durability.site import machine_of, make_model, quiet
from benchmarks.aggregate.durability.wire import RUN, TASK, ScriptedDevice, Wire
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import About, Run, create_run
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.task.saved_model import SavedModel
from edge_sdk.protocol.encoding.encoding import Encoding

ANSWERED = "answered"
GROUPS, UNITS = 8, 128
LEVEL = 0.25
TOGETHER = 10
"""Devices that train in one round, while the memory is filled."""
CHUNK_BYTES = 2**18


def sized_model(megabytes: float) -> SavedModel:
    """Return a model with weights of this size."""
    return make_model(max(4, round(megabytes * 1e6 / 4 / (GROUPS * UNITS))), (UNITS,) * GROUPS)


@contextmanager
def _service(folder: Path, wire: Wire, model: SavedModel, devices: int) -> Iterator[Service]:
    machine = machine_of("ram-fed", model.plan)
    if not isinstance(machine, RoundsConfig):
        raise TypeError("ram-fed runs in rounds")
    config = ServiceConfig(
        machine=replace(machine, rounds=10**6, min_devices=devices),
        down=Encoding(),
        keeping=Keeping(keep_last=1),
        chunk_bytes=CHUNK_BYTES,
    )
    with Run(folder) as run:
        service = Service(run, config, open_link=wire.open_link)
        try:
            yield service
        finally:
            service.kill()


def fill_memory(folder: Path, megabytes: float, devices: int) -> None:
    """Make a run in which every device has trained a part of the model once."""
    model, wire = sized_model(megabytes), Wire(lambda _: None)
    about = About(task=TASK, run=RUN, source="t.py:f", batch_size=4)
    create_run(folder, about, model)
    for number in range(devices):
        wire.devices.append(_device(wire, model, number))
    rounds = -(-devices // TOGETHER)
    with quiet(), _service(folder, wire, model, devices) as service:
        for device in wire.devices:
            device.join()
        while service.course.state.round <= rounds:  # type: ignore[union-attr]
            wire.pass_on()
            service.pump()


def _device(wire: Wire, model: SavedModel, number: int) -> ScriptedDevice:
    """Return a device that trains once, in its turn."""
    turn = 1 + number // TOGETHER

    def level(round: int) -> float | None:
        return LEVEL if round == turn else None

    name, value = f"device-{number:03}", 1e-4 * (number + 1)
    return ScriptedDevice(wire, model.plan, name, value, level, chunk_bytes=CHUNK_BYTES)


def answer_bid(folder: Path, megabytes: float) -> None:
    """Start a coordinator on the run, and return when it has answered a bid."""
    model, wire = sized_model(megabytes), Wire(lambda _: None)
    device = ScriptedDevice(
        wire, model.plan, "device-000", 1e-4, lambda _: LEVEL, mute=lambda _: True
    )
    wire.devices.append(device)
    with quiet(), _service(folder, wire, model, 1) as service:
        device.join()
        while not device.assigned:
            if not wire.pass_on() and not service.pump():
                time.sleep(0.001)


if __name__ == "__main__":
    answer_bid(Path(sys.argv[1]), float(sys.argv[2]))
    print(f"{ANSWERED} {time.process_time()}", flush=True)
