"""Faults at the device itself (its disk, its clock), and a task that changes."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edge_sdk.protocol.messages.movement import decode_movement
from edge_sdk.protocol.messages.round import Bid, Receipt
from tests.interruptions.world import Worlds, is_message


@contextmanager
def small_disk(folder: Path, size_kb: int) -> Iterator[bool]:
    """A disk of its own at this folder; False where we may not mount one."""
    folder.mkdir(parents=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(folder)]
    done = subprocess.run(options, check=False, capture_output=True) if os.geteuid() == 0 else None
    mounted = done is not None and done.returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def no_large_files() -> None:
    """Where no disk can be mounted: files have no room for a movement, but for chunks and logs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))


def fill(folder: Path) -> None:
    """Use up a disk to its last byte."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_disk_full_on_the_device(worlds: Worlds) -> None:
    """A device's disk is full from the first receipt on"""
    world = worlds.make(rounds=4, units=256, chunk_bytes=4096)
    receipt = world.proxy("one").hold(is_message(Receipt, round=1))
    one, disk = world.device("one"), world.folder / "one" / "state"
    with small_disk(disk, 2048) as mounted:
        if not mounted:
            one.before = no_large_files
        world.start()
        receipt.wait()
        if mounted:
            fill(disk)
        receipt.release()
        said = one.wait_for("disk")
        outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.receipts["one"] == {"kept": 4, "counted": 4}
    world.note(f"it logged: {said.content['message'].partition(': ')[2]}")
    world.note("it kept movements in memory and took part in every round")


@pytest.mark.slow
def test_disk_full_loses_nothing_that_is_kept(worlds: Worlds) -> None:
    """A device is killed while its disk is full and holds a movement without a receipt"""
    world = worlds.make(chunk_bytes=1024)
    receipt = world.proxy("one").hold(is_message(Receipt, round=1))
    bid = world.proxy("two").hold(is_message(Bid, round=2))
    one, disk = world.device("one"), world.folder / "one" / "state"
    with small_disk(disk, 512) as mounted:
        if not mounted:
            pytest.skip("needs to mount a disk of its own")
        world.start()
        receipt.wait()
        fill(disk)
        one.kill()
        receipt.release()
        (kept,) = disk.rglob("*.movement")
        assert decode_movement(kept.read_bytes()).round == 1
        one.start()
        one.wait_for("disk")
        one.wait_for("receipt", round=1, outcome="counted")
        one.wait_for("bid", round=2)
        bid.release()
        outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.receipts["one"]["counted"] == 3
    world.note("restarted on a full disk, it logged this, sent the stored movement and continued")


def test_task_replaced_while_devices_train(worlds: Worlds) -> None:
    """The coordinator is stopped while devices train, and started with a new run of the task"""
    world = worlds.make(rounds=2, steps=10**9)
    world.start()
    for device in world.devices:
        device.wait_for("training", round=1)
    assert world.coordinator.stop() == 143
    old = world.run_id
    world.replace_run(steps=3)
    world.coordinator.start()
    for device in world.devices:
        given_up = device.wait_for("failed", round=1)
        device.wait_for("task", after=given_up, run=world.run_id)
    world.finish()
    assert old != world.run_id
    assert not [device for device in world.devices if list(device.find("movement", run=old))]
    world.note("devices dropped the old training at once and joined the new run")


@pytest.mark.slow
def test_clocks_an_hour_wrong(worlds: Worlds) -> None:
    """One device's clock is an hour ahead, the other's an hour behind"""
    world = worlds.make()
    for name, skew_s in (("one", 3600), ("two", -3600)):
        world.device(name).skew_clock(skew_s)
    world.start()
    world.finish()
    world.expect_undisturbed()
    hours = {name: world.device(name).lines[0].content["time"][11:13] for name in ("one", "two")}
    assert (int(hours["one"]) - int(hours["two"])) % 24 in (2, 1)
    world.note("no device depends on the time of day")
