"""Energy per day, and how rounds are spread over it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.decide.budget import DAY_S, MARGIN, Allowance, History, take_turn


def heard(*times: float) -> History:
    history = History()
    for time in times:
        history = history.heard(time)
    return history


def test_interval_is_learnt_from_rounds_heard() -> None:
    assert heard(100).interval_s is None
    assert heard(100, 160).interval_s == 60
    assert heard(100, 160, 220).interval_s == 60
    slower = heard(100, 160, 280).interval_s
    assert slower is not None
    assert 60 < slower < 120


def test_rounds_left_are_those_of_the_day_or_of_the_run() -> None:
    assert heard(0).rounds_left(None) == 1
    assert heard(0).rounds_left(40) == 40
    hourly = heard(0, 3600)
    assert hourly.rounds_left(None) == 24  # at 1 h: this one, and those at 2 … 24 h
    assert hourly.rounds_left(5) == 5
    assert heard(0, DAY_S - 1).rounds_left(None) == 1


def test_a_new_day_forgets_what_was_spent_and_keeps_its_hour() -> None:
    history = heard(1000).spent(50)
    assert history.heard(1000 + DAY_S - 1).spent_j == 50
    later = history.heard(1000 + 2.5 * DAY_S)
    assert later.spent_j == 0
    assert later.day_from_s == 1000 + 2 * DAY_S


def test_a_clock_that_goes_back_gives_no_new_energy() -> None:
    history = heard(5000).spent(50).heard(4000)
    assert history.spent_j == 50
    assert history.day_from_s == 4000  # or a date in the future would hold for years
    assert history.interval_s is None


def test_share_of_a_round_is_what_is_left_per_round_left() -> None:
    history = heard(0, 3600)  # 24 rounds are left
    assert Allowance(24 * MARGIN * 10).share(10, history, None) == 1
    assert math.isclose(Allowance(24 * MARGIN * 10).share(40, history, None), 0.25)
    assert math.isclose(Allowance(MARGIN * 40).share(40, history, None), 1 / 24)
    assert Allowance(MARGIN * 40 - 1).share(40, history, None) == 0
    assert Allowance(100).share(10, history.spent(100), None) == 0
    assert Allowance(0).share(0, history, None) == 0
    assert Allowance(None).share(1e12, history.spent(1e12), None) == 1


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=200),
    phase=st.floats(0, 1, exclude_max=True),
)
def test_turns_come_to_the_sum_of_shares(shares: list[float], phase: float) -> None:
    history, trained = History(), 0
    for count, p in enumerate(shares, 1):
        turn, history = take_turn(history, p, phase)
        trained += turn
        assert history.turn is not None
        assert 0 <= history.turn < 1
        assert -1e-6 < phase + sum(shares[:count]) - trained < 1 + 1e-6
