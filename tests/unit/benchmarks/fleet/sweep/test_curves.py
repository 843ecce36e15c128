"""Curves over seeds: their mean, lowest and highest, along any axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.fleet.sweep.curves import curves_of, grouped, varied_keys
from benchmarks.report.options import UsageError


def rows(
    name: str, seed: int, points: list[tuple[int, float, float | None]]
) -> list[dict[str, Any]]:
    """Rows of a case: round, hours and accuracy."""
    case = {"id": f"{name}{seed}", "case": "", "rule.name": name, "run.seed": seed}
    return [
        {
            **case,
            "round": round,
            "time_s": 3600 * hours,
            "joules": 10.0 * round,
            "bytes_down": 3,
            "bytes_up": round,
            "accuracy": accuracy,
        }
        for round, hours, accuracy in points
    ]


def test_seeds_are_one_curve_with_their_lowest_and_highest() -> None:
    found = curves_of(
        rows("a", 0, [(1, 1.0, 0.2), (2, 2.0, None), (3, 3.0, 0.6)])
        + rows("a", 1, [(1, 1.0, 0.4), (3, 3.0, 0.4), (5, 5.0, 0.9)])
        + rows("b", 0, [(2, 2.0, 0.5)]),
        "rounds",
        "accuracy",
    )
    first, second = found
    assert (first.label, first.seeds, first.x.tolist()) == ("a", 2, [1, 3])
    assert first.mean.tolist() == pytest.approx([0.3, 0.5])
    assert first.low.tolist() == pytest.approx([0.2, 0.4])
    assert first.high.tolist() == pytest.approx([0.4, 0.6])
    assert (second.label, second.seeds, second.mean.tolist()) == ("b", 1, [0.5])


def test_seeds_measured_at_other_hours_are_interpolated() -> None:
    (curve,) = curves_of(
        rows("a", 0, [(1, 0.0, 0.0), (2, 4.0, 0.8)]) + rows("a", 1, [(1, 1.0, 0.5), (2, 3.0, 0.5)]),
        "hours",
        "accuracy",
    )
    assert (curve.x[0], curve.x[-1]) == (1.0, 3.0)
    assert np.allclose(curve.mean, (0.2 * curve.x + 0.5) / 2)
    assert np.allclose(curve.low, np.minimum(0.2 * curve.x, 0.5))


def test_bytes_and_joules_are_those_of_all_devices() -> None:
    of = rows("a", 0, [(1, 1.0, 0.2), (4, 2.0, 0.3)])
    assert [curve.x.tolist() for curve in curves_of(of, "bytes", "accuracy")] == [[4, 7]]
    assert [curve.x.tolist() for curve in curves_of(of, "joules", "accuracy")] == [[10, 40]]


def test_labels_name_what_varies_and_nothing_that_follows_from_it() -> None:
    base = {"case": "", "mask.name": "coverage"}
    first = {"id": "1", **base, "run.widths": "own", "rule.name": "a", "data.alpha": 0.1}
    found = [
        first,
        {**first, "id": "2", "data.alpha": 1.0},
        {**first, "id": "3", "rule.name": "b", "run.widths": "sandwich"},
    ]
    assert varied_keys(found) == ["rule.name", "data.alpha"]
    assert list(grouped(found)) == ["a, alpha 0.1", "a, alpha 1", "b, alpha 0.1"]
    assert list(grouped(found, ["data.alpha"])) == ["alpha 0.1", "alpha 1"]
    with pytest.raises(UsageError, match=r"did you mean 'rule\.name'"):
        grouped(found, ["rule.nam"])
