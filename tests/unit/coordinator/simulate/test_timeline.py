"""Events in virtual time happen in order, for the right endpoint, only when asked."""

from __future__ import annotations

from coordinator.simulate.timeline import Timeline


def drain(timeline: Timeline[int]) -> list[list[tuple[str, int]]]:
    taken = []
    while timeline.next_s is not None:
        batch = timeline.take(alone="coordinator")
        taken.append([(each.to, each.message) for each in batch])
    return taken


def test_earliest_happens_first_and_of_one_time_what_was_added_first() -> None:
    timeline: Timeline[int] = Timeline()
    for time_s, message in ((2.0, 1), (1.0, 2), (2.0, 3), (0.5, 4)):
        timeline.add(time_s, "a", message)
    assert timeline.next_s == 0.5
    assert drain(timeline) == [[("a", 4)], [("a", 2)], [("a", 1)], [("a", 3)]]
    assert timeline.take(alone="coordinator") == []


def test_what_may_happen_together_is_for_different_endpoints() -> None:
    timeline: Timeline[int] = Timeline()
    for to, message in [("a", 1), ("b", 2), ("a", 3), ("coordinator", 4), ("b", 5)]:
        timeline.add(0.0, to, message)
    assert drain(timeline) == [
        [("a", 1), ("b", 2)],
        [("a", 3)],
        [("coordinator", 4)],
        [("b", 5)],
    ]


def test_nothing_is_taken_that_happens_later_than_asked_for() -> None:
    timeline: Timeline[int] = Timeline()
    for time_s, to in ((1.0, "a"), (2.0, "b"), (3.0, "c")):
        timeline.add(time_s, to, 0)
    assert [each.to for each in timeline.take(alone="", until_s=2.0)] == ["a", "b"]
    assert timeline.next_s == 3.0
