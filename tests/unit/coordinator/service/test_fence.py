"""One coordinator is in charge of a task: the fence alone, all orders of two starts, and services
that share a broker in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coordinator.run.folder import Run, read_history
from coordinator.service.outgoing.fence import Fence, FencedError, FenceState
from coordinator.service.service import REPAIR_S, Service, ServiceConfig
from coordinator.service.store import Keeping
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.epoch import Claim, Epoch
from edge_sdk.protocol.messages.round import RoundClosed
from edge_sdk.protocol.messages.topics import Topic, parse_topic
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import decode_stamped, encode_message
from edge_sdk.transport.link import LinkEvent, Received, Refused
from tests.unit.coordinator.service.service_world import (
    CHUNK_BYTES,
    TASK,
    TOPICS,
    World,
    Worlds,
    rounds_config,
)

OWN = Epoch(5, "8" * 16)
EARLIER, LATER = Epoch(4, "f" * 16), Epoch(6, "0" * 16)
TWIN_BELOW, TWIN_ABOVE = Epoch(5, "7" * 16), Epoch(5, "9" * 16)


def in_charge() -> Fence:
    fence = Fence(OWN, "digits")
    fence.connected()
    assert fence.answered()
    return fence


def test_nobody_speaks_before_the_echo_has_come_back() -> None:
    fence = Fence(OWN, "digits")
    assert not fence.answered()
    speaks = [fence.in_charge]
    fence.connected()
    speaks.append(fence.in_charge)
    assert fence.answered()
    speaks.append(fence.in_charge)
    assert not fence.answered()  # the echo of a pulse
    fence.lost()
    assert [*speaks, fence.in_charge] == [False, False, True, False]


@pytest.mark.parametrize("retained", [True, False])
@pytest.mark.parametrize("other", [LATER, TWIN_ABOVE])
def test_larger_epoch_stops_the_coordinator(other: Epoch, retained: bool) -> None:
    asking = Fence(OWN, "digits")
    asking.connected()
    for fence in (asking, in_charge()):
        with pytest.raises(FencedError, match=rf"'digits' has taken over \(epoch {other}"):
            fence.hear(other, retained=retained)
        assert not fence.in_charge
        assert not fence.answered()


@pytest.mark.parametrize("other", [EARLIER, TWIN_BELOW])
def test_smaller_epoch_that_speaks_is_contradicted_once(other: Epoch) -> None:
    fence = in_charge()
    fence.hear(other, retained=True)  # a leftover
    assert not fence.take_contradiction()
    fence.hear(other, retained=False)
    assert fence.take_contradiction()
    assert not fence.take_contradiction()
    assert fence.state is FenceState.IN_CHARGE


def test_own_epoch_means_nothing() -> None:
    fence = in_charge()
    fence.hear(OWN, retained=False)
    assert not fence.take_contradiction()


# -- all orders of two starts --------------------------------------------------------------------

ECHO = "echo"
Mail = tuple[Epoch | str, bool]
"""An epoch, or the receiver's own echo; and True if it was retained."""


@dataclass(frozen=True)
class Side:
    """One coordinator in the model: what is on its way to it and from it."""

    epoch: Epoch
    state: FenceState = FenceState.AWAY
    inbound: tuple[Mail, ...] = ()
    outbound: tuple[Epoch | str, ...] = ()
    started: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Model:
    """A broker that retains one claim, and two coordinators."""

    sides: tuple[Side, Side]
    retained: Epoch | None = None

    def successors(self) -> Iterator[Model]:
        for number, side in enumerate(self.sides):
            if not side.started:
                yield self._connect(number)
            if side.outbound:
                yield self._accept(number)
            if side.inbound and not side.stopped:
                yield self._receive(number)

    def _with(self, number: int, side: Side, retained: Epoch | None) -> Model:
        sides = (side, self.sides[1]) if number == 0 else (self.sides[0], side)
        return Model(sides, retained)

    def _connect(self, number: int) -> Model:
        side, kept = self.sides[number], self.retained
        inbound: tuple[Mail, ...] = () if kept is None else ((kept, True),)
        changed = replace(
            side, started=True, state=FenceState.ASKING, inbound=inbound, outbound=(ECHO,)
        )
        return self._with(number, changed, kept)

    def _accept(self, number: int) -> Model:
        """The broker takes the next message of a side, and sends it to those who listen."""
        side = self.sides[number]
        message, rest = side.outbound[0], side.outbound[1:]
        model = self._with(number, replace(side, outbound=rest), self.retained)
        for to, other in enumerate(model.sides):
            if other.started and (to == number or message != ECHO):
                there = replace(other, inbound=(*other.inbound, (message, False)))
                model = model._with(to, there, model.retained)
        return model if isinstance(message, str) else replace(model, retained=message)

    def _receive(self, number: int) -> Model:
        side = self.sides[number]
        (message, retained), rest = side.inbound[0], side.inbound[1:]
        fence = Fence(side.epoch, "digits")
        fence.state = side.state
        out, stopped = side.outbound, False
        if isinstance(message, str):
            out += (side.epoch,) if fence.answered() else ()
        else:
            try:
                fence.hear(message, retained=retained)
            except FencedError:
                out, stopped = (), True  # it leaves without sending what waits
            if fence.take_contradiction():
                out += (side.epoch,)
        changed = replace(side, state=fence.state, inbound=rest, outbound=out, stopped=stopped)
        return self._with(number, changed, self.retained)


