"""`tessera-bench closing`: real closes of a real coordinator, and the figures they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.network.closing.command import closing_tables
from benchmarks.network.closing.measure import (
    WARM,
    ClosedRow,
    ClosingRow,
    closed_row,
    closing_figures,
    measure_closing,
)
from benchmarks.network.deployed.job import SMALL
from benchmarks.network.stage.tasks import prepare_untrained


def test_rounds_of_devices_without_training_close_and_questions_are_answered(
    tmp_path: Path,
) -> None:
    job = replace(SMALL, widths=(784, 16, 10), devices=2)
    task, ticks = prepare_untrained(job.widths), list[str]()

    def begin(name: str) -> object:
        return lambda: ticks.append(name)

    row = measure_closing(job, task, tmp_path, rounds=2, starts=1, begin=begin)  # type: ignore[arg-type]
    assert len(ticks) == 3
    assert len(row.rounds) == 2
    assert WARM > 0
    assert all(each.close_s > 0 for each in row.rounds)
    # Parts that are renamed would go unmeasured.
    assert set(row.parts_s()) >= {
        *("rule", "memory", "digest", "checkpoint", "evaluation", "history"),
        *("packing", "publishing", "deleting"),
    }
    assert row.starts_s[0] > 0


def test_a_close_is_from_the_last_movement_on_disk_to_the_opening() -> None:
    told = {
        "opened_s": 12.0,
        "device_waits": [(9.5, 0.4), (10.5, 0.1)],
        "operator_waits": [(11.0, 0.2), (12.5, 0.1)],
    }
    calls = [
        ("keeping", 8.0, 9.0, 0.1),
        ("keeping", 9.0, 10.0, 0.1),
        ("rule", 10.0, 10.5, 0.3),
        ("memory", 10.2, 10.4, 0.1),
        ("memory", 11.9, 12.4, 0.2),
        ("keeping", 12.5, 13.0, 0.1),
    ]
    row = closed_row(told, calls)
    assert row.close_s == 2
    assert row.device_waits_s == (0.1,)
    assert row.operator_waits_s == (0.2,)
    assert row.parts_s == pytest.approx({"rule": 0.5, "memory": 0.3})
    assert row.parts_cpu_s == pytest.approx({"rule": 0.3, "memory": 0.3})


def test_figures_are_medians_and_the_slowest_answers() -> None:
    def closed(close_s: float, wait_s: float) -> ClosedRow:
        return ClosedRow(
            close_s=close_s,
            device_waits_s=(wait_s,) * 100,
            operator_waits_s=(wait_s / 2,) * 100,
            parts_s={"rule": close_s / 2},
            parts_cpu_s={"rule": close_s / 4},
        )

    rounds = (closed(0.5, 0.01), closed(0.7, 0.01), closed(0.9, 0.04))
    row = ClosingRow(job="l", model_mb=100, devices=4, rounds=rounds, starts_s=(1.0, 3.0, 1.5))
    found = {each.name: each for each in closing_figures(row)}
    assert found["closing.l.close"].value == 0.7
    assert found["closing.l.close"].target == 0.8
    assert found["closing.l.device_wait_p99"].value == pytest.approx(40)
    assert found["closing.l.operator_wait_p99"].value == pytest.approx(20)
    assert found["closing.l.operator_wait_p99"].target == 50
    assert found["closing.l.part.rule"].value == pytest.approx(0.35)
    assert (found["closing.l.start"].value, found["closing.l.start"].target) == (1.5, 2)


def test_start_is_one_number_in_table_and_figure_of_an_even_number_of_starts() -> None:
    round_ = ClosedRow(
        close_s=0.5, device_waits_s=(0.1,), operator_waits_s=(0.1,), parts_s={}, parts_cpu_s={}
    )
    row = ClosingRow(job="l", model_mb=1, devices=4, rounds=(round_,), starts_s=(1.0, 2.0))
    figure = next(each for each in closing_figures(row) if each.name == "closing.l.start")
    table = next(closing_tables([row]))
    start = next(column for column in table.columns if column.header == "start\ns")
    assert (figure.value, list(start.cells)) == (1.5, ["1.50"])
