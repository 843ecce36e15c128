"""Lists, comparisons and pages of runs, from real folders of runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coordinator.checksums import open_json, seal_json
from coordinator.cli import main
from coordinator.operate.results.comparison import amount, at_equal_cost
from coordinator.operate.results.page import WHOLE_ROUNDS, _few
from coordinator.operate.results.record import read_record
from coordinator.run.folder import HISTORY, START, Run, write_json
from coordinator.run.steering import stopped
from coordinator.service.overview.facts import keep_facts
from coordinator.service.overview.folder import overview_of
from tests.unit.coordinator.service.service_world import Worlds, rounds_config
from tests.unit.coordinator.service.test_service import scored

HOSTILE = '<script>alert("x")</script>&<img src=x onerror=alert(1)>'


def made(worlds: Worlds, folder: str, *accuracies: float) -> Path:
    said = iter(accuracies)
    world = worlds.make(
        rounds_config(rounds=len(accuracies)),
        folder,
        evaluate=lambda _, levels: scored(levels, next(said), 0.1),
    )
    world.add("one"), world.add("two", level=lambda n: None if n == 2 else 0.5)
    world.settle()
    world.stop()
    return world.folder


def rewrite(folder: Path, change: Any) -> None:
    """Change lines of a run's history, as they would be written."""
    path = folder / HISTORY
    lines = [open_json(line) for line in path.read_bytes().splitlines(keepends=True)]
    path.write_bytes(b"".join(seal_json(change(line)) for line in lines))


