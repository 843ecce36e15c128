"""What docs/deploy.md and the units of examples/systemd say fits the programs.

Whether systemd accepts the units is checked by scripts/verify-units, with systemd's own tool.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib.machinery import SourceFileLoader
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from coordinator import cli as coordinator_cli
from edge_sdk import __version__
from edge_sdk import cli as device_cli
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service import ending
from edge_sdk.program.settings.types import keys

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "examples/systemd").glob("*.service"))
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("deploy.md", "boards.md"))
PROGRAMS: dict[str, ArgumentParser] = {
    "tessera-device": device_cli.make_parser(),
    "tessera-coordinator": coordinator_cli.make_parser(),
}

KNOWN = {
    "Unit": "After Description StartLimitBurst StartLimitIntervalSec Wants",
    "Service": """
        CPUWeight CapabilityBoundingSet Environment ExecStart Group IOWeight LimitCORE
        LockPersonality MemoryMax MemorySwapMax Nice NoNewPrivileges NotifyAccess OOMScoreAdjust
        PrivateDevices PrivateTmp ProtectClock ProtectControlGroups ProtectHome ProtectHostname
        ProtectKernelLogs ProtectKernelModules ProtectKernelTunables ProtectProc ProtectSystem
        RemoveIPC Restart RestartPreventExitStatus RestartSec RestrictAddressFamilies
        RestrictNamespaces RestrictRealtime RestrictSUIDSGID StateDirectory StateDirectoryMode
        SuccessExitStatus SystemCallArchitectures SystemCallErrorNumber SystemCallFilter TasksMax
        TimeoutStartSec TimeoutStopSec Type UMask User WatchdogSec
    """,
    "Install": "WantedBy",
}
"""Directives that systemd 249 has (JetPack 6), by section; it ignores others with a warning."""

PERSONS = {
    ending.EXIT_CONFIG,
    ending.EXIT_DATA,
    ending.EXIT_TASK,
    ending.EXIT_REPLACED,
    ending.EXIT_DENIED,
}
"""Exit codes of a device after which only a person can help."""


def directives(unit: Path) -> list[tuple[str, str, str]]:
    """Section, name and value of every line."""
    section, found = "", []
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            found.append((section, name, value))
    return found


def values(unit: Path, wanted: str) -> list[str]:
    return [value for _, name, value in directives(unit) if name == wanted]


def value(unit: Path, wanted: str) -> str:
    (only,) = values(unit, wanted)
    return only


def unit(name: str) -> Path:
    return ROOT / "examples/systemd" / f"{name}.service"


def code_blocks() -> list[str]:
    return re.findall(r"^```(?:bash|console)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Program and arguments of every command of ours in the page."""
    program = "|".join(PROGRAMS)
    for line in "".join(code_blocks()).splitlines():
        for name, rest in re.findall(rf"(?:^|[\s/])({program})\s+([a-z][^#;&|>]*)", line):
            yield name, shlex.split(rest)


def read(program: str, arguments: list[str]) -> Namespace:
    """As the program itself reads them, but flags in full. Fails for what it does not know."""
    page = StringIO()
    with redirect_stdout(page), suppress(SystemExit):
        PROGRAMS[program].parse_args([arguments[0], "--help"])
    flags = {each for each in arguments if each.startswith("--")}
    assert flags <= set(re.findall(r"--[a-z-]+", page.getvalue())), f"{program} {arguments}"
    try:
        return PROGRAMS[program].parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{program} {shlex.join(arguments)}")


# -- units -------------------------------------------------------------------------------------


