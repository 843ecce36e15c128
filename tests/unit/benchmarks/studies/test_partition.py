"""`tessera-bench partition`: what it counts, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.cli import main


def test_partition_counts_every_sample_and_draws_a_bubble_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, file = tmp_path / "who.svg", tmp_path / "who.json"
    wanted = ["--partition", "labels", "--classes", "3", "--devices", "6", "--seed", "2"]
    assert main(["partition", *wanted, "--plot", str(plot), "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["config"]["classes"] == 3
    counts = run["counts"]
    assert [sum(each > 0 for each in row) for row in counts] == [3] * 6
    assert sum(map(sum, counts)) == 1437  # the training digits
    printed = capsys.readouterr().out
    assert "digits: labels(3), 6 devices" in printed
    assert f"{sum(counts[0]):,}" in printed
    xml = ElementTree.fromstring(plot.read_text())
    points = xml.find(".//{*}g[@id='PathCollection_1']")
    assert points is not None
    assert len(points.findall(".//{*}path")) == 18


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--partition", "key"], "does not say whose samples are whose"),
        (["--quick", "--devices", "200"], "144 samples are too few for 200 devices"),
        (["--alpha", "-1"], "alpha = -1.0: must be above 0"),
        (["--plot", "who.txt"], "--plot must end in one of"),
    ],
)
def test_partition_refuses_what_cannot_be(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", *options]) == 2
    assert says in capsys.readouterr().err
