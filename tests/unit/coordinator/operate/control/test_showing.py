"""`status` and `devices`: of runs that are served, and of those that are not."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli import main
from coordinator.operate.control.overview import overview_commands
from coordinator.operate.control.showing import NOBODY, NONE_FITS
from coordinator.operate.control.tables import device_page, runs_table, status_table
from coordinator.service.overview.facts import keep_facts
from coordinator.service.overview.rows import COLUMNS
from edge_sdk.program.control import MAX_LINE_BYTES, ControlSocket, ask_run
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import Bid
from tests.unit.coordinator.service.service_world import World, Worlds, rounds_config
from tests.waiting import HANGS_S


@contextmanager
def served(world: World) -> Iterator[None]:
    """The run's socket, as `serve` opens it."""
    control = ControlSocket(world.folder, overview_commands(world.service.overview))
    control.start()
    try:
        yield
    finally:
        control.close()


@pytest.fixture
def world(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run in its second round, with a device that trains, one that skips, and one that left."""
    monkeypatch.setenv("COLUMNS", "80")
    made = worlds.make(rounds_config(rounds=9))
    for name in ("one", "gone"):
        made.add(name, sends=name == "gone")
    two = made.add("two", level=lambda number: 0.5 if number == 1 else 1.0)
    made.settle()
    made.devices[0].send(1)
    run = made.run.about.run
    why = "skip: battery 20 % < 30 %"
    two.tell(Bid(device="two", round=2, level=None, reason=why, code="battery", run=run))
    told = Condition(
        device="two", battery=0.2, charging=True, temperature_c=41.4, labels={"site": "berlin"}
    )
    two.tell(told)
    made.settle()
    made.leave(made.devices[1])
    made.settle()
    return made


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_status_says_what_the_run_does(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with served(world):
        world.wait(1.5)
        text = shown(capsys, "status", world.folder)
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "state      running: collecting movements",
        "round      2 (1 of 9 committed)",
        "waits for  round 2: movements of one",
        "devices    2 of 3 here, 1 training",
        "skips      1 × battery",
        "broker     connected",
    ):
        assert words in text, text


def test_devices_say_why_they_skip(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with served(world):
        text = shown(capsys, "devices", world.folder)
    assert max(map(len, text.splitlines())) <= 80
    (line,) = [each for each in text.splitlines() if each.startswith("two")]
    for words in ("skipped", "20% +", "41°C", "skip: battery 20 % < 30 %"):
        assert words in line
    (line,) = [each for each in text.splitlines() if each.startswith("gone")]
    assert "offline" in line
    assert "last answered: " in text
    assert "1 trained, 0 skipped" in text


def test_wide_terminal_has_a_line_for_each_device(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with served(world):
        text = shown(capsys, "devices", world.folder)
    assert len(text.splitlines()) == 4
    assert "t/s/l/r" in text


def test_one_device_is_shown_in_full(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with served(world):
        text = shown(capsys, "devices", world.folder, "two")
    for words in ("labels        site=berlin", "skipped: skip: battery 20 % < 30 %", "counted"):
        assert words in text


def test_filters_and_json(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with served(world):
        found = shown(
            capsys,
            *("devices", world.folder, "--filter", "battery<0.3", "--filter", "state=skipped"),
            *("--filter", "label.site=berlin", "--sort=-trained", "--json"),
        )
    (row,) = json.loads(found)
    assert set(row) == set(COLUMNS)
    assert row["device"] == "two"


def test_nobody_is_said_so(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with served(world):
        text = shown(capsys, "devices", world.folder, "--filter", "battery>0.99")
    assert text == f"{NONE_FITS}\n"


def test_run_without_devices_is_told_from_filters_that_none_fits(
    worlds: Worlds, capsys: pytest.CaptureFixture[str]
) -> None:
    world = worlds.make(rounds_config())
    assert shown(capsys, "devices", world.folder, "--filter", "battery>0.9") == f"{NOBODY}\n"


def test_runs_are_listed_with_task_and_folder_in_full() -> None:
    console = Console(width=80, file=io.StringIO())
    devices = {"present": 12, "known": 12}
    rows = [
        {
            "task": f"digits-with-a-rather-long-name-{name}",
            "folder": f"/srv/runs/berlin/{name}/run",
            "state": "running",
            "round": 1234,
            "committed": 1230,
            "rounds": 5000,
            "accuracy": 0.9123,
            "devices": devices,
            "waits_for": f"round 1235: movements of {name} and many other devices",
        }
        for name in ("one", "two")
    ]
    console.print(runs_table(rows, top=Path("/srv/runs"), width=80))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for words in ("berlin/one/run", "berlin/two/run", "1230 of 5000", "91.23%", "12/12"):
        assert words in text
    joined = "".join("".join(line[:20].split()) for line in lines)
    assert joined.count("digits-with-a-rather") == 2


def printed(what: Any) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("number", "committed", "words"),
    [
        (15, 15, "round       15 (15 of 15 committed)"),
        (16, 15, "round       16 (15 of 15 committed; void and undone rounds do not count)"),
        (7, 4, "round       7 (4 of 15 committed; void and undone rounds do not count)"),
    ],
)
def test_void_rounds_have_numbers_and_do_not_count(
    world: World, number: int, committed: int, words: str
) -> None:
    status = world.service.overview.status()
    status |= {"round": number, "rounds": 15, "committed": committed}
    assert " ".join(words.split()) in " ".join(printed(status_table(status)).split())


def test_a_paused_run_waits_for_resume(world: World) -> None:
    status = world.service.overview.status()
    words = "paused by root since 2026-11-18 21:46 UTC"
    status |= {"state": "paused", "waits_for": words, "paused": {"by": "root", "time": 0.0}}
    assert f"`resume` ({words})" in printed(status_table(status))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "2 rounds, 0 s"),
        (0.004, "2 rounds, under 0.01 s"),
        (0.041, "2 rounds, 0.04 s"),
        (3.21, "2 rounds, 3.2 s"),
        (75.4, "2 rounds, 75 s"),
    ],
)
def test_seconds_of_training_are_not_rounded_away(world: World, seconds: float, words: str) -> None:
    device = world.service.overview.device("gone") | {"trained": 2, "train_s": seconds}
    assert words in printed(device_page(device, now=0.0, rounds=0))


def test_accuracy_names_the_level_of_each_number(world: World) -> None:
    status = world.service.overview.status()
    status |= {"accuracy": 0.7806, "best": {"accuracy": 0.7889, "level": 0.75, "round": 3}}
    console = Console(width=100, file=io.StringIO())
    console.print(status_table(status))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "78.06% (level 100%); best 78.89% (level 75%, round 3)" in text


def test_watching_on_a_terminal_ends_with_q(world: World) -> None:
    master, slave = pty.openpty()
    command = "from coordinator.cli import main; raise SystemExit(main())"
    arguments = [sys.executable, "-c", command, "status", str(world.folder), "--watch"]
    with subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave) as watching:
        os.close(slave)
        while b"tiny" not in os.read(master, 65536):
            pass
        os.write(master, b"q")
        with suppress(OSError):  # Linux ends a terminal that nobody has by an error
            while os.read(master, 65536):
                pass
        assert watching.wait(HANGS_S) == 0
    os.close(master)


def test_mistakes_are_explained(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", str(world.folder), "--filter", "batery<1"]) == 2
    assert "did you mean 'battery'" in capsys.readouterr().err
    assert main(["devices", str(world.folder), "twoo"]) == 2
    assert "did you mean 'two'" in capsys.readouterr().err
    assert main(["devices", str(world.folder), "two", "--sort", "battery"]) == 2
    assert "leave out the name" in capsys.readouterr().err
    assert main(["status", str(world.folder.parent)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


def test_stopped_run_is_read_from_its_folder(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_facts(world.folder, world.service.overview.facts)
    world.stop()
    text = shown(capsys, "status", world.folder)
    assert "state    stopped" in text
    assert "round    2 (1 of 9 committed)" in text
    assert "offline" in shown(capsys, "devices", world.folder)
    assert "counted" in shown(capsys, "devices", world.folder, "two")


def test_all_runs_of_a_folder_are_listed(
    world: World,
    worlds: Worlds,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (world.folder.parent / "more").mkdir()
    other = worlds.make(rounds_config(), folder="more/other")
    other.stop()
    top = world.folder.parent
    found = json.loads(shown(capsys, "status", "--all", top, "--json"))
    assert [each["folder"] for each in found] == [str(top / "more/other"), str(world.folder)]
    assert len(shown(capsys, "status", "--all", top).splitlines()) == 3
    (top / "more" / "other" / "run.json").write_text("damaged")
    assert main(["status", "--all", str(top)]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert "run.json is damaged" in captured.err
    monkeypatch.chdir(top)
    assert main(["status"]) == 2
    assert "there are 2 runs here" in capsys.readouterr().err
    monkeypatch.chdir(world.folder)
    assert "tiny" in shown(capsys, "status")


def test_watching_ends_cleanly(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("coordinator.operate.control.showing.time.sleep", sleep)
    with served(world):
        lines = shown(capsys, "status", world.folder, "--watch", "--json").splitlines()
    assert [json.loads(each)["task"] for each in lines] == ["tiny"] * 3


def test_hostile_text_of_a_device_stays_text(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run, one = world.run.about.run, world.devices[0]
    words = "[red]no[/red] \x1b[31m\x07 \u202e"
    one.tell(Bid(device="one", round=2, level=None, reason=words, code="failed", run=run))
    world.settle()
    with served(world):
        for command in (("devices",), ("devices", "one")):
            text = shown(capsys, command[0], world.folder, *command[1:])
            assert "[red]no[/red]" in text
            assert not set("\x1b\x07\u202e") & set(text)


def test_two_thousand_devices_fit_into_an_answer(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    overview = world.service.overview
    for number in range(2000):
        name = f"device-{number:04}-with-a-rather-long-name-as-people-like-them"
        overview.joined(name)
        overview.bid(Bid(device=name, round=1, level=0.5, reason="why " * 50))
    with served(world):
        found = ask_run(world.folder, "devices")
    assert len(found) == 2000
    assert len(json.dumps(found)) > MAX_LINE_BYTES


def test_answers_come_while_the_loop_is_busy(worlds: Worlds) -> None:
    """Nothing runs the loop here, so an answer that needed it would not come."""
    world = worlds.make(rounds_config())
    with served(world):
        answers = [ask_run(world.folder, name) for name in ("status", "devices", "blocks")]
        assert ask_run(world.folder, "strip", rounds=5)["rounds"] == []
    assert answers[0]["task"] == "tiny"
