"""Boards side by side: who is compared with whom, in which unit, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks.cli import main
from benchmarks.device.report import comparison_plot as compare_plot
from benchmarks.device.report.comparison import (
    BoardComparison,
    boards_sheet,
    case_sheets,
    compare,
    comparison_figures,
    comparison_markdown,
    means_sheet,
)
from benchmarks.device.results import Case, Joules, Results, write_results
from benchmarks.report.options import UsageError
from tests.unit.benchmarks.device.sample_results import (
    board_with_sensors,
    computer_without_sensors,
    make_case,
    modelled_phone,
)


def board(*cases: Case, title: str = "Laptop", steps: int = 20, batch: int = 32) -> Results:
    """Measured, complete, with these cases and no others."""
    results = computer_without_sensors(title=title, cases=cases, curves=())
    config = replace(results.config, steps=steps, batch=batch, quick=False)
    return replace(results, config=config)


def timed(
    train_s: float, threads: int = 1, level: float = 1.0, gross: float | None = None, **others: Any
) -> Case:
    """A case whose step takes a 10th of its round's training, and which peaks at 50 MB.

    All rounds take 9 s besides, which nobody compares.
    """
    case = make_case("cnn", level, threads=threads, **others)
    joules = Joules(gross=gross, provenance=case.round_s.provenance, source="rail")
    return replace(
        case,
        round_s=replace(case.round_s, median=9 + train_s, p90=9 + train_s),
        train_s=replace(case.round_s, median=train_s, p90=train_s),
        step_s=replace(case.step_s, median=train_s / 10, p90=train_s / 10),
        peak_bytes=replace(case.peak_bytes, value=50e6),
        joules=None if gross is None else joules,
    )


def figures(comparison: BoardComparison) -> dict[str, float]:
    return {figure.name: figure.value for figure in comparison_figures(comparison)}


def test_ratios_are_to_the_first_board() -> None:
    comparison = compare(
        [
            board(timed(2.0, gross=8.0), title="a"),
            board(timed(3.0, gross=2.0), title="b"),
            board(timed(1.0), title="c"),
        ]
    )
    assert comparison.work == "training"
    first, second, third = comparison.lines
    assert (first.seconds.ratio, second.seconds.ratio, third.seconds.ratio) == (1, 1.5, 0.5)
    assert first.joules is not None
    assert second.joules is not None
    assert (first.joules.ratio, second.joules.ratio) == (1, 0.25)
    assert third.joules is None
    assert {line.peak_bytes.ratio for line in comparison.lines} == {1}


def test_figures_are_geometric_means_over_shared_cases() -> None:
    first = board(timed(1.0), timed(1.0, level=0.5), timed(1.0, level=0.25))
    second = board(timed(8.0), timed(2.0, level=0.5, gross=3.0), title="b")
    found = figures(compare([first, second]))
    assert found == {"compare.2.seconds": pytest.approx(math.sqrt(8 * 2)), "compare.2.memory": 1}


def test_case_that_the_first_does_not_have_has_no_ratio() -> None:
    comparison = compare(
        [
            board(timed(1.0), title="a"),
            board(timed(2.0), timed(3.0, level=0.5), title="b"),
            board(timed(6.0, level=0.5), title="c"),
        ]
    )
    half = [line for line in comparison.lines if line.level == 0.5]
    assert [(line.board, line.seconds.ratio) for line in half] == [(2, None), (3, None)]
    assert figures(comparison) == {"compare.2.seconds": 2, "compare.2.memory": 1}


def test_each_board_is_taken_with_its_fastest_threads() -> None:
    first = board(timed(4.0, threads=1), timed(2.0, threads=4), title="a")
    second = board(timed(3.0, threads=1), timed(5.0, threads=2), title="b")
    comparison = compare([first, second])
    assert [(line.threads, line.seconds.value) for line in comparison.lines] == [(4, 2), (1, 3)]
    assert "Threads: for each case those that make the board fastest." in comparison.notes
    assert figures(comparison)["compare.2.seconds"] == 1.5


def test_equal_threads_are_compared_where_asked_for() -> None:
    first = board(timed(4.0, threads=1), timed(2.0, threads=4), title="a")
    second = board(timed(3.0, threads=1), title="b")
    comparison = compare([first, second], threads=1)
    assert [(line.threads, line.seconds.value) for line in comparison.lines] == [(1, 4), (1, 3)]
    assert "Threads: 1 on every board." in comparison.notes
    with pytest.raises(UsageError, match="no two of the results have a case with 4 threads"):
        compare([first, second], threads=4)


def test_rounds_of_other_steps_are_compared_by_step() -> None:
    first = board(timed(4.0, gross=40.0), steps=20, title="a")
    second = board(timed(3.0, gross=40.0), steps=10, title="b")
    comparison = compare([first, second])
    assert comparison.work == "step"
    assert [line.seconds.value for line in comparison.lines] == [0.4, 0.3]
    assert [line.joules and line.joules.value for line in comparison.lines] == [2, 4]
    assert figures(comparison)["compare.2.memory"] == 1
    assert any("differ in steps (20, 10): seconds are of a step" in n for n in comparison.notes)
    [sheet] = case_sheets(comparison)
    assert {"ms/step", "mJ/step"} <= set(sheet.columns)
    assert "s of training" not in sheet.columns
    assert sheet.rows[0][4] == "400"


def test_batches_of_other_sizes_are_compared_by_sample_and_memory_is_not() -> None:
    first = board(timed(4.0, gross=64.0), batch=32, title="a")
    second = board(timed(4.0, gross=64.0), batch=16, title="b")
    comparison = compare([first, second])
    assert comparison.work == "sample"
    assert figures(comparison) == {"compare.2.seconds": 2, "compare.2.joules": 2}
    assert [line.joules and line.joules.value for line in comparison.lines] == [0.1, 0.2]
    assert {line.peak_bytes.ratio for line in comparison.lines} == {None}
    assert any("differ in batch (32, 16)" in note for note in comparison.notes)


def test_modelled_numbers_and_their_ratios_are_marked() -> None:
    phone = modelled_phone(cases=(timed(3.0, gross=9.0, provenance="modelled"),))
    comparison = compare([board(timed(2.0, gross=3.0)), phone])
    [sheet] = case_sheets(comparison)
    assert sheet.rows == (
        ("100%", "onnx", "1 Laptop", "1", "2.00", "1.00", "3.00", "1.00", "50.0", "1.00"),
        (
            *("100%", "onnx", "2 Google Pixel 6", "1"),
            *("~3.00", "~1.50", "~9.00", "~3.00", "~50.0", "~1.00"),
        ),
    )
    assert "2 is modelled: no such device was run." in comparison.notes
    # What is measured is marked as well where it is divided by something modelled.
    [sheet] = case_sheets(compare([phone, board(timed(2.0, gross=3.0))]))
    assert sheet.rows[1][4:6] == ("2.00", "~0.667")


def test_notes_tell_what_differs() -> None:
    first = board_with_sensors()
    second = computer_without_sensors(complete=False)
    notes = compare([first, second]).notes
    assert "Versions of numpy differ: 1 has 2.2.6, 2 has 2.4.0." in notes
    assert "2 is incomplete." in notes
    assert "2 is a --quick run." in notes
    third = computer_without_sensors(title="Other laptop")
    assert "2 and 3 are --quick runs." in compare([first, second, third]).notes
    # Of the first: sensor-cnn with two backends, mlp and cnn with torch, four levels each.
    assert "Cases that only one has, left out: 16." in notes
    assert not any("onnxruntime" in note for note in notes)


def test_rounds_are_compared_where_one_has_no_seconds_of_training() -> None:
    untimed = modelled_phone(
        cases=(replace(timed(3.0, gross=1.0, provenance="modelled"), train_s=None),)
    )
    comparison = compare([board(timed(1.0, gross=2.0)), untimed])
    assert comparison.work == "round"
    assert [line.seconds.value for line in comparison.lines] == [10, 12]
    [sheet] = case_sheets(comparison)
    assert "s/round" in sheet.columns
    assert any("a modelled round is its training alone" in note for note in comparison.notes)
    # With training on both sides, seconds mean the same, and joules still do not.
    phone = modelled_phone(cases=(timed(3.0, gross=1.0, provenance="modelled"),))
    comparison = compare([board(timed(1.0, gross=2.0)), phone])
    assert "s of training" in case_sheets(comparison)[0].columns
    assert any(note.startswith("Seconds are of a round's training") for note in comparison.notes)
    assert any(note.startswith("Joules are of all of a measured") for note in comparison.notes)


def test_boards_of_one_title_are_told_apart_by_their_beginning() -> None:
    again = replace(board(timed(2.0)), started="2026-11-05T09:30:00+00:00")
    comparison = compare([board(timed(1.0)), board(timed(1.0), title="b"), again])
    names = ("1 Laptop, 2026-11-02T08:00:00", "2 b", "3 Laptop, 2026-11-05T09:30:00")
    assert comparison.names == names
    assert tuple(row[0] for row in boards_sheet(comparison).rows) == names
    assert tuple(row[2] for row in case_sheets(comparison)[0].rows) == names


def test_what_no_board_knows_has_no_column() -> None:
    comparison = compare([board(timed(1.0)), board(timed(2.0), title="b")])
    [sheet] = case_sheets(comparison)
    assert sheet.columns[4:] == ("s of training", "÷ 1", "peak MB", "÷ 1")
    assert boards_sheet(comparison).columns == ("board", "numbers")
    assert means_sheet(comparison).columns == ("board", "cases", "seconds", "memory")


@pytest.mark.parametrize(("slow", "scale"), [(29.0, "linear"), (31.0, "log")])
def test_all_panels_have_the_scale_that_one_needs(
    slow: float, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(compare_plot, "save", lambda figure, path: figures.append(figure))
    phone = modelled_phone(cases=(timed(slow, gross=2.0, provenance="modelled"),))
    comparison = compare([board(timed(1.0, gross=2.0)), phone])
    compare_plot.write_comparison_plot(comparison, Path("/nowhere"))
    [figure] = figures
    assert [axes.get_yscale() for axes in figure.axes] == [scale, scale]
    assert [bool(axes.patches) for axes in figure.axes] == [scale == "linear"] * 2
    assert figure.get_suptitle().endswith(
        "hatched: modelled" if scale == "linear" else "hollow: modelled"
    )


@pytest.mark.parametrize(("ending", "magic"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_picture_has_the_format_of_its_name(ending: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"c{ending}"
    comparison = compare([board(timed(1.0)), board(timed(2.0), title="b")])
    compare_plot.write_comparison_plot(comparison, path)
    assert path.read_bytes().startswith(magic)


def test_title_with_dollars_is_no_formula(tmp_path: Path) -> None:
    boards = [board(timed(1.0), title=r"A $\foo{$"), board(timed(2.0), title="b")]
    compare_plot.write_comparison_plot(compare(boards), tmp_path / "c.png")
    assert (tmp_path / "c.png").is_file()


def test_families_come_in_the_order_of_the_first_and_large_levels_first() -> None:
    comparison = compare([board_with_sensors(), computer_without_sensors()])
    assert [sheet.title.split(":")[0] for sheet in case_sheets(comparison)] == ["mlp", "cnn"]
    levels = [line.level for line in comparison.lines if line.family == "cnn"]
    assert levels == [1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]


def test_nothing_in_common_is_refused_with_what_each_has() -> None:
    other = computer_without_sensors(cases=(make_case("mlp", 1.0, threads=2),))
    with pytest.raises(UsageError) as error:
        compare([board(timed(1.0)), other])
    assert str(error.value) == (
        "no two of the results have a case in common: number 1 has cnn with 1 threads; "
        "number 2 has mlp with 2 threads. Measure the same families and levels on both"
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three files: with sensors, without, modelled."""
    paths = []
    for make in (board_with_sensors, computer_without_sensors, modelled_phone):
        path = tmp_path / f"{make.__name__}.json"
        write_results(path, make(), [])
        paths.append(str(path))
    return paths


