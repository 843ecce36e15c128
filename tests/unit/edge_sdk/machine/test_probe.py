from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from edge_sdk.machine.probe import (
    LocalProbe,
    PushedProbe,
    StaticProbe,
    choose_probe,
)
from edge_sdk.machine.sensors import files
from edge_sdk.machine.snapshot import (
    Battery,
    Cpu,
    Heat,
    MemoryState,
    Network,
    Probe,
    Snapshot,
)
from edge_sdk.program.plain import ProfileError
from tests.unit.edge_sdk.machine.machines import MACHINES, build, laptop, program
from tests.unit.edge_sdk.machine.sensors.linux.test_linux import Clock
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_probe_is_chosen_by_the_machine(tmp_path: Path, machine: Callable[[Path], Path]) -> None:
    name = machine.__name__.replace("_", "-")
    expected = {"pixel-6": "android", "laptop": "linux"}.get(name)
    if expected is None:
        expected = "jetson" if name.startswith("jetson") else "raspberry-pi"
    assert choose_probe(machine(tmp_path)).name == expected


def test_probe_can_be_forced(tmp_path: Path) -> None:
    assert choose_probe(laptop(tmp_path), name="jetson").snapshot().memory.unified is True


def test_probe_of_unknown_name_is_refused() -> None:
    with pytest.raises(ProfileError, match="'toaster': must be one of linux"):
        choose_probe(name="toaster")  # type: ignore[arg-type]


def test_probe_of_an_empty_folder_knows_nothing(tmp_path: Path) -> None:
    assert choose_probe(tmp_path).snapshot() == Snapshot()


def test_metered_network_is_asked_of_network_manager(tmp_path: Path) -> None:
    program(laptop(tmp_path), "busctl", "echo u 4")
    probe = choose_probe(tmp_path)
    assert probe.snapshot().network.metered is None
    assert probe.settle(HANGS_S)
    assert probe.snapshot().network.metered is False
    probe.close()


def test_broken_sensors_are_unknown_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(
        laptop(tmp_path),
        {
            "sys/class/thermal/thermal_zone0/temp": "hot\n",
            "sys/class/power_supply/BAT0/capacity": "900\n",
        },
    )
    (tmp_path / "sys/class/power_supply/BAT0/power_now").unlink()
    (tmp_path / "sys/class/power_supply/BAT0/power_now").mkdir()
    caplog.set_level(logging.WARNING)
    probe = choose_probe(tmp_path)
    for _ in range(3):
        snapshot = probe.snapshot()
        assert snapshot.heat.zones is None
        assert (snapshot.battery.percent, snapshot.battery.watts) == (None, None)
        assert snapshot.battery.charging is False
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert any("thermal_zone0/temp" in message for message in told)
    assert any("battery.percent = 900" in message for message in told)
    assert any("power_now" in message for message in told)


