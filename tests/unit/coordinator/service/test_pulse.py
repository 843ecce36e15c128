"""A broker that stands still makes no device late: the pulse alone, and a run over a broker in
memory whose messages do not move for a while.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.synchronous import RoundPhase
from coordinator.service.outgoing.pulse import BEAT_S, STALL_S, Pulse
from tests.unit.coordinator.service.service_world import World, Worlds, rounds_config


def test_echo_is_due_after_silence_and_only_one_is_under_way() -> None:
    pulse = Pulse(100.0)
    assert not pulse.is_due(101.0, 1e9)
    assert pulse.is_due(100.0 + BEAT_S, 1e9)
    pulse.send(100.0 + BEAT_S)
    assert not pulse.is_due(1e6, 1e9)
    assert not pulse.stalls(100.0 + BEAT_S + STALL_S - 0.1)
    assert pulse.stalls(100.0 + BEAT_S + STALL_S)
    pulse.hear(1e6)
    assert not pulse.stalls(2e6)
    assert pulse.heard_s == 1e6


def test_deadline_needs_a_sign_of_life_behind_it() -> None:
    pulse = Pulse(100.0)
    assert not pulse.is_due(100.9, 101.0)
    assert pulse.is_due(101.0, 101.0)  # at once, without waiting for a longer silence
    assert not pulse.vouches(101.0)
    pulse.hear(101.1)
    assert pulse.vouches(101.0)
    assert not pulse.is_due(101.2, 101.0)


def test_broker_that_gives_no_echoes_is_believed() -> None:
    pulse = Pulse(0.0)
    pulse.trusted = False
    assert pulse.vouches(1e9)
    assert not pulse.is_due(1e9, 0.0)
    assert not pulse.stalls(1e9)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.sampled_from(["hear", "send", "wait"]))))
def test_stall_is_never_seen_in_a_gap_shorter_than_the_limit(
    steps: list[tuple[float, str]],
) -> None:
    now, pulse, sent, heard = 0.0, Pulse(0.0), None, 0.0
    for gap_s, what in steps:
        now += gap_s
        if what == "hear":
            pulse.hear(now)
            sent, heard = None, now
        elif what == "send" and sent is None:
            pulse.send(now)
            sent = now
        assert pulse.stalls(now) == (sent is not None and now - sent >= STALL_S)
        assert pulse.heard_s == heard


# -- a run ---------------------------------------------------------------------------------------


def freeze(world: World, seconds: float) -> None:
    """Let time pass in which no message moves."""
    for _ in range(int(seconds)):
        world.clock.now += 1.0
        world.service.pump()


def test_frozen_broker_burns_no_rounds_while_devices_bid(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(rounds_config(bid_s=10.0, min_participants=2))
    one, two = world.add("one"), world.add("two")
    one.level = two.level = lambda _: 1.0
    world.broker.tamper = lambda name, event: () if "/up/" in event.topic else (0,)
    world.settle()
    assert world.state.phase is RoundPhase.BIDDING
    world.broker.tamper = None
    caplog.set_level("INFO")
    freeze(world, 200.0)
    assert (world.state.round, world.state.void) == (1, 0)
    assert world.state.phase is RoundPhase.BIDDING
    assert caplog.text.count("the broker does not answer") == 1
    world.settle()
    assert caplog.text.count("answers again") == 1
    assert (world.state.round, world.state.void) == (1, 0)
    # Devices have their time from where it stopped: nothing of it was used up.
    world.wait(9.0)
    assert world.state.round == 1
    world.wait(2.0)
    assert world.state.void == 1  # a deadline that was really missed still ends the round


def test_frozen_broker_closes_no_round_while_devices_train(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1, bid_s=10.0, train_deadline_s=30.0))
    one, two = world.add("one", sends=False), world.add("two", sends=False)
    world.settle()
    assert world.state.phase is RoundPhase.TRAINING
    freeze(world, 500.0)
    assert world.state.phase is RoundPhase.TRAINING
    world.settle()
    world.wait(25.0)
    assert world.state.phase is RoundPhase.TRAINING
    one.send(1), two.send(1)
    assert one.verdicts == two.verdicts == [(1, "counted")]
    assert world.service.finished
    assert [len(entry["devices"]) for entry in world.history] == [2]


def test_quiet_broker_that_answers_keeps_deadlines(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = worlds.make(rounds_config(bid_s=10.0))
    world.add("one", level=lambda _: 1.0), world.add("two", level=lambda _: 1.0)
    world.broker.tamper = lambda name, event: () if "/up/" in event.topic else (0,)
    world.settle()
    for void in range(3):
        assert world.state.void == void
        world.wait(9.0)
        assert world.state.void == void
        world.wait(1.5)
    assert world.state.void == 3
    assert "round 3 is void: no device answered within 10 s" in caplog.messages
    record = next(each for each in caplog.records if "round 3 is void" in each.getMessage())
    assert vars(record)["facts"] == {"event": "void", "round": 3}


def test_round_with_too_few_offers_says_why_it_is_void(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = worlds.make(rounds_config(bid_s=10.0, min_participants=2))
    world.add("one", level=lambda _: 1.0), world.add("two", level=lambda _: None)
    world.settle()
    world.wait(10.5)
    assert world.state.void == 1
    why = "too few devices offered to train: 2 of 2 answered, and min_participants is 2"
    assert f"round 1 is void: {why}" in caplog.messages