def test_command_writes_tables_data_and_a_picture(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [tmp_path / name for name in ("c.json", "c.md", "c.png")]
    data, page, picture = map(str, outputs)
    assert main(["compare", *files, "--json", data, "--out", page, "--plot", picture]) == 0
    printed = capsys.readouterr().out
    run = json.loads(outputs[0].read_text(encoding="utf-8"))
    assert run["command"] == "compare"
    assert run["work"] == "training"
    assert [each["provenance"] for each in run["boards"]] == ["measured", "measured", "modelled"]
    names = [figure["name"] for figure in run["figures"]]
    assert names == [
        *("compare.2.seconds", "compare.2.memory"),
        *("compare.3.seconds", "compare.3.joules", "compare.3.memory"),
    ]
    comparison = compare([board_with_sensors(), computer_without_sensors(), modelled_phone()])
    assert outputs[1].read_text(encoding="utf-8") == comparison_markdown(comparison)
    assert outputs[2].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert outputs[2].stat().st_size > 8000
    # The terminal has the rows of the page.
    for line in comparison_markdown(comparison).splitlines():
        if line.startswith("| 100%"):
            cells = line.replace("|", " ").split()
            assert any(row.split() == cells for row in printed.splitlines())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{a}"], "give two or more results"),
        (["{a}", "{b}", "{a}"], "number 1 and number 3 are the same results"),
        (["{a}", "{none}"], "none.json is not there"),
        (["{none}", "{none}", "--plot", "c.txt"], "--plot must end in one of .png, .svg, .pdf"),
        (["{a}", "{b}", "--threads", "0"], "--threads must be at least 1"),
        (["{a}", "{b}", "--threads", "99"], "have a case with 99 threads in common"),
        (["{a}", "{b}", "--out", "no/such/folder/x.md"], "directory that exists"),
        (["{a}", "{costs}"], "costs.json: is not what `tessera-bench device` writes"),
    ],
)
def test_command_refuses_what_cannot_be_compared(
    arguments: list[str],
    complaint: str,
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "costs.json").write_text('{"schema": 1, "command": "costs", "figures": []}')
    names = {"a": files[0], "b": files[1]}
    names |= {name: str(tmp_path / f"{name}.json") for name in ("none", "costs")}
    assert main(["compare", *(each.format(**names) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tessera-bench: ")
    assert complaint in error