def test_source_that_raises_costs_only_its_own_values(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Snapshot:
        raise RuntimeError("no such bus")

    probe = LocalProbe("linux", [broken, lambda: Snapshot(cpu=Cpu(cores=2.0))])
    for _ in range(2):
        assert probe.snapshot() == Snapshot(cpu=Cpu(cores=2.0))
    assert len(caplog.records) == 1
    assert "no such bus" in caplog.text


def test_narrow_probe_reads_only_what_tells_of_its_parts() -> None:
    asked: list[str] = []

    def source(name: str, snapshot: Snapshot) -> Callable[[], Snapshot]:
        def read() -> Snapshot:
            asked.append(name)
            return snapshot

        return read

    battery, heat = Snapshot(battery=Battery(percent=50.0)), Snapshot(heat=Heat(throttling=True))
    cpu = Snapshot(cpu=Cpu(cores=2.0))
    sources = [source("battery", battery), source("cpu", cpu), source("heat", heat)]
    probe = LocalProbe("linux", sources)
    narrow = probe.only("power", "battery")
    asked.clear()
    assert narrow.snapshot() == battery
    assert asked == ["battery"]
    assert probe.snapshot().cpu.cores == 2.0
    assert probe.only("power").snapshot() == Snapshot()


def test_snapshot_lasts_as_long_as_it_is_told_to() -> None:
    clock, reads = Clock(), [0]

    def read() -> Snapshot:
        reads[0] += 1
        return Snapshot(cpu=Cpu(load=float(reads[0])))

    probe = LocalProbe("linux", [read], lasts_s=1.0, clock=clock)
    assert probe.snapshot().cpu.load == 1.0
    clock.now += 0.75
    again = probe.snapshot()
    assert again.cpu.load == 1.0
    assert again.age_s("cpu.load") == 0.75
    clock.now += 0.25
    assert probe.snapshot().cpu.load == 2.0
    probe.settle(HANGS_S)  # somebody decides now, and wants to know it anew
    assert probe.snapshot().cpu.load == 3.0
    assert reads == [3]


def test_second_look_reads_what_changes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What describes the machine is read once a minute; what it is like now, every time."""
    read: list[str] = []
    clock = Clock()
    root = laptop(tmp_path)
    before = files._read

    def counted(path: str) -> bytes:
        read.append(path.removeprefix(f"{root}/"))
        return before(path)

    monkeypatch.setattr(files, "_read", counted)
    probe = choose_probe(root, clock=clock)
    read.clear()  # of the kind of machine
    probe.snapshot()
    first, read[:] = list(read), []
    probe.snapshot()
    assert set(read) < set(first)
    assert not [path for path in read if "trip_point" in path or path.endswith("mountinfo")]
    assert "proc/meminfo" in read
    clock.now += 61
    read.clear()
    probe.snapshot()
    assert sorted(read) == sorted(first)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_narrow_probe_says_what_the_whole_one_does(
    tmp_path: Path, machine: Callable[[Path], Path]
) -> None:
    probe = choose_probe(machine(tmp_path))
    probe.snapshot()
    probe.settle(HANGS_S)
    whole, narrow = probe.snapshot(), probe.only("power", "battery").snapshot()
    assert (narrow.power, narrow.battery) == (whole.power, whole.battery)


def test_earlier_source_wins() -> None:
    first = Snapshot(cpu=Cpu(cores=2.0))
    second = Snapshot(cpu=Cpu(cores=4.0, load=1.0))
    probe = LocalProbe("linux", [lambda: first, lambda: second])
    assert probe.snapshot().cpu == Cpu(cores=2.0, load=1.0)


def test_static_probe_says_what_it_was_given() -> None:
    snapshot = Snapshot(memory=MemoryState(available_bytes=2e9))
    probe: Probe = StaticProbe(snapshot)
    assert probe.snapshot() is snapshot


def test_pushed_values_win_over_the_base_and_age() -> None:
    clock = Clock()
    base = StaticProbe(Snapshot(cpu=Cpu(cores=4.0), battery=Battery(percent=1.0)))
    probe = PushedProbe(base, max_age_s=60, clock=clock)
    assert probe.snapshot() == base.snapshot()
    probe.push({"battery": {"percent": 80, "charging": True}})
    clock.now += 10
    probe.push(Snapshot(heat=Heat(status=2)))
    clock.now += 5
    snapshot = probe.snapshot()
    assert snapshot.battery == Battery(percent=80.0, charging=True)
    assert snapshot.heat.status == 2
    assert snapshot.cpu.cores == 4
    assert snapshot.age_s("battery.percent") == 15
    assert snapshot.age_s("heat.status") == 5
    assert snapshot.age_s("cpu.cores") == 0


def test_pushed_values_that_nobody_renews_become_unknown() -> None:
    clock = Clock()
    probe = PushedProbe(max_age_s=60, clock=clock)
    probe.push({"network": {"metered": True}})
    clock.now += 50
    probe.push({"battery": {"percent": 80}})
    clock.now += 11
    assert set(probe.snapshot().known()) == {"battery.percent"}
    clock.now += 50
    assert probe.snapshot() == Snapshot()


@pytest.mark.parametrize(
    "wrong", [{"battery": {"percent": 300}}, Snapshot(battery=Battery(percent=300.0))]
)
def test_push_of_impossible_values_changes_nothing(wrong: Snapshot | dict[str, object]) -> None:
    clock = Clock()
    probe = PushedProbe(clock=clock)
    probe.push({"network": {"metered": True}})
    with pytest.raises(ProfileError, match=r"battery\.percent = 300"):
        probe.push(wrong)
    assert probe.snapshot().network == Network(metered=True)
    assert set(probe.snapshot().known()) == {"network.metered"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_probe_of_this_machine_agrees_with_psutil() -> None:
    probe = choose_probe()
    snapshot = probe.snapshot()
    allowed = len(psutil.Process().cpu_affinity() or ())
    assert snapshot.cpu.cores is not None
    assert 0 < snapshot.cpu.cores <= allowed
    memory = psutil.virtual_memory()
    assert snapshot.memory.total_bytes is not None
    assert 0 < snapshot.memory.total_bytes <= memory.total
    assert snapshot.memory.available_bytes is not None
    assert 0 < snapshot.memory.available_bytes <= snapshot.memory.total_bytes
    assert snapshot.cpu.load is not None
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot
    probe.close()


def test_profile_prints_this_machine_from_a_fresh_interpreter() -> None:
    code = (
        "import json, sys, edge_sdk\n"
        "assert 'edge_sdk.machine' not in sys.modules, 'import edge_sdk loads it'\n"
        "from edge_sdk.machine.probe import choose_probe\n"
        "assert 'psutil' not in sys.modules, 'loaded before it is used'\n"
        "probe = choose_probe(); probe.snapshot(); probe.settle(60)\n"
        "print(json.dumps({'name': probe.name, **probe.snapshot().to_dict()}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=HANGS_S,
    )
    content = json.loads(result.stdout)
    assert content.pop("name")
    assert Snapshot.from_dict(content).memory.available_bytes
    assert result.stderr == ""
