"""Packets far over the limit reach the coordinator and a device, from a broker that allows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import Topics
from tests.interruptions.proxy import publish_packet
from tests.interruptions.world import COORDINATOR, TASK, Worlds, is_message

LARGE_BYTES = 48 << 20
GROWTH_MB = 40.0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_large_packets(worlds: Worlds) -> None:
    """Four packets of 48 MiB reach the coordinator and a device on all their connections"""
    world, topics = worlds.make(), Topics(TASK)
    held = world.proxy("one").hold(is_message(Bid, round=2))
    world.start()
    held.wait()
    programs = {COORDINATOR: world.coordinator, "one": world.device("one")}
    # A device that trains takes more and more; from here on both only wait.
    before = {name: program.peak_mb() for name, program in programs.items()}
    id = f"{COORDINATOR}-{TASK}"
    for name, client, topic in (
        (COORDINATOR, id, topics.up_control("evil")),
        (COORDINATOR, f"{id}-bulk", topics.up_chunk("evil")),
        ("one", "one", topics.down_control("one")),
        ("one", "one-bulk", topics.down_chunk("one", bytes(16))),
    ):
        large = publish_packet(topic, bytes(LARGE_BYTES))
        world.proxy(name).inject(client, "down", large)
    for program in programs.values():
        program.wait_for("oversized", match="/control")
        program.wait_for("oversized", match="/chunk")
    grown = {name: program.peak_mb() - before[name] for name, program in programs.items()}
    held.release()
    world.finish()
    world.expect_undisturbed()
    assert max(grown.values()) < GROWTH_MB, f"memory grew by {grown} MB"
