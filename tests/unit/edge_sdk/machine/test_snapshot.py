from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.machine.snapshot import (
    PARTS,
    Battery,
    CoreClass,
    Cpu,
    Heat,
    Network,
    Power,
    Snapshot,
    Trip,
    Zone,
)
from edge_sdk.program.plain import ProfileError

HOT = Zone(name="cpu", celsius=81.5, trips=(Trip(kind="passive", celsius=80.0),))

shares = st.none() | st.floats(0, 1)
percents = st.none() | st.floats(0, 100)
flags = st.none() | st.booleans()
watts = st.floats(0, 60)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    classes = (CoreClass(cores=4, max_mhz=1800.0), CoreClass(cores=2, capacity=1024.0))
    snapshot = Snapshot(
        cpu=Cpu(
            cores=draw(st.none() | st.floats(0, 64)), classes=draw(st.sampled_from([None, classes]))
        ),
        battery=Battery(percent=draw(percents), charging=draw(flags), present=draw(flags)),
        heat=Heat(zones=draw(st.sampled_from([None, (), (HOT,)])), throttling=draw(flags)),
        power=Power(rails=draw(st.none() | st.dictionaries(st.text(), watts, max_size=3))),
        network=Network(metered=draw(flags)),
    )
    old = draw(st.sets(st.sampled_from(sorted(snapshot.known())))) if snapshot.known() else set()
    ages = {path: draw(st.floats(0, 1000)) for path in sorted(old)}
    return Snapshot(**{part: getattr(snapshot, part) for part in PARTS}, ages_s=ages)


def test_snapshot_of_nothing_knows_nothing() -> None:
    assert Snapshot().known() == {}
    assert Snapshot().to_dict() == {}
    for part in PARTS:
        for each in fields(getattr(Snapshot(), part)):
            assert getattr(getattr(Snapshot(), part), each.name) is None


@given(snapshots())
def test_dict_of_snapshot_survives_json(snapshot: Snapshot) -> None:
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


@given(snapshots(), snapshots())
def test_filled_snapshot_prefers_its_own_values(mine: Snapshot, theirs: Snapshot) -> None:
    filled = mine.filled_from(theirs)
    assert set(filled.known()) == set(mine.known()) | set(theirs.known())
    for path, value in filled.known().items():
        if path in ("heat.zones", "power.rails"):
            continue  # these add up; below
        first = mine if path in mine.known() else theirs
        assert value == first.known()[path]
        assert filled.age_s(path) == first.age_s(path)


@given(snapshots())
def test_filling_from_nothing_changes_nothing(snapshot: Snapshot) -> None:
    assert snapshot.filled_from(Snapshot()) == snapshot
    assert Snapshot().filled_from(snapshot) == snapshot


def test_zones_and_rails_add_up_by_name() -> None:
    cool = Zone(name="cpu", celsius=20.0)
    battery = Zone(name="battery", celsius=33.0)
    mine = Snapshot(heat=Heat(zones=(HOT,)), power=Power(rails={"IN": 5.0}))
    theirs = Snapshot(
        heat=Heat(zones=(cool, battery)), power=Power(rails={"IN": 9.0, "GPU": 1.0})
    ).aged(7)
    filled = mine.filled_from(theirs)
    assert filled.heat.zones == (HOT, battery)
    assert filled.power.rails == {"IN": 5.0, "GPU": 1.0}
    assert filled.age_s("heat.zones") == filled.age_s("power.rails") == 7


def test_age_of_a_value_grows_and_ends_it() -> None:
    snapshot = Snapshot(battery=Battery(percent=50.0)).aged(20).aged(15)
    assert snapshot.age_s("battery.percent") == 35
    assert snapshot.age_s("battery.charging") is None
    assert snapshot.no_older_than(35) == snapshot
    assert snapshot.no_older_than(34) == Snapshot()


@pytest.mark.parametrize(
    "impossible",
    [
        Snapshot(battery=Battery(percent=101.0)),
        Snapshot(battery=Battery(percent=-0.1)),
        Snapshot(cpu=Cpu(busy=1.5)),
        Snapshot(cpu=Cpu(cores=math.nan)),
        Snapshot(cpu=Cpu(load=math.inf)),
        Snapshot(heat=Heat(status=7)),
        Snapshot(heat=Heat(zones=(Zone(name="x", celsius=900.0),))),
        Snapshot(
            heat=Heat(zones=(Zone(name="x", celsius=9.0, trips=(Trip(kind="hot", celsius=-1),)),))
        ),
        Snapshot(power=Power(rails={"IN": -3.0})),
    ],
)
def test_impossible_value_is_unknown_and_named(impossible: Snapshot) -> None:
    (path,) = impossible.known()
    known = Snapshot(network=Network(metered=True))
    checked, wrong = known.filled_from(impossible).credible()
    assert checked == known
    assert [sentence.split(" ")[0] for sentence in wrong] == [path]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"batery": {}}, "did you mean 'battery'"),
        ({"battery": {"percents": 3}}, "battery.percents is .* did you mean 'percent'"),
        ({"battery": {"percent": "50"}}, "must be a number"),
        ({"battery": {"percent": True}}, "must be a number"),
        ({"battery": {"percent": 10**400}}, "finite"),
        ({"battery": {"percent": math.nan}}, "finite"),
        ({"battery": {"percent": 120}}, "not from 0 to 100"),
        ({"battery": {"charging": 1}}, "true or false"),
        ({"battery": [1]}, "battery = .* table"),
        ({"heat": {"status": 1.5}}, "whole number"),
        ({"heat": {"zones": {"cpu": 3}}}, "list"),
        ({"heat": {"zones": [{"name": "cpu"}]}}, "celsius"),
        ({"heat": {"zones": [{"name": "cpu", "celsius": None}]}}, "celsius"),
        ({"power": {"rails": {"IN": "x"}}}, "power.rails = .*each value a number"),
        ({"power": {"mode": 3}}, "a text"),
        ({"ages_s": {"battery.percent": 3}}, "for a known value"),
        ({"battery": {"percent": 3}, "ages_s": {"battery.percent": -1}}, "seconds"),
        ([], "table"),
    ],
)
def test_wrong_dict_is_refused_with_advice(content: Any, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        Snapshot.from_dict(content)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["battery", "percent", "heat", "zones", "name", "celsius", "ages_s", "rails"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(plain)
def test_any_plain_value_is_a_snapshot_or_refused(content: Any) -> None:
    try:
        snapshot = Snapshot.from_dict(content)
    except ProfileError:
        return
    assert snapshot.credible() == (snapshot, [])


def test_none_in_a_dict_is_unknown() -> None:
    content = {"battery": None, "cpu": {"cores": None, "load": 1}, "ages_s": None}
    assert Snapshot.from_dict(content) == Snapshot(cpu=Cpu(load=1.0))
