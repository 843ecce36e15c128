"""`tessera-bench sweep` and `plot`: stopped, killed, resumed; rows, table, curves and pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.cli import main
from benchmarks.fleet.sweep.curves import curves_of, read_results
from benchmarks.fleet.sweep.grid import read_cases
from benchmarks.fleet.sweep.plot import draw_curves
from benchmarks.fleet.sweep.rows import FAILED, FINISHED, SweepRows, read_rows
from benchmarks.fleet.sweep.run import SweepPlaces, run_cases
from benchmarks.fleet.sweep.worker import case_rows
from edge_sdk.program.files import lock_file
from tests.unit.benchmarks.interruption import interrupted
from tests.unit.coordinator.run.test_tensorboard import events
from tests.waiting import until

SWEEP = """
model.name = "mlp"
fleet.devices = 4
rule.name = "ra-fed"
simulation.evaluate_every = 3

[run]
rounds = 4
steps = 2
batch_size = 8
seed = [0, 1]

[[cases]]
name = "good"
data.samples = [64, 128]

[[cases]]
name = "bad"
data.samples = 3
run.seed = 0
"""
UNTRAINED = """
model.name = "mlp"
fleet.devices = 4
run.rounds = 60
run.seed = {seeds}
rule.name = "ra-fed"
simulation.train = false
simulation.evaluate_every = 20
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that nobody stopped."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.toml").write_text(SWEEP)
    board = ["--tensorboard", str(folder / "board"), "--json", str(folder / "sweep.json")]
    assert main(["sweep", str(folder / "sweep.toml"), "--out", str(folder / "out"), *board]) == 0
    return folder


def test_every_evaluated_round_is_a_row_with_every_setting(whole: Path) -> None:
    rows = [row for row in read_rows(whole / "out" / "rows.jsonl") if row["case"] == "good"]
    cases = {case.id: case for case in read_cases(whole / "sweep.toml")}
    assert [(row["data.samples"], row["run.seed"], row["round"]) for row in rows] == [
        (samples, seed, round) for seed in (0, 1) for samples in (64, 128) for round in (3, 4)
    ]
    for row in rows:
        given = cases[row["id"]]
        assert given.row.keys() <= row.keys()
        assert row["run.seed"] == given.config.run.seed
        assert row["data.samples"] == given.config.data.samples
        assert (row["model.name"], row["mask.name"]) == ("mlp", "nested")
        assert 0 <= row["accuracy"] <= 1
        assert row["loss"] > 0
        assert row["state"] == (FINISHED if row["round"] == 4 else "going")
        assert ("test_100" in row) == (row["round"] == 4)
    written = json.loads((whole / "sweep.json").read_text())
    figures = {each["name"]: each["value"] for each in written["figures"]}
    ends = [row["test_100"] for row in rows if row["round"] == 4 and row["data.samples"] == 64]
    assert figures["sweep.failed"] == 1
    assert figures["sweep.1-good-samples-64.accuracy"] == pytest.approx(sum(ends) / 2)


def test_table_has_the_rows_of_the_lines(whole: Path) -> None:
    lines = read_rows(whole / "out" / "rows.jsonl")
    known = [{key: it for key, it in row.items() if it is not None} for row in lines]
    assert read_rows(whole / "out" / "rows.parquet") == known


def test_rounds_are_written_for_tensorboard(whole: Path) -> None:
    folders = sorted((whole / "board").iterdir())
    assert [folder.name.rsplit("-", 1)[0] for folder in folders if "good" in folder.name] == [
        f"good-data.samples-{samples}-seed-{seed}" for samples in (128, 64) for seed in (0, 1)
    ]
    found = {
        (event.step, value.tag): value.simple_value
        for event in events(folders[1])
        for value in event.summary.value
    }
    rows = read_rows(whole / "out" / "rows.jsonl")
    last = next(row for row in rows if row["data.samples"] == 128 and row.get("round") == 4)
    assert {step for step, _ in found} == {1, 2, 3, 4}
    assert found[4, "accuracy/level_100"] == pytest.approx(last["accuracy"])
    assert found[4, "spent/joules"] == pytest.approx(last["joules"])


