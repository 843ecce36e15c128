from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_sdk.machine.sensors.commands import Background, Command
from edge_sdk.machine.snapshot import Battery, Snapshot
from tests.unit.edge_sdk.machine.sensors.linux.test_linux import Clock
from tests.unit.edge_sdk.machine.sensors.test_android import wait_until_gone
from tests.waiting import HANGS_S


def percent(output: str) -> Snapshot:
    return Snapshot(battery=Battery(percent=float(output)))


def script(
    tmp_path: Path,
    text: str,
    *,
    parse: Callable[[str], Snapshot] = percent,
    timeout_s: float = 60.0,
) -> Command:
    file = tmp_path / "command.py"
    file.write_text(text)
    return Command(
        argv=("command", str(file)),
        program=lambda _: sys.executable,
        parse=parse,
        fills=("battery.percent",),
        every_s=30.0,
        timeout_s=timeout_s,
    )


def test_command_tells_its_value_with_an_age(tmp_path: Path) -> None:
    clock = Clock()
    background = Background(script(tmp_path, "print(42)"), clock)
    assert background.latest() == Snapshot()
    assert background.settle(HANGS_S)
    clock.now += 12
    snapshot = background.latest()
    assert snapshot.battery.percent == 42
    assert snapshot.age_s("battery.percent") == 12


def test_command_runs_again_only_when_due(tmp_path: Path) -> None:
    clock = Clock()
    runs = tmp_path / "runs"
    count = f"open({str(runs)!r}, 'a').write('x'); print(len(open({str(runs)!r}).read()))"
    background = Background(script(tmp_path, count), clock)
    for _ in range(3):
        background.latest()
        assert background.settle(HANGS_S)
    assert runs.read_text() == "x"
    clock.now += 31
    background.latest()
    assert background.settle(HANGS_S)
    assert background.latest().battery.percent == 2


def test_value_that_is_not_renewed_becomes_unknown(tmp_path: Path) -> None:
    clock = Clock()
    background = Background(script(tmp_path, "print(42)"), clock)
    background.latest()
    assert background.settle(HANGS_S)
    (tmp_path / "command.py").write_text("raise SystemExit(1)")
    clock.now += 299
    assert background.latest().battery.percent == 42
    assert background.settle(HANGS_S)
    clock.now += 2
    assert background.latest() == Snapshot()
    assert background.settle(HANGS_S)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import time; print('many', time.time_ns())", "unexpected output"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", "unexpected output"),
    ],
)
def test_command_that_fails_is_logged_once(
    tmp_path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    background = Background(script(tmp_path, text), clock)
    for _ in range(2):
        assert background.latest() == Snapshot()
        assert background.settle(HANGS_S)
        clock.now += 31
    assert [words in record.getMessage() for record in caplog.records] == [True]
    assert "battery.percent" in caplog.text


@pytest.mark.parametrize("program", [None, "/nowhere/at/all"])
def test_command_that_is_not_there_tells_nothing(
    program: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = Command(
        argv=("nothing",), program=lambda _: program, parse=percent, fills=("battery.percent",)
    )
    background = Background(command, Clock())
    background.latest()
    assert background.settle(HANGS_S)
    assert background.latest() == Snapshot()
    assert "nothing" in caplog.text


def test_hanging_command_is_killed_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pids = tmp_path / "pids"
    hang = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(1000)\n"
    )
    background = Background(script(tmp_path, hang, timeout_s=3.0), Clock())
    background.latest()
    assert background.settle(HANGS_S)
    assert "does not answer within 3 s" in caplog.text
    for pid in pids.read_text().split() if pids.exists() else ():
        wait_until_gone(int(pid))


def test_closed_command_starts_no_more(tmp_path: Path) -> None:
    clock = Clock()
    background = Background(script(tmp_path, "import time; time.sleep(1000)"), clock)
    background.latest()
    background.close()
    assert background.settle(HANGS_S)
    clock.now += 100
    background.latest()
    assert background.settle(0)


def test_command_under_way_ends_with_the_program(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hang = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    file = tmp_path / "hang.py"
    file.write_text(hang)
    main = (
        "import os, sys, time\n"
        "from edge_sdk.machine.snapshot import Snapshot\n"
        "from edge_sdk.machine.sensors.commands import Background, Command\n"
        f"command = Command(argv=('x', {str(file)!r}), program=lambda _: sys.executable,\n"
        "    parse=lambda _: Snapshot(), fills=('battery.percent',), timeout_s=600.0)\n"
        "Background(command, time.monotonic).latest()\n"
        f"while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read():\n"
        "    time.sleep(0.01)\n"
    )
    root = Path(__file__).resolve().parents[5]
    subprocess.run([sys.executable, "-c", main], check=True, timeout=HANGS_S, cwd=root)
    wait_until_gone(int(pid.read_text()))


def test_nothing_runs_while_nobody_asks(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    background = Background(script(tmp_path, f"open({str(ran)!r}, 'w'); print(1)"), Clock())
    assert background.settle(HANGS_S)
    assert not ran.exists()
    background.latest()
    assert background.settle(HANGS_S)
    assert ran.exists()
