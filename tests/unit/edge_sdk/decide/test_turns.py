"""Whose turn it is, of a device's tasks."""

from __future__ import annotations

import pytest

from edge_sdk.decide.turns import PATIENCE_S, Obstacle, TaskTurns

LEASE_S = 20.0


def train(turns: TaskTurns, task: str, now: float) -> None:
    """A whole training, at once."""
    assert turns.ask(task, now) is None
    turns.offer(task, now, LEASE_S)
    assert turns.begin(task)
    turns.end(task)


def refused(turns: TaskTurns, task: str, now: float) -> Obstacle | None:
    obstacle = turns.ask(task, now)
    turns.refuse(task, now)
    return obstacle


def test_training_is_not_interrupted_even_for_a_higher_priority() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    assert turns.ask("low", 0) is None
    turns.offer("low", 0, LEASE_S)
    assert turns.begin("low")
    assert turns.ask("high", 1_000) == Obstacle("low", training=True)
    assert turns.training == "low"
    turns.end("low")
    assert turns.ask("high", 1_001) is None


def test_offer_yields_to_a_higher_priority_only() -> None:
    turns = TaskTurns({"high": 1, "low": 2, "lower": 3})
    assert turns.ask("low", 0) is None
    turns.offer("low", 0, LEASE_S)
    assert refused(turns, "lower", 1) == Obstacle("low", training=False)
    assert turns.ask("high", 2) is None
    assert not turns.begin("low")
    assert turns.holder == "high"


def test_decision_yields_to_nobody() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    assert turns.ask("low", 0) is None
    assert turns.ask("high", 1_000) == Obstacle("low", training=False)


def test_offer_without_an_assignment_yields_to_anybody_when_its_lease_is_over() -> None:
    turns = TaskTurns({"a": 1, "b": 1})
    train(turns, "a", 0)
    assert turns.ask("b", 1) is None
    turns.offer("b", 1, LEASE_S)
    assert turns.ask("a", LEASE_S) == Obstacle("b", training=False)
    assert turns.ask("a", 1 + LEASE_S) is None
    assert not turns.begin("b")


def test_equals_take_turns() -> None:
    turns = TaskTurns({"a": 1, "b": 1})
    train(turns, "a", 0)
    assert turns.ask("b", 1) is None
    turns.offer("b", 1, LEASE_S)
    turns.begin("b")
    assert refused(turns, "a", 2) == Obstacle("b", training=True)
    turns.end("b")
    # Both had the turn once; a was passed over, and goes first.
    assert refused(turns, "b", 3) == Obstacle("a", training=False)
    train(turns, "a", 4)
    train(turns, "b", 5)


def test_claim_of_a_task_whose_rounds_stopped_is_over_some_time() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    assert turns.ask("low", 0) is None
    turns.begin("low")
    assert refused(turns, "high", 1) is not None
    turns.end("low")
    assert refused(turns, "low", PATIENCE_S) == Obstacle("high", training=False)
    assert turns.ask("low", 1 + PATIENCE_S) is None


def test_claim_lasts_for_two_rounds_of_the_task() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    train(turns, "high", 0)
    assert turns.ask("low", 50) is None
    turns.begin("low")
    assert refused(turns, "high", 100) is not None
    turns.end("low")
    assert refused(turns, "low", 299) == Obstacle("high", training=False)
    assert turns.ask("low", 300) is None


def test_lower_priority_is_owed_nothing_by_a_higher_one() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    assert turns.ask("high", 0) is None
    turns.begin("high")
    assert refused(turns, "low", 1) is not None
    turns.end("high")
    train(turns, "high", 2)


def test_longest_not_served_is_known_after_a_restart() -> None:
    turns = TaskTurns({"a": 1, "b": 1, "c": 1})
    for now, task in enumerate(("b", "c", "a")):
        train(turns, task, now)
    again = TaskTurns({"a": 1, "b": 1, "c": 1}, turns.served)
    assert again.ask("a", 0) is None
    again.begin("a")
    for task in ("c", "b"):
        again.ask(task, 1)
    again.end("a")
    assert again.ask("c", 2) == Obstacle("b", training=False)
    assert again.ask("b", 2) is None


def test_task_that_left_is_in_nobodys_way() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    assert turns.ask("low", 0) is None
    assert refused(turns, "high", 1) is not None
    turns.leave("high")
    turns.leave("low")
    train(turns, "low", 2)


def test_waived_claim_is_in_nobodys_way_and_keeps_the_turn() -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    assert turns.ask("low", 0) is None
    turns.begin("low")
    assert refused(turns, "high", 1) is not None
    turns.waive("low")
    assert turns.training == "low"
    turns.end("low")
    assert refused(turns, "low", 2) == Obstacle("high", training=False)
    turns.waive("high")
    train(turns, "low", 3)


def test_work_that_is_no_training_takes_the_free_turn_and_counts_as_none() -> None:
    turns = TaskTurns({"a": 1, "b": 1})
    assert turns.occupy("a", 0)
    assert not turns.occupy("b", 0)
    assert turns.ask("b", 0) == Obstacle("a", training=True)
    turns.end("a")
    assert turns.served == {}
    assert turns.ask("b", 1) is None
    turns.offer("b", 1, LEASE_S)
    assert not turns.occupy("a", LEASE_S)
    assert turns.occupy("a", 1 + LEASE_S)


@pytest.mark.parametrize("stage", ["nothing", "asked", "offered"])
def test_training_begins_only_with_the_turn(stage: str) -> None:
    turns = TaskTurns({"a": 1, "b": 1})
    if stage != "nothing":
        turns.ask("b", 0)
    if stage == "offered":
        turns.offer("b", 0, LEASE_S)
    assert not turns.begin("a")
    turns.end("a")  # harmless
    assert turns.holder == (None if stage == "nothing" else "b")
