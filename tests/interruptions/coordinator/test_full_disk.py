"""The coordinator's disk is full."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.transfer import Credit, Offer
from tests.interruptions.disks import fill, small_disk
from tests.interruptions.world import World, Worlds, is_message

ROOM_KB = 2048


@contextmanager
def own_disk(world: World) -> Iterator[Path]:
    """Put a run's folder on a small disk, and afterwards back to its place."""
    folder, aside = world.run_folder, world.folder / "run-aside"
    folder.rename(aside)
    with small_disk(folder, ROOM_KB) as mounted:
        if mounted:
            shutil.copytree(aside, folder, dirs_exist_ok=True)
            shutil.rmtree(aside)
            try:
                yield folder
            finally:
                world.coordinator.end()
                shutil.copytree(folder, aside)
    folder.rmdir()
    aside.rename(folder)
    if not mounted:
        pytest.skip("needs to mount a disk of its own")


def test_upload_that_finds_no_room_waits(worlds: Worlds) -> None:
    """The coordinator's disk is full when a device offers its movement, and later has room"""
    world = worlds.make(chunk_bytes=1024, rule="ra-fed")  # memory asks for more room
    proxy = world.proxy("one")
    hold = proxy.hold(is_message(Offer))
    with own_disk(world) as disk:
        world.start()
        hold.wait()
        world.device("two").wait_for("receipt", round=1)
        fill(disk)
        hold.release()
        said = world.coordinator.wait_for("disk_full").content
        assert said["path"].startswith(f"{disk}/")
        assert said["needed_bytes"] > 0
        assert said["free_bytes"] < said["needed_bytes"]
        told = is_message(Credit, window=0)
        proxy.wait_for(lambda: any(p.direction == "down" and told(p) for p in proxy.passed))
        (disk / "filler").unlink()
        world.coordinator.wait_for("disk_room")
        outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.rounds == [1, 2, 3]
    world.note(f"it logged: {said['message']}")


@pytest.mark.slow
def test_run_that_finds_no_room_waits(worlds: Worlds) -> None:
    """The coordinator's disk is full when it has to write down a round's assignments"""
    world = worlds.make(chunk_bytes=1024, rule="ra-fed")  # memory asks for more room
    holds = [world.proxy(name).hold(is_message(Bid, round=2)) for name in ("one", "two")]
    with own_disk(world) as disk:
        world.start()
        for hold in holds:
            hold.wait()
        fill(disk)
        for hold in holds:
            hold.release()
        said = world.coordinator.wait_for("disk_full").content
        assert Path(said["path"]).parent == disk
        (disk / "filler").unlink()
        world.coordinator.wait_for("disk_room")
        outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.rounds == [1, 2, 3]
    world.note("it waited, and the round went on when there was room")
