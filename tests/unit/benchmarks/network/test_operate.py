"""`tessera-bench operate`: a real page that is really looked at, and the figures it makes."""

from __future__ import annotations

import pytest

from benchmarks.network.operate.measure import (
    OperateConfig,
    OperateRows,
    QuestionRow,
    WatchedRow,
    measure_operate,
    operate_figures,
)


def watched(changing: int, alone: float, with_it: float) -> WatchedRow:
    return WatchedRow(changing=changing, alone_percent=alone, watched_percent=with_it, kb_per_s=1.0)


def test_viewer_gets_what_changes_and_questions_are_answered() -> None:
    config = OperateConfig(devices=40, seconds=1.5, questions=1, repeats=1)
    ticks: list[str] = []

    def begin(name: str) -> object:
        return lambda: ticks.append(name)

    rows = measure_operate(config, begin)  # type: ignore[arg-type]
    assert len(ticks) == 3
    some, every = rows.watched
    assert (some.changing, every.changing) == (10, 40)
    assert 0 < some.kb_per_s < every.kb_per_s  # rows of 10 devices, and of 40
    assert every.watched_percent > 0
    sizes = {row.name: row.kb for row in rows.questions}
    assert sizes["devices"] > 40 * 0.3
    assert sizes["metrics_by_device"] > sizes["metrics"] + 40 * 0.3
    assert all(row.cpu_ms > 0 for row in rows.questions)


def test_figures_are_the_cost_of_the_viewer_alone() -> None:
    rows = OperateRows(
        (watched(100, 1.0, 1.5), watched(2000, 3.0, 5.5)),
        (QuestionRow(name="status", cpu_ms=2.0, kb=1.0),),
    )
    found = {each.name: each for each in operate_figures(OperateConfig(), rows)}
    assert found["operate.2000.page"].value == pytest.approx(0.5)
    assert found["operate.2000.page"].met is True
    assert found["operate.2000.page_all_change"].value == pytest.approx(2.5)
    assert found["operate.2000.page_all_change"].met is False
    assert found["operate.2000.status"].value == 2.0
    assert watched(1, 2.0, 1.9).cost_percent == 0
