"""Messages that are duplicated, late, reordered, truncated, repeated much later, or wrong."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from edge_sdk.protocol.messages.round import Bid, Receipt, RoundOpen
from edge_sdk.protocol.messages.topics import Topics, parse_topic
from edge_sdk.protocol.messages.wire import decode_stamped, encode_message
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.interruptions.proxy import Packet, topic_ends
from tests.interruptions.world import TASK, World, Worlds, is_message, upload_chunks

EVERYBODY = ("one", "two", "coordinator")


def test_messages_come_twice(worlds: Worlds) -> None:
    """Every message to and from devices and coordinator arrives twice"""
    world = worlds.make(chunk_bytes=1024)
    for name in EVERYBODY:
        world.proxy(name).tamper = lambda packet: [packet, packet]
    world.start()
    world.finish()
    world.expect_undisturbed()


def test_messages_cut_short(worlds: Worlds) -> None:
    """Every message is preceded by a truncated one"""
    world = worlds.make(chunk_bytes=1024)

    def truncated_first(packet: Packet) -> list[Packet]:
        half = packet.payload[: len(packet.payload) // 2]
        return [packet.with_payload(half), packet] if half else [packet]

    for name in ("one", "coordinator"):
        world.proxy(name).tamper = truncated_first
    world.start()
    world.finish()
    world.expect_undisturbed()
    assert list(world.device("one").find("ignored"))
    ignored = len(list(world.device("one").find("ignored")))
    world.note(f"the device ignored {ignored} messages, with a line for each")


def test_messages_in_another_order(worlds: Worlds) -> None:
    """Chunks of an upload arrive in reverse order, and a receipt after the next round opened"""
    world = worlds.make(chunk_bytes=1024)
    proxy = world.proxy("one")
    chunks = proxy.hold(upload_chunks)
    receipt = proxy.hold(is_message(Receipt, round=1))
    bid = world.proxy("two").hold(is_message(Bid, round=2))
    world.start()
    proxy.wait_for(lambda: len(chunks.packets) >= 8)
    chunks.release(newest_first=True)
    receipt.wait()
    world.device("one").wait_for("bid", round=2)
    receipt.release()
    world.device("one").wait_for("receipt", round=1)
    bid.release()
    world.finish()
    world.expect_undisturbed()


def test_messages_replayed(worlds: Worlds) -> None:
    """Every message is followed by one from any earlier round"""
    world = worlds.make(rounds=4, chunk_bytes=1024)

    def replaying(name: str) -> None:
        earlier: dict[tuple[str, str], list[Packet]] = {}
        turn = 0

        def tamper(packet: Packet) -> list[Packet]:
            nonlocal turn
            if not packet.payload:
                return [packet]
            known = earlier.setdefault((packet.client, packet.direction), [])
            known.append(packet)
            turn += 1
            return [packet, known[turn * 7919 % len(known)]]

        world.proxy(name).tamper = tamper

    for name in EVERYBODY:
        replaying(name)
    world.start()
    world.finish()
    world.expect_undisturbed()


def test_wrong_version_and_wrong_plan(worlds: Worlds) -> None:
    """A device is sent messages of protocol version 2, and a round for another plan"""
    world = worlds.make()
    proxy = world.proxy("one")
    bid = world.proxy("two").hold(is_message(Bid, round=2))
    world.start()
    one = world.device("one")
    bid.wait()
    one.wait_for("bid", round=2)
    newest = [p for p in proxy.passed if topic_ends("pub/round", direction="down")(p)][-1]
    opened, epoch = decode_stamped(parse_topic(newest.topic), newest.payload)
    assert isinstance(opened, RoundOpen)
    wrong = replace(opened, round=77, plan_hash="ab" * 32)
    future = msgpack.packb({**msgpack.unpackb(newest.payload), "v": 2})
    _publish(world, Topics(TASK).down_control("one"), encode_message(wrong, epoch), future)
    ignored = one.wait_for("ignored", match="version 2.* 1")
    refused = one.wait_for("wrong_plan", round=77)
    assert "ababababab" in refused.content["message"]
    assert opened.plan_hash[:12] in refused.content["message"]
    bid.release()
    world.finish()
    world.expect_undisturbed()
    world.note(f"ignored: {ignored.content['message'].rpartition(': ')[2]}")
    world.note(refused.content["message"])


@pytest.mark.slow
def test_nonsense_on_every_topic_of_a_device(worlds: Worlds) -> None:
    """Random bytes are published on every topic that a device reads"""
    world = worlds.make()
    bid = world.proxy("two").hold(is_message(Bid, round=2))
    world.start()
    one = world.device("one")
    bid.wait()
    topics = Topics(TASK)
    for topic in (topics.down_control("one"), topics.round, topics.task, topics.coordinator):
        _publish(world, topic, bytes(range(256)), b"\xc1", b"\x80")
    for _ in range(12):
        one.wait_for("ignored")
    bid.release()
    world.finish()
    world.expect_undisturbed()


def _publish(world: World, topic: str, *payloads: bytes) -> None:
    settings = BrokerSettings(port=world.broker.port)
    link = open_link(settings, name="somebody", deliver=lambda _: None)
    for payload in payloads:
        link.publish(topic, payload)
    link.close()
