"""The tables of the papers: cells that can be run, runs that resume, a page that agrees."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cli import main
from benchmarks.device.report.page import update_page
from benchmarks.fleet.study import Study
from benchmarks.report.figures import Figure
from benchmarks.report.options import UsageError
from benchmarks.studies.papers import running, tables, working
from benchmarks.studies.papers.cell import (
    CellOutcome,
    CellPlace,
    PaperCell,
    PaperClaim,
    PaperTable,
    Ran,
)
from benchmarks.studies.papers.command import hours_sheet
from benchmarks.studies.papers.page import BEGIN, plot_name, render_page, render_table
from benchmarks.studies.papers.record import (
    append_outcome,
    open_runs,
    outcomes_of,
    read_outcomes,
)
from benchmarks.studies.papers.running import own_tests, run_study_cell, study_of, thinned
from benchmarks.studies.papers.tables import all_tables, find_table
from benchmarks.studies.papers.tables.shared import settings
from benchmarks.studies.papers.verdicts import judge
from benchmarks.studies.papers.working import run_all

ROOT = Path(__file__).parents[5]
A, B = CellPlace("", "a", "x"), CellPlace("", "b", "x")
STUDIES = [table for table in all_tables() if table.name not in ("subdismo7", "worth")]


# -- cells ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.name)
def test_table_is_well_formed(table: PaperTable) -> None:
    places = [cell.place for cell in table.cells]
    assert len(set(places)) == len(places)
    assert find_table(table.name) is table
    assert table.seeds >= 3 or not table.folders
    assert table.about
    names = [claim.name for claim in table.claims]
    assert len(set(names)) == len(names)
    for claim in table.claims:
        assert {claim.better, claim.worse} <= set(places), claim
        Figure(f"papers.{table.name}.{claim.name}", 0.0, "points")
    for cell in table.cells:
        assert json.loads(json.dumps(cell.settings)) == cell.settings


@cache
def plan_of(model: str, groups: int, ratios: tuple[float, ...], regions: str) -> Any:
    config = {"model.name": model, "model.groups": groups, "model.ratios": list(ratios)}
    cell = PaperCell(
        place=A,
        settings=settings(config, model_regions=regions, fleet_devices=2, simulation_train=False),
    )
    return Study(study_of(cell, 0)).task.plan


@pytest.mark.parametrize("table", STUDIES, ids=lambda table: table.name)
def test_every_cell_makes_a_run_without_running_it(table: PaperTable) -> None:
    for cell in (*table.cells, *table.quick_cells()):
        if cell.missing:
            continue
        config = study_of(cell, 0)
        model = config.model
        assert model.name is not None
        machine = config.machine(plan_of(model.name, model.groups, model.ratios, model.regions))
        assert machine.local_rule.clip_norm is None
        assert machine.levels[0] == 1
        assert machine.min_devices == config.fleet.devices


def test_tables_have_names_of_their_own_and_an_unknown_one_is_refused() -> None:
    names = [table.name for table in all_tables()]
    assert len(set(names)) == len(names)
    with pytest.raises(UsageError, match="unknown table 'ram9'; --table is one of ram2"):
        find_table("ram9")


# -- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_no_test_image_is_in_training(name: str) -> None:
    folder = Path(os.environ.get("TESSERA_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / name).is_dir():
        pytest.skip(f"real data: no {folder / name}; set TESSERA_DATA to a folder that has {name}")
    dealt: dict[str, PaperCell] = {}
    for table in STUDIES:
        for cell in table.cells:
            if cell.settings["data.name"] == name and cell.settings.get("simulation.train", True):
                data = ("partition", "alpha", "classes", "samples")
                keys = ("fleet.devices", *(f"data.{key}" for key in data))
                dealt[str([cell.settings.get(key) for key in keys])] = cell
    assert dealt
    test: set[bytes] | None = None
    for cell in dealt.values():
        study = Study(study_of(cell, 0), folder)
        assert study.data is not None
        rows = np.concatenate(study.rows)
        most = cell.settings.get("data.samples", len(study.data.train))
        assert len(np.unique(rows)) == len(rows) == most
        images = study.data.train.inputs[0]
        if test is None:
            test = {image.tobytes() for image in study.data.test.inputs[0]}
            assert not any(images[row].tobytes() in test for row in rows)


def test_test_images_are_dealt_out_in_the_proportions_of_training() -> None:
    draws = np.random.default_rng(0)
    labels = draws.integers(0, 3, 900)
    held = [np.repeat([0, 1], [30, 10]), np.repeat([0, 2], [10, 5]), np.repeat([1, 2], [30, 15])]
    parts = own_tests(held, labels, draws)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows) == 900
    for label in range(3):
        total = np.count_nonzero(labels == label)
        shares = np.array([np.count_nonzero(each == label) for each in held], float)
        found = [np.count_nonzero(labels[part] == label) for part in parts]
        np.testing.assert_allclose(found, shares / shares.sum() * total, atol=1)


# -- running -------------------------------------------------------------------------------------

TINY = settings(
    data_name="digits",
    model_name="digits-cnn",
    fleet_devices=4,
    fleet_levels=[1.0, 0.5],
    rule_name="ra-fed",
    mask_name="random",
    run_rounds=3,
    run_steps=2,
    run_learning_rate=0.1,
    simulation_evaluate_every=1,
)


def test_cell_is_measured_on_the_test_set_and_repeats_itself() -> None:
    cell = PaperCell(place=A, settings=TINY)
    ran = run_study_cell(cell, 1, None)
    assert [point[0] for point in ran.curve] == [1, 2, 3]
    assert ran.values["last"] == pytest.approx(ran.curve[-1][2], abs=1e-3)
    assert ran.values["best"] == pytest.approx(max(point[2] for point in ran.curve), abs=1e-3)
    assert 0 < ran.values["noise"] < 1
    assert ran.values["trained"] == ran.values["asked"] == 4
    assert ran.values["time_s"] > 0
    again = run_study_cell(cell, 1, None, target=0.0)
    assert again.curve == ran.curve
    assert again.values["time_s"] == pytest.approx(ran.curve[0][1], abs=1e-3)
    assert "time_s" not in run_study_cell(cell, 1, None, target=101.0).values


def test_curve_is_thinned_and_keeps_its_end() -> None:
    curve = [(at, float(at), 1.0) for at in range(1, 101)]
    thin = thinned(curve)
    assert len(thin) <= running.POINTS
    assert thin[-1] == curve[-1]
    assert thinned(curve[:3]) == curve[:3]


# -- record --------------------------------------------------------------------------------------


def fake(cell: PaperCell, seed: int, _data: Path | None) -> Ran:
    """Give numbers without any training."""
    return Ran(values={"last": cell.settings["score"] + seed, "best": 90.0}, curve=[(1, 2.0, 3.0)])


def tiny_table(**changes: Any) -> PaperTable:
    table = PaperTable(
        name="tiny",
        title="Table 0",
        paper="Nobody",
        about="Made up.",
        cells=(
            PaperCell(place=A, settings={"score": 80.0}, paper=85.0, quick={"score": 70.0}),
            PaperCell(place=B, settings={"score": 75.0}, paper=80.0, spread=0.5),
        ),
        claims=(PaperClaim(name="a-over-b", words="a over b", better=A, worse=B),),
        run=fake,
    )
    return replace(table, **changes)


def finished(place: CellPlace, score: float, *lasts: float) -> list[CellOutcome]:
    return [
        CellOutcome(
            table="tiny",
            place=place,
            seed=seed,
            settings={"score": score},
            values={"last": last, "best": last},
        )
        for seed, last in enumerate(lasts)
    ]


def test_runs_resume_and_a_changed_cell_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, path = tiny_table(), tmp_path / "record.jsonl"
    monkeypatch.setattr(working, "find_table", lambda _: table)
    works = [("tiny", *each) for each in open_runs(table, {}, 3)]
    assert [(cell.place, seed) for _, cell, seed in works[:3]] == [(A, 0), (B, 0), (A, 1)]
    for outcome in run_all(works[:4], None, 1):
        append_outcome(path, outcome)
    with path.open("a") as file:
        file.write('{"table": "ti')
    done = outcomes_of(table, read_outcomes([path]))
    assert [each.values["last"] for each in done[A]] == [80.0, 81.0]
    assert [(cell.place, seed) for cell, seed in open_runs(table, done, 3)] == [(A, 2), (B, 2)]
    changed = replace(table, cells=(replace(table.cells[0], settings={"score": 1.0}),))
    assert outcomes_of(changed, read_outcomes([path])) == {}
    barred = replace(table, cells=(replace(table.cells[0], missing="no such rule"),))
    assert open_runs(barred, {}, 3) == []
    assert [cell.settings for cell in table.quick_cells()] == [{"score": 70.0}]


def test_no_run_begins_after_the_time_is_up() -> None:
    works = [("tiny", *each) for each in open_runs(tiny_table(), {}, 1)]
    assert list(run_all(works, None, 1, ends_s=0.0)) == []


# -- verdicts and page ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "changes", "verdict", "says"),
    [
        ((80, 81, 82), (75, 76, 77.5), {}, "reproduced", "paper +5.0, here +4.8 ± 0.3"),
        ((80, 81, 82), (79, 83, 80), {}, "within the noise", "here +0.3 ± 2.1"),
        ((80, 81), (79.96, 80.96), {}, "within the noise", "here +0.0 ± 0.0"),
        ((80, 80, 80), (82, 82, 83), {}, "not reproduced", "here -2.3 ± 0.6"),
        ((80,), (82,), {}, "not as claimed", "here -2.0, 1 seed:"),
        ((83,), (82,), {}, "as claimed", "here +1.0, 1 seed:"),
        ((80, 80), (82, 82), {"within": 3.0}, "reproduced", "here -2.0 ± 0.0, 2 seeds"),
        ((80, 80), (84, 84), {"within": 3.0}, "not reproduced", "here -4.0 ± 0.0"),
        ((40, 40), (80, 81), {"ratio": True}, "reproduced", "paper 1.06 ×, here 0.50 × ± 0.00"),
        ((), (80,), {}, "not run", "a over b: not run."),
    ],
)
def test_claim_is_judged_seed_by_seed(
    first: tuple[float, ...],
    second: tuple[float, ...],
    changes: Mapping[str, Any],
    verdict: str,
    says: str,
) -> None:
    table = tiny_table()
    done = outcomes_of(table, [*finished(A, 80.0, *first), *finished(B, 75.0, *second)])
    judged = judge(table, replace(table.claims[0], **changes), done)
    assert judged.verdict == verdict
    assert says in judged.words


def test_table_shows_means_and_what_was_not_run() -> None:
    table = tiny_table()
    text = render_table(table, outcomes_of(table, finished(A, 80.0, 80.0, 82.0)))
    assert "| a | 81.0 ± 1.4 | 81.0 ± 1.4 | 85 |" in text
    assert "| b | – | – | 80 ± 0.5 |" in text
    assert "Not run: b, x." in text
    assert "Cells with fewer than 3 seeds: 1 with 2." in text
    barred = replace(table.cells[1], missing="no such rule")
    text = render_table(replace(table, cells=(table.cells[0], barred)), {})
    assert "Not run (no such rule): b, x." in text
    assert "| Nobody: Table 0 | – | – | – | – | – | 1 | 0 of 6 |" in render_page([table], [])


def test_page_of_results_agrees_with_its_record(tmp_path: Path) -> None:
    docs = ROOT / "docs"
    text = (docs / "results.md").read_text(encoding="utf-8")
    copy = tmp_path / "results.md"
    copy.write_text(text, encoding="utf-8")
    update_page(copy, render_page(all_tables(), read_outcomes([docs / "results.jsonl"])), BEGIN)
    assert copy.read_text(encoding="utf-8") == text
    plots = [line.rpartition("(")[2].rstrip(")") for line in text.splitlines() if line[:2] == "!["]
    assert all((docs / name).is_file() for name in plots)


def test_plots_are_drawn_of_what_is_there(tmp_path: Path) -> None:
    found = read_outcomes([ROOT / "docs" / "results.jsonl"])
    for table in all_tables():
        done = outcomes_of(table, found)
        if table.draw is not None and done:
            path = tmp_path / plot_name(table)
            table.draw(table, done, path)
            assert path.stat().st_size > 1000
            return


# -- command -------------------------------------------------------------------------------------


def test_hours_are_those_measured_or_expected() -> None:
    table = tiny_table(expected_s=3600.0)
    assert hours_sheet([table], []).rows[0][2:] == ("6", "0", "6.00", "6.00")
    known = [replace(each, seconds=360.0) for each in finished(A, 80.0, 80.0)]
    assert hours_sheet([table], known).rows[0][2:] == ("6", "1", "0.60", "0.50")
    assert hours_sheet([table], [], quick=True).rows[0][2:] == ("1", "0", "1.00", "1.00")


def test_command_runs_records_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(working, "find_table", lambda _: tiny_table())
    monkeypatch.setattr(tables, "find_table", lambda _: tiny_table())
    monkeypatch.setattr(os, "nice", lambda _: 0)
    record, result = tmp_path / "record.jsonl", tmp_path / "result.json"
    asked = ["papers", "--table", "tiny", "--record", str(record)]
    assert main([*asked, "--seeds", "1", "--json", str(result)]) == 0
    assert "a over b: paper +5.0, here +5.0, 1 seed: **as claimed**." in capsys.readouterr().out
    assert len(read_outcomes([record])) == 2
    written = json.loads(result.read_text())
    assert written["figures"][0]["name"] == "papers.tiny.a-over-b"
    assert main([*asked, "--limit-min", "0"]) == 0
    assert "Not run: 4 runs of tiny." in capsys.readouterr().out
    assert main(["papers", "--table", "tiny", "--quick"]) == 0
    assert "70.0" in capsys.readouterr().out
    assert main([*asked, "--hours"]) == 0
    assert "Nobody: Table 0" in capsys.readouterr().out


def test_command_lists_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "--table", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [table.name for table in all_tables()]


def test_command_says_what_is_missing_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, says in (
        (["--table", "ram9"], "unknown table 'ram9'; --table is one of ram2"),
        (["--table", "ram2"], "data set 'mnist': --data is not given"),
        (["--table", "ram2", "--data", str(tmp_path)], "has no folder mnist"),
        (["--quick", "--update", "x.md"], "leave out --quick"),
    ):
        assert main(["papers", *options, "--record", str(tmp_path / "none")]) == 2
        assert says in capsys.readouterr().err.replace("\n", " ")
