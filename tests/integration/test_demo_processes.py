"""The demo as a broker, a coordinator and devices of their own, over MQTT."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.cli import main
from coordinator.operate.broker.embedded import available
from coordinator.simulate.demo.config import DemoConfig
from coordinator.simulate.demo.processes import signals_noted
from coordinator.simulate.demo.run import make_demo
from coordinator.simulate.demo.view import as_json
from coordinator.task.saved_model import read_model
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    not available(), reason="needs a broker: neither mosquitto nor amqtt is installed"
)

PROGRAM = Path(sys.executable).parent / "tessera-coordinator"
DEVICES = 4


class Watched:
    """The demo as a user runs it, and every process it was ever seen to start."""

    def __init__(self, folder: Path, devices: int, *arguments: str) -> None:
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [PROGRAM, "demo", "--devices", str(devices), *arguments],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )
        self.demo = psutil.Process(self.process.pid)
        self.seen: dict[psutil.Process, str] = {}

    def until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            failed = (self.process.poll() or 0) > 0  # what it said last is looked at after that
            self.look()
            held = condition()
            assert held or not failed, f"the demo failed\n{self.text}"
            return held

        until(holds, lambda: self.text, every_s=0.3)  # looking takes a while itself

    def look(self) -> None:
        try:
            for child in self.demo.children(recursive=True):
                self.seen[child] = " ".join(child.cmdline()) or self.seen.get(child, "")
        except psutil.NoSuchProcess:
            return  # one of them ended as we looked

    def find(self, word: str) -> list[psutil.Process]:
        return [process for process, command in self.seen.items() if word in command]

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def left(self) -> list[psutil.Process]:
        """What still runs of all that was started."""
        return [process for process in self.seen if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def watched(folder: Path, *arguments: str, devices: int = 2) -> Iterator[Watched]:
    demo = Watched(folder, devices, *arguments)
    try:
        yield demo
    finally:
        for process in demo.left():
            process.kill()
        demo.process.kill()
        demo.process.wait()


def in_process(seed: int, rounds: int) -> dict[str, Any]:
    demo = make_demo(DemoConfig(rounds=rounds, devices=DEVICES, seed=seed))
    for _ in demo.run():
        pass
    return as_json(demo)


def decided(run: dict[str, Any]) -> list[Any]:
    """What devices and coordinator did, without the bytes that packing adds."""
    keys = ("device", "level", "reason", "loss", "battery_percent", "train_s", "joules")
    return [
        {**each, "devices": [[d[key] for key in keys] for d in each["devices"]]}
        for each in run["rounds"]
    ]


def test_demo_of_programs_ends_with_the_bits_of_one_process_and_leaves_none(
    tmp_path: Path,
) -> None:
    arguments = ("--rounds", "3", "--seed", "1", "--json", "run.json")
    with watched(tmp_path, *arguments, devices=DEVICES) as demo:
        demo.until(lambda: len(demo.find("edge_sdk.cli run")) == DEVICES)
        expected = in_process(1, 3)
        demo.until(lambda: demo.ended)
        assert demo.process.returncode == 0, demo.text
        assert len(demo.find("edge_sdk.cli run")) == DEVICES
        assert len(demo.find("coordinator.cli serve")) == 1
        assert demo.left() == []
    assert list(tmp_path.glob("tessera-*")) == [tmp_path / "tessera-demo.png"]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["model_sha256"] == expected["model_sha256"]
    assert decided(run) == decided(expected)
    assert "round   3/3" in demo.text
    assert run["model_sha256"][:16] in demo.text
    assert_compared(run, demo.text)


def assert_compared(run: dict[str, Any], said: str) -> None:
    """The second run, in which everybody trains everything, is told beside the first."""
    full = run["full"]
    assert {d["level"] for each in full["rounds"] for d in each["devices"]} == {1.0}
    assert {d["level"] for each in run["rounds"] for d in each["devices"]} != {1.0}
    for key in ("bytes", "joules", "train_s", "slowest_s"):
        assert 0 < run[key] < full[key]
    # What was said to be saved while the run went on is what the second run takes.
    assert full["bytes"] == pytest.approx(run["bytes_full_training"], rel=1e-3)  # headers
    accuracy = full["rounds"][-1]["accuracy"]
    assert re.search(rf"all train everything.*\n.*accuracy.* {accuracy:.1%}", said)
    assert re.search(r"too late for the round +0 times +[1-9]", said)


def test_demo_of_programs_interrupted_keeps_the_model_and_leaves_none(tmp_path: Path) -> None:
    with watched(tmp_path, "--rounds", "100000", "--save", "model") as demo:
        demo.until(lambda: "round   2/" in demo.text)
        demo.process.send_signal(signal.SIGINT)
        demo.until(lambda: demo.ended)
        assert demo.process.returncode == 130, demo.text
        assert demo.left() == []
    assert "stopped after" in demo.text
    assert "Traceback" not in demo.text
    assert read_model(tmp_path / "model").plan.parameters > 0
    assert not list(tmp_path.glob("tessera-demo-*"))


def test_demo_of_programs_stopped_while_it_starts_leaves_none(tmp_path: Path) -> None:
    with watched(tmp_path) as demo:
        demo.until(lambda: bool(demo.find("coordinator.task.graphs.child")))
        demo.process.send_signal(signal.SIGTERM)
        demo.until(lambda: demo.ended)
        assert demo.process.returncode == 143, demo.text
        assert demo.left() == []
    assert "Traceback" not in demo.text
    assert not list(tmp_path.glob("tessera-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends programs with their parent")
def test_programs_end_with_a_demo_that_was_killed(tmp_path: Path) -> None:
    with watched(tmp_path, "--rounds", "100000") as demo:
        demo.until(lambda: len(demo.find("edge_sdk.cli run")) == 2)
        assert demo.find("coordinator.cli serve")
        demo.process.kill()
        demo.until(lambda: demo.left() == [])


@pytest.mark.parametrize(
    ("first", "raised"),
    [
        (signal.SIGINT, KeyboardInterrupt()),
        (signal.SIGTERM, SystemExit(143)),
        (signal.SIGHUP, SystemExit(129)),
    ],
)
def test_signals_are_obeyed_when_all_is_stopped(
    first: signal.Signals, raised: BaseException
) -> None:
    """However many come: what stops programs is not interrupted."""
    heard: list[signal.Signals] = []

    def stop_all() -> None:
        with signals_noted() as noted:
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGINT)
            heard.extend(noted)

    before = signal.signal(first, signal.SIG_DFL)
    try:
        with pytest.raises(type(raised)) as caught:
            stop_all()
        assert signal.getsignal(first) == signal.SIG_DFL
    finally:
        signal.signal(first, before)
    assert caught.value.args == raised.args
    assert heard == [first, signal.SIGINT]


def test_signal_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_noted() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert not noted
    finally:
        signal.signal(signal.SIGHUP, before)


def test_demo_of_programs_says_why_the_coordinator_ended(tmp_path: Path) -> None:
    with watched(tmp_path) as demo:
        demo.until(lambda: bool(demo.find("coordinator.task.graphs.child")))
        demo.find("coordinator.task.graphs.child")[0].kill()
        demo.until(lambda: demo.ended)
        assert demo.process.returncode == 1, demo.text
        assert demo.left() == []
    assert "coordinator ended with code 2" in demo.text
    assert "did not compile: the process ended with code -9" in demo.text


def test_demo_of_programs_does_not_wait_for_a_device_that_died(tmp_path: Path) -> None:
    with watched(tmp_path, "--rounds", "100000") as demo:
        demo.until(lambda: len(demo.find("edge_sdk.cli run")) == 2)
        demo.find("galaxy-s23")[0].kill()
        demo.until(lambda: demo.ended)
        assert demo.process.returncode == 1, demo.text
        assert demo.left() == []
    assert "galaxy-s23 ended with code -9" in demo.text


def test_demo_names_what_is_wrong_with_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text('[[members]]\nboard = "pixel_5"\n')
    assert main(["demo", "--fleet", "own.toml"]) == 2
    assert (
        "own.toml: members[0].board = 'pixel_5': there is no profile 'pixel_5'"
        in capsys.readouterr().err
    )
    assert main(["demo", "--fleet", "none.toml"]) == 2
    assert "none.toml is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--backend", "torch"), ("--memory", "memory"), ("--threads", "2")]
)
def test_demo_of_programs_refuses_what_is_for_one_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments]) == 2
    assert re.search(rf"{arguments[0]}.* is for --in-process: \w+", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--recipe", "fjor"), "there is no recipe 'fjor'; did you mean 'fjord'"),
        (
            ("--recipe", "fjord", "--mask", "core"),
            "recipe fjord sets mask = 'nested', but --mask gives",
        ),
        (("--recipe", "nefl"), "the demo's has none"),
        (("--recipe", "fedprox", "--local-option", "rescale=1"), "sets local.rescale = 0.0, but"),
        (("--local-option", "proximale=1"), "no option 'proximale'; did you mean 'proximal'?"),
        (("--widths", "sandwich", "--mask", "rolling"), "rolling masks have no order"),
        (("--widths", "sandwich", "--rule", "fed-raa"), "leave widths at own"),
    ],
)
def test_demo_refuses_choices_that_do_not_go_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_demo_of_programs_without_a_broker_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coordinator.simulate.demo.processes.available", lambda: ())
    assert main(["demo"]) == 2
    assert re.search(r"no broker.* install mosquitto .* --in-process", capsys.readouterr().err)
