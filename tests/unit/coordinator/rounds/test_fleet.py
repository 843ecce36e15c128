"""Devices and data that taught each level, against sets kept by hand."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from coordinator.rounds.fleet import new_fleet
from coordinator.rounds.report import level_reports
from coordinator.task.levels import LevelScore, LevelScores
from edge_sdk.protocol.messages.round import Bid
from tests.unit.coordinator.masks.fleet import chain

PLAN = chain((2, 3, 3), (1, 2, 2, 3))
LEVELS = LevelScores(
    tuple(
        LevelScore(level, {axis.name: tuple(range(count)) for axis in PLAN.axes})
        for level, count in ((1.0, 3), (0.5, 2), (0.25, 1))
    )
)


@pytest.mark.parametrize("seed", range(5))
def test_levels_are_taught_by_the_devices_in_sets_kept_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    fleet = new_fleet(PLAN)
    blocks: dict[str, set[int]] = defaultdict(set)
    samples: dict[str, int] = {}
    seen = set()
    for round in range(1, 25):
        present = [f"d{n}" for n in range(6) if random.random() < 0.3]
        bids = [
            Bid(device=name, round=round, level=1.0, reason="-", samples=int(random.integers(4)))
            for name in present
        ]
        fleet = fleet.heard(bids)
        samples |= {bid.device: bid.samples for bid in bids if bid.samples}
        trained = {
            name: {
                axis.name: tuple(
                    random.permutation(len(axis.groups))[: 1 + random.integers(3)].tolist()
                )
                for axis in PLAN.axes
            }
            for name in present[: len(present) // 2 + 1]
        }
        fleet = fleet.covered(PLAN, round, trained)
        if random.random() < 0.5:
            fleet = fleet.settled()
        for name, groups in trained.items():
            blocks[name] |= set(PLAN.block_ids(PLAN.choose(groups)).tolist())
        for each, report in zip(LEVELS.levels, level_reports(PLAN, fleet, LEVELS), strict=True):
            ids = PLAN.block_ids(PLAN.choose(each.groups)).tolist()
            teachers = [[name for name, own in blocks.items() if block in own] for block in ids]
            taught = min(sum(samples.get(name, 0) for name in names) for names in teachers)
            assert report.devices == min(map(len, teachers))
            assert report.data_share == (taught / sum(samples.values()) if samples else None)
            seen.add(report.devices)
    assert len(seen) > 3


def test_news_are_the_devices_that_grew_since_they_were_written() -> None:
    half = {axis.name: (0,) for axis in PLAN.axes}
    fleet = new_fleet(PLAN).covered(PLAN, 1, {"a": half, "b": PLAN.all_groups()})
    assert fleet.teachers.news.keys() == {"a", "b"}
    again = fleet.settled().covered(PLAN, 2, {"a": half, "b": half})
    assert not again.teachers.news
    grown = again.taught(PLAN, {"a": PLAN.all_groups()})
    assert dict(grown.teachers.news) == {"a": fleet.teachers.blocks["b"]}
