"""Hostile programs flood a real coordinator over a real broker while honest devices train."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.service.admission.limits import WARNING
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import Topics
from tests.interruptions.programs import ROOT
from tests.interruptions.proxy import publish_packet
from tests.interruptions.world import COORDINATOR, TASK, World, Worlds, is_message

GROWTH_MB = 48.0
"""Of the coordinator's memory: what the flood may have waiting, and what reading it takes."""

FLOODER = """
import itertools, random, sys, time
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Offer, Presence, Want
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.transport.link import Connected
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from edge_sdk.transport.uploads import pack_chunk

port, run = int(sys.argv[1]), sys.argv[2]
topics, up = Topics("digits"), []
link = open_link(BrokerSettings(port=port), name="evil", deliver=up.append)
while not any(isinstance(event, Connected) for event in up):
    time.sleep(0.02)
chance = random.Random(1)
bomb = b"\\x82\\xa1v\\x01\\xa4type\\xdc\\x0f\\xf0" + b"\\x80" * 4080
sent, told = 0, False
for number in itertools.count():
    name = f"evil{number % 500}" if number % 3 == 0 else "evil"
    offer = Offer(device=name, run=run, upload=number.to_bytes(16, "little"), round=1, answers=None,
                  size=20_000, chunk_bytes=4096, sha256=bytes(32))
    want = Want(device=name, chunks=(bytes(16),) * 64)
    session = Presence(name=name, session=number, online=bool(number % 2))
    for topic, payload, bulk in (
        (topics.presence(name), encode_message(session), False),
        (topics.up_control(name), bomb, False),
        (topics.up_control(name), chance.randbytes(250_000), False),
        (topics.up_control(name), encode_message(offer), False),
        (topics.up_control(name), encode_message(want), False),
        (topics.up_chunk(name), pack_chunk(offer.upload, 0, bytes(250_000)), True),
        (topics.up_chunk(name), pack_chunk(bytes(16), number, bytes(4096)), True),
    ):
        while not link.publish(topic, payload, bulk=bulk):
            time.sleep(0.001)
        sent += 1
    if sent >= 1000 and not told:
        print("flooding", flush=True)
        told = True
    # Without an end, but in the end so slow that any machine has time for others.
    time.sleep(0.1 if sent > 8000 else 0)
"""


@contextmanager
def flood(world: World, folder: Path) -> Iterator[None]:
    """A process that sends as much as it can, for the time of the context."""
    script = folder / "flooder.py"
    script.write_text(FLOODER)
    command = [sys.executable, str(script), str(world.broker.port), world.run_id]
    with subprocess.Popen(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"flooding\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_coordinator_flooded(worlds: Worlds, tmp_path: Path) -> None:
    """A hostile program floods under 168 names: bombs, noise, offers, chunks, presence"""
    # Names that join and never bid are waited for; not for long here.
    world = worlds.make(rounds=3, bid_s=6.0, round={"max_devices": 10})
    world.without_proxy(COORDINATOR)
    # No round is complete from now on until the flood has begun.
    first, any_bid = is_message(Bid, round=1), is_message(Bid)
    bid = world.proxy("one").hold(lambda packet: any_bid(packet) and not first(packet))
    world.start()
    bid.wait()
    before = world.coordinator.peak_mb()
    with flood(world, tmp_path):
        bid.release()
        before_it = world.coordinator.wait_for("round_closed", round=1)
        closed = world.coordinator.wait_for("round_closed", after=before_it)
        grown = world.coordinator.peak_mb() - before
    outcome = world.finish()
    assert closed.content["movements"]["counted"] > 0
    assert all(receipts["counted"] > 1 for receipts in outcome.receipts.values())
    assert list(world.coordinator.find("dropped", level="warning"))
    assert len(list(world.coordinator.find("full"))) == 1
    assert grown < GROWTH_MB, f"the coordinator's memory grew by {grown:.1f} MB"
    world.note(f"the coordinator's memory grew by less than {GROWTH_MB:.0f} MB")


PER_S = 1000


@contextmanager
def garbage(world: World) -> Iterator[None]:
    """A stranger's connection that sends 1000 messages a second, random bytes, to the topics of
    everybody: its own, those of a device, and those that devices listen to.
    """
    topics, chance, ending = Topics(TASK), random.Random(1), threading.Event()

    def where(number: int) -> str:
        return (
            topics.up_control("one"),
            topics.up_control(f"stranger{number}"),
            topics.up_chunk("one"),
            topics.presence("one"),
            topics.presence(f"stranger{number}"),
            topics.down_control("one"),
            topics.round,
        )[number % 7]

    def send(connected: socket.socket) -> None:
        number = 0
        while not ending.wait(0.01):
            for _ in range(PER_S // 100):
                number += 1
                connected.sendall(publish_packet(where(number), chance.randbytes(200), level=4))

    with socket.create_connection(("127.0.0.1", world.broker.port)) as connected:
        connected.sendall(b"\x10\x14\x00\x04MQTT\x04\x02\x00\x00\x00\x08stranger")
        assert connected.recv(4) == b"\x20\x02\x00\x00"
        thread = threading.Thread(target=send, args=(connected,), daemon=True)
        thread.start()
        try:
            yield
            assert thread.is_alive()
        finally:
            ending.set()
            thread.join()


def test_garbage_from_strangers(worlds: Worlds) -> None:
    """Strangers send 1000 messages of garbage a second, also under a device's name"""
    world = worlds.make(rounds=12)
    for name in (COORDINATOR, "one", "two"):
        world.without_proxy(name)
    world.start()
    world.coordinator.wait_for("round_closed", round=1)
    with garbage(world):
        world.coordinator.wait_for("round_closed", round=11)
    outcome = world.finish()
    assert all(receipts["counted"] == 12 for receipts in outcome.receipts.values())
    # Nothing but garbage was dropped, whatever came in between.
    dropped = [line.content["message"] for line in world.coordinator.find("dropped")]
    assert dropped
    assert all("bytes that are no message" in each for each in dropped)
    assert len(dropped) <= WARNING.burst
    assert 1 <= len(list(world.device("one").find("ignored"))) <= 2
