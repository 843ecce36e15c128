"""Imports point one way, and importing the SDK stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edge_sdk", "coordinator", "benchmarks", "devices")

ALLOWED = {
    "edge_sdk.protocol": {"edge_sdk.protocol"},
    "edge_sdk": {"edge_sdk"},
    "devices": {"devices"},
    "coordinator": {"coordinator", "edge_sdk"},
    "benchmarks": {"benchmarks", "coordinator", "edge_sdk", "devices"},
}
"""Which of our packages the modules of a layer may import."""

LAZY = {"torch", "onnxruntime", "paho", "sklearn", "matplotlib", "zstandard"}
"""Not to be imported at the top of any module of the SDK but the backend that is for it."""

BACKENDS = {
    "edge_sdk/train/torch.py": "torch",
    "edge_sdk/train/onnx.py": "onnxruntime",
    "edge_sdk/transport/connection.py": "paho",
}


def modules() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def layer_of(module: str) -> str:
    return max((layer for layer in ALLOWED if _within(module, layer)), key=len)


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Every module name imported by a file, `TYPE_CHECKING` blocks included."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward_imports(path: Path, name: str) -> list[str]:
    allowed = ALLOWED[layer_of(name)]
    return [
        imported
        for imported in imports(path)
        if imported.split(".")[0] in PACKAGES
        and not any(_within(imported, layer) for layer in allowed)
    ]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", modules(), ids=_name)
def test_module_imports_only_its_own_layer_and_below(path: Path) -> None:
    assert upward_imports(path, _name(path)) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("edge_sdk.device", "from coordinator.rounds import Phase"),
        ("edge_sdk.protocol.plan", "import edge_sdk.streams"),
        ("edge_sdk.protocol.plan", "from edge_sdk import streams"),
        ("coordinator.rounds", "def f():\n    import benchmarks.models"),
    ],
)
def test_upward_import_is_found(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    assert upward_imports(path, name)


@pytest.mark.parametrize("path", [p for p in modules() if "edge_sdk" in p.parts], ids=_name)
def test_sdk_module_loads_heavy_packages_lazily(path: Path) -> None:
    own = BACKENDS.get(str(path.relative_to(ROOT)))
    roots = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert roots & LAZY <= {own}


@pytest.mark.parametrize("package", ["edge_sdk", "edge_sdk.app", "edge_sdk.cli", "coordinator"])
def test_import_loads_nothing_heavy(package: str) -> None:
    code = f"import {package}, sys; print(sorted({LAZY!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"
