"""Devices that are drawn before they decide: invited ones alone take part, and count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.errors import ConfigError
from coordinator.rounds.events import Broadcast, Joined, Left, Send
from coordinator.rounds.state import OpenRound, Selection
from coordinator.rounds.synchronous import (
    Committed,
    Effect,
    RoundPhase,
    RoundsConfig,
    invitation_of,
    opening_of,
    resume,
    start,
)
from edge_sdk.protocol.messages.round import Assignment, RoundOpen
from tests.unit.coordinator.rounds.test_rounds import CONFIG, Coordinator, bid, commit

NAMES = tuple("abcdefgh")
WARMUP = RamFed(warmup_rounds=1)


def config_of(participants: int = 2, **changes: Any) -> RoundsConfig:
    values = {"min_devices": len(NAMES), "rounds": 9, **changes}
    return replace(CONFIG, participants=participants, **values)


def after_verdicts(effects: list[Effect]) -> list[Effect]:
    """What a commit says after the verdicts and the closing."""
    first = next(n for n, each in enumerate(effects) if isinstance(each, Broadcast))
    return effects[first + 1 :]


def opened(effects: list[Effect]) -> tuple[RoundOpen, list[str]]:
    """The opening that everybody hears, and the names of those who are invited."""
    first, *others = effects
    assert isinstance(first, Broadcast)
    assert isinstance(first.message, RoundOpen)
    invited = []
    for each in others:
        assert isinstance(each, Send)
        assert each.message == replace(first.message, by_invitation=False)
        invited.append(each.device)
    return first.message, invited


def invited_to(config: RoundsConfig, *names: str) -> tuple[Coordinator, list[str], list[str]]:
    """A coordinator with an open round, the invited devices, and the others."""
    coordinator = Coordinator(*names[:-1], config=config)
    _, invited = opened(coordinator.tell(Joined(names[-1])))
    return coordinator, invited, [name for name in names if name not in invited]


def test_round_by_invitation_goes_to_the_devices_drawn() -> None:
    coordinator = Coordinator(*NAMES[:-1], config=config_of(2, over_selection=1.5))
    message, invited = opened(coordinator.tell(Joined(NAMES[-1])))
    assert message.by_invitation
    assert len(invited) == 3
    assert coordinator.state.selected == set(invited)
    assert message == opening_of(coordinator.config, coordinator.state)


def test_uninvited_devices_are_not_heard_and_not_counted() -> None:
    coordinator, (one, two), others = invited_to(config_of(2), *NAMES)
    before = coordinator.state
    for name in others:
        assert coordinator.tell(bid(name)) == []
        assert coordinator.tell(bid(name, None)) == []
    assert coordinator.state == before
    coordinator.tell(bid(one), bid(two, None))
    assert coordinator.count(one)[-1] == commit(1, (one,), silent=(two,))


def test_draw_depends_on_names_seed_and_round_alone() -> None:
    def draws(seed: int, names: tuple[str, ...]) -> list[list[str]]:
        coordinator, invited, _ = invited_to(config_of(3, seed=seed), *names)
        coordinator.tell(Left(names[2]), Joined(names[2]))
        found = [invited]
        for round in range(1, 6):
            coordinator.tell(*(bid(name, None, round) for name in invited))
            _, invited = opened(after_verdicts(coordinator.tell(Committed(round))))
            found.append(invited)
        return found

    first = draws(5, NAMES)
    assert first == draws(5, NAMES[::-1]) != draws(6, NAMES)
    assert len({tuple(invited) for invited in first}) > 1


def test_newcomer_waits_a_round() -> None:
    coordinator, (one, two), _ = invited_to(config_of(2), *NAMES)
    assert coordinator.tell(Joined("new"), bid("new")) == []
    coordinator.tell(bid(one), bid(two))
    assert set(coordinator.state.assigned) == {one, two}
    coordinator.count(one, two)
    coordinator.tell(Committed(1))
    assert "new" in coordinator.state.present


def test_fleet_smaller_than_wanted_is_invited_whole() -> None:
    coordinator, invited, others = invited_to(config_of(20, min_devices=3), "a", "b", "c")
    assert (invited, others) == (["a", "b", "c"], [])
    assert coordinator.tell(Joined("d"), bid("d")) == []
    assert coordinator.state.selected == {"a", "b", "c"}


def test_invited_device_that_leaves_is_not_waited_for_and_counts_as_a_skip() -> None:
    coordinator, (one, two, three), _ = invited_to(config_of(3), *NAMES)
    coordinator.tell(bid(one), bid(two))
    effects = coordinator.tell(Left(three))
    assert [type(each.message) for each in effects if isinstance(each, Send)] == [Assignment] * 2
    assert coordinator.count(one, two)[-1] == commit(1, (one, two), silent=(three,))


def test_invited_device_that_comes_back_is_invited_again() -> None:
    coordinator, (one, two), _ = invited_to(config_of(2), *NAMES)
    coordinator.tell(Left(two))
    (again,) = coordinator.tell(Joined(two))
    assert again == Send(two, invitation_of(coordinator.config, coordinator.state))
    assert coordinator.tell(bid(one)) == []  # it waits for the other once more
    coordinator.tell(bid(two))
    assert coordinator.state.phase is RoundPhase.TRAINING


def test_others_that_leave_change_nothing() -> None:
    coordinator, (one, two), others = invited_to(config_of(2), *NAMES)
    coordinator.tell(bid(one), *(Left(name) for name in others))
    assert set(coordinator.state.bids) == {one}
    assert not coordinator.state.assigned
    coordinator.tell(bid(two))
    assert coordinator.state.phase is RoundPhase.TRAINING


def test_deadline_makes_silent_ones_skips() -> None:
    coordinator, (one, two), _ = invited_to(config_of(2, min_participants=1), *NAMES)
    coordinator.tell(bid(two))
    coordinator.run_out()
    assert set(coordinator.state.assigned) == {two}
    assert coordinator.count(two)[-1] == commit(1, (two,), silent=(one,))


def test_quorum_is_of_the_movements_wanted() -> None:
    config = config_of(4, over_selection=1.5, quorum=0.5)
    coordinator, invited, _ = invited_to(config, *NAMES)
    coordinator.tell(*(bid(name) for name in invited))
    fresh, silent = invited[:2], invited[2:]
    assert len(silent) == 4
    assert coordinator.count(*fresh)[-1] == commit(1, tuple(fresh), silent=tuple(silent))


def test_too_few_offers_of_the_invited_make_a_new_draw_at_the_deadline() -> None:
    coordinator, invited, _ = invited_to(config_of(2, min_participants=1), *NAMES)
    coordinator.config = replace(coordinator.config, min_devices=len(NAMES) - 1)
    coordinator.tell(Left(invited[0]), bid(invited[1], None))
    assert coordinator.state.phase is RoundPhase.BIDDING
    message, drawn = opened(coordinator.run_out())
    assert (message.round, len(drawn), coordinator.state.void) == (2, 2, 1)
    assert invited[0] not in drawn


@pytest.mark.parametrize("first", ["invited", "other"])
def test_round_that_everybody_left_goes_on_with_whoever_comes(first: str) -> None:
    config = config_of(2, min_participants=1)
    coordinator, invited, others = invited_to(config, *NAMES)
    config = coordinator.config = replace(config, min_devices=len(others))
    coordinator.tell(*(Left(name) for name in NAMES))
    assert coordinator.run_out() == []
    assert coordinator.state.deadline is None
    if first == "invited":
        (again,) = coordinator.tell(Joined(invited[0]))
        assert again == Send(invited[0], invitation_of(config, coordinator.state))
        assert coordinator.state.deadline == coordinator.now + config.bid_s
    else:
        # Others return too: the next round is drawn of all that are back by then.
        assert coordinator.tell(*(Joined(name) for name in others)) == []
        message, drawn = opened(coordinator.run_out())
        assert message.round == 2
        assert len(drawn) == 2
        assert set(drawn) <= set(others)


@pytest.mark.parametrize("select", ["before", "after"])
def test_warmup_asks_and_takes_everybody(select: Selection) -> None:
    config = config_of(2, select=select, rule=WARMUP)
    coordinator = Coordinator(*NAMES[:-1], config=config)
    message, invited = opened(coordinator.tell(Joined(NAMES[-1])))
    assert (message.by_invitation, message.warmup, invited) == (False, True, [])
    assert len(coordinator.tell(Joined("new"))) == 1
    everybody = (*NAMES, "new")
    coordinator.tell(*(bid(name, 1.0) for name in everybody))
    assert set(coordinator.state.assigned) == set(everybody)
    assert coordinator.count(*everybody[:-1])[-1] != commit(1, everybody[:-1], silent=("new",))
    assert coordinator.count("new")[-1] == commit(1, everybody)
    message, invited = opened(after_verdicts(coordinator.tell(Committed(1))))
    assert message.by_invitation is (select == "before")
    assert len(invited) == (2 if select == "before" else 0)


@pytest.mark.parametrize("changes", [{}, {"participants": 1, "select": "after"}])
def test_opening_is_for_everybody_where_nobody_is_drawn_before(changes: dict[str, Any]) -> None:
    coordinator = Coordinator("a", config=replace(CONFIG, **changes))
    message, invited = opened(coordinator.tell(Joined("b")))
    assert (message.by_invitation, invited) == (False, [])


def test_more_offers_needed_than_devices_invited_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"only 3 devices are invited .* select = \"after\""):
        config_of(2, over_selection=1.5, min_participants=4)
    assert config_of(2, over_selection=1.5, min_participants=3).invites(1)
    assert not config_of(2, select="after", min_participants=4).invites(1)


def test_resumed_round_knows_whom_it_invited_and_the_next_waits_for_the_fleet() -> None:
    config = config_of(2)
    coordinator, invited, _ = invited_to(config, *NAMES)
    coordinator.tell(*(bid(name) for name in invited))
    was = coordinator.state
    again = Coordinator(config=config)
    round = OpenRound(1, was.selected, was.bids, was.assigned)
    again.state = resume(config, replace(start(config), round=1), round, 0.0)
    again.groups = coordinator.groups
    assert again.count(*invited)[-1] == coordinator.count(*invited)[-1]
    _, drawn = opened(after_verdicts(coordinator.tell(Committed(1))))
    again.tell(Committed(1), *(Joined(name) for name in NAMES[1:]))
    assert again.state.phase is RoundPhase.WAITING
    assert again.state.deadline is None
    assert opened(again.tell(Joined(NAMES[0])))[1] == drawn


def test_resumed_run_waits_for_the_least_number_of_devices_and_no_more() -> None:
    config = config_of(2)
    coordinator, invited, _ = invited_to(config, *NAMES)
    coordinator.tell(*(bid(name) for name in invited))
    was = coordinator.state
    config = replace(config, min_devices=len(NAMES) - 1)
    again = Coordinator(config=config)
    round = OpenRound(1, was.selected, was.bids, was.assigned)
    again.state = resume(config, replace(start(config), round=1), round, 0.0)
    again.groups = coordinator.groups
    again.count(*invited)
    again.tell(Committed(1))
    assert again.state.deadline is None  # nobody is there
    assert again.tell(*(Joined(name) for name in NAMES[2:])) == []
    message, drawn = opened(again.tell(Joined(NAMES[1])))
    assert message.round == 2
    assert len(drawn) == 2
    assert NAMES[0] not in drawn
