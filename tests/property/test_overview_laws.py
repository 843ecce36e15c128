"""The overview adds up: its sums are those of a run's history, however it came by the lines."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.service.overview.facts import RunFacts
from coordinator.service.overview.overview import Overview
from coordinator.service.overview.strip import HELD
from tests.property.strategies import law
from tests.unit.coordinator.service.service_world import PLAN

few = settings(law, max_examples=60)
NAMES = ("a", "b", "c", "d")
Lines = list[dict[str, Any]]


@st.composite
def parts(draw: st.DrawFn, device: str) -> dict[str, Any]:
    level = draw(st.sampled_from([None, None, 0.25, 0.5, 1.0]))
    trained = level is not None
    return {
        "device": device,
        "level": level,
        "reason": "why",
        "code": None if trained else draw(st.sampled_from([None, "battery", "silent"])),
        "loss": 1.0 if trained else None,
        "bytes_up": draw(st.integers(0, 1000)),
        "bytes_down": draw(st.integers(0, 1000)),
        "train_s": draw(st.integers(0, 10)) / 2,
        "energy_j": draw(st.sampled_from([None, 1.5, 4.0])) if trained else None,
    }


@st.composite
def histories(draw: st.DrawFn) -> Lines:
    lines: Lines = []
    round = 0
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["round", "round", "round", "back", "forgot"]))
        if kind == "back" and round:
            back = draw(st.integers(0, round - 1))
            lines.append({"rolled_back": {"from": round, "to": back}})
            continue
        if kind == "forgot":
            lines.append({"forgotten": {"device": "a", "by": "me"}})
            continue
        round += draw(st.integers(1, 3))
        devices = draw(st.lists(st.sampled_from(NAMES), unique=True))
        refused = draw(st.lists(st.sampled_from(["late", "memory", "rejected"]), max_size=3))
        refusals = [
            {"device": "d", "round": max(1, round - 1), "outcome": each, "reason": "x"}
            for each in refused
        ]
        counts = Counter(refused)
        lines.append(
            {
                "round": round,
                "devices": [draw(parts(name)) for name in sorted(devices)],
                "movements": {name: counts[name] for name in ("memory", "late", "rejected")},
                "refusals": refusals,
                "accuracy": None,
                "levels": [],
                "deploy": None,
                "seconds": draw(st.integers(0, 100)) / 4,
                "coverage_min": 0,
                "trained_coverage_min": 0,
                "oldest_memory": None,
                "digest": "d",
                "time": float(round),
            }
        )
    return lines


def overview_with(lines: Lines) -> Overview:
    facts = RunFacts(task="t", run="0" * 16, folder=None, plan=PLAN)
    return Overview(facts, history=lines)


def naive(lines: Lines) -> dict[str, Any]:
    """Sums over every device of every round, one after the other."""
    found: dict[str, Any] = dict.fromkeys(
        ("seconds", "bytes_up", "bytes_down", "trained", "skipped", "late", "rejected"), 0
    )
    joules = []
    for line in lines:
        if "devices" not in line:
            continue
        found["seconds"] += line["seconds"]
        found["late"] += line["movements"]["late"] + line["movements"]["memory"]
        found["rejected"] += line["movements"]["rejected"]
        for part in line["devices"]:
            found["trained" if part["level"] is not None else "skipped"] += 1
            found["bytes_up"] += part["bytes_up"]
            found["bytes_down"] += part["bytes_down"]
            joules += [part["energy_j"]] if part["energy_j"] is not None else []
    return {**found, "joules": sum(joules) if joules else None}


@few
@given(histories())
def test_totals_are_the_sums_over_history(lines: Lines) -> None:
    assert overview_with(lines).status()["totals"] == naive(lines)


@few
@given(histories())
def test_devices_add_up_to_the_totals(lines: Lines) -> None:
    overview = overview_with(lines)
    totals, rows = overview.status()["totals"], overview.devices()
    for name in ("bytes_up", "bytes_down", "trained", "skipped", "late", "rejected"):
        assert sum(row[name] for row in rows) == totals[name], name
    assert sum(row["joules"] or 0.0 for row in rows) == (totals["joules"] or 0.0)
    trained = totals["trained"]
    for row in rows:  # shown to a millionth
        assert abs(row["contribution"] - row["trained"] / max(1, trained)) <= 0.5e-6 + 1e-12, row


@few
@given(histories(), st.integers(0, 12))
def test_it_does_not_matter_which_lines_came_while_it_was_there(lines: Lines, cut: int) -> None:
    early, whole = overview_with(lines[:cut]), overview_with(lines)
    for line in lines[cut:]:
        early.line(line)
    assert early.status()["totals"]["trained"] == whole.status()["totals"]["trained"]
    assert early.status()["committed"] == whole.status()["committed"]
    assert early.rounds() == whole.rounds()
    assert {row["device"]: row["trained"] for row in early.devices()} == {
        row["device"]: row["trained"] for row in whole.devices() if row["device"] != "d"
    } | {row["device"]: row["trained"] for row in early.devices() if row["device"] == "d"}


@few
@given(histories())
def test_strip_has_a_character_for_every_round_and_device(lines: Lines) -> None:
    strip = overview_with(lines).strip(HELD)
    numbers = [line["round"] for line in lines if "devices" in line]
    assert strip["rounds"] == numbers
    assert all(len(marks) == len(numbers) for marks in strip["devices"].values())
    assert all(mark in strip["legend"] for marks in strip["devices"].values() for mark in marks)
    for at, line in enumerate(line for line in lines if "devices" in line):
        there = {part["device"] for part in line["devices"]}
        for name, marks in strip["devices"].items():
            if name not in there and name != "d":
                assert marks[at] == "."
