"""`all` and `regress`: figures of several runs, and which of them moved."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cli import main
from benchmarks.report.command import Measured, run_command
from benchmarks.report.figures import Figure, write_json
from benchmarks.report.options import UsageError
from benchmarks.report.suite.change import ALONE, FLOOR, FigureChange
from benchmarks.report.suite.passes import run_measuring
from benchmarks.report.suite.repeats import Repeated, merge, read_repeats

CHECKOUT = """\
import json, sys
from pathlib import Path

def main(argv):
    if argv[0] == "wire":
        sys.exit("wire: there is no broker")
    count = Path(__file__).with_name("count")
    number = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (number + 1))
    figures = [
        dict(name=argv[0] + ".time", value={time} + 0.01 * number, unit="s"),
        dict(name=argv[0] + ".share", value=0.5, unit="×", better="higher"),
    ]
    path = argv[argv.index("--json") + 1]
    Path(path).write_text(json.dumps(dict(schema=1, figures=figures, quick="--quick" in argv)))
    return 0
"""

numbers = st.floats(min_value=1e-3, max_value=1e3)
repeats = st.lists(numbers, min_size=1, max_size=5)


def checkout(folder: Path, time: float) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks/__init__.py").touch()
    (folder / "benchmarks/cli.py").write_text(CHECKOUT.replace("{time}", str(time)))
    return folder


def repeated(values: list[float], *, better: str = "lower", name: str = "a.time") -> Repeated:
    figure = Figure(name, median(values), "s", better="lower" if better == "lower" else "higher")
    return Repeated(figure, tuple(values))


def test_merge_keeps_every_repeat_and_the_median() -> None:
    one, two = Figure("a.time", 3.0, "s", target=2), Figure("a.rest", 1.0, "×")
    passes = [[one, two], [Figure("a.time", 5.0, "s")], [Figure("a.time", 4.0, "s")]]
    time, rest = merge(passes)
    assert (time.figure, time.values) == (Figure("a.time", 4.0, "s", target=2), (3.0, 5.0, 4.0))
    assert (rest.figure, rest.values) == (two, (1.0,))


@given(repeats, repeats, st.sampled_from(["lower", "higher"]))
def test_change_is_news_only_beyond_both_sides(
    old: list[float], new: list[float], better: str
) -> None:
    change = FigureChange(repeated(old, better=better), repeated(new, better=better))
    back = FigureChange(repeated(new, better=better), repeated(old, better=better))
    if change.verdict == "same":
        return
    apart = min(new) > max(old) or max(new) < min(old)
    floor = ALONE if 1 in (len(old), len(new)) else FLOOR
    assert apart
    assert abs(median(new) / median(old) - 1) > floor
    grew = median(new) > median(old)
    assert change.verdict == ("worse" if grew == (better == "lower") else "better")
    assert back.verdict in ("same", "better" if change.verdict == "worse" else "worse")


@given(repeats)
def test_change_of_nothing_is_never_news(values: list[float]) -> None:
    assert FigureChange(repeated(values), repeated(values)).verdict == "same"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1.0, 1.01, 0.99], [1.2, 1.21, 1.19], "worse"),
        ([1.2, 1.21, 1.19], [1.0, 1.01, 0.99], "better"),
        ([1.0, 1.01, 0.99], [1.04, 1.05, 1.03], "same"),  # below the floor
        ([1.0, 1.5, 0.8], [1.2, 1.7, 1.0], "same"),  # the repeats lie further apart
        ([1.0], [1.2], "same"),  # one repeat says nothing of its noise
        ([1.0], [1.3], "worse"),
        ([0.0, 0.0], [1.0, 1.0], "worse"),
    ],
)
def test_verdict_of_a_time(old: list[float], new: list[float], verdict: str) -> None:
    assert FigureChange(repeated(old), repeated(new)).verdict == verdict


def test_regress_of_files_names_what_became_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, time in (("old", 1.0), ("new", 2.0)):
        values = [time, time + 0.01, time - 0.01]
        figures = [Figure("a.time", time, "s"), Figure("a.share", time, "×")]
        data = {"repeats": {"a.time": values, "a.share": values}, "host": "one"}
        write_json(tmp_path / f"{name}.json", figures, data)
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert main(["regress", old, new, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "2 worse" in said
    assert "regress.worse is 2 figures, target 0 figures" in said
    assert "figures compared: 2 (2 worse, 0 better, 0 same within noise)" in said
    assert "left out" not in said
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert {each["name"]: each["verdict"] for each in written["changes"]} == {
        "a.time": "worse",
        "a.share": "worse",
    }


def test_regress_of_two_machines_compares_ratios_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in ("one", "two"):
        figures = [Figure("a.time", 1 + 2 * (host == "two"), "s"), Figure("a.share", 0.5, "×")]
        write_json(tmp_path / f"{host}.json", figures, {"host": host})
    assert main(["regress", str(tmp_path / "one.json"), str(tmp_path / "two.json")]) == 0
    said = capsys.readouterr().out
    assert "figures compared: 1 (0 worse, 0 better, 1 same within noise)" in said
    assert "figures left out: 1 that are not ratios; the files are of two machines" in said


def test_regress_of_a_file_without_machine_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    write_json(old, [Figure("a.time", 1.0, "s")], {})
    write_json(new, [Figure("a.time", 1.0, "s")], {"host": "one"})
    assert main(["regress", str(old), str(new)]) == 2
    assert f"{old} does not say which machine it is of" in capsys.readouterr().err


def test_regress_compares_all_figures_of_one_command_on_one_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    figures = [Figure("a.time", 1.0, "s"), Figure("a.size", 5, "MB"), Figure("a.share", 0.5, "×")]
    options = argparse.Namespace(json=path, quick=False)
    assert run_command("one", lambda _: Measured(figures=figures, shown=[]), options) == 0
    capsys.readouterr()
    assert main(["regress", str(path), str(path)]) == 0
    said = capsys.readouterr().out
    assert "figures compared: 3 (0 worse, 0 better, 3 same within noise)" in said
    assert "left out" not in said


@pytest.mark.parametrize("options", [["--commands", "step"], ["--repeats", "2"], ["--quick"]])
def test_regress_of_files_refuses_what_is_for_checkouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = tmp_path / "one.json"
    write_json(path, [Figure("a.share", 0.5, "×")], {"host": "one"})
    assert main(["regress", str(path), str(path), *options]) == 2
    assert f"{options[0]} says what to measure in two checkouts" in capsys.readouterr().err


def test_regress_of_checkouts_measures_both_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = checkout(tmp_path / "old", 1.0), checkout(tmp_path / "new", 2.0)
    command = ["regress", str(old), str(new), "--commands", "step", "--repeats", "2", "--quick"]
    assert main([*command, "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert written["old_repeats"]["step.time"] == [1.0, 1.01]
    assert written["new_repeats"]["step.time"] == [2.0, 2.01]
    assert "step.time" in capsys.readouterr().out


def test_failed_command_is_named_with_its_last_words(tmp_path: Path) -> None:
    run = run_measuring("wire", quick=True, tree=checkout(tmp_path / "old", 1.0))
    assert run.figures == ()
    assert run.failure == "exit code 1: wire: there is no broker"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": 9, "figures": []}', '{"schema": 1, "figures": [{}]}']
)
def test_file_without_figures_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"odd\.json has no figures"):
        read_repeats(path)


def test_mistakes_on_the_command_line_cost_no_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["all", "--commands", "stepp"]) == 2
    assert "unknown command 'stepp'" in capsys.readouterr().err
    assert main(["regress", str(tmp_path), str(tmp_path / "x.json")]) == 2
    assert "two files, or two checkouts" in capsys.readouterr().err
    assert main(["regress", str(tmp_path), str(tmp_path)]) == 2
    assert "is not a checkout" in capsys.readouterr().err
