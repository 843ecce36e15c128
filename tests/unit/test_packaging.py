"""The base install stays small, and the extras are those of docs/install.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import edge_sdk

ROOT = Path(__file__).resolve().parents[2]


def requirements(extra: str | None) -> set[str]:
    """Names of the distributions that an extra (None: the base install) asks for directly."""
    found = set()
    for line in metadata.requires("tessera-fl") or []:
        name = re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0].lower()
        marker = re.search(r"extra == ['\"](\w+)['\"]", line)
        if (marker.group(1) if marker else None) == extra:
            found.add(name)
    return found


def test_base_install_is_what_a_device_needs() -> None:
    assert requirements(None) == {"numpy", "msgpack", "psutil", "paho-mqtt", "tomli"}


@pytest.mark.parametrize(
    ("extra", "needs"),
    [
        ("onnx", {"onnxruntime"}),
        ("zstd", {"zstandard"}),
        ("join", {"cryptography"}),
        ("qr", {"segno"}),
        ("broker", {"amqtt"}),
        ("torch", {"torch"}),
        (
            "coordinator",
            {
                "tessera-fl",
                "onnx",
                "safetensors",
                "cryptography",
                "rich",
                "matplotlib",
                "scikit-learn",
                "xxhash",
                "starlette",
                "uvicorn",
                "prometheus-client",
            },
        ),
    ],
)
def test_extra_adds_only_its_own(extra: str, needs: set[str]) -> None:
    assert requirements(extra) == needs


def test_page_lists_every_extra() -> None:
    listed = re.findall(r"^\| `tessera-fl\[(\w+)\]`", (ROOT / "docs/install.md").read_text(), re.M)
    assert {*listed, "dev"} == set(metadata.metadata("tessera-fl").get_all("Provides-Extra") or ())


def test_version_is_the_same_everywhere() -> None:
    assert metadata.version("tessera-fl") == edge_sdk.__version__
    assert f"## {edge_sdk.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("script", ["tessera-device", "tessera-coordinator", "tessera-bench"])
def test_console_script_explains_itself(script: str) -> None:
    program = Path(sys.executable).parent / script
    result = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"usage: {script}")


def test_device_info_names_what_is_installed() -> None:
    program = Path(sys.executable).parent / "tessera-device"
    result = subprocess.run([program, "info"], capture_output=True, text=True, check=True)
    assert re.search(r"^numpy +\d", result.stdout, re.MULTILINE)
    assert re.search(r"^memory_mb +\d", result.stdout, re.MULTILINE)


SHIPPED = """
import json
from setuptools import Distribution
distribution = Distribution({"name": "tessera-fl"})
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
command.manifest_files = {}  # of an sdist, which is not made here
print(json.dumps(command.find_data_files("coordinator.operate.http", "coordinator/operate/http")))
"""


def test_wheel_has_every_file_of_the_page() -> None:
    # In a process of its own: setuptools replaces distutils wherever it is imported.
    done = subprocess.run(
        [sys.executable, "-c", SHIPPED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    shipped = set(json.loads(done.stdout.splitlines()[-1]))
    folder = ROOT / "coordinator/operate/http/page"
    files = {str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file()}
    assert files
    assert files <= shipped
