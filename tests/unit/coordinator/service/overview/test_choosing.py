"""Filters and orders of devices, as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import ConfigError
from coordinator.service.overview.choosing import choose_rows
from coordinator.service.overview.rows import new_row, shown


def row(device: str, **changes: Any) -> dict[str, Any]:
    return shown({**new_row(device), "present": True, **changes}, counted=0, newest=0)


ROWS = [
    row("a", battery=0.2, charging=False, labels={"site": "Berlin"}, trained=3),
    row("b", battery=None, charging=True, labels={"site": "oslo"}, trained=10),
    row("c", battery=0.9, state="skipped", trained=1, quarantined={"round": 1, "reason": "x"}),
]


def names(*filters: str, sort: str | None = None) -> str:
    return "".join(each["device"] for each in choose_rows(ROWS, filters, sort))


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("battery<0.3", "a"),
        ("battery >= 0.2", "ac"),
        ("battery=none", "b"),
        ("battery!=none", "ac"),
        ("battery!=0.2", "bc"),
        ("charging=true", "b"),
        ("charging=no", "a"),
        ("charging!=true", "ac"),
        ("label.site=berlin", "a"),
        ("label.site!=berlin", "bc"),
        ("label.room=x", ""),
        ("state=quarantined", "c"),
        ("quarantined=true", "c"),
        ("device=a", "a"),
        ("device>a", "bc"),
        ("trained==10", "b"),
    ],
)
def test_filter_keeps_the_rows_it_holds_for(written: str, found: str) -> None:
    assert names(written) == found


def test_all_filters_have_to_hold() -> None:
    assert names("trained>1", "battery<0.5") == "a"


@pytest.mark.parametrize(
    ("key", "found"),
    [("trained", "cab"), ("-trained", "bac"), ("battery", "acb"), ("-battery", "cab")],
)
def test_rows_are_sorted_and_unknown_values_come_last(key: str, found: str) -> None:
    assert names(sort=key) == found


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("batery<0.3", "did you mean 'battery'"),
        ("battery", "is not KEY=VALUE"),
        ("battery<low", "compares with a number"),
    ],
)
def test_filter_that_makes_no_sense_is_explained(written: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        names(written)


def test_key_that_makes_no_sense_is_explained() -> None:
    with pytest.raises(ConfigError, match="did you mean 'state'"):
        names(sort="stat")
