"""Messages refuse what contradicts itself, when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import MAX_REASON_CHARACTERS, Bid, RoundOpen

NAN, INF = float("nan"), float("inf")

BID: dict[str, Any] = {"device": "pi", "round": 1, "level": 0.5, "reason": "half", "samples": 3}
OPEN: dict[str, Any] = {
    "round": 1,
    "plan_hash": "0" * 64,
    "local_rule": LocalRule(learning_rate=0.1),
    "steps": 1,
    "batch_size": 1,
    "bid_s": 10.0,
    "train_deadline_s": 600.0,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"level": None},
        {"level": 1},
        {"level": 5e-324},
        {"samples": 0},
        {"reason": "x" * MAX_REASON_CHARACTERS},
    ],
)
def test_bid_within_bounds_is_kept_as_it_is(change: dict[str, Any]) -> None:
    fields = BID | change
    bid = Bid(**fields)
    assert {name: getattr(bid, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"level": 0}, "level"),
        ({"level": -0.5}, "level"),
        ({"level": 1.001}, "level"),
        ({"level": NAN}, "level"),
        ({"level": INF}, "level"),
        ({"reason": ""}, "reason"),
        ({"reason": "x" * (MAX_REASON_CHARACTERS + 1)}, "reason"),
        ({"samples": -1}, "samples"),
    ],
)
def test_bid_out_of_bounds_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(MessageError, match=text):
        Bid(**BID | change)


@pytest.mark.parametrize("name", ["round", "steps", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_round_of_nothing_is_refused(name: str, value: int) -> None:
    assert RoundOpen(**OPEN).round == 1
    with pytest.raises(MessageError, match=name):
        RoundOpen(**OPEN | {name: value})


@pytest.mark.parametrize("name", ["bid_s", "train_deadline_s"])
@pytest.mark.parametrize("value", [0, -1.0, NAN, INF])
def test_round_without_a_sound_time_limit_is_refused(name: str, value: float) -> None:
    with pytest.raises(MessageError, match=name):
        RoundOpen(**OPEN | {name: value})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"learning_rate": 1},
        {"momentum": 0.999},
        {"clip_norm": 1.0, "sam_radius": 0.05, "proximal": 1.0, "weight_decay": 1e-4},
        {"rescale": 0},
        {"rescale": 1},
        {"widths": "ordered-dropout"},
        {"widths": "sandwich", "distillation": 1.0},
        {"classes": "own"},
    ],
)
def test_local_rule_within_bounds_is_kept_as_it_is(change: dict[str, Any]) -> None:
    fields = {"learning_rate": 0.1} | change
    rule = LocalRule(**fields)
    assert {name: getattr(rule, name) for name in fields} == fields


@pytest.mark.parametrize(
    "name",
    [
        "learning_rate",
        "momentum",
        "weight_decay",
        "clip_norm",
        "sam_radius",
        "proximal",
        "rescale",
        "distillation",
    ],
)
@pytest.mark.parametrize("value", [-1e-9, NAN, INF, -INF, "1", [1.0]])
def test_local_rule_number_out_of_bounds_is_refused(name: str, value: Any) -> None:
    with pytest.raises(MessageError, match=name):
        LocalRule(**{"learning_rate": 0.1} | {name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0},
        {"learning_rate": None},
        {"clip_norm": 0},
        {"momentum": 1},
        {"momentum": 1.5},
        {"rescale": None},
        {"widths": "both"},
        {"classes": "some"},
        {"distillation": 0.5},
        {"distillation": 1.1, "widths": "sandwich"},
    ],
)
def test_local_rule_that_cannot_train_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=next(iter(change))):
        LocalRule(**{"learning_rate": 0.1} | change)
