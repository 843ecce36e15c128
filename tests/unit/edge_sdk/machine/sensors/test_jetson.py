from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_sdk.machine.probe import choose_probe
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.jetson import READ_JTOP, is_jetson, jtop, nvpmodel, parse_jtop
from edge_sdk.machine.snapshot import Snapshot
from tests.unit.edge_sdk.machine.machines import (
    build,
    jetson_agx_orin,
    jetson_agx_xavier,
    jetson_nano,
    jetson_orin_nano,
    jetson_tx2,
    jetson_xavier_nx,
    model,
    program,
)
from tests.waiting import HANGS_S


def look(root: Path) -> Snapshot:
    probe = choose_probe(root)
    assert probe.name == "jetson"
    return probe.snapshot()


@pytest.mark.parametrize(
    ("machine", "rails", "total", "mode", "gpu"),
    [
        (
            jetson_nano,
            {"POM_5V_IN": 2.54, "POM_5V_GPU": 0.04, "POM_5V_CPU": 0.49},
            2.54,
            "MAXN",
            0.125,
        ),
        (
            jetson_tx2,
            {
                "VDD_SYS_GPU": 0.076,
                "VDD_SYS_SOC": 0.46,
                "VDD_4V0_WIFI": 0.019,
                "VDD_IN": 2.251,
                "VDD_SYS_CPU": 0.152,
                "VDD_SYS_DDR": 0.345,
            },
            2.251,
            "MAXP_CORE_ARM",
            0.0,
        ),
        (
            jetson_xavier_nx,
            {"VDD_IN": 4.3648, "VDD_CPU_GPU_CV": 0.7936, "VDD_SOC": 0.992},
            4.3648,
            "MODE_20W_6CORE",
            0.99,
        ),
        (
            jetson_agx_xavier,
            {"GPU": 0.0, "CPU": 0.57, "SOC": 1.52, "CV": 0.0, "VDDRQ": 0.456, "SYS5V": 2.0},
            4.546,
            "MAXN",
            0.0,
        ),
        (
            jetson_orin_nano,
            {"VDD_IN": 15.01312, "VDD_CPU_GPU_CV": 6.5832, "VDD_SOC": 3.0384},
            15.01312,
            "MAXN_SUPER",
            0.407,
        ),
        (
            jetson_agx_orin,
            {"VDD_GPU_SOC": 3.8, "VDD_CPU_CV": 1.9, "VIN_SYS_5V0": 3.5, "VDDQ_VDD2_1V8AO": 0.75},
            9.95,
            "MODE_50W",
            0.0,
        ),
    ],
)
def test_rails_total_mode_and_gpu(
    tmp_path: Path,
    machine: Callable[[Path], Path],
    rails: dict[str, float],
    total: float,
    mode: str,
    gpu: float,
) -> None:
    snapshot = look(machine(tmp_path))
    assert snapshot.power.rails == pytest.approx(rails)
    assert snapshot.power.total_watts == pytest.approx(total)
    assert snapshot.power.mode == mode
    assert snapshot.gpu.busy == gpu
    assert snapshot.memory.unified is True
    assert snapshot.battery.present is False


def test_tx2_has_the_cores_its_mode_leaves_on(tmp_path: Path) -> None:
    assert look(jetson_tx2(tmp_path)).cpu.cores == 4


def test_total_of_rails_is_unknown_when_one_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jetson_agx_orin(tmp_path)
    chip = tmp_path / "sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon3"
    (chip / "curr2_input").unlink()
    snapshot = look(tmp_path)
    assert set(snapshot.power.rails or {}) == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}
    assert snapshot.power.total_watts is None
    assert "udev" in caplog.text


def test_rails_for_root_only_are_unknown(tmp_path: Path) -> None:
    """As on JetPack 4. The process gives up being root where it is."""
    for path in [tmp_path, *jetson_nano(tmp_path).rglob("*")]:
        path.chmod(0o755)
    for path in tmp_path.rglob("in_power*_input"):
        path.chmod(0)
    code = (
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from edge_sdk.machine.probe import choose_probe\n"
        # Folders above are root's own; whoever is inside already needs them no more.
        "os.chdir(sys.argv[1])\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65534)\n"
        "print(json.dumps(choose_probe(Path('.')).snapshot().to_dict()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[5],
        timeout=HANGS_S,
    )
    snapshot = Snapshot.from_dict(json.loads(result.stdout))
    assert snapshot.power.mode == "MAXN"
    assert (snapshot.power.rails, snapshot.power.total_watts) == (None, None)
    assert "udev" in result.stderr