@pytest.mark.parametrize("one", [EARLIER, TWIN_BELOW])
@pytest.mark.parametrize("retained", [None, Epoch(3, "5" * 16), EARLIER])
def test_of_two_starts_in_any_order_the_larger_epoch_stays(
    one: Epoch, retained: Epoch | None
) -> None:
    """Every order of connections, deliveries and messages that a broker could choose."""
    waiting = {Model((Side(one), Side(OWN)), retained)}
    seen: set[Model] = set()
    ends = 0
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        larger = model.sides[1]
        assert not larger.stopped
        following = list(model.successors())
        if not following:
            ends += 1
            assert larger.state is FenceState.IN_CHARGE
            assert model.sides[0].stopped
            assert model.retained == OWN
        waiting.update(following)
    assert ends >= 1
    assert len(seen) > 30


# -- services ------------------------------------------------------------------------------------


def stamp(world: World, topic: str) -> Epoch | None:
    return decode_stamped(parse_topic(topic), world.broker.retained[topic])[1]


def test_everything_a_coordinator_says_is_stamped(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    one, _ = world.add("one"), world.add("two")
    heard: list[tuple[Topic, Epoch | None]] = []

    def listen(event: LinkEvent) -> None:
        if isinstance(event, Received) and event.payload:
            topic = parse_topic(event.topic)
            heard.append((topic, decode_stamped(topic, event.payload)[1]))

    ear = world.broker.open_link(name="ear", deliver=listen)
    for topic_filter in ("tessera/v1/+/pub/+", "tessera/v1/+/down/+/control"):
        ear.subscribe(topic_filter)
    world.settle()
    assert one.receipts == [(1, "kept"), (1, "counted")]
    own = world.run.epoch
    kinds = {topic.kind.value for topic, _ in heard}
    assert {"pub/epoch", "pub/task", "pub/round", "down/<device>/control"} <= kinds
    assert {epoch for _, epoch in heard} == {own}
    assert isinstance(world.retained(TOPICS.epoch), Claim)


def public(world: World) -> dict[str, bytes]:
    return {topic: data for topic, data in world.broker.retained.items() if "/pub/" in topic}


def test_earlier_coordinator_stops_and_leaves_the_topics_of_the_later_one(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=3))
    world.add("one")
    world.settle()
    other = worlds.make(world.machine, folder="second")
    other.stop()
    other.broker, other.clock = world.broker, world.clock
    other.start()  # for the second time, so its counter is 2
    other.settle()
    before = public(world)
    # A broker ends the first connection of two with one name; the link returns by itself.
    world.broker.restore(world.service._link)
    world.broker.run()
    with pytest.raises(FencedError, match="has taken over"):
        world.service.pump()
    world.stop()
    gone = {TOPICS.coordinator}  # the other's will, because its name was taken for a moment
    assert {t: d for t, d in public(world).items() if t not in gone} == {
        t: d for t, d in before.items() if t not in gone
    }
    other.broker.restore(other.service._link)
    other.settle()
    assert stamp(other, TOPICS.coordinator) == other.run.epoch
    assert other.service._fence.in_charge


def test_each_start_in_a_folder_has_a_larger_epoch(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.settle()
    first = world.run.epoch
    world.restart()
    assert first is not None
    assert world.run.epoch is not None
    assert world.run.epoch.counter == first.counter + 1
    assert stamp(world, TOPICS.epoch) == world.run.epoch


def test_topics_that_an_earlier_coordinator_overwrote_are_repaired(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=3))
    world.restart()
    own, run = world.run.epoch, world.run.about.run
    assert own is not None
    stale = Epoch(own.counter - 1, "f" * 16)
    world.publish(TOPICS.epoch, encode_message(Claim(run=run), stale))
    world.publish(TOPICS.round, encode_message(RoundClosed(round=9, run=run), stale))
    world.wait(REPAIR_S)
    world.service.tick()
    world.settle()
    assert stamp(world, TOPICS.epoch) == own
    round_topic = world.broker.retained.get(TOPICS.round)
    assert round_topic is None or stamp(world, TOPICS.round) == own