def with_energy(joules: float | None) -> Any:
    """Lines as a version that measures energy writes them."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        devices = [{**each, "energy_j": joules} for each in line["devices"]]
        return {**line, "seconds": 10.0, "devices": devices}

    return change


def test_run_that_an_operator_changed_is_told_as_it_is_now(worlds: Worlds) -> None:
    folder = made(worlds, "run", 0.2, 0.6)
    write_json(
        folder / START, {"time": 1.0, "settings": {"run.learning_rate": 0.1}, "versions": {}}
    )
    stopped.change(folder, "learning_rate", "0.05", "anna")
    record = read_record(folder)
    assert record.settings["run.learning_rate"] == 0.05
    assert record.news == [(2, "learning_rate 0.1 → 0.05 (anna)")]


def states(folder: Path) -> tuple[str, str]:
    """As `runs` and `status` tell them."""
    return read_record(folder).state, overview_of(folder).status()["state"]


def test_complete_run_that_is_made_longer_is_complete_no_more(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    world.add("one"), world.add("two")
    world.settle()
    world.stop()
    keep_facts(world.folder, world.service.overview.facts)
    assert states(world.folder) == ("finished", "finished")
    stopped.change(world.folder, "learning_rate", "0.05", "anna")
    assert states(world.folder) == ("finished", "finished")
    stopped.lengthen(world.folder, 3, "anna")
    assert states(world.folder) == ("stopped", "stopped")


def test_complete_run_that_is_rolled_back_is_complete_no_more(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    world.add("one"), world.add("two")
    world.settle()
    world.stop()
    keep_facts(world.folder, world.service.overview.facts)
    assert main(["rollback", str(world.folder), "--to-round", "1", "--yes"]) == 0
    assert states(world.folder) == ("stopped", "stopped")


def test_run_that_is_made_longer_as_it_ends_is_complete_no_more(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    world.add("one"), world.add("two")
    world.settle()
    assert "start serve again" in world.service.helm.lengthen(3, "anna")["note"]
    world.stop()
    keep_facts(world.folder, world.service.overview.facts)
    assert states(world.folder) == ("stopped", "stopped")


def test_runs_are_found_and_told(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(worlds, "b", 0.2, 0.6, 0.4)
    (tmp_path / "a").mkdir()
    made(worlds, "a/deep", 0.3)
    (tmp_path / ".hidden").mkdir()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    deep, flat = json.loads(capsys.readouterr().out)
    assert [Path(each["folder"]).name for each in (deep, flat)] == ["deep", "b"]
    assert flat["best"] == {"round": 2, "accuracy": 0.6}
    assert (flat["rounds"], flat["accuracy"], flat["state"]) == (3, 0.4, "stopped")
    assert flat["joules"] is None  # nobody measured any
    assert flat["bytes"] > 0
    assert flat["size"] > 1000
    (tmp_path / "b" / "run.json").write_bytes(b"{}")
    assert main(["runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"b +– +damaged", said)
    assert "run.json is damaged" in said
    assert main(["runs", str(tmp_path / "nowhere")]) == 2


def test_comparison_is_at_equal_cost(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = made(worlds, "short", 0.5, 0.6), made(worlds, "long", 0.3, 0.4, 0.5, 0.9)
    rewrite(short, with_energy(10.0))
    rewrite(long, with_energy(2.0))
    records = [read_record(each) for each in (short, long)]
    assert at_equal_cost(records, "rounds") == (2.0, [0.6, 0.4])
    assert at_equal_cost(records, "joules") == (16.0, [None, 0.9])  # a round of short costs 20 J
    assert main(["compare", str(short), str(long), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["runs"]] == ["short", "long"]
    assert [each["joules"] for each in found["runs"]] == [40.0, 16.0]
    assert found["equal_cost"]["hours"]["accuracies"] == [0.6, 0.4]
    plot = tmp_path / "plot.png"
    command = ["compare", str(short), str(long), "--plot", str(plot), "--against", "joules"]
    assert main(command) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert re.search(r"best accuracy +60\.00% \(round 2\) +90\.00% \(round 4\)", said)
    assert re.search(r"^time +\d+ s +\d+ s$", said, re.MULTILINE)
    assert not re.search(r"^hours", said, re.MULTILINE)
    assert re.search(r"skips +1: as scripted 1 +1: as scripted 1", said)
    assert main([*command[:-3], "plot.gif"]) == 2


def test_comparison_against_a_cost_that_nobody_knows_says_so(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, unknown = made(worlds, "known", 0.5), made(worlds, "unknown", 0.3)
    rewrite(known, with_energy(10.0))
    rewrite(unknown, with_energy(None))
    command = ["compare", str(known), str(unknown), "--plot", str(tmp_path / "plot.png")]
    assert main([*command, "--against", "joules"]) == 0
    said = capsys.readouterr().err
    assert "joules of all devices are not known of unknown: their devices measure none" in said
    assert "the plot leaves them out" in said
    assert main([*command, "--against", "bytes"]) == 0
    assert capsys.readouterr().err == ""


def test_undone_rounds_are_left_out(worlds: Worlds) -> None:
    folder = made(worlds, "run", 0.2, 0.6, 0.4)
    with Run(folder) as run:
        run.rollback(1)
    record = read_record(folder)
    assert [each.round for each in record.costs] == [1]
    assert record.news == [(3, "went back from round 3 to round 1")]


class Elements(HTMLParser):
    """The elements of a page, the texts in it, and everything that could be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.asked: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.asked += [each for each in attrs if each[0] in ("src", "href") or each[0][:2] == "on"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_page_needs_nothing_and_escapes_what_devices_say(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(worlds, "run", 0.2, 0.6, 0.4)

    def hostile(line: dict[str, Any]) -> dict[str, Any]:
        devices = [{**each, "device": HOSTILE, "reason": HOSTILE} for each in line["devices"]]
        return {**line, "devices": devices}

    rewrite(folder, hostile)
    out, again = tmp_path / "run.html", tmp_path / "again.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert main(["report", str(folder), "--out", str(again)]) == 0
    assert out.read_bytes() == again.read_bytes()
    page = Elements()
    page.feed(out.read_text())
    assert HOSTILE in page.texts
    assert not page.asked
    assert not {"script", "img", "link", "iframe", "object"} & set(page.found)
    assert page.found.count("polyline") >= 3  # levels against rounds, hours, bytes
    assert page.found.count("rect") > 5  # blocks
    assert "60.00%" in page.texts
    assert "time" in page.texts
    assert "hours" not in page.texts
    capsys.readouterr()
    assert main(["report", str(folder), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--out", str(out), "--force"]) == 2


@pytest.mark.parametrize("rounds", [1, 60, 61, 90, 91, 468, 10_000])
def test_table_of_a_long_run_shows_its_ends_and_some_rounds_between(rounds: int) -> None:
    lines = [{"round": number} for number in range(1, rounds + 1)]
    found, note = _few(lines)
    numbers = [each["round"] for each in found]
    assert numbers == sorted(set(numbers))
    assert len(numbers) <= WHOLE_ROUNDS
    assert numbers[0] == 1
    assert numbers[-1] == rounds
    if rounds <= WHOLE_ROUNDS:
        assert (len(numbers), note) == (rounds, "")
        return
    assert f"{len(numbers)} of {rounds} rounds" in note
    assert numbers[:15] == list(range(1, 16))
    assert numbers[-15:] == list(range(rounds - 14, rounds + 1))
    (step,) = {b - a for a, b in pairwise(numbers[14:-15])}
    assert numbers[-15] - numbers[-16] <= step


def test_amounts_have_units() -> None:
    said = [amount(n, "bytes") for n in (0, 999, 1500, 2e6, 3e9, 4e15)]
    assert said == ["0 B", "999 B", "1.5 kB", "2.0 MB", "3.0 GB", "4000.0 TB"]
    assert [amount(n, "hours") for n in (None, 0.01, 2.5)] == ["–", "36 s", "2.50 h"]


def test_status_finds_the_same_runs_as_the_list(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b/c/d/e/deep", "memory/run"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        made(worlds, name, 0.3)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    listed = [each["folder"] for each in json.loads(capsys.readouterr().out)]
    assert main(["status", "--all", str(tmp_path), "--json"]) == 0
    assert [each["folder"] for each in json.loads(capsys.readouterr().out)] == listed
    assert len(listed) == 3
