"""The commands around a run, and its logs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.errors import ConfigError
from coordinator.operate.config import read_config
from coordinator.operate.serve.serving import broker_table, open_run
from coordinator.run.folder import Run
from edge_sdk.program.logs import JsonLines
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.coordinator.service.service_world import TASK, World, Worlds, rounds_config

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def finished(worlds: Worlds) -> Path:
    world = worlds.make(rounds_config(rounds=3))
    world.add("one"), world.add("two", level=lambda _: 0.5)
    world.settle()
    world.stop()
    return world.folder


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    handler = Recorder()
    logger = logging.getLogger("coordinator")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_history_prints_a_line_a_round(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(finished)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["round", "1"], ["round", "2"], ["round", "3"]]
    said = (
        r"all rounds: least coverage of a trained block \d+ \(Γ\*\), least trained in a round "
        r"\d+ regions, \d+ blocks \(S\*\)(, oldest memory \d+ rounds \(τ\))?"
    )
    assert re.fullmatch(said, last)
    assert main(["history", str(finished), "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(entry["devices"]) for entry in entries] == [2, 2, 2]


def test_rollback_goes_back_and_the_run_goes_on(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollback", str(finished), "--to-round", "1", "--yes"]) == 0
    assert main(["history", str(finished)]) == 0
    assert "went back from round 3 to round 1" in capsys.readouterr().out
    world = World(finished, rounds_config(rounds=3))
    one = world.add("one")
    world.add("two")
    world.settle()
    assert world.service.finished
    assert one.opened.keys() == {4, 5}  # numbers are not used twice


def test_rollback_of_a_run_that_is_served_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(finished):
        assert main(["rollback", str(finished), "--to-round", "1"]) == 2
    assert "open in another process" in capsys.readouterr().err
    assert main(["rollback", str(finished), "--to-round", "77"]) == 2
    assert "round 77 has no checkpoint" in capsys.readouterr().err


def test_init_writes_the_example_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["init", str(path)]) == 0
    assert path.read_text() == (ROOT / "examples" / "coordinator" / "run.toml").read_text()
    assert main(["init", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_serve_refuses_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[task]\nname = "t"\nsource = "t.py:f"\n[run]\nfoldr = "x"\n')
    assert main(["serve", "--config", str(path)]) == 2
    assert "did you mean 'folder'" in capsys.readouterr().err


def test_run_of_something_else_is_not_gone_on_with(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    content = (
        '[task]\nname = "{task}"\nsource = "t.py:f"\n[run]\nfolder = "run"\nbatch_size = {n}\n'
    )
    path.write_text(content.format(task=TASK, n=4))
    open_run(read_config(path)).close()
    path.write_text(content.format(task=TASK, n=8))
    with pytest.raises(ConfigError, match="batch_size 4, but the configuration says 8"):
        open_run(read_config(path))
    path.write_text(content.format(task="other", n=4))
    with pytest.raises(ConfigError, match="task 'tiny'"):
        open_run(read_config(path))
    path.write_text(content.format(task=TASK, n=4) + "[inputs]\nrange = [0.0, 5.0]\n")
    with pytest.raises(ConfigError, match="holds a run whose task has other classes or inputs"):
        open_run(read_config(path))


def test_logs_are_json_with_fields(worlds: Worlds, records: list[logging.LogRecord]) -> None:
    world = worlds.make(rounds_config(rounds=1))
    world.add("one"), world.add("two")
    world.settle()
    world.stop()
    lines = [json.loads(JsonLines().format(record)) for record in records]
    assert {line["device"] for line in lines if line.get("event") == "joined"} == {"one", "two"}
    closed = [line for line in lines if line.get("event") == "round_closed"]
    assert [line["round"] for line in closed] == [1]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_broker_table_is_read_again(tmp_path: Path) -> None:
    settings = BrokerSettings(port=1999, username="tessera", password='a"b\\c')
    path = tmp_path / "run.toml"
    head = '[task]\nname = "t"\nsource = "t.py:f"\n[run]\nfolder = "x"\n'
    path.write_text(head + broker_table(settings))
    read = read_config(path).broker
    assert {each.name: getattr(read, each.name) for each in fields(settings)} == asdict(settings)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_run_has_graphs_for_the_precision_that_it_names(tmp_path: Path, precision: str) -> None:
    (tmp_path / "t.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from coordinator.task.task import make_task\n"
        "def f():\n"
        "    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))\n"
        "    return make_task(model, torch.zeros(2, 6), groups=2)\n"
    )
    path = tmp_path / "run.toml"
    path.write_text(
        f'[task]\nname = "t"\nsource = "t.py:f"\n[run]\nfolder = "run"\nprecision = "{precision}"\n'
    )
    with open_run(read_config(path)) as run:
        kinds = {each.kind for each in run.task.manifest.graphs}
    assert ("gradient-fp16" in kinds) == (precision == "fp16")
    assert "gradient" in kinds