def test_will_of_an_earlier_connection_is_replaced(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.settle()
    gone = Presence(name="coordinator", session=1, online=False)
    world.publish(TOPICS.coordinator, encode_message(gone))
    world.settle()
    here = world.retained(TOPICS.coordinator)
    assert isinstance(here, Presence)
    assert here.online


def test_coordinator_that_returns_says_nothing_if_it_was_replaced(worlds: Worlds) -> None:
    """It was cut off when the other took over; what it had to say waits, and is dropped."""
    world = worlds.make(rounds_config(rounds=3))
    world.add("one"), world.add("two")
    world.settle()
    link = world.service._link
    world.broker.cut(link)
    world.service.pump()
    own = world.run.epoch
    assert own is not None
    later = Epoch(own.counter + 1, "0" * 16)
    world.broker._retained[TOPICS.epoch] = encode_message(Claim(run=world.run.about.run), later)
    before = public(world)
    world.broker.restore(link)
    world.broker.run()
    with pytest.raises(FencedError):
        world.service.pump()
    world.stop()
    assert public(world) == before


def test_broker_that_forgot_everything_gets_the_claim_again(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=3))
    world.add("one")
    world.settle()
    world.broker.stop()
    world.service.pump()
    world.broker.start(keep_retained=False)
    world.settle()
    assert stamp(world, TOPICS.epoch) == world.run.epoch
    assert world.service._fence.in_charge


def test_broker_that_gives_no_echo_is_noted_and_the_run_goes_on(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(rounds_config(rounds=1))
    world.broker.tamper = lambda _, event: () if event.topic == TOPICS.echo else (0,)
    world.add("one"), world.add("two")
    world.settle()
    assert not world.service._fence.in_charge
    world.service.handle(Refused(TOPICS.echo, "not allowed"))
    world.settle()
    assert world.service.finished
    assert caplog.text.count("go unnoticed") == 1


def test_opening_without_a_stamp_is_no_reason_to_stop(worlds: Worlds) -> None:
    """A version that knows no epochs speaks; the one in charge contradicts."""
    world = worlds.make(rounds_config(rounds=3))
    world.settle()
    here = Presence(name="coordinator", session=77, online=True)
    world.publish(TOPICS.coordinator, encode_message(here))
    world.wait(REPAIR_S)
    assert stamp(world, TOPICS.coordinator) == world.run.epoch


def test_folder_knows_that_it_is_a_copy(tmp_path: Path, worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    assert not world.run.copied
    shutil.copytree(world.folder, tmp_path / "copy")
    with Run(tmp_path / "copy") as copy:
        before = copy.copied
        assert copy.epoch == world.run.epoch
        copy.take_epoch("0" * 16)
        assert (before, copy.copied) == (True, False)
    world.stop()
    with Run(world.folder.rename(tmp_path / "moved")) as moved:
        assert not moved.copied


# -- the window ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 10, 40, 100, 400])
def test_nothing_counts_twice_or_is_lost_while_two_coordinators_speak(
    worlds: Worlds, tmp_path: Path, steps: int
) -> None:
    """A copy is started in an open round, and the earlier coordinator hears of it only so many
    messages later. The devices know no epochs: they answer both.
    """
    world = worlds.make(rounds_config(rounds=3))
    one, two = world.add("one"), world.add("two", sends=False)
    world.settle()
    assert one.receipts == [(1, "kept")]
    shutil.copytree(world.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock"))
    blind = True
    public = {TOPICS.epoch, TOPICS.coordinator, TOPICS.round}

    def tamper(name: str, event: Received) -> tuple[int, ...]:
        return () if blind and name == f"coordinator-{TASK}" and event.topic in public else (0,)

    world.broker.tamper = tamper
    config = ServiceConfig(
        machine=world.machine, down=Encoding(), keeping=Keeping(), chunk_bytes=CHUNK_BYTES
    )
    with Run(tmp_path / "copy") as run:
        later = Service(
            run,
            config,
            open_link=lambda **link: world.broker.open_link(**{**link, "name": "later"}),
            clock=world.clock,
            wall=world.clock,
        )
        two.sends = True
        two.offer(two.movements[1])
        for _ in range(steps):
            world.broker.step()
            later.pump(), world.service.pump()
            for device in (one, two):
                device.pump()
        for _ in range(3):
            world.broker.run()
            later.pump()
        blind = False
        later._send_claim()  # as it does whenever it hears the other
        world.broker.run()
        with pytest.raises(FencedError):
            world.service.pump()
        world.stop()
        world.broker.tamper = None
        for _ in range(500):
            world.broker.run()
            later.pump()
            for device in (one, two):
                device.pump()
            if not world.broker.step():
                if later.finished:
                    break
                world.clock.now += 50.0  # a device that answered the other one is not waited for
        assert later.finished
        own = run.epoch
        later.close()
        world.broker.run()
    for folder in (world.folder, tmp_path / "copy"):
        rounds = [entry["round"] for entry in read_history(folder) if "round" in entry]
        assert len(set(rounds)) == len(rounds)
    entries = [each for each in read_history(tmp_path / "copy") if "round" in each]
    assert len(entries) == 3
    trained = [d["device"] for d in entries[0]["devices"] if d["loss"] is not None]
    assert trained == ["one", "two"]  # what had a receipt, and what was under way, once each
    for topic in (TOPICS.epoch, TOPICS.task, TOPICS.round):
        assert stamp(world, topic) == own
