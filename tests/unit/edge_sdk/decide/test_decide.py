"""CCFL's skip rule: how often a device takes part."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.decide.budget import History, outlived_share
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import ON_MAINS, Policy, Sight, decide
from edge_sdk.machine.snapshot import MemoryState
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.round import Bid

shares = st.one_of(
    st.floats(0.01, 1), st.builds(lambda n: 1 / n, st.integers(1, 20)), st.just(0.75)
)
seeds = st.integers(0, 2**32)


def trained(policy: Policy, device: str, rounds: range, seed: int) -> list[bool]:
    took_part, history = [], History()
    for round in rounds:
        decision = decide(policy, None, history, device=device, round=round, seed=seed)
        took_part.append(decision.level is not None)
        history = decision.history
    return took_part


@given(p=shares, seed=seeds, start=st.integers(1, 10**6))
def test_round_robin_keeps_its_rate_in_every_window(p: float, seed: int, start: int) -> None:
    took_part = trained(Policy(participation=p), "pi", range(start, start + 60), seed)
    sums = [Fraction(0)]
    for once in took_part:
        sums.append(sums[-1] + once - Fraction(p))
    # A window's excess is a difference of two sums; the slack is for sums in floating point.
    assert max(sums) - min(sums) <= 1 + Fraction(1, 10**6)


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8])
def test_round_robin_trains_once_every_so_many_rounds(every: int) -> None:
    policy = Policy(participation=1 / every)
    for seed in range(20):
        took_part = trained(policy, "pi", range(1, 10 * every + 1), seed)
        assert sum(took_part) == 10
        assert took_part == took_part[:every] * 10


def test_round_robin_spreads_devices_over_rounds() -> None:
    policy = Policy(participation=0.25)
    first = [trained(policy, f"device{n}", range(1, 5), seed=1).index(True) for n in range(400)]
    assert all(60 <= first.count(round) <= 140 for round in range(4))


@pytest.mark.parametrize("every", [1, 2, 3, 7, 8, 10, 49])
def test_common_phase_trains_every_device_in_the_same_rounds(every: int) -> None:
    policy = Policy(participation=1 / every, phase="common")
    rhythm = [number % every == 0 for number in range(12 * every)]
    for device, seed in [("pi", 1), ("nano", 2)]:
        assert trained(policy, device, range(1, 12 * every + 1), seed) == rhythm
    # Also on a device that is asked only now and then.
    some = range(1, 12 * every + 1)[::3]
    assert trained(policy, "pi", some, 1) == [rhythm[round - 1] for round in some]


@pytest.mark.parametrize(
    ("policy", "within"),
    [
        (Policy(participation=1 / 8, schedule="ad-hoc"), 8),
        (Policy(participation=1 / 8, schedule="ad-hoc"), 3),
        (Policy(participation=1 / 8), 3),
        (Policy(participation=1 / 8), 8),
        (Policy(participation=0.4, schedule="ad-hoc"), 2),
    ],
)
def test_share_of_skips_with_too_old_a_movement_is_what_devices_see(
    policy: Policy, within: int
) -> None:
    rounds = trained(policy, "pi", range(1, 40_000), seed=3)
    last, old, skips = None, 0, 0
    for number, took_part in enumerate(rounds):
        if took_part:
            last = number
        elif last is not None:
            skips += 1
            old += number - last > within
    even = policy.schedule == "round-robin"
    said = outlived_share(policy.participation, within, even=even)
    assert said == pytest.approx(old / skips, abs=0.02)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_ad_hoc_trains_with_its_probability(p: float) -> None:
    rounds = 4000
    took_part = trained(
        Policy(participation=p, schedule="ad-hoc"), "pi", range(1, rounds + 1), seed=5
    )
    deviation = (p * (1 - p) / rounds) ** 0.5
    assert abs(sum(took_part) / rounds - p) < 4 * deviation
    # Independent of the round before: as often after a skip as after training.
    pairs = list(pairwise(took_part))
    for before in (True, False):
        after = [now for then, now in pairs if then is before]
        assert abs(sum(after) / len(after) - p) < 4 * (p * (1 - p) / len(after)) ** 0.5


@pytest.mark.parametrize("schedule", ["round-robin", "ad-hoc"])
def test_full_participation_never_skips(schedule: Any) -> None:
    policy = Policy(level=0.5, schedule=schedule)
    answers = {decide(policy, device="pi", round=r, seed=2).level for r in range(1, 500)}
    assert answers == {0.5}


@given(
    level=st.floats(0, 1, exclude_min=True),
    p=st.floats(1e-6, 1),
    schedule=st.sampled_from(["round-robin", "ad-hoc"]),
    seed=seeds,
    round=st.integers(1, 10**9),
)
def test_decision_repeats_and_makes_a_bid(
    level: float, p: float, schedule: Any, seed: int, round: int
) -> None:
    policy = Policy(level=level, participation=p, schedule=schedule)
    decision = decide(policy, device="pi", round=round, seed=seed)
    assert decision == decide(policy, device="pi", round=round, seed=seed)
    assert decision.level in (None, level)
    assert decision.reason.startswith("skip") == (decision.level is None)
    Bid(device="pi", round=round, level=decision.level, reason=decision.reason)


@pytest.mark.parametrize("schedule", ["round-robin", "ad-hoc"])
def test_decision_depends_on_device_and_seed(schedule: Any) -> None:
    policy = Policy(participation=0.317, schedule=schedule)
    histories = {
        tuple(trained(policy, device, range(1, 200), seed))
        for device, seed in [("pi", 1), ("nano", 1), ("pi", 2), ("nano", 2)]
    }
    assert len(histories) == 4


@pytest.mark.parametrize("schedule", ["round-robin", "ad-hoc"])
def test_owners_share_of_rounds_holds_where_only_the_whole_model_is_of_use(schedule: Any) -> None:
    policy = Policy(participation=0.3, schedule=schedule)
    took_part = trained(policy, "pi", range(1, 200), seed=4)
    history = History()
    for round, expected in enumerate(took_part, start=1):
        sight = Sight(whole=True)
        decision = decide(policy, sight, history, device="pi", round=round, seed=4)
        assert decision.level == (1.0 if expected else None)
        history = decision.history


def test_owners_level_is_not_exceeded_but_in_a_warm_up() -> None:
    policy = Policy(level=0.25, participation=0.1)
    skip = decide(policy, Sight(whole=True), device="pi", round=1, seed=4)
    assert (skip.level, skip.code) == (None, "owner")
    assert skip.reason == "skip: full model is more than this device's owner allows"
    warm = decide(policy, Sight(whole=True, warmup=True), device="pi", round=1, seed=4)
    assert (warm.level, warm.code) == (1.0, "whole")


def test_device_that_cannot_train_everything_bids_as_usual_where_masks_measure() -> None:
    costs = tuple(
        Cost(level=level, seconds=100 * level, peak_bytes=1, bytes_down=1, bytes_up=1, joules=0.0)
        for level in (1.0, 0.5, 0.25)
    )
    policy, roomy = Policy(level=0.5), replace(ON_MAINS, memory=MemoryState(available_bytes=2**30))
    for deadline_s, level in ((200.0, 1.0), (60.0, 0.5), (30.0, 0.25), (10.0, None)):
        sight = Sight(snapshot=roomy, costs=costs, deadline_s=deadline_s, warmup=True)
        assert decide(policy, sight, device="pi", round=1, seed=4).level == level
        whole = decide(policy, replace(sight, whole=True), device="pi", round=1, seed=4)
        assert whole.level == (level if level == 1 else None)


@pytest.mark.parametrize("name", ["level", "participation"])
@pytest.mark.parametrize("value", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_policy_share_out_of_bounds_is_refused(name: str, value: float) -> None:
    shares: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name):
        Policy(**shares)


def test_policy_of_an_unknown_schedule_is_refused() -> None:
    schedule: Any = "round robin"
    with pytest.raises(ConfigError, match="schedule"):
        Policy(schedule=schedule)


def test_growing_round_gets_no_more_than_it_trains() -> None:
    def level(policy: Policy, largest: float) -> tuple[float | None, str]:
        made = decide(policy, Sight(largest=largest), device="pi", round=1, seed=0)
        return made.level, made.code

    assert level(Policy(), 1.0) == (1.0, "owner")
    assert level(Policy(), 0.5) == (0.5, "growing")
    assert level(Policy(level=0.4), 0.5) == (0.4, "growing")
    # Nothing so small is offered: the coordinator gives a part of it.
    assert level(Policy(levels=(1.0,)), 0.25) == (1.0, "growing")
    assert level(Policy(level=0.4), 0.3) == (0.25, "growing")
