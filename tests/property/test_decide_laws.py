"""Laws of the decision: less never gives more, budgets hold, rates are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.decide.budget import DAY_S, MARGIN, History
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import Decision, Policy, Sight, decide, verdicts
from edge_sdk.decide.gates import Limits
from edge_sdk.machine.snapshot import Battery, Heat, MemoryState, Network, Snapshot
from edge_sdk.protocol.messages.round import Bid
from tests.unit.edge_sdk.decide.prices import share_of

law = settings(max_examples=300)

LEVELS = (1.0, 0.75, 0.5, 0.25)
maybe_share = st.one_of(st.none(), st.floats(0.01, 1))


@st.composite
def costs(draw: st.DrawFn) -> tuple[Cost, ...]:
    """Of levels that cost no more the smaller they are."""
    joules = draw(st.one_of(st.none(), st.floats(1, 2000)))
    peak, seconds = draw(st.floats(1e6, 1e9)), draw(st.floats(0.1, 600))
    power = draw(st.floats(0.5, 2))
    more = draw(st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    whole = Cost(
        level=1,
        seconds=seconds,
        joules=joules,
        peak_bytes=peak,
        bytes_down=1e6,
        bytes_up=1e6,
        second_s=more * seconds,
        second_j=None if joules is None else more * joules,
        second_bytes=more * peak,
    )
    return tuple(share_of(whole, level, power) for level in LEVELS)


def cheap(joules: float | None) -> tuple[Cost, ...]:
    """Levels of which nothing but the energy matters."""
    whole = Cost(level=1, seconds=10, joules=joules, peak_bytes=1e8, bytes_down=1, bytes_up=1)
    return tuple(share_of(whole, level) for level in LEVELS)


snapshots = st.builds(
    Snapshot,
    battery=st.builds(
        Battery,
        present=st.sampled_from([None, True, False]),
        percent=st.one_of(st.none(), st.floats(0, 100)),
        charging=st.sampled_from([None, True, False]),
        capacity_wh=st.one_of(st.none(), st.floats(1, 60)),
    ),
    memory=st.builds(
        MemoryState,
        available_bytes=st.one_of(st.none(), st.floats(0, 2e9)),
        pressure=st.one_of(st.none(), st.floats(0, 30)),
    ),
    heat=st.builds(Heat, status=st.sampled_from([None, 0, 1, 2, 3])),
    network=st.builds(Network, metered=st.sampled_from([None, True, False])),
)
policies = st.builds(
    Policy,
    level=st.sampled_from(LEVELS),
    participation=st.sampled_from([0.2, 0.5, 1.0]),
    schedule=st.sampled_from(["round-robin", "ad-hoc"]),
    prefer=st.sampled_from(["smaller", "rarer"]),
    max_gap=st.sampled_from([None, 1, 3]),
    limits=st.builds(Limits, energy_wh_per_day=st.one_of(st.none(), st.floats(0, 5))),
)
sights = st.builds(
    Sight,
    snapshot=snapshots,
    costs=costs(),
    deadline_s=st.floats(1, 1000),
    rounds_left=st.one_of(st.none(), st.integers(1, 1000)),
    whole=st.sampled_from([False, False, True]),
    warmup=st.sampled_from([False, False, True]),
    minute=st.integers(0, 1439),
)
histories = st.builds(
    History,
    turn=st.one_of(st.none(), st.floats(0, 0.999)),
    skipped=st.integers(0, 5),
    day_from_s=st.just(-3600.0),
    opened_s=st.just(-600.0),
    spent_j=st.floats(0, 5000),
    interval_s=st.one_of(st.none(), st.floats(10, 7200)),
)


def answer(policy: Policy, sight: Sight, history: History, round: int = 1) -> Decision:
    return decide(policy, sight, history, device="pi", round=round, seed=3)


def size(decision: Decision) -> float:
    return decision.level or 0.0


def affordable(policy: Policy, sight: Sight, history: History) -> float:
    weighed = verdicts(policy, sight, history.heard(sight.now_s))
    return max((verdict.level for verdict in weighed if verdict.share > 0), default=0.0)


@law
@given(policies, sights, histories, st.integers(1, 100))
def test_decision_repeats_and_makes_a_bid(
    policy: Policy, sight: Sight, history: History, round: int
) -> None:
    decision = answer(policy, sight, history, round)
    assert decision == answer(policy, sight, history, round)
    own = () if sight.whole else policy.offered_levels()
    whole = (1.0,) if sight.whole or sight.warmup else ()
    assert size(decision) in (0.0, *whole, *own)
    # What the owner allows at most may be exceeded while a rule warms up, and only then.
    assert size(decision) <= (1.0 if sight.warmup else policy.level)
    assert decision.reason.startswith("skip: ") == (decision.level is None)
    Bid(device="pi", round=round, level=decision.level, reason=decision.reason)


def less(sight: Sight, what: str, share: float) -> Sight:
    """The same moment with a share of what there is of one thing; unknown stays unknown."""
    snapshot = sight.snapshot
    if what == "time":
        return replace(sight, deadline_s=sight.deadline_s * share)
    if what == "memory" and snapshot.memory.available_bytes is not None:
        left = snapshot.memory.available_bytes * share
        memory = replace(snapshot.memory, available_bytes=left)
        return replace(sight, snapshot=replace(snapshot, memory=memory))
    if what == "battery" and snapshot.battery.percent is not None:
        battery = replace(snapshot.battery, percent=snapshot.battery.percent * share)
        return replace(sight, snapshot=replace(snapshot, battery=battery))
    return sight


@law
@given(policies, sights, histories, st.sampled_from(["battery", "memory", "time"]), st.floats(0, 1))
def test_less_of_anything_never_raises_the_level(
    policy: Policy, sight: Sight, history: History, what: str, share: float
) -> None:
    worse = less(sight, what, share)
    assert affordable(policy, worse, history) <= affordable(policy, sight, history)
    steady = replace(policy, prefer="smaller")
    assert size(answer(steady, worse, history)) <= size(answer(steady, sight, history))


@law
@given(policies, sights, histories, st.floats(0, 1e5))
def test_energy_spent_never_raises_the_level(
    policy: Policy, sight: Sight, history: History, joules: float
) -> None:
    steady = replace(policy, prefer="smaller")
    poorer = history.spent(joules)
    assert size(answer(steady, sight, poorer)) <= size(answer(steady, sight, history))


@law
@given(policies, sights, histories)
def test_a_level_that_is_trained_fits_memory_time_and_energy(
    policy: Policy, sight: Sight, history: History
) -> None:
    decision = answer(policy, sight, history)
    if decision.level is None:
        return
    cost = next(cost for cost in sight.costs if cost.level == decision.level)
    battery, memory = sight.snapshot.battery, sight.snapshot.memory
    assert cost.seconds <= sight.deadline_s
    if memory.available_bytes is not None:
        assert cost.peak_bytes <= 0.8 * memory.available_bytes
    if battery.present is not False and not battery.charging:
        watt_hours = policy.limits.energy_wh_per_day
        if watt_hours is None:
            assert battery.capacity_wh is not None
            watt_hours = 0.1 * battery.capacity_wh
        assert cost.joules is not None
        assert cost.joules + history.spent_j <= 3600 * watt_hours
        assert battery.percent is not None
        assert battery.percent >= 30


@settings(max_examples=100)
@given(policies, sights, histories)
def test_second_pass_changes_no_level_and_fits_where_it_is_made(
    policy: Policy, sight: Sight, history: History
) -> None:
    decision = answer(policy, sight, history)
    none = tuple(
        replace(each, second_s=0.0, second_j=0.0, second_bytes=0.0) for each in sight.costs
    )
    without = answer(policy, replace(sight, costs=none), history)
    for name in ("level", "code", "share", "history"):
        assert getattr(decision, name) == getattr(without, name)
    assert decision.reason.startswith(without.reason)
    cost = next((each for each in sight.costs if each.level == decision.level), None)
    if cost is None or cost.second_s == 0:
        assert (decision.passes, decision.reason) == (2, without.reason)
        return
    assert "second, narrower pass a step" in decision.reason
    assert ("does not fit" in decision.reason) is (decision.passes == 1)
    both = replace(
        cost,
        seconds=cost.seconds + cost.second_s,
        peak_bytes=cost.peak_bytes + cost.second_bytes,
        joules=None if cost.joules is None else cost.joules + (cost.second_j or 0.0),
        second_s=0.0,
    )
    costs = tuple(both if each is cost else each for each in none)
    known = sight.snapshot.memory.available_bytes is not None
    weighed = verdicts(policy, replace(sight, costs=costs), history.heard(sight.now_s))
    of_both = next(each for each in weighed if each.level == decision.level)
    assert (decision.passes == 2) is (known and of_both.share >= decision.share)


@settings(max_examples=100)
@given(policies, sights, histories, st.sampled_from(["memory", "time"]), st.floats(0, 1))
def test_less_of_anything_never_adds_a_pass(
    policy: Policy, sight: Sight, history: History, what: str, share: float
) -> None:
    now, worse = (answer(policy, each, history) for each in (sight, less(sight, what, share)))
    if now.level is not None and now.level == worse.level:
        assert worse.passes <= now.passes


ON_BATTERY = Snapshot(
    battery=Battery(present=True, percent=80, charging=False, capacity_wh=15),
    memory=MemoryState(available_bytes=2e9),
)


DAYS = 6


@settings(max_examples=40)
@given(
    prefer=st.sampled_from(["smaller", "rarer"]),
    schedule=st.sampled_from(["round-robin", "ad-hoc"]),
    max_gap=st.sampled_from([None, 4]),
    watt_hours=st.floats(0.05, 1.5),
    joules=st.floats(5, 900),
    interval_s=st.floats(120, 7200),
    errors=st.lists(st.floats(0.5, MARGIN), min_size=5, max_size=5),
    known=st.booleans(),
    whole=st.sampled_from([False, False, True]),
)
def test_budget_of_a_day_holds_on_every_day(
    prefer: Any,
    schedule: Any,
    max_gap: int | None,
    watt_hours: float,
    joules: float,
    interval_s: float,
    errors: list[float],
    known: bool,
    whole: bool,
) -> None:
    policy = Policy(
        prefer=prefer,
        schedule=schedule,
        max_gap=max_gap,
        limits=Limits(energy_wh_per_day=watt_hours),
    )
    rounds = int(DAYS * DAY_S / interval_s)
    history, spent = History(), [0.0] * (DAYS + 1)
    costs = cheap(joules)
    for round in range(1, rounds + 1):
        now = (round - 1) * interval_s
        sight = Sight(
            snapshot=ON_BATTERY,
            costs=costs,
            rounds_left=rounds - round + 1 if known else None,
            whole=whole,
            now_s=now,
        )
        decision = answer(policy, sight, history, round)
        history = decision.history
        if decision.level is not None:
            # Predictions are off by at most their margin.
            really = joules * decision.level * errors[round % len(errors)]
            history = history.spent(really)
            spent[int(now // DAY_S)] += really
    assert max(spent) <= 3600 * watt_hours * (1 + 1e-9)


@pytest.mark.parametrize(
    ("prefer", "whole"), [("smaller", False), ("rarer", False), ("smaller", True)]
)
def test_a_tight_budget_is_used_and_spread_over_the_day(prefer: Any, whole: bool) -> None:
    # 24 rounds a day of 300 J, and 3600 J: full model every other hour, or half of it every hour.
    policy = Policy(prefer=prefer, limits=Limits(energy_wh_per_day=1))
    history, levels = History(), []
    for hour in range(3 * 24):
        costs, now = cheap(300 / MARGIN), hour * 3600.0
        sight = Sight(snapshot=ON_BATTERY, costs=costs, whole=whole, now_s=now)
        decision = answer(policy, sight, history, hour + 1)
        history = decision.history
        if decision.level is not None:
            history = history.spent(300 * decision.level / MARGIN)
        levels.append(size(decision))
    # The first day begins without knowing how often rounds come.
    for day in (levels[24:48], levels[48:]):
        assert 0.7 * 12 <= sum(day) <= MARGIN * 12
        if prefer == "smaller" and not whole:
            assert all(level > 0 for level in day)
        else:
            assert set(day) == {0.0, 1.0}
            assert all(any(day[hour : hour + 4]) for hour in range(20))


def test_reasons_say_what_was_needed_and_what_there_was() -> None:
    cost = [
        Cost(level=level, seconds=s, joules=j, peak_bytes=m, bytes_down=1, bytes_up=1)
        for level, s, j, m in [
            (1.0, 90, 200, 412e6),
            (0.75, 60, 150, 310e6),
            (0.5, 30, 100, 200e6),
            (0.25, 15, 50, 100e6),
        ]
    ]

    def said(policy: Policy | None = None, history: History | None = None, **sight: Any) -> str:
        seen = Sight(**{"snapshot": ON_BATTERY, "costs": tuple(cost), **sight})
        policy = Policy(limits=Limits(energy_wh_per_day=100)) if policy is None else policy
        return answer(policy, seen, history or History()).reason

    def free(megabytes: float) -> Snapshot:
        return replace(ON_BATTERY, memory=MemoryState(available_bytes=megabytes * 1e6 / 0.8))

    assert said() == "full model: all of it fits"
    assert said(snapshot=free(300)) == "level 50 %: 75 % needs 310 MB, 300 MB free"
    assert said(snapshot=free(311)) == "level 75 %: full needs 412 MB, 311 MB free"
    assert said(snapshot=free(50)) == "skip: level 25 % needs 100 MB, 50 MB free"
    assert said(deadline_s=40) == "level 50 %: 75 % needs 60 s, the round has 40 s"
    assert said(Policy(limits=Limits(energy_wh_per_day=0.05)), rounds_left=1) == (
        "level 50 %: 75 % needs 150 J, 180 J are left today"
    )
    assert said(Policy(limits=Limits(energy_wh_per_day=0.01))) == (
        "skip: level 25 % needs 50 J, 36 J are left today"
    )
    unknown = Snapshot(battery=Battery(present=True, percent=50, charging=False))
    assert said(Policy(), snapshot=unknown) == (
        "skip: level 25 % is on battery, and its size is not known: set board, or energy_wh_per_day"
    )
    assert said(Policy(level=0.5, limits=Limits(energy_wh_per_day=100))) == (
        "level 50 %: the most this device's owner allows"
    )
    low = Snapshot(battery=Battery(present=True, percent=24, charging=False))
    assert said(snapshot=low) == "skip: battery 24 % < 30 % and not charging"
    assert said(
        Policy(max_gap=3, participation=0.01, limits=Limits(energy_wh_per_day=100)),
        History(turn=0.0, skipped=2),
    ) == ("level 25 %: the last 2 rounds were skipped")

    cost[0] = replace(cost[0], second_s=12, second_j=40, second_bytes=50e6)
    told = "full model: all of it fits; a second, narrower pass a step "
    assert said() == f"{told}fits"
    assert said(deadline_s=95) == f"{told}does not fit: needs 12 s more, 5 s are left"
    assert said(snapshot=free(420)) == f"{told}does not fit: needs 50 MB more, 8 MB are left"
    little = Policy(limits=Limits(energy_wh_per_day=0.07))
    assert said(little, rounds_left=1) == f"{told}does not fit: needs 40 J more"


def test_unknown_memory_is_neither_plenty_nor_nothing() -> None:
    sight = Sight(snapshot=Snapshot(battery=Battery(present=False)), costs=cheap(None))
    assert answer(Policy(), sight, History()).level == 0.25


def test_mains_without_a_battery_is_not_budgeted() -> None:
    memory = MemoryState(available_bytes=math.inf)
    mains = Snapshot(battery=Battery(present=False), memory=memory)
    sight = Sight(snapshot=mains, costs=cheap(None))
    policy = Policy(limits=Limits(energy_wh_per_day=0, battery_floor=100))
    assert answer(policy, sight, History()).level == 1.0
