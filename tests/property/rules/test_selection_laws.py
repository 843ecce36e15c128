"""Laws of rounds by invitation: who is invited, heard and counted, whatever devices do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.events import Joined, Left, Send
from coordinator.rounds.synchronous import Commit, Committed, Effect, RoundPhase
from edge_sdk.protocol.messages.round import Assignment, RoundOpen
from tests.unit.coordinator.rounds.test_rounds import CONFIG, Coordinator, bid

NAMES = [f"device-{number}" for number in range(9)]
ACTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["offer", "skip", "leave", "join"])),
    max_size=40,
)


def told(effects: list[Effect], kind: type[RoundOpen | Assignment]) -> set[str]:
    return {
        each.device for each in effects if isinstance(each, Send) and type(each.message) is kind
    }


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 6), st.lists(ACTS, max_size=4))
def test_only_invited_devices_are_heard_and_all_of_them_count(
    there: int, seed: int, participants: int, rounds: list[list[tuple[str, str]]]
) -> None:
    config = replace(
        CONFIG, min_devices=there, participants=participants, seed=seed, rounds=len(rounds) + 1
    )
    coordinator = Coordinator(*NAMES[: there - 1], config=config)
    effects = coordinator.tell(Joined(NAMES[there - 1]))
    for acts in rounds:
        for name in NAMES[:there]:  # below `min_devices` a run waits
            if coordinator.state.phase is RoundPhase.WAITING:
                effects = coordinator.tell(Joined(name))
        state = coordinator.state
        present, invited = set(state.present), told(effects, RoundOpen)
        assert invited == state.selected <= present
        assert len(invited) == min(participants, len(present))
        offered, skipped = set[str](), set[str]()
        effects = []
        for name, act in acts:
            match act:
                case "leave":
                    effects += coordinator.tell(Left(name))
                case "join":
                    effects += coordinator.tell(Joined(name))
                case _ if coordinator.state.phase is RoundPhase.BIDDING:
                    effects += coordinator.tell(
                        bid(name, None if act == "skip" else 0.5, state.round)
                    )
                    (skipped if act == "skip" else offered).add(name)
            assert coordinator.state.selected == invited
            assert coordinator.state.bids.keys() <= invited & (offered | skipped)
        if coordinator.state.phase is RoundPhase.BIDDING:
            effects += coordinator.run_out()
        assert told(effects, RoundOpen) | told(effects, Assignment) <= invited
        trained = sorted(coordinator.state.assigned)[::2]
        effects += coordinator.count(*trained)
        if coordinator.state.phase is RoundPhase.TRAINING:
            effects += coordinator.run_out()
        (commit,) = [each for each in effects if isinstance(each, Commit)]
        assert {*commit.fresh, *commit.silent} == invited
        assert len(commit.fresh) + len(commit.silent) == len(invited)
        effects = coordinator.tell(Committed(state.round))


def test_every_device_and_pair_is_drawn_about_equally_often() -> None:
    """2 of 6 in 600 rounds: a pair is drawn 40 times on average, give or take 6.1."""
    rounds = 600
    config = replace(CONFIG, min_devices=6, participants=2, rounds=rounds + 1)
    coordinator = Coordinator(*NAMES[:6], config=config)
    drawn: Counter[tuple[str, ...]] = Counter()
    for round in range(1, rounds + 1):
        invited = sorted(coordinator.state.selected)
        drawn[tuple(invited)] += 1
        coordinator.tell(*(bid(name, None, round) for name in invited), Committed(round))
    assert len(drawn) == 15
    assert max(abs(number - 40) for number in drawn.values()) < 4 * 6.1