def test_rail_that_is_the_total_is_enough(tmp_path: Path) -> None:
    jetson_orin_nano(tmp_path)
    (tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/curr2_input").write_text("-3\n")
    snapshot = look(tmp_path)
    assert snapshot.power.total_watts == pytest.approx(15.01312)
    assert "VDD_CPU_GPU_CV" not in (snapshot.power.rails or {})


def test_gpu_is_found_by_its_folder_where_the_device_tree_is_hidden(tmp_path: Path) -> None:
    jetson_xavier_nx(tmp_path)
    shutil.rmtree(tmp_path / "sys/class/devfreq/17000000.gv11b/device/of_node")
    assert look(tmp_path).gpu.busy == 0.99


def test_jetson_in_a_container_is_recognised(tmp_path: Path) -> None:
    assert not is_jetson(Files(tmp_path), "")
    build(tmp_path, {"etc/nv_tegra_release": "# R36 (release), REVISION: 4.3\n"})
    assert choose_probe(tmp_path).name == "jetson"


def test_jetson_on_a_foreign_carrier_board_is_recognised(tmp_path: Path) -> None:
    build(tmp_path, model("Acme Box"))
    build(tmp_path, {"proc/device-tree/compatible": "acme,box\0nvidia,tegra234\0"})
    assert choose_probe(tmp_path).name == "jetson"


def test_mode_without_its_table_is_a_number(tmp_path: Path) -> None:
    jetson_nano(tmp_path)
    (tmp_path / "etc/nvpmodel.conf").unlink()
    assert look(tmp_path).power.mode == "0"


def test_mode_is_asked_for_where_the_file_is_not_there(tmp_path: Path) -> None:
    jetson_nano(tmp_path)
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    script = 'test "$1" = -q && echo "NV Fan Mode:quiet" && echo "NV Power Mode: MAXN" && echo 0'
    program(tmp_path, "nvpmodel", script, "usr/sbin")
    probe = choose_probe(tmp_path)
    assert probe.snapshot().power.mode is None
    assert probe.settle(HANGS_S)
    assert probe.snapshot().power.mode == "MAXN"
    probe.close()


@pytest.mark.parametrize(
    ("output", "mode"),
    [
        ("NV Power Mode: MODE_30W_4CORE\n5\n", "MODE_30W_4CORE"),
        ("NVPM WARN: fan mode is not set!\nNV Power Mode: 15W\n0\n", "15W"),
        ("", None),
    ],
)
def test_nvpmodel_prints_the_mode(output: str, mode: str | None) -> None:
    assert nvpmodel(Files()).parse(output).power.mode == mode


def test_jtop_tells_milliwatts() -> None:
    said = {"total": 4546, "rails": {"CPU": 570, "GPU": 0}, "mode": "MAXN"}
    power = parse_jtop(json.dumps(said)).power
    assert power.total_watts == 4.546
    assert power.rails == {"CPU": 0.57, "GPU": 0.0}
    assert power.mode == "MAXN"


def test_jtop_is_read_by_another_python(tmp_path: Path) -> None:
    """Against a module of the same shape as jetson-stats 4 and later."""
    build(
        tmp_path,
        {
            "jtop.py": (
                "class jtop:\n"
                "    power = {'rail': {'CPU': {'power': 570, 'avg': 1}},\n"
                "             'tot': {'power': 4546, 'avg': 1}}\n"
                "    nvpmodel = 'MAXN'\n"
                "    def __enter__(self): return self\n"
                "    def __exit__(self, *_): pass\n"
            )
        },
    )
    result = subprocess.run(
        [sys.executable, "-c", READ_JTOP],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=HANGS_S,
    )
    power = parse_jtop(result.stdout).power
    assert (power.total_watts, power.rails, power.mode) == (4.546, {"CPU": 0.57}, "MAXN")


def test_jtop_is_not_used_unless_installed(tmp_path: Path) -> None:
    assert jtop(Files()).program("jtop") is None
    assert jtop(Files(tmp_path)).program("jtop") is None
