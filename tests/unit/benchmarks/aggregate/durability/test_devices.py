"""A device that ends at any step: no movement without a receipt is lost, none is settled twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.aggregate.durability.disk import CUTS, DiskStep, Fault, FaultyDisk, Killed
from benchmarks.aggregate.durability.enumeration import scratch
from benchmarks.aggregate.durability.site import make_model
from edge_sdk.device.stores.movements import DeviceFolder, FolderMovements
from edge_sdk.device.stores.residuals import FolderStore, Residuals
from edge_sdk.protocol.encoding.codec import decode_blocks, encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.movement import decode_movement
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.streams import stream
from tests.messages import make_movement

PLAN = make_model().plan
TOP_K = Encoding.parse("top-k:0.25")
ROUNDS = 3
IDS = np.arange(PLAN.block_count)


def trained(round: int) -> Blocks:
    values = np.random.default_rng(round).normal(size=PLAN.parameters).astype(np.float32)
    return Blocks(IDS, values)


class Coordinator:
    """Keeps what arrives first for a round, and gives a receipt to everything."""

    def __init__(self) -> None:
        self.accepted: dict[int, bytes] = {}

    def deliver(self, round: int, data: bytes) -> None:
        payload = bytes(decode_movement(data).payload)
        assert self.accepted.setdefault(round, payload) == payload, "another movement is sent"


def live(folder: Path, coordinator: Coordinator) -> None:
    """One process of a device, in the order in which the app does it, until all is settled."""
    device = DeviceFolder(folder, "task", "device")
    device.next_session()
    run = device.start_run("0" * 16)
    movements = FolderMovements(run / "movements")
    residuals = Residuals(PLAN, FolderStore(run / "residuals"), forget_after=9)

    def settle(round: int) -> None:
        coordinator.deliver(round, bytes(movements.again(round).data))
        residuals.settle(round, used=True)
        movements.forget(round)

    for round in sorted(movements.waiting):
        settle(round)
    for round in range(1, ROUNDS + 1):
        if round in coordinator.accepted:
            continue
        movement = trained(round)
        corrected = residuals.corrected(round, movement)
        payload = encode_blocks(PLAN, PLAN.all_groups(), corrected, TOP_K, stream(round))
        residuals.keep(round, movement, decode_blocks(PLAN, payload)[1])
        whole = make_movement(PLAN, round=round, keeps_copy=round % 2 == 0)
        movements.keep(replace(whole, payload=payload))
        settle(round)


def run(base: Path, fault: Fault | None) -> tuple[list[DiskStep], list[bytes]]:
    """Processes of a device until one is done: the first one's steps, and all that is left."""
    folder, left, coordinator = base / "0", base / "1", Coordinator()
    folder.mkdir()
    disk = FaultyDisk(folder, left, fault)
    try:
        with disk:
            live(folder, coordinator)
            if disk.dead:  # by a removal, after which there was no step left to tell
                raise Killed
    except Killed:
        folder = left
        live(folder, coordinator)
    except OSError:
        live(folder, coordinator)
    state = folder / "task" / "device" / "runs" / ("0" * 16)
    residuals = Residuals(PLAN, FolderStore(state / "residuals"), forget_after=9)
    held = residuals.corrected(ROUNDS, Blocks(IDS, np.zeros(PLAN.parameters, np.float32))).values
    sent = [decode_blocks(PLAN, coordinator.accepted[each])[1].values for each in range(1, 4)]
    np.testing.assert_allclose(
        np.sum([trained(each).values for each in range(1, 4)], axis=0),
        np.sum(sent, axis=0) + held,
        rtol=0,
        atol=1e-5,
    )
    assert FolderMovements(state / "movements").waiting == frozenset()
    for place in (state, state.parent.parent):
        assert not [name for name in os.listdir(place) if name.endswith(".draft")]
    return disk.steps, [held.tobytes(), *(coordinator.accepted[each] for each in range(1, 4))]


def faults_at(step: DiskStep) -> Iterator[Fault]:
    yield Fault(step.number, "kill")
    yield Fault(step.number, "error")
    if step.writes:
        yield Fault(step.number, "torn")
        yield Fault(step.number, "short")
    for cut in CUTS:
        yield Fault(step.number, "lost", cut)


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_device_that_ends_at_any_step_loses_nothing(every: int) -> None:
    with scratch() as base:
        (base / "calm").mkdir()
        steps, calm = run(base / "calm", None)
        assert {step.operation for step in steps} >= {"write", "fsync", "rename", "remove"}
        for fault in [fault for step in steps for fault in faults_at(step)][::every]:
            place = base / "point"
            place.mkdir()
            try:
                assert run(place, fault)[1] == calm
            except (AssertionError, OSError, KeyError) as error:
                pytest.fail(f"{fault}: {steps[fault.step]}: {error!r}")
            finally:
                shutil.rmtree(place)
