"""What people see of results: terminal, pictures, report. Nothing modelled looks measured."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console

from benchmarks.cli import make_parser
from benchmarks.device.report.lines import accuracy_sheet, print_results
from benchmarks.device.report.plots import PLOTS, why_not, write_plots
from benchmarks.device.report.report import command, report, write_report
from benchmarks.device.results import Joules, LeftOut, Predicted, Results, TrialHeat
from benchmarks.report.sheet import Sheet, number, without_unknown
from tests.unit.benchmarks.device.sample_results import (
    board_with_sensors,
    computer_without_sensors,
    make_case,
    modelled_phone,
)
from tests.waiting import HANGS_S

SAMPLES = (board_with_sensors, computer_without_sensors, modelled_phone)


def printed(results: Results, width: int = 100) -> str:
    console = Console(width=width, legacy_windows=False)
    with console.capture() as captured:
        print_results(results, console)
    return captured.get()


def rows(text: str, *beginning: str) -> list[list[str]]:
    """The cells of the lines that begin with these words, in a terminal's table or Markdown's."""
    split = (line.replace("|", " ").split() for line in text.splitlines())
    return [words for words in split if tuple(words[: len(beginning)]) == beginning]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.00001234, "1.2e-05"),
        (0.0012345, "0.0012"),
        (0.012345, "0.0123"),
        (0.12345, "0.123"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (123.45, "123"),
        (123456, "123456"),
        (1234567, "1.2e+06"),
    ],
)
def test_number_has_three_digits_that_count(value: float | None, text: str) -> None:
    assert number(value) == text
    assert number(value, modelled=True) == ("–" if value is None else "~" + text)


@pytest.mark.parametrize("make", SAMPLES)
def test_printed_tables_fit_a_hundred_columns(make: Any) -> None:
    lines = printed(make()).splitlines()
    assert max(map(len, lines)) <= 100
    # Nothing was folded or cut: a row stands for each case.
    assert sum(" onnx × " in line or " torch × " in line for line in lines) >= len(make().cases)
    assert not any("…" in line for line in lines)


def test_run_without_sensors_fits_eighty_columns() -> None:
    laptop = computer_without_sensors()
    said = Predicted(seconds=0.01, grown_bytes=30e6)
    results = replace(laptop, cases=tuple(replace(case, predicted=said) for case in laptop.cases))
    text = printed(results, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "J/round" not in text
    assert "slowed" not in text
    for page in (text, report(results, Path("/nowhere"))):
        [first, *_] = rows(page, "100%", "onnx", "×", "1")
        assert len(first) == 4 + 8  # two of a step, two of a round, training, memory, two ratios
        assert "–" not in first


def test_column_stays_in_all_tables_where_one_row_of_one_tells_it() -> None:
    told = Sheet(title="a", columns=("x", "m", "n", "k"), rows=(("1", "–", "2", "–"),), texts=2)
    untold = replace(told, title="b", rows=(("–", "–", "–", "–"), ("3", "–", "–", "–")))
    first, second = without_unknown([told, untold])
    assert first.columns == second.columns == ("x", "n")
    assert (first.rows, second.rows) == ((("1", "2"),), (("–", "–"), ("3", "–")))
    assert first.texts == 1
    empty = replace(told, rows=())
    assert without_unknown([empty]) == [empty]
    assert without_unknown([]) == []


def test_row_has_every_number_of_its_case() -> None:
    case = replace(
        make_case("cnn", 0.5, "torch", 4),
        joules=Joules(gross=12.34, net=5.678, provenance="measured", source="rail"),
        heat=TrialHeat(start_c=40.0, highest_c=71.4, throttled=True),
        predicted=Predicted(seconds=0.0375, grown_bytes=69e6),
    )
    case = replace(
        case,
        step_s=replace(case.step_s, median=0.001234, p90=0.002346),
        round_s=replace(case.round_s, median=0.04, p90=0.06),
        train_s=replace(case.round_s, median=0.03, p90=0.06),
        peak_bytes=replace(case.peak_bytes, value=244.5e6),
        grown_bytes=replace(case.grown_bytes, value=34.5e6),
    )
    expected = ["50%", "torch", "×", "4", "1.23", "2.35", "0.0400", "0.0600", "0.0300"]
    expected += ["244"]
    expected += ["12.3", "5.68", "71", "yes", "1.25", "2.00"]
    results = board_with_sensors(cases=(case,), left_out=(), curves=())
    assert rows(printed(results), "50%") == [expected]
    assert rows(report(results, Path("/nowhere")), "50%") == [expected]


def test_measured_joules_are_plain_and_modelled_ones_are_marked() -> None:
    case = make_case("cnn", 1.0)
    joules = Joules(gross=7.5, provenance="modelled", source="profile pi, 5 W")
    results = computer_without_sensors(cases=(replace(case, joules=joules),))
    [row] = rows(printed(results), "100%")
    assert row[10:] == ["~7.50"]
    assert [cell for cell in row if cell.startswith("~")] == ["~7.50"]
    assert "modelled: energy (profile pi, 5 W)" in printed(results)


def test_every_number_of_modelled_results_is_marked() -> None:
    phone = modelled_phone()
    cases = [
        replace(
            case,
            step_s=replace(case.step_s, samples=0),
            round_s=replace(case.round_s, samples=0),
        )
        for case in phone.cases
    ]
    text = printed(replace(phone, cases=tuple(cases)))
    assert "p90" not in text  # which nothing modelled has
    for level in ("100%", "75%", "50%", "25%"):
        [row] = rows(text, level)
        assert [cell[0] for cell in row[4:]] == ["~"] * 5
    assert "a modelled round is its training alone" in " ".join(text.split())
    assert "with fsync" not in text
    assert "No such device was run" in text
    assert "counted: bytes" in text


def test_legend_tells_what_a_measured_round_is_besides_training() -> None:
    for text in (printed(board_with_sensors()), report(board_with_sensors(), Path("/nowhere"))):
        words = " ".join(text.split())
        assert "the rest of a round unpacks the model, encodes the movement and writes it" in words
        assert "a modelled round" not in words


def test_energy_that_is_not_known_has_its_reason() -> None:
    text = " ".join(printed(computer_without_sensors()).split())
    assert (
        "not known: energy: no sensor tells the power, and a profile's watts (--board) count only "
        "with as many threads as the board has cores"
    ) in text
    phone = modelled_phone()
    first, *others = phone.cases
    text = " ".join(printed(replace(phone, cases=(replace(first, joules=None), *others))).split())
    assert "not known: energy (1 of the cases): a profile's watts count only with" in text
    assert "not known: energy" not in printed(phone)


@pytest.mark.parametrize(
    ("learners", "failed", "reason"),
    [
        ((), None, "none of mlp and cnn takes samples of faces"),
        (("mlp",), None, "the run ended before any family learned"),
        (("mlp",), "no memory", "every training failed"),
    ],
)
def test_accuracy_that_is_not_there_has_its_reason(
    learners: tuple[str, ...], failed: str | None, reason: str
) -> None:
    laptop = computer_without_sensors()
    [curve] = laptop.curves
    results = replace(
        laptop,
        config=replace(laptop.config, data="faces", learners=learners),
        curves=() if failed is None else (replace(curve, points=(), failed=failed),),
    )
    text, page = printed(results), report(results, Path("/nowhere"))
    assert f"no accuracy: {reason}" in text
    assert f"- no accuracy: {reason}" in page
    assert f"No picture (accuracy): {reason}." in page
    assert (f"no accuracy of mlp at 100%: {failed}" in text) == (failed is not None)
    assert "with --quick" not in text


def test_quick_run_says_that_one_family_learns() -> None:
    laptop = computer_without_sensors()
    said = "accuracy of mlp alone: with --quick only the first family learns that takes samples of"
    assert said in " ".join(printed(laptop).split())
    assert said in report(laptop, Path("/nowhere"))
    assert said not in " ".join(
        printed(replace(laptop, config=replace(laptop.config, quick=False))).split()
    )


def test_ratio_to_something_modelled_is_no_prediction() -> None:
    phone = modelled_phone()
    said = Predicted(seconds=1.0, grown_bytes=1.0)
    results = replace(phone, cases=tuple(replace(case, predicted=said) for case in phone.cases))
    assert printed(results) == printed(phone)
    assert why_not(results, "predicted") is not None


def test_bytes_are_given_in_fp32_and_the_smallest_encoding() -> None:
    [row] = rows(printed(modelled_phone()), "cnn", "100%")
    assert row == ["cnn", "100%", "200,000", "800", "800", "10.0", "top-k:0.01+zstd"]


def test_left_out_cases_are_grouped_by_reason() -> None:
    lines = printed(board_with_sensors()).splitlines()
    assert "left out: cnn 100% torch × 1, cnn 75% torch × 1: asked to stop" in lines
    assert "left out: mlp 100% torch × 2: needs 9 GB" in lines


def test_machine_is_told_in_one_line() -> None:
    text = " ".join(printed(board_with_sensors()).split())
    assert (
        "machine: NVIDIA Jetson Orin Nano Developer Kit; power mode 15W; clocks 6 × 1510 MHz, "
        "governor performance, pinned; cooling fan; fed by mains; power sensor VDD_IN, read at "
        "20 Hz; idle 3.02 W"
    ) in text
    assert "machine: model not known; power mode –; clocks –" in printed(computer_without_sensors())


def test_incomplete_run_says_so_at_the_top() -> None:
    results = board_with_sensors(complete=False)
    assert printed(results).splitlines()[1].startswith("Incomplete: the run ended early")
    text = report(results, Path("/nowhere"))
    assert text.index("> **Incomplete.**") < text.index("## ")
    assert "Incomplete" not in report(board_with_sensors(), Path("/nowhere"))


def test_foreign_texts_neither_mark_up_nor_control() -> None:
    title = "[/red] \x1b[2J | <b>\nnext"
    left = LeftOut(family="x", level=1.0, backend="onnx", threads=1, why="[bold]\x07|")
    results = computer_without_sensors(title=title, left_out=(left,))
    results = replace(results, cases=(replace(results.cases[0], family="[/x]|\x1b"),))
    text = printed(results)
    assert "[/red]" in text
    assert "\x1b" not in text.replace("\x1b[", "")  # rich's own styles, if any
    assert "\x1b[2J" not in text
    page = report(results, Path("/nowhere"))
    assert "# \\[/red\\]  \\[2J \\| &lt;b> next: what a level costs" in page.splitlines()
    assert "\x1b" not in page


def test_sheet_is_the_same_in_a_terminal_and_in_markdown() -> None:
    sheet = Sheet(title="T", columns=("a\nb", "\nn"), rows=(("x|y", "1"), ("z", "~20")))
    assert sheet.markdown().splitlines() == [
        "| a b | n |",
        "| --- | --: |",
        "| x\\|y | 1 |",
        "| z | ~20 |",
    ]
    console = Console(width=40)
    with console.capture() as captured:
        sheet.print(console)
    assert [line.split() for line in captured.get().splitlines()[-3:-1]] == [
        ["x|y", "1"],
        ["z", "~20"],
    ]


def test_narrow_terminal_cuts_words_and_no_numbers() -> None:
    words = "a very long name of a very long board"
    sheet = Sheet(title="T", columns=("name", "n"), rows=((words, "123456"),))
    for width, cut in ((24, "a very long na…"), (10, "a very long…")):
        console = Console(width=width, force_terminal=True, color_system=None)
        with console.capture() as captured:
            sheet.print(console)
        assert captured.get().splitlines()[-2].rstrip() == f" {cut} 123456"


def test_file_has_long_lines_and_nothing_cut() -> None:
    words = "a very long name of a very long board"
    sheet = Sheet(title="T", columns=("name", "n"), rows=((words, "123456"),))
    console = Console(width=20, force_terminal=False)
    with console.capture() as captured:
        sheet.print(console)
    assert f"{words} 123456" in captured.get()


@pytest.mark.parametrize("make", SAMPLES)
def test_report_is_the_same_for_the_same_results(make: Any, tmp_path: Path) -> None:
    path = write_report(make(), tmp_path)
    assert path == tmp_path / "report.md"
    assert path.read_text(encoding="utf-8") == report(make(), tmp_path)


def test_report_of_modelled_results_says_so_before_anything_else() -> None:
    lines = report(modelled_phone(), Path("/nowhere")).splitlines()
    assert lines[:3] == [
        "# Google Pixel 6: what a level costs",
        "",
        "> **Modelled.** No such device was run: every number is modelled from a profile, or "
        "counted; accuracies are those of trainings on another machine.",
    ]
    assert "Modelled from profile `pixel_6`, on 2026-11-01T12:00:00+00:00." in lines[4]


@pytest.mark.parametrize("modelled", [False, True])
def test_accuracy_of_every_level_is_a_number_too(modelled: bool) -> None:
    results = board_with_sensors()
    curves = [curve for curve in results.curves if curve.points]
    assert curves
    if modelled:
        kind: Any = "modelled"
        of_profile = [replace(each, provenance=kind, joules_provenance=kind) for each in curves]
        results = modelled_phone(curves=tuple(of_profile))
    sheet = accuracy_sheet(results)
    assert sheet.markdown() in report(results, Path("/nowhere"))
    for curve, row in zip(curves, sheet.rows, strict=True):
        last = curve.points[-1]
        assert row[:4] == (
            curve.family,
            f"{curve.level:.0%}",
            str(last.round),
            f"{100 * last.accuracy:.1f}",
        )
        assert all(cell.startswith("~") for cell in row[4:7]) == modelled


def test_report_tells_what_the_numbers_hold_for() -> None:
    text = report(board_with_sensors(), Path("/nowhere"))
    for row in (
        "| power mode | 15W |",
        "| clocks | 6 × 1510 MHz, governor performance, pinned |",
        "| cooling | fan |",
        "| power sensor | VDD_IN, read at 20 Hz |",
        "| idle | 3.02 W |",
        "| onnxruntime | 1.23.2 |",
        "| cnn | 100% | 200,000 | 800 / 800 | 400 / 400 | 200 | 10.0 |",
        "- measured: seconds, memory and energy (rail VDD_IN, read at 20 Hz)",
        "- mlp 100% torch × 2: needs 9 GB",
    ):
        assert row in text.splitlines()


def test_report_names_the_median_and_the_worst_prediction() -> None:
    ratios = {1.0: 1.5, 0.75: 0.9, 0.5: 1.2}
    cases = []
    for level, ratio in ratios.items():
        case = make_case("cnn", level)
        assert case.train_s is not None
        said = Predicted(
            seconds=ratio * case.train_s.median, grown_bytes=2 * case.grown_bytes.value
        )
        cases.append(replace(case, predicted=said))
    cases.append(make_case("cnn", 0.25))
    text = report(computer_without_sensors(cases=tuple(cases)), Path("/nowhere"))
    assert (
        "Seconds of a round: the median error of 3 predictions is 20%; the worst, cnn at 100% on "
        "onnx × 1, is 1.50 times what was measured."
    ) in text
    assert "Memory a round adds: the median error of 3 predictions is 100%" in text


def test_report_says_why_there_is_no_picture(tmp_path: Path) -> None:
    text = report(computer_without_sensors(), tmp_path)
    assert "No picture (energy): no joules are known: no sensor tells the power" in text
    assert "No picture (predicted): nothing was both predicted and measured." in text
    assert "![" not in text  # nobody drew any


def test_command_repeats_what_was_asked_for() -> None:
    assert command(computer_without_sensors()) == (
        "tessera-bench device --families mlp,cnn --levels 1,0.75,0.5,0.25 --backends onnx "
        "--threads 1,2 --repeats 1 --batch 32 --steps 20 --quick"
    )
    assert command(modelled_phone()) == (
        "tessera-bench device --emulate pixel_6 --families cnn --levels 1,0.75,0.5,0.25 "
        "--backends onnx --threads 8 --batch 32 --steps 20"
    )
    own = modelled_phone()
    own = replace(own, machine=replace(own.machine, board="my_phone"))
    assert " --emulate my_phone.toml " in command(own)


def test_command_is_one_that_exists() -> None:
    for make in SAMPLES:
        words = command(make()).split()[1:]
        assert make_parser().parse_args(words).steps == 20


def test_results_of_nothing_are_shown_as_nothing(tmp_path: Path) -> None:
    results = computer_without_sensors(cases=(), curves=(), complete=False)
    assert write_plots(results, tmp_path) == {}
    assert "after 0 cases" in printed(results)
    assert {why_not(results, name) for name in PLOTS} >= {"no case was measured"}
    assert "Cases: 0; left out: 0." in report(results, tmp_path)


def is_png(path: Path) -> bool:
    content = path.read_bytes()
    return content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR" and len(content) > 8000


def test_pictures_are_drawn_and_shown_in_the_report(tmp_path: Path) -> None:
    board = board_with_sensors()
    results = replace(
        board,
        cases=tuple(case for case in board.cases if case.family == "cnn"),
        curves=board.curves[:2],
    )
    results = replace(results, title=r"A board for $5 or \$6, $\foo{$")
    paths = write_plots(results, tmp_path)
    assert paths == {name: tmp_path / f"{name}.png" for name in PLOTS}
    assert all(map(is_png, paths.values()))
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", report(results, tmp_path))
    assert shown == [path.name for path in paths.values()]


def test_picture_of_another_run_is_not_shown(tmp_path: Path) -> None:
    results = replace(computer_without_sensors(), curves=())
    for name in PLOTS:
        (tmp_path / f"{name}.png").write_bytes(b"old")
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", report(results, tmp_path))
    assert shown == ["time.png", "memory.png", "bytes.png"]


def drawn(results: Results, name: str, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """A picture that is not written."""
    from benchmarks.device.report import plots

    found: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure))
    PLOTS[name][0](results, Path("/nowhere"))
    [figure] = found
    return figure


def drawn_texts(results: Results, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All words of a picture, without drawing it."""
    import matplotlib.text

    figure = drawn(results, name, monkeypatch)
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_series_and_families_without_joules_leave_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    phone = modelled_phone()
    alone = tuple(make_case("cnn", case.level, provenance="modelled") for case in phone.cases)
    other = make_case("mlp", 1.0, threads=8, provenance="modelled")
    results = replace(phone, cases=(*phone.cases, *alone, other))
    figure = drawn(results, "energy", monkeypatch)
    [axes] = figure.axes
    assert axes.get_legend_handles_labels()[1] == ["onnx × 8"]
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_width()]
    assert len(bars) == len(phone.cases)
    for place, bar in enumerate(bars):  # each in the middle of its tick
        assert bar.get_x() + bar.get_width() / 2 == pytest.approx(place)


