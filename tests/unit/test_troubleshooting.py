"""docs/troubleshooting.md names every exit code and every error of the project, and no other."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from pathlib import Path

import benchmarks
import coordinator
import edge_sdk
from edge_sdk import TesseraError

TEXT = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()
PACKAGES = (edge_sdk, coordinator, benchmarks)


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in Path(package.__path__[0]).rglob("*.py")]


def errors() -> set[str]:
    """Names of all errors, wherever they are defined."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            path = Path(package.__path__[0]).parent.joinpath(*module.name.split("."))
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if re.search(r"^class \w+\(.*Error\)", source.read_text(), re.MULTILINE):
                import_module(module.name)
    found, kinds = set(), [TesseraError]
    while kinds:
        kind = kinds.pop()
        found.add(kind.__name__)
        kinds += kind.__subclasses__()
    return {name for name in found if not name.startswith("_")}


def test_every_error_is_explained() -> None:
    section = TEXT.split("## Errors by family")[1].split("## Symptoms")[0]
    explained = re.findall(r"`(\w+(?:Error|Stopped|Busy|Damaged))`", section)
    assert set(explained) == errors()


def test_every_exit_code_is_explained() -> None:
    codes = {
        code
        for path in sources()
        for code in re.findall(r"^EXIT_[A-Z]+ = (\d+)", path.read_text(), re.MULTILINE)
    }
    assert {"2", "3", "130"} <= codes
    section = TEXT.split("## Exit codes")[1].split("## ")[0]
    explained = set(re.findall(r"^\| (\d+) \|", section, re.MULTILINE))
    assert explained == codes | {"0", "1"}


def test_help_of_run_lists_the_same_codes() -> None:
    from edge_sdk.cli import make_parser

    commands = next(each for each in make_parser()._actions if each.dest == "==SUPPRESS==")
    assert commands.choices is not None
    epilogue = dict(commands.choices)["run"].epilog
    device = TEXT.split("| `tessera-device run`")[1].split("| `tessera-coordinator")[0]
    listed = re.findall(r"^ +(\d+) ", epilogue, re.MULTILINE)
    assert listed == re.findall(r"^\| (\d+) \|", device, re.MULTILINE)
