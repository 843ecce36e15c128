"""A profile of this machine: what is measured, what comes of it, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.device.kit import read_kit, write_kit
from benchmarks.device.own_profile.profile import (
    Identity,
    identify,
    make_profile,
    profile_errors,
)
from benchmarks.device.own_profile.profiling import (
    Endurance,
    Pace,
    ProfilingConfig,
    measure_endurance,
)
from benchmarks.device.results import Machine
from benchmarks.device.trial.machine import usable_threads
from edge_sdk.decide.costs.model import known_of
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.decide.emulation.fleet import FleetMember
from edge_sdk.machine.board import Board, load_board, write_board
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.snapshot import (
    Battery,
    CoreClass,
    Cpu,
    Heat,
    MemoryState,
    Power,
    Snapshot,
    Trip,
    Zone,
)
from edge_sdk.protocol.errors import ConfigError
from tests.unit.devices.test_profiles import calculate
from tests.unit.edge_sdk.machine.machines import jetson_nano, raspberry_pi_5

MIB = 1024.0**2
IDENTITY = Identity(
    name="mine",
    title="My board",
    kind="board",
    soc="Example 1",
    core="Core-X",
    circumstances="`tessera-bench profile`, 2026-01-02, Linux 6.6 aarch64",
)
SNAPSHOT = Snapshot(
    cpu=Cpu(
        cores=6.0,
        max_mhz=2000,
        classes=(
            CoreClass(cores=2, max_mhz=2000, capacity=1024),
            CoreClass(cores=4, max_mhz=1500, capacity=500),
        ),
    ),
    memory=MemoryState(total_bytes=4096 * MIB, available_bytes=3000 * MIB),
    battery=Battery(present=False),
    heat=Heat(
        zones=(
            Zone(
                name="cpu-thermal",
                celsius=50,
                trips=(Trip(kind="passive", celsius=85), Trip(kind="critical", celsius=110)),
            ),
        )
    ),
    power=Power(rails={"VDD_IN": 3.0}, total_watts=3.0),
)
HOT = Endurance(seconds=180, first_per_s=10.0, last_per_s=8.0, train_w=7.5, sensor_hz=25.0)


def pace(family: str, level: float, threads: int, macs: float, step_s: float) -> Pace:
    return Pace(family=family, level=level, threads=threads, macs=macs, step_s=step_s)


PACES = [
    pace("mlp", 1.0, 1, 2e9, 1.0),
    pace("mlp", 0.25, 1, 1e9, 1.0),
    pace("cnn", 1.0, 1, 3e9, 1.0),
    pace("mlp", 1.0, 6, 8e9, 1.0),
    pace("mlp", 0.25, 6, 1e9, 0.25),
    pace("cnn", 1.0, 6, 15e9, 1.0),
]


def made(
    snapshot: Snapshot = SNAPSHOT,
    paces: list[Pace] = PACES,
    endurance: Endurance | None = HOT,
    idle_w: float | None = 3.0,
    *,
    identity: Identity = IDENTITY,
    heat: bool = True,
) -> tuple[Board, list[str]]:
    return make_profile(identity, snapshot, paces, endurance, idle_w=idle_w, heat=heat)


# -- the profile ---------------------------------------------------------------------------------


def test_profile_has_every_number_that_was_measured(tmp_path: Path) -> None:
    board, lacking = made()
    values = {key: quantity.value for key, quantity in board.quantities()}
    assert values == {
        "cores[0].count": 2,
        "cores[0].ghz": 2.0,
        "cores[1].count": 4,
        "cores[1].ghz": 1.5,
        "memory.memory_mb": 4096,
        "memory.app_mb": 3000,
        "speed.speed_ratio": 1.6,
        "speed.one_core_ratio": 0.4,
        "power.idle_w": 3.0,
        "power.train_w": 7.5,
        "heat.throttle_c": 85,
        "heat.sustained_ratio": 0.8,
    }
    assert board.heat.sensor == "chip"
    assert [sentence.partition(":")[0] for sentence in lacking] == ["network"]
    for _, quantity in board.quantities():
        assert "2026-01-02, Linux 6.6 aarch64" in quantity.source
    write_board(tmp_path / "mine.toml", board)
    assert load_board(tmp_path / "mine.toml") == board


def test_speed_shows_arithmetic_that_gives_it() -> None:
    board, _ = made()
    for quantity in (board.speed.speed_ratio, board.speed.one_core_ratio):
        assert quantity is not None
        assert quantity.provenance == "derived"
        found = re.match(r"= ([^:]+): \S", quantity.source)
        assert found
        assert calculate(found[1]) == pytest.approx(quantity.value, rel=0.005)
    assert board.speed.speed_ratio is not None
    assert "6 threads" in board.speed.speed_ratio.source
    assert "from 4e9 to 1.5e10" in board.speed.speed_ratio.source


def test_emulation_of_a_profile_takes_the_median_pace() -> None:
    board, _ = made()
    emulation = Emulation(FleetMember(name="mine", board=board))
    assert emulation.step_s(8e9) == pytest.approx(1.0)
    # One thread: 2, 1 and 3 · 10⁹ a second. All cores: 8, 4 and 15. They are held to 2 and to 8.
    assert profile_errors(board, PACES) == pytest.approx([0.0, 0.5, 0.5, 0.0, 0.5, 15 / 8 - 1])


def test_cost_model_knows_the_watts_of_a_profile() -> None:
    board, _ = made()
    assert known_of(board, None).net_w == pytest.approx(4.5)


def test_one_core_is_never_written_as_faster_than_all() -> None:
    paces = [pace("mlp", 1.0, 1, 6e9, 1.0), pace("mlp", 1.0, 6, 5e9, 1.0)]
    board, lacking = made(paces=paces)
    assert any("one thread was 1.20 times as fast as 6" in sentence for sentence in lacking)
    assert profile_errors(board, paces) == pytest.approx([0.2, 0.0])
    assert board.speed.speed_ratio is not None
    assert board.speed.one_core_ratio is not None
    assert board.speed.speed_ratio.value == board.speed.one_core_ratio.value == 1.0
    assert "one thread reached 6e9" in board.speed.one_core_ratio.source


def test_machine_with_one_core_has_one_speed() -> None:
    single = replace(SNAPSHOT, cpu=Cpu(cores=0.5))
    assert usable_threads(single) == 1
    board, lacking = made(single, [pace("mlp", 1.0, 1, 6e9, 1.0)])
    assert board.speed.speed_ratio == board.speed.one_core_ratio
    assert [each.count.value for each in board.cores] == [1]
    assert any("cores.ghz" in sentence for sentence in lacking)


@pytest.mark.parametrize(("load", "told"), [(None, False), (1.4, False), (1.6, True)])
def test_other_programs_stand_behind_every_number(load: float | None, told: bool) -> None:
    board, _ = made(replace(SNAPSHOT, cpu=replace(SNAPSHOT.cpu, load=load)))
    for _, quantity in board.quantities():
        assert (f"load {load}" in quantity.source) == told


def test_quota_counts_as_cores_of_no_class() -> None:
    board, _ = made(replace(SNAPSHOT, cpu=replace(SNAPSHOT.cpu, cores=3.5)))
    (cores,) = board.cores
    assert cores.count.value == 3
    assert cores.ghz is not None
    assert cores.ghz.value == 2.0


@pytest.mark.parametrize(
    ("idle_w", "train_w", "charging", "why"),
    [
        (None, None, False, "no sensor tells"),
        (None, None, True, "unplug"),
        (3.0, 3.1, False, "does not follow"),
        (3.0, 2.0, False, "does not follow"),
    ],
)
def test_watts_that_are_not_known_are_left_out_with_the_reason(
    idle_w: float | None, train_w: float | None, charging: bool, why: str
) -> None:
    battery = Battery(present=True, charging=charging)
    endurance = replace(HOT, train_w=train_w)
    board, lacking = made(replace(SNAPSHOT, battery=battery), PACES, endurance, idle_w)
    assert board.power.train_w is None
    assert board.power.idle_w is None
    assert any("power.train_w" in sentence and why in sentence for sentence in lacking)


def test_quick_run_does_not_tell_what_heat_does() -> None:
    board, lacking = made(heat=False)
    assert board.heat.sustained_ratio is None
    assert board.power.train_w is not None
    assert any("sustained_ratio" in sentence for sentence in lacking)


def test_speed_that_rises_while_hot_is_no_gain() -> None:
    board, _ = made(endurance=replace(HOT, last_per_s=11.0))
    assert board.heat.sustained_ratio is not None
    assert board.heat.sustained_ratio.value == 1.0


def test_phone_has_its_battery_and_needs_one() -> None:
    phone = replace(IDENTITY, kind="phone")
    battery = Battery(present=True, charging=False, capacity_wh=15.44)
    board, _ = made(replace(SNAPSHOT, battery=battery), identity=phone)
    assert board.battery is not None
    assert board.battery.battery_wh.value == 15.44
    Emulation(FleetMember(name="phone", board=board, battery_percent=50))
    _, lacking = made(
        replace(SNAPSHOT, battery=battery), endurance=None, idle_w=None, identity=phone
    )
    assert any("cannot be emulated" in sentence for sentence in lacking)
    with pytest.raises(ConfigError, match="a phone has one"):
        made(identity=phone)


def test_machine_is_called_what_it_calls_itself(tmp_path: Path) -> None:
    root = raspberry_pi_5(tmp_path)
    compatible = tmp_path / "proc/device-tree/compatible"
    compatible.write_text("raspberrypi,5-model-b\0brcm,bcm2712\0")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd0b\n")
    machine = Machine(
        model="Raspberry Pi 5 Model B Rev 1.0",
        system="Linux 6.6",
        python="3.11",
        power_mode="MAXN",
        cooling="fan",
        versions={"onnxruntime": "1.23", "numpy": "2"},
    )
    identity = identify(Files(root), "raspberry-pi", machine, name="pi", date="2026-01-02")
    assert identity.title == "Raspberry Pi 5 Model B Rev 1.0"
    assert (identity.kind, identity.soc) == ("board", "brcm,bcm2712")
    assert identity.core.endswith("CPU part 0xd0b")
    for part in ("2026-01-02", "Linux 6.6", "onnxruntime 1.23", "power mode MAXN", "cooling fan"):
        assert part in identity.circumstances
    said = identify(
        Files(root), "linux", machine, name="pi", date="", title="Mine", kind="computer"
    )
    assert (said.title, said.kind) == ("Mine", "computer")


# -- measuring -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits") / "kit"
    write_kit(folder, ["mlp"], levels=(1.0, 0.25))
    return folder


def test_command_writes_a_profile_that_gives_the_seconds_of_this_machine(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = tmp_path / "mine.toml", tmp_path / "mine.json"
    root = raspberry_pi_5(tmp_path / "root")
    arguments = ["profile", "--quick", "--write", str(path), "--kit", str(kit)]
    said = ["--title", "Mine", "--cooling", "fan on", "--root", str(root), "--json", str(data)]
    assert main([*arguments, *said]) == 0

    board = load_board(path)
    assert (board.name, board.title, board.kind) == ("mine", "Mine", "board")
    assert board.cores[0].count.value == 4
    assert board.memory.memory_mb.value == 8061
    run = json.loads(data.read_text(encoding="utf-8"))
    assert run["command"] == "profile"
    rows = {(row["level"], row["threads"]): row for row in run["paces"]}
    assert set(rows) == {(level, threads) for level in (1.0, 0.25) for threads in (1, 4)}
    # A perceptron 784-w-w-10 by hand; a step of 32 samples is three forward passes.
    for (level, _), row in rows.items():
        width = int(200 * level)
        assert row["macs"] == 3 * 32 * (784 * width + width * width + 10 * width)
        assert row["step_s"] > 0
    rates = [rows[level, 4]["macs"] / rows[level, 4]["step_s"] for level in (1.0, 0.25)]
    emulation = Emulation(FleetMember(name="mine", board=board))
    for level, rate in zip((1.0, 0.25), rates, strict=True):
        row = rows[level, 4]
        off = emulation.step_s(row["macs"]) / row["step_s"]
        assert off == pytest.approx(rate / (sum(rates) / 2), rel=0.005)
    for _, quantity in board.quantities():
        assert "cooling fan on" in quantity.source
    figures = {figure["name"]: figure["value"] for figure in run["figures"]}
    assert board.speed.speed_ratio is not None
    assert figures["profile.speed_ratio"] == board.speed.speed_ratio.value

    out = capsys.readouterr().out
    assert str(path) in out
    assert "Not measured" in out
    assert "[network]" in out

    before = path.read_bytes()
    assert main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_endurance_reads_the_rails_while_it_trains(kit: Path, tmp_path: Path) -> None:
    config = ProfilingConfig(families=("mlp",), endure_s=0.6)
    found = measure_endurance(kit, read_kit(kit), config, 1, jetson_nano(tmp_path))
    assert found.train_w == pytest.approx(2.54)
    assert min(found.first_per_s, found.last_per_s) > 0
    assert found.sensor_hz is not None


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--write", "mine.json"], "must end in .toml"),
        (["--write", "My-Board.toml"], "lower-case letters"),
        (["--write", "nowhere/mine.toml"], "directory that exists"),
        (["--write", "mine.toml", "--kit", "nothing"], "is not a kit"),
    ],
)
def test_command_refuses_before_it_measures(
    options: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *options]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.glob("*.toml"))


def test_command_refuses_a_kit_without_models_that_speed_is_counted_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = tmp_path / "kit"
    kit.mkdir()
    content = {"version": 1, "tessera": "0", "batch": 32, "levels": [1.0], "families": ["text"]}
    (kit / "kit.json").write_text(json.dumps(content))
    assert main(["profile", "--write", str(tmp_path / "a.toml"), "--kit", str(kit)]) == 2
    assert "tessera-bench kit --families mlp," in capsys.readouterr().err


def test_command_refuses_a_phone_whose_battery_is_not_known(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = raspberry_pi_5(tmp_path / "root")
    path = tmp_path / "phone.toml"
    options = ["--kit", str(kit), "--kind", "phone", "--root", str(root)]
    assert main(["profile", "--quick", "--write", str(path), *options]) == 2
    assert "capacity of its battery" in capsys.readouterr().err
    assert not path.exists()
