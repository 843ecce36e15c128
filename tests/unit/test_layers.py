"""Imports point one way, and importing the SDK stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edge_sdk", "coordinator", "benchmarks", "devices")

ORDER = {
    "": ("edge_sdk", "devices", "coordinator", "benchmarks"),
    "edge_sdk": (
        *("protocol", "program", "transport", "machine", "data", "train", "decide", "device"),
        "cli",
    ),
    "coordinator": (
        *("errors", "task", "masks", "aggregate", "rounds", "run", "service"),
        *("operate", "simulate", "cli"),
    ),
}
"""Of these packages, the entries in layers: each imports only those before it."""

LAZY = {"torch", "onnxruntime", "paho", "sklearn", "matplotlib", "zstandard"}
"""Not to be imported at the top of any module of the SDK but the backend that is for it."""

BACKENDS = {
    "edge_sdk/train/torch.py": "torch",
    "edge_sdk/train/onnx.py": "onnxruntime",
    "edge_sdk/transport/mqtt/connection.py": "paho",
}


def modules() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


@cache
def imports(path: Path, *, top_level_only: bool = False) -> tuple[str, ...]:
    """Every module name imported by a file, `TYPE_CHECKING` blocks included."""
    tree = ast.parse(path.read_text())
    found: list[str] = []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            assert node.module is not None
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def edges(package: str, sources: Mapping[str, Path]) -> dict[str, set[str]]:
    """Which entries of a package import which others of its entries.

    An import inside a function counts where it leaves or enters a folder. Between two modules side
    by side it does not: one of them may need the other only while it runs.
    """
    found: dict[str, set[str]] = {}
    for module, path in sources.items():
        if (own := _entry(package, module)) is None:
            continue
        found.setdefault(own, set())
        later = set(imports(path)) - set(imports(path, top_level_only=True))
        for name in imports(path):
            other = _entry(package, name)
            if other is None or other == own:
                continue
            beside = _is_module(package, own, sources) and _is_module(package, other, sources)
            if not (beside and name in later):
                found[own].add(other)
    return {entry: others & found.keys() for entry, others in found.items()}


def _entry(package: str, module: str) -> str | None:
    """The entry of a package that a module lies in."""
    if package and not module.startswith(f"{package}."):
        return None
    entry = module[len(package) :].lstrip(".").split(".")[0]
    return entry if package or entry in PACKAGES else None


def _is_module(package: str, entry: str, sources: Mapping[str, Path]) -> bool:
    path = sources.get(f"{package}.{entry}")
    return path is not None and path.name != "__init__.py"


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The entries left when those that import no other are taken away, again and again."""
    left = {entry: set(others) for entry, others in graph.items()}
    while free := [entry for entry, others in left.items() if not others & left.keys()]:
        for entry in free:
            del left[entry]
    return sorted(left)


def _sources() -> dict[str, Path]:
    return {_name(path).removesuffix(".__init__"): path for path in modules()}


def _packages() -> list[str]:
    return ["", *sorted(_name(path.parent) for path in modules() if path.name == "__init__.py")]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("package", _packages())
def test_entries_of_every_package_import_one_way(package: str) -> None:
    assert cycle(edges(package, _sources())) == []


@pytest.mark.parametrize("package", ORDER)
def test_entries_import_only_what_is_before_them(package: str) -> None:
    graph, order = edges(package, _sources()), ORDER[package]
    assert sorted(graph) == sorted(order)
    for number, entry in enumerate(order):
        assert graph[entry] <= set(order[:number]), entry


def test_cycle_of_folders_is_found(tmp_path: Path) -> None:
    texts = {
        "edge_sdk.a": "import edge_sdk.b.c",
        "edge_sdk.b": "",
        "edge_sdk.b.c": "def f():\n    from edge_sdk import a",
    }
    sources = {}
    for name, text in texts.items():
        path = tmp_path / name / ("__init__.py" if name == "edge_sdk.b" else "module.py")
        path.parent.mkdir()
        path.write_text(text)
        sources[name] = path
    assert cycle(edges("edge_sdk", sources)) == ["a", "b"]


@pytest.mark.parametrize("path", [p for p in modules() if "edge_sdk" in p.parts], ids=_name)
def test_sdk_module_loads_heavy_packages_lazily(path: Path) -> None:
    own = BACKENDS.get(str(path.relative_to(ROOT)))
    roots = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert roots & LAZY <= {own}


@pytest.mark.parametrize(
    "package", ["edge_sdk", "edge_sdk.device.app", "edge_sdk.cli", "coordinator"]
)
def test_import_loads_nothing_heavy(package: str) -> None:
    code = f"import {package}, sys; print(sorted({LAZY!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"
