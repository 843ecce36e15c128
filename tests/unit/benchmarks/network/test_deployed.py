"""What `tessera-bench deployed` makes of what it measured, and one small deployment."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.network.deployed.job import LARGE, SMALL
from benchmarks.network.deployed.measure import (
    AGAINST,
    OURS,
    REST,
    CheckoutRow,
    DeployedRow,
    deployed_figures,
    measure_deployed,
    parts_of,
    ticks,
)
from benchmarks.network.deployed.start import (
    CONNECTED,
    HELP,
    NUMPY,
    measure_start,
    start_figures,
    start_rows,
)
from benchmarks.network.stage.processes import MEASURABLE
from benchmarks.network.stage.tasks import prepare_perceptron
from benchmarks.report.figures import FigureError

ROOT = Path(__file__).parents[4]
TINY = replace(SMALL, widths=(8, 8, 4), devices=2, steps=4, rounds=2, warm=1, bare_devices=2)


def checkout(name: str, cpu_s: float) -> CheckoutRow:
    return CheckoutRow(
        checkout=name,
        devices=5,
        cpu_s=cpu_s,
        over_bare=cpu_s / 0.02,
        peak_mb=300.0,
        parts_s={"training": 0.02, REST: 0.01},
        fsyncs=2.0,
    )


def test_figures_compare_with_the_bare_loop_and_the_other_checkout() -> None:
    row = DeployedRow(
        job="l",
        rounds=3,
        devices=10,
        model_mb=100.0,
        wall_s=4.0,
        bare_wall_s=2.0,
        bare_cpu_s=0.02,
        coordinator_cpu_s=1.0,
        broker_cpu_s=0.1,
        checkouts=(checkout(OURS, 0.05), checkout(AGAINST, 0.1)),
    )
    found = {each.name: each for each in deployed_figures(row, LARGE)}
    assert found["deployed.l.cpu_over_bare"].value == pytest.approx(2.5)
    assert found["deployed.l.cpu_over_bare"].met
    assert found["deployed.l.wall_over_bare"].value == pytest.approx(2.0)
    assert found["deployed.l.peak"].target == pytest.approx(3 * 100 + 60)
    assert found["deployed.l.part.training"].value == pytest.approx(1.0)
    assert found["deployed.l.part.the-rest"].value == pytest.approx(0.5)
    assert found["deployed.l.cpu_over_other"].value == pytest.approx(0.5)


def test_parts_are_means_of_rounds_and_the_rest_is_what_is_left() -> None:
    lines = [
        {"cpu_s": 1.0, "parts_s": {"training": 0.5}, "counts": {"fsync": 3}},
        {"cpu_s": 1.5, "parts_s": {"training": 0.7, "link": 0.1}, "counts": {"fsync": 5}},
        {"cpu_s": 2.0, "parts_s": {"training": 0.9, "link": 0.2}, "counts": {"fsync": 7}},
    ]
    parts, fsyncs = parts_of(lines)
    assert parts == pytest.approx({REST: 0.2, "training": 0.2, "link": 0.1})
    assert fsyncs == 2.0
    with pytest.raises(FigureError, match="took part in no round"):
        parts_of(lines[:1])


def test_starts_are_compared_turn_by_turn() -> None:
    spent = {NUMPY: [0.1, 0.2, 0.1], CONNECTED: [0.3, 0.8, 0.5], **dict.fromkeys(HELP, [0.1] * 3)}
    rows = {row.program: row for row in start_rows(spent)}
    assert rows[CONNECTED].over_numpy == pytest.approx(4.0)
    assert rows[CONNECTED].cpu_ms == pytest.approx(500)
    figures = {each.name: each for each in start_figures(list(rows.values()))}
    assert figures["deployed.start.device-connected"].met
    assert "deployed.start.import-numpy" not in figures


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parts", "x"], "unknown part 'x'"),
        (["--rounds", "0"], "must be at least 1"),
        (["--against", "/nowhere"], "no folder edge_sdk"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deployed", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not MEASURABLE, reason="needs /proc")
def test_a_small_job_is_deployed_with_the_code_of_two_checkouts(tmp_path: Path) -> None:
    """Devices write a movement once, whatever else they keep."""
    told: list[str] = []
    task = prepare_perceptron(TINY.widths)
    row = measure_deployed(TINY, task, tmp_path, ROOT, lambda _: lambda: told.append(""))
    assert len(told) == ticks(TINY)
    assert row.rounds == 2
    assert row.wall_s > 0
    assert row.bare_cpu_s > 0
    assert [each.checkout for each in row.checkouts] == [OURS, AGAINST]
    for each in row.checkouts:
        assert each.devices == 1
        assert {"training", "link", "writing", "deciding", REST} <= set(each.parts_s)
        assert each.parts_s["training"] > 0
        assert each.fsyncs >= 2  # the movement: its file and its folder
    json.dumps([figure.value for figure in deployed_figures(row, TINY)])


@pytest.mark.skipif(not MEASURABLE, reason="needs getrusage")
def test_programs_are_started_until_they_are_connected(tmp_path: Path) -> None:
    rows = measure_start(1, tmp_path)
    assert [row.program for row in rows] == [NUMPY, CONNECTED, *HELP]
    assert all(row.cpu_ms > 0 for row in rows)


def test_help_imports_neither_numpy_nor_what_commands_need() -> None:
    code = (
        "import sys\nfrom {module} import make_parser\n"
        "parser = make_parser()\nparser.format_help()\n"
        "print(sorted(sys.modules.keys() & {{'numpy', 'paho', 'msgpack', 'psutil', 'torch',"
        " 'onnxruntime', 'edge_sdk.device.config', 'starlette', 'importlib.metadata'}}))"
    )
    for module in ("edge_sdk.cli", "coordinator.cli", "benchmarks.cli"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(module=module)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert done.stdout.strip() == "[]", module
