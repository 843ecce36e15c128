"""Availability traces: what a file says is what devices do, and what is wrong is named."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import ConfigError
from coordinator.simulate.fleet.trace import parse_trace, read_trace


def test_intervals_of_a_device_are_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("# who,from,to\nb,0,10\na,5,7.5\n\nb, 20 , 30  # charging\na,8,9\n")
    trace = read_trace(path)
    assert len(trace) == 2
    assert list(trace.intervals(0)) == [(0, 10), (20, 30)]
    assert list(trace.intervals(1)) == [(5, 7.5), (8, 9)]
    assert list(trace.intervals(2)) == list(trace.intervals(0))


def test_trace_with_a_period_comes_again() -> None:
    trace = parse_trace(["a,0,10", "a,50,60"], repeat_s=100)
    found = list(islice(trace.intervals(7), 5))
    assert found == [(0, 10), (50, 60), (100, 110), (150, 160), (200, 210)]


@given(
    st.lists(st.lists(st.integers(1, 50), max_size=6).map(lambda gaps: gaps[: len(gaps) // 2 * 2]))
)
def test_written_intervals_are_read_back(gaps: list[list[int]]) -> None:
    expected = []
    for each in gaps:
        times, now = [], 0
        for gap in each:
            now += gap
            times.append(now)
        expected.append(list(zip(times[::2], times[1::2], strict=True)))
    lines = [f"d{n},{a},{b}" for n, some in enumerate(expected) for a, b in some]
    kept = [some for some in expected if some]
    if not kept:
        with pytest.raises(ConfigError, match="no interval"):
            parse_trace(lines)
        return
    trace = parse_trace(lines)
    assert [list(trace.intervals(n)) for n in range(len(trace))] == kept


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a,5,5", "to_s after from_s"),
        ("a,-1,5", "seconds from 0"),
        ("a,1,inf", "no interval"),
        ("a,1,nan", "no interval"),
        ("a;1;2", "no interval"),
        ("a,1", "no interval"),
        (",1,2", "no interval"),
        ("a,1,2,3", "no interval"),
        ("a,x,2", "no interval"),
        ("b,3,9", "sort its lines"),
    ],
)
def test_wrong_line_is_named(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"t.csv:2: .*{words}"):
        parse_trace(["b,1,4", line], where="t.csv")


def test_interval_after_the_period_is_refused() -> None:
    with pytest.raises(ConfigError, match="repeat_s"):
        parse_trace(["a,0,200"], repeat_s=100)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere.csv")