def test_net_bar_is_as_wide_as_its_outline(monkeypatch: pytest.MonkeyPatch) -> None:
    for axes in drawn(board_with_sensors(), "energy", monkeypatch).axes:
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_width()]
        assert len({(round(bar.get_width(), 9), bar.get_linewidth()) for bar in bars}) == 1


@pytest.mark.parametrize("name", sorted(PLOTS))
def test_panels_have_one_scale_and_bars_begin_at_zero(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels = drawn(board_with_sensors(), name, monkeypatch).axes
    [scale] = {axes.get_yscale() for axes in panels}
    bars = [bar for axes in panels for bar in axes.patches if isinstance(bar, Rectangle)]
    if name in ("time", "energy", "memory"):
        assert scale == "linear"
        assert {bar.get_y() for bar in bars} == {0}
    elif name == "bytes":
        assert scale == "log"
        assert not bars


def test_pictures_say_what_is_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    phone = modelled_phone()
    assert "Google Pixel 6\ntime of a round (median), modelled" in drawn_texts(
        phone, "time", monkeypatch
    )
    assert "Google Pixel 6\nenergy of a round (gross), modelled" in drawn_texts(
        phone, "energy", monkeypatch
    )
    assert "Google Pixel 6\nmemory of the process, modelled" in drawn_texts(
        phone, "memory", monkeypatch
    )
    board = board_with_sensors()
    [first, *others] = board.cases
    assert first.joules is not None
    mixed = replace(first, joules=replace(first.joules, provenance="modelled"))
    assert (
        "Jetson Orin Nano\nenergy of a round (outline: gross, filled: net of idle), partly modelled"
    ) in drawn_texts(replace(board, cases=(mixed, *others)), "energy", monkeypatch)


def test_accuracy_is_against_joules_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "spent in training, J" in drawn_texts(board_with_sensors(), "accuracy", monkeypatch)
    laptop = drawn_texts(computer_without_sensors(), "accuracy", monkeypatch)
    assert "spent in training, s (joules are not known)" in laptop


def test_results_are_shown_without_torch(tmp_path: Path) -> None:
    code = """
import sys
for name in ("torch", "onnx", "sklearn", "onnxruntime", "pyplot"):
    sys.modules[name] = None
import benchmarks.device.report.comparison, benchmarks.device.report.report
import benchmarks.device.commands.compare
assert not {"matplotlib", "rich", "coordinator"} & set(sys.modules), "heavy imports at the top"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS_S)
