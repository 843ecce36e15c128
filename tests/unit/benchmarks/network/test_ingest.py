"""`tessera-bench ingest`: real uploads to a real coordinator, and the figures they make."""

from __future__ import annotations

import pytest

from benchmarks.network.ingest.measure import (
    IngestConfig,
    IngestRow,
    ingest_figures,
    measure_ingest,
)


def test_movements_of_devices_without_training_are_kept() -> None:
    config = IngestConfig(devices=2, widths=(784, 16, 10), repeats=1)
    ticks: list[str] = []

    def begin(name: str) -> object:
        return lambda: ticks.append(name)

    [row] = measure_ingest(config, begin)  # type: ignore[arg-type]
    assert len(ticks) == 2
    assert row.movement_mb == pytest.approx(4e-6 * (784 * 16 + 16 + 16 * 10 + 10))
    assert row.peak_mb > 10
    assert row.cpu_s >= 0


def test_figures_are_the_largest_memory_and_the_least_time() -> None:
    one = IngestRow(devices=4, movement_mb=10, before_mb=100, peak_mb=150, cpu_s=0.2, seconds=2)
    two = IngestRow(devices=4, movement_mb=10, before_mb=100, peak_mb=120, cpu_s=0.1, seconds=3)
    found = {each.name: each for each in ingest_figures([one, two])}
    assert found["ingest.4.anonymous"].value == 150
    assert found["ingest.4.cpu_per_mb"].value == pytest.approx(2.5)
    assert found["ingest.4.grown_over_movement"].value == pytest.approx(5)
    assert found["ingest.4.wall"].value == 2
    assert (found["ingest.4.anonymous"].target, found["ingest.4.cpu_per_mb"].target) == (200, 4)
