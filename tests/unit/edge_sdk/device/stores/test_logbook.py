"""The logbook's last error: it stays until the device has had a round since."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

from edge_sdk.device.stores.logbook import SOON_S, Logbook, read_logbook
from edge_sdk.protocol.messages.round import Bid
from tests.messages import make_movement
from tests.unit.edge_sdk.device.test_app import PLAN

NOBODY = "nobody offers the task 'digits'"


def bid(round: int, level: float | None, code: str | None = None) -> Bid:
    return Bid(device="one", round=round, level=level, reason="why", samples=1, code=code)


def test_error_is_dropped_by_a_training_that_began_after_it(tmp_path: Path) -> None:
    seconds = count(1000.0)
    book = Logbook("digits", tmp_path, wall=lambda: next(seconds))
    movement = make_movement(PLAN, PLAN.all_groups(), 0.1, round=4)
    book.bid(bid(4, 1.0))
    book.error(NOBODY)
    book.made(movement)
    assert (book.to_dict()["error"] or {}).get("words") == NOBODY  # it came meanwhile
    book.bid(bid(5, 1.0))
    assert book.to_dict()["error"] is not None  # an offer alone cures nothing
    book.made(replace(movement, round=5))
    assert book.to_dict()["error"] is None
    again = Logbook("digits", tmp_path, wall=lambda: next(seconds))
    assert again.to_dict()["error"] is None


def test_error_is_dropped_by_a_skip_but_not_by_a_failure(tmp_path: Path) -> None:
    seconds = count(1000.0)
    book = Logbook("digits", tmp_path, wall=lambda: next(seconds))
    book.error(NOBODY)
    book.bid(bid(4, None, "failed"))
    assert book.to_dict()["error"] is not None
    book.bid(bid(5, None, "battery"))
    assert book.to_dict()["error"] is None


def test_file_is_replaced_once_a_second_and_by_the_loop(tmp_path: Path) -> None:
    now = 1000.0
    book = Logbook("digits", tmp_path, wall=lambda: now)

    def rounds() -> list[int]:
        return [row["round"] for row in (read_logbook(tmp_path) or {"rounds": []})["rounds"]]

    book.bid(bid(1, 1.0))
    now += SOON_S / 2
    book.bid(bid(2, 1.0))
    book.save_due()
    assert rounds() == [1]
    now += SOON_S / 2
    book.save_due()
    assert rounds() == [1, 2]
    book.bid(bid(3, 1.0))
    assert rounds() == [1, 2]
    book.ends(0, "told to stop")
    assert rounds() == [1, 2, 3]
