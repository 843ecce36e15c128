"""The owner's pause, and who was served last, on disk."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from edge_sdk.device.stores.pause import LOOK_S, Pause
from edge_sdk.device.stores.slot import TrainingSlot


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_pause(tmp_path: Path, clock: Clock) -> Pause:
    return Pause(tmp_path / "new" / "paused", wall=clock, clock=clock)


def test_pause_is_there_after_a_restart_until_it_is_lifted(tmp_path: Path, clock: Clock) -> None:
    pause = make_pause(tmp_path, clock)
    assert not pause.active
    assert not pause.lift()
    pause.begin()
    again = make_pause(tmp_path, clock)
    assert again.active
    assert again.terms == pause.terms
    assert again.lift()
    assert again.terms is None
    assert pause.terms is not None  # it has not looked
    clock.now += LOOK_S
    assert pause.terms is None


def test_pause_ends_by_itself(tmp_path: Path, clock: Clock) -> None:
    pause = make_pause(tmp_path, clock)
    pause.begin(60)
    for seconds, lasts in ((59, True), (1, False)):
        clock.now += seconds
        assert [pause.active, make_pause(tmp_path, clock).active] == [lasts, lasts]
    assert not pause.lift()  # there is none any more
    pause.begin()
    assert pause.active


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"since": "x", "until": null}', '{"since": 1, "until": NaN}', "\xff"]
)
def test_pause_that_cannot_be_read_lasts(
    tmp_path: Path, clock: Clock, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "paused").write_bytes(text.encode("latin-1"))
    pause = make_pause(tmp_path, clock)
    assert pause.active
    clock.now += LOOK_S
    assert pause.active
    assert caplog.text.count("stays paused") == 1
    assert pause.lift()
    assert not pause.active


def first_of(path: Path) -> str:
    """The task that gets the turn when both had to skip a round while a third one trained."""
    slot = TrainingSlot({"a": 1, "b": 1, "c": 1}, path)
    seats = {name: slot.seat(name, lambda: None) for name in ("a", "b", "c")}
    with seats["c"].occupied():
        for name in ("a", "b"):
            assert seats[name].claim(10, lambda: True) is not None
    obstacle = seats["b"].claim(10, lambda: True)
    return "b" if obstacle is None else obstacle.task


def test_longest_not_served_outlives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "turns.json"
    assert first_of(path) == "a"  # nobody was served: by name
    seat = TrainingSlot({"a": 1, "b": 1}, path).seat("a", lambda: None)
    assert seat.claim(10, lambda: True) is None
    seat.offer(10)
    assert seat.begin()  # and the program is killed
    assert first_of(path) == "b"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": "x", "b": true, "gone": 7}'])
def test_damaged_turns_favour_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "turns.json").write_text(text)
    assert first_of(tmp_path / "turns.json") == "a"


def test_task_that_waits_gets_the_turn_as_soon_as_it_is_free(tmp_path: Path) -> None:
    slot = TrainingSlot({"a": 1, "b": 2}, tmp_path / "turns.json")
    first, second = (slot.seat(name, lambda: None) for name in ("a", "b"))
    assert second.claim(10, lambda: True) is None
    second.offer(10)
    assert second.begin()
    assert first.disturbs
    got: list[object] = []
    waiting = Thread(target=lambda: got.append(first.claim(1e6, lambda: False)))
    waiting.start()
    second.release()
    waiting.join()
    assert got == [None]


def test_loser_of_an_offer_is_told(tmp_path: Path) -> None:
    lost: list[str] = []
    slot = TrainingSlot({"a": 1, "b": 2}, tmp_path / "turns.json")
    first = slot.seat("a", lambda: lost.append("a"))
    second = slot.seat("b", lambda: lost.append("b"))
    assert second.claim(10, lambda: True) is None
    second.offer(10)
    assert first.claim(10, lambda: True) is None
    assert lost == ["b"]
    assert not second.begin()