def test_units_are_both_there() -> None:
    assert [path.stem for path in UNITS] == ["tessera-coordinator", "tessera-device"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_has_only_directives_that_systemd_knows(path: Path) -> None:
    for section, name, _ in directives(path):
        assert name in KNOWN[section].split(), f"[{section}] {name}"
    names = [name for _, name, _ in directives(path) if name != "Environment"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_starts_its_program_with_flags_that_exist(path: Path) -> None:
    program, *arguments = shlex.split(value(path, "ExecStart"))
    assert program == f"/opt/tessera/bin/{path.stem}"
    assert read(path.stem, arguments).config.is_relative_to("/etc/tessera")


def test_device_unit_keeps_its_state_where_it_may_write() -> None:
    path = unit("tessera-device")
    parsed = read("tessera-device", shlex.split(value(path, "ExecStart"))[1:])
    assert parsed.state_dir == f"%S/{value(path, 'StateDirectory')}"
    assert value(path, "ProtectSystem") == "strict"


def test_coordinator_unit_keeps_its_state_where_the_page_says() -> None:
    folder = f"/var/lib/{value(unit('tessera-coordinator'), 'StateDirectory')}/run"
    assert f'"{folder}"' in PAGE
    assert f'"{folder}"' in unit("tessera-coordinator").read_text()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_sets_only_variables_that_are_read(path: Path) -> None:
    known = {key.variable for key in keys(DeviceConfig)} | {"PYTHONFAULTHANDLER"}
    assert {each.partition("=")[0] for each in values(path, "Environment")} <= known


def test_device_unit_gives_up_where_only_a_person_can_help() -> None:
    stays_down = value(unit("tessera-device"), "RestartPreventExitStatus").split()
    assert {int(code) for code in stays_down} == PERSONS
    assert ending.EXIT_BROKER not in PERSONS
    assert value(unit("tessera-device"), "Restart") == "on-failure"


def test_coordinator_unit_takes_a_stop_for_success() -> None:
    path = unit("tessera-coordinator")
    assert int(value(path, "SuccessExitStatus")) == coordinator_cli.EXIT_TERMINATED
    assert value(path, "RestartPreventExitStatus") == f"2 {coordinator_cli.EXIT_FENCED}"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_waits_for_signs_of_life(path: Path) -> None:
    assert value(path, "Type") == "notify"
    assert value(path, "NotifyAccess") == "main"
    assert re.fullmatch(r"\d+min", value(path, "WatchdogSec"))


# -- the page ----------------------------------------------------------------------------------


def test_page_shows_only_commands_that_exist() -> None:
    seen = set()
    for program, arguments in commands():
        read(program, arguments)
        seen.add((program, arguments[0]))
    coordinator = {"broker-config", "init", "enroll", "history", "identities", "revoke", "serve"}
    coordinator |= {"verify", "repair", "rollback", "served", "grant", "withdraw"}
    coordinator |= {"pack", "unpack"}
    device = {"explain", "info", "join", "run", "status", "pause", "resume"}
    assert seen == {
        *(("tessera-coordinator", command) for command in coordinator),
        *(("tessera-device", command) for command in device),
    }


def test_page_names_the_codes_of_the_unit() -> None:
    table = next(line for line in PAGE.splitlines() if "stays down, `failed`: the journal" in line)
    assert {int(code) for code in re.findall(r"\d", table)} == PERSONS
    (loop,) = re.findall(r"case \$\? in ([\d |]+)\)", PAGE)
    assert {int(code) for code in loop.split("|")} == PERSONS


def test_page_names_files_and_wheels_that_exist() -> None:
    for path in re.findall(r"(?:examples/systemd|scripts)/[\w.-]+", PAGE):
        assert (ROOT / path.rstrip(".")).exists(), path
    assert re.findall(r"tessera_fl-([\d.]+)-py3", PAGE) == [__version__]


# -- the wheel folder --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels() -> Iterator[ModuleType]:
    """scripts/wheels, which has no ending in .py."""
    loader = SourceFileLoader("tessera_wheels", str(ROOT / "scripts/wheels"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    yield module
    del sys.modules[loader.name]


def make_wheel(folder: Path, name: str, *requires: str) -> None:
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in requires)]
    stem = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w") as content:
        content.writestr(f"{stem}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("python", "platform", "lacking"),
    [
        ("3.10", "manylinux_2_28_aarch64", ["backport>=2", "deep", "for-arm<3"]),
        ("3.11", "manylinux_2_28_aarch64", ["deep", "for-arm<3"]),
        ("3.11", "manylinux2014_x86_64", ["deep"]),
    ],
)
def test_wheels_finds_what_the_target_lacks(
    wheels: ModuleType, tmp_path: Path, python: str, platform: str, lacking: list[str]
) -> None:
    """By the target's Python and machine, and through what is there; other extras are left out."""
    make_wheel(
        tmp_path,
        "tessera-fl",
        "Here_too[more]>=1",
        "backport>=2; python_version < '3.11'",
        "runtime; extra == 'onnx'",
        "elsewhere; extra == 'torch'",
    )
    make_wheel(tmp_path, "here-too", "deep; extra == 'more'", "shallow; extra == 'less'")
    make_wheel(tmp_path, "runtime", "for-arm<3; platform_machine == 'aarch64'")
    make_wheel(tmp_path, "unrelated", "nobody-needs-this")
    target = wheels.Target(python, platform)
    assert wheels.missing(tmp_path.glob("*.whl"), target) == lacking


def test_wheels_takes_wheels_for_an_older_glibc(wheels: ModuleType) -> None:
    flags = wheels.Target("3.11", "manylinux_2_19_aarch64").flags
    named = [flag for before, flag in pairwise(flags) if before == "--platform"]
    assert named == [
        "manylinux_2_19_aarch64",
        "manylinux_2_18_aarch64",
        "manylinux_2_17_aarch64",
        "manylinux2014_aarch64",
        "linux_aarch64",
    ]


def test_wheels_for_python_310_takes_the_last_made_for_it(wheels: ModuleType) -> None:
    newest = wheels.Target("3.11", None).constraints.splitlines()
    oldest = wheels.Target("3.10", None).constraints.splitlines()
    floor = (ROOT / "scripts/constraints-floor.txt").read_text().splitlines()
    changed = set(oldest) - set(newest)
    assert {line.partition("=")[0] for line in changed} == {"numpy", "onnxruntime"}
    assert changed <= set(floor)


@pytest.mark.parametrize(
    "arguments",
    [["--platform", "aarch64", "x"], ["--python", "3", "x"], ["--python", "py311", "x"]],
)
def test_wheels_refuses_a_target_it_does_not_understand(
    wheels: ModuleType, tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        wheels.main(arguments)
    assert caught.value.code not in (None, 0)
    assert list(tmp_path.iterdir()) == []


def test_wheels_reads_the_flags_of_the_page(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = re.findall(r"^python3 scripts/wheels (.*)$", PAGE, flags=re.MULTILINE)
    filled = []
    monkeypatch.setattr(wheels, "fill", lambda folder, target: filled.append((folder, target)))
    monkeypatch.chdir(tmp_path)
    assert wheels.main(shlex.split(line)) == 0
    assert filled == [(Path("wheels"), wheels.Target("3.11", "manylinux_2_28_aarch64"))]