def test_sweep_goes_on_wherever_it_was_stopped(tmp_path: Path) -> None:
    path, lines = tmp_path / "sweep.toml", tmp_path / "out" / "rows.jsonl"
    path.write_text(UNTRAINED.format(seeds=[0, 1, 2]))
    sweep = ["sweep", str(path), "--out", str(tmp_path / "out")]
    interrupted(sweep, "seed 1", tmp_path)
    stopped = SweepRows(tmp_path / "out")
    (done,) = stopped.ended()
    first = [row for row in stopped.rows if row["id"] == done]
    assert len(first) == 3
    assert len(read_rows(tmp_path / "out" / "rows.parquet")) == len(stopped.rows)

    code = f"import sys; from benchmarks.cli import main; sys.exit(main({sweep}))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        until(lambda: '"run.seed": 2' in lines.read_text())
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(workers)  # they end by themselves
    data = lines.read_bytes()
    lines.write_bytes(data[: data.rindex(b'"round"') + 4])  # killed in the middle of a line

    path.write_text(UNTRAINED.format(seeds=[0, 2, 3]))
    assert main(sweep) == 0
    rows = read_rows(lines)
    assert rows[:3] == first
    for case in read_cases(path):
        expected = [{**case.row, **row} for row in case_rows(case.settings, tmp_path, None)]
        assert [row for row in rows if row["id"] == case.id] == expected


def test_case_whose_process_is_killed_has_failed_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(UNTRAINED.format(seeds=[0, 1]))
    rows, cases = SweepRows(tmp_path), read_cases(path)

    def begin(name: str) -> Callable[[], None]:
        def tick() -> None:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # or a zombie: it is killed already
                    if "seed 0" in name and "benchmarks.fleet.sweep.worker" in child.cmdline():
                        child.kill()

        return tick

    run_cases(cases, rows, SweepPlaces(base=tmp_path), 1, begin)
    assert rows.ended(failed=False) == {cases[1].id}
    (failed,) = [row for row in rows.rows if row["state"] == FAILED]
    assert failed["id"] == cases[0].id
    assert "ended with code -9" in failed["error"]


def test_finished_and_failed_cases_are_not_run_again(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "out" / "rows.jsonl").read_bytes()
    sweep = ["sweep", str(whole / "sweep.toml"), "--out", str(whole / "out")]
    assert main(sweep) == 0
    assert (whole / "out" / "rows.jsonl").read_bytes() == before
    said = capsys.readouterr()
    assert "failed: bad, seed 0: ConfigError: 3 samples are too few for 4 devices" in said.out
    assert "seed 0 …" not in said.err

    handle = lock_file(whole / "out" / ".lock")  # as if another one were at it
    assert main(sweep) == 2
    os.close(handle)
    assert "another sweep is writing" in capsys.readouterr().err


def test_plot_has_a_panel_for_each_axis_and_a_line_for_each_case(
    whole: Path, tmp_path: Path
) -> None:
    rows = read_results(whole / "out")
    drawn = {x: curves_of(rows, x, "accuracy") for x in ("rounds", "hours", "joules", "bytes")}
    figure = draw_curves(drawn, "accuracy")  # type: ignore[arg-type]
    assert [len(axes.lines) for axes in figure.axes] == [2] * 4
    assert [len(axes.collections) for axes in figure.axes] == [2] * 4  # bands over two seeds
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"good, samples {samples} (2 seeds: mean, lowest to highest)" for samples in (64, 128)
    ]
    for results in ("out", "out/rows.parquet"):
        path = tmp_path / "plot.png"
        more = ["--x", "rounds", "--by", "rule.name", "--out", str(path), "--json"]
        told = tmp_path / "plot.json"
        assert main(["plot", str(whole / results), *more, str(told)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
        (curve,) = json.loads(told.read_text())["curves"]["rounds"]
        assert (curve["label"], curve["seeds"], curve["x"]) == ("ra-fed", 4, [3, 4])


def test_plot_reads_a_study_and_refuses_what_it_cannot_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = ["fleet", "--population", "phones", "--rounds", "2", "--model", "mlp"]
    assert main([*study, "--json", str(tmp_path / "study.json")]) == 0
    plot = ["plot", str(tmp_path / "study.json"), "--out", str(tmp_path / "plot.svg")]
    assert main(plot) == 2
    assert "was anything trained?" in capsys.readouterr().err
    written = json.loads((tmp_path / "study.json").read_text())
    for row in written["rounds"]:
        row["accuracy"] = 0.1 * row["round"]
    (tmp_path / "study.json").write_text(json.dumps(written))
    assert main(plot) == 0
    (tmp_path / "study.json").write_text("{}")
    for results, words in (("study.json", "is no result of"), ("gone", "is not there")):
        assert main(["plot", str(tmp_path / results)]) == 2
        assert words in capsys.readouterr().err
