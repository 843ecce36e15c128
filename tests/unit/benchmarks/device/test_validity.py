"""Rules by which a run of `tessera-bench device` counts, and entries for others to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.device.measure import TOO_SLOW, Bench, device_figures, measure
from benchmarks.device.report.comparison import compare
from benchmarks.device.report.entries import MARKER, entries_page, read_entries
from benchmarks.device.report.lines import headline
from benchmarks.device.report.page import read_page
from benchmarks.device.report.report import report
from benchmarks.device.results import Case, Results, ResultsError, TrialHeat, write_results
from benchmarks.device.trial.machine import look
from benchmarks.device.trial.process import _OtherPrograms
from benchmarks.device.trial.providers import PROVIDERS, backends_with
from benchmarks.device.validity import QUALITY, faults, objections, reached
from tests.unit.benchmarks.device.sample_results import (
    board_with_sensors,
    computer_without_sensors,
    make_case,
)

ROOT = Path(__file__).resolve().parents[4]


def quiet() -> Results:
    """A run that nothing disturbed."""
    results = board_with_sensors()
    cases = tuple(
        replace(
            case,
            heat=replace(case.heat, throttled=False),
            repeat_s=tuple(case.round_s.median * share for share in (1.0, 0.97, 1.04)),
            busy=0.01,
        )
        for case in results.cases
    )
    return replace(
        results,
        complete=True,
        machine=replace(results.machine, load=0.1, model="A board"),
        config=replace(results.config, quick=False, repeats=3),
        cases=cases,
    )


def changed(results: Results, **changes: object) -> Results:
    first: Case = replace(results.cases[0], **changes)  # type: ignore[arg-type]
    return replace(results, cases=(first, *results.cases[1:]))


DISTURBED: dict[str, Callable[[Results], Results]] = {
    "other programs were running": lambda r: replace(r, machine=replace(r.machine, load=9.0)),
    "other programs took more than 10%": lambda r: changed(r, busy=0.2),
    "slowed down in 1 of": lambda r: changed(r, heat=TrialHeat(throttled=True)),
    "more than 10% from their middle": lambda r: changed(
        r, repeat_s=tuple(r.cases[0].round_s.median * share for share in (1.0, 1.0, 1.2))
    ),
    "ended before": lambda r: replace(r, complete=False),
}


def test_run_that_nothing_disturbed_counts() -> None:
    results = quiet()
    assert faults(results) == []
    assert objections(results) == []
    assert not any("Invalid" in line for line in headline(results))
    assert "Invalid" not in report(results, Path("nowhere"))


@pytest.mark.parametrize("words", DISTURBED)
def test_disturbed_run_is_marked_wherever_it_is_shown(words: str) -> None:
    results = DISTURBED[words](quiet())
    [fault] = faults(results)
    assert words in fault
    assert any(line.startswith("Invalid: ") and words in line for line in headline(results))
    assert "> **Invalid.**" in report(results, Path("nowhere"))
    other = replace(quiet(), title="Another")
    notes = compare([other, results]).notes
    assert any(note.startswith("2 is invalid: ") and words in note for note in notes)
    assert not any(note.startswith("1 is invalid") for note in notes)
    assert fault in objections(results)


def test_spread_is_the_largest_distance_from_the_median() -> None:
    case = make_case()
    middle = case.round_s.median
    assert replace(case, repeat_s=(middle,)).spread is None
    assert replace(case, repeat_s=(middle, 0.7 * middle, 1.1 * middle)).spread == pytest.approx(0.3)


def test_quick_and_single_runs_are_no_entries() -> None:
    results = quiet()
    quick = replace(results, config=replace(results.config, quick=True))
    once = replace(results, config=replace(results.config, repeats=1))
    assert objections(quick) == ["it is a --quick run"]
    assert objections(once) == ["it has fewer than 3 repeats of every case"]


def test_goal_is_reached_at_the_first_point_that_is_good_enough() -> None:
    for curve in quiet().curves:
        goal = QUALITY[curve.data]
        good = [point for point in curve.points if point.accuracy >= goal]
        assert reached(curve) == (good[0] if good else None)
    names = {figure.name for figure in device_figures(quiet())}
    hit = [curve for curve in quiet().curves if reached(curve) is not None]
    wanted = {f"device.{c.family}.{c.level * 100:g}.to_quality.seconds" for c in hit}
    assert wanted <= names


def test_providers_are_backends_where_onnxruntime_has_them() -> None:
    assert backends_with(["CPUExecutionProvider"]) == ()
    assert backends_with(["CPUExecutionProvider", "CUDAExecutionProvider"]) == ("onnx-cuda",)
    assert backends_with(PROVIDERS.values()) == tuple(PROVIDERS)


def test_other_programs_share_grows_with_their_work() -> None:
    import subprocess
    import sys

    watch = _OtherPrograms()
    program = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    share = watch.share()
    assert share is not None
    assert 0 < share <= 1


def test_quick_run_out_of_time_says_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that is resumed far beyond its time measures nothing more."""
    results = computer_without_sensors()
    begun = replace(
        results,
        complete=False,
        seconds=1e6,
        cases=results.cases[:1],
        left_out=(),
        curves=(),
        config=replace(results.config, quick=True, learners=("mlp",), levels=(1.0,)),
    )
    *_, last = measure(Bench(tmp_path, look()), begun)
    assert {each.why for each in last.left_out} == {TOO_SLOW}
    assert [curve.failed for curve in last.curves] == [TOO_SLOW]
    assert last.complete


def test_entries_are_lined_up_and_bad_ones_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "boards"
    folder.mkdir()
    write_results(folder / "board.json", quiet(), [])
    page = tmp_path / "page.md"
    page.write_text(f"# Boards\n{MARKER}\nold\n<!-- end -->\n")
    assert main(["boards", str(folder), "--update", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "A board" in text
    fastest = min(
        (c for c in quiet().cases if (c.family, c.level) == ("cnn", 1.0)),
        key=lambda case: case.round_s.median,
    )
    assert f"| board | 100% | {fastest.backend} × {fastest.threads} |" in text
    write_results(folder / "busy.json", changed(quiet(), busy=0.9), [])
    assert main(["boards", str(folder)]) != 0
    assert "busy.json is no entry: other programs took" in capsys.readouterr().err


def test_submitted_results_are_entries_and_the_page_has_them() -> None:
    entries = read_entries(ROOT / "docs/boards")
    page = ROOT / "docs/board-results.md"
    before, after = read_page(page, MARKER)
    assert page.read_text(encoding="utf-8") == f"{before}{entries_page(entries)}\n{after}"


def test_entry_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(ResultsError, match=r"odd\.json"):
        read_entries(tmp_path)
