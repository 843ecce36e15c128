"""README and tutorial, typed as printed by a reader with several terminals.

Mosquitto speaks TLS; devices join with the code that serve prints. In the tutorial, devices run
from the wheel, as it would be published, in an environment that has nothing of this folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest

import edge_sdk
from coordinator.operate.broker.embedded import find_mosquitto
from edge_sdk.program.processes import Children
from tests.integration.terminals import Walkthrough
from tests.integration.test_docs import ROOT
from tests.waiting import lasting_port, until

needs_mosquitto = pytest.mark.skipif(
    find_mosquitto() is None, reason="needs mosquitto, which is not installed"
)
HERE = Path(sys.executable).parent
SOURCES = ("edge_sdk", "coordinator", "benchmarks", "devices")
JOIN = r"^  tessera-device join (\S+)$"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with the examples. Others may enter it: Mosquitto may be another user."""
    with TemporaryDirectory() as name:
        path = Path(name) / "clone"
        path.parent.chmod(0o755)
        shutil.copytree(ROOT / "examples", path / "examples")
        (path / ".venv").symlink_to(sys.prefix)
        yield path


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


@pytest.fixture
def from_wheel(tmp_path: Path) -> Path:
    """The programs of an environment with our wheel, which is made from our sdist.

    Other packages are those of this environment, so that nothing is downloaded.
    """
    source = tmp_path / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python = [sys.executable, "-m"]
    build = [*python, "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    files = sorted((tmp_path / "dist").iterdir())
    assert [each.name.removeprefix(f"tessera_fl-{edge_sdk.__version__}") for each in files] == [
        "-py3-none-any.whl",
        ".tar.gz",
    ]
    kept = {each.relative_to(source).as_posix() for each in source.rglob("*") if each.is_file()}
    with ZipFile(files[0]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in kept if name.startswith(SOURCES)}
    subprocess.run([*python, "twine", "check", "--strict", *files], check=True, capture_output=True)

    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    others = sysconfig.get_paths()["purelib"]
    Path(others.replace(sys.prefix, str(clean)), "others.pth").write_text(f"{others}\n")
    install = [*python, "pip", f"--python={clean}/bin/python", "install", "--no-deps", "--no-index"]
    subprocess.run([*install, files[0]], check=True, capture_output=True)
    return clean / "bin"


def own_ports() -> dict[str, dict[str, str]]:
    """Ports for the coordinator that no other test takes while it restarts."""
    names = ("TESSERA_BROKER_PORT", "TESSERA_BROKER_TLS_PORT", "TESSERA_JOIN_PORT")
    return {"coordinator": {name: str(lasting_port()) for name in names}}


@needs_mosquitto
def test_readme(folder: Path, children: Children) -> None:
    reader = Walkthrough("README.md", children, folder, {}, own_ports())
    coordinator, _ = reader.next()
    reader.code = coordinator.wait_for(JOIN)[1]
    kitchen, _ = reader.next()
    garden, _ = reader.next()
    coordinator.wait_for(r"round 2 closed")
    _, exported = reader.next()
    assert "accuracy" in exported
    assert (folder / "model.onnx").stat().st_size > 10_000
    reader.finish()
    for terminal in (kitchen, garden, coordinator):
        terminal.interrupt()


@needs_mosquitto
def test_tutorial(folder: Path, from_wheel: Path, children: Children) -> None:
    devices = ("kitchen", "kitchen 2", "garden", "camera")
    programs = {"coordinator": HERE, "operator": HERE, **dict.fromkeys(devices, from_wheel)}
    reader = Walkthrough("docs/tutorial.md", children, folder, programs, own_ports())
    _, shown = reader.next()  # data
    assert "5.1,3.5,1.4,0.2,setosa" in shown
    reader.next()  # model
    reader.next()  # settings
    coordinator, _ = reader.next()
    reader.code = coordinator.wait_for(JOIN)[1]
    kitchen, _ = reader.next()
    until((kitchen.folder / "kitchen" / "device.toml").exists, kitchen.output)
    _, shown = reader.next()  # check
    assert "✗" not in shown
    garden, _ = reader.next()
    coordinator.wait_for(r"round 3 closed")
    coordinator.interrupt()
    kitchen.interrupt()
    _, shown = reader.next()  # history, explain
    assert "round     1" in shown

    reader.next()
    reader.next()  # both again; the garden has been waiting
    coordinator.wait_for(r"round \d+ closed: 2 of 2 devices trained")
    kitchen.wait_for(r"round \d+: counted")
    assert [each.ended() for each in (kitchen, garden, coordinator)] == [0, 0, 0]

    _, shown = reader.next()  # infer
    # A slow device may have the model of an earlier round: it predicts, but not always well.
    predicted = re.findall(r"setosa|versicolor|virginica", shown)
    assert len(predicted) == 3
    _, shown = reader.next()  # the same from Python
    assert re.findall(r"setosa|versicolor|virginica", shown) == predicted
    _, shown = reader.next()  # evaluate, export, infer with the narrowest level
    assert float(re.findall(r"accuracy +([\d.]+)% of 50", shown)[-1]) > 60

    reader.next()  # photos
    reader.next()
    reader.code = coordinator.wait_for(JOIN)[1]
    camera, _ = reader.next()
    closed = coordinator.wait_for(r"round 10 closed: .* accuracy ([\d.]+)%")
    assert float(closed[1]) > 60
    assert [each.ended() for each in (camera, coordinator)] == [0, 0]
    _, shown = reader.next()
    assert "accuracy" in shown
    assert "zero" in shown
    reader.finish()
