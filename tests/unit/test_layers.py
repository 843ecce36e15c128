"""Imports point one way, and importing the SDK stays cheap.

The table of rooms in docs/architecture.md is the one source of the order: it has a row for every
folder, with the folder's entries from the lowest to the highest.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edge_sdk", "coordinator", "benchmarks", "devices")

DOCUMENT = ROOT / "docs/architecture.md"
MOST_ENTRIES = 11

LAZY = {"torch", "onnxruntime", "paho", "sklearn", "matplotlib", "zstandard"}
"""Not to be imported at the top of any module of the SDK but the backend that is for it."""

BACKENDS = {
    "edge_sdk/train/torch.py": "torch",
    "edge_sdk/train/onnx.py": "onnxruntime",
    "edge_sdk/transport/mqtt/client.py": "paho",
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


def layers(graph: Mapping[str, set[str]]) -> tuple[list[str], list[str]]:
    """The entries, each behind all that it imports; and those left over, which form a cycle."""
    order: list[str] = []
    left = {entry: set(others) for entry, others in sorted(graph.items())}
    while free := [entry for entry, others in left.items() if not others & left.keys()]:
        order += free
        for entry in free:
            del left[entry]
    return order, list(left)


def rows(text: str) -> dict[str, list[str]]:
    """Entries by package, as the table of rooms has them; folders end with a slash."""
    _, found, table = text.partition(
        "| folder | entries, each imports only those to its left | is |\n"
    )
    assert found, f"{DOCUMENT.name} has no table of rooms"
    of: dict[str, list[str]] = {}
    for row in table.split("\n\n")[0].splitlines()[1:]:
        folder, entries, _ = (cell.strip() for cell in row.strip("|").split(" | "))
        of[folder.strip("`./").replace("/", ".")] = re.findall(r"`([^`]+)`", entries)
    return of


def objections(package: str, listed: list[str] | None, graph: Mapping[str, set[str]]) -> list[str]:
    """All that is wrong with a row, and what to do."""
    there, _ = layers(graph)
    if listed is None:
        entries = " ".join(f"`{_shown(package, entry)}`" for entry in there)
        return [f"add a row: | `{package.replace('.', '/')}/` | {entries or '–'} | one sentence |"]
    wanted = {_shown(package, entry) for entry in there}
    found = [f"add {entry} to the row" for entry in sorted(wanted - set(listed))]
    found += [
        f"take {entry} out of the row: it is not there" for entry in sorted(set(listed) - wanted)
    ]
    place = {entry.rstrip("/"): number for number, entry in enumerate(listed)}
    return found + [
        f"{entry} imports {other}, which is to its right: move one of them, or the import"
        for entry in there
        for other in sorted(graph[entry])
        if place.get(entry, 0) < place.get(other, 0)
    ]


def _shown(package: str, entry: str) -> str:
    return f"{entry}/" if ROOT.joinpath(*package.split("."), entry).is_dir() else entry


def _sources() -> dict[str, Path]:
    return {_name(path).removesuffix(".__init__"): path for path in modules()}


def _packages() -> list[str]:
    return ["", *sorted(_name(path.parent) for path in modules() if path.name == "__init__.py")]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("package", _packages())
def test_entries_of_every_package_import_one_way(package: str) -> None:
    assert layers(edges(package, _sources()))[1] == []


@pytest.mark.parametrize("package", _packages())
def test_table_of_rooms_is_the_tree_and_its_order_holds(package: str) -> None:
    wrong = objections(package, rows(DOCUMENT.read_text()).get(package), edges(package, _sources()))
    assert not wrong, "\n".join((f"docs/architecture.md, {package or '.'}:", *wrong))


def test_table_of_rooms_has_no_row_for_a_folder_that_is_gone() -> None:
    assert rows(DOCUMENT.read_text()).keys() <= set(_packages()), "take these rows out"


def test_no_module_is_there_for_tests_alone() -> None:
    """Every module is imported by another, or started by its name: by a program or by a person."""
    reached = set(re.findall(r'"([\w.]+):main"', (ROOT / "pyproject.toml").read_text()))
    for module, path in _sources().items():
        named = {
            node.value.partition(":")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        reached |= {*imports(path), *named} - {module}
        if path.name == "__init__.py" or "__main__" in named:
            reached.add(module)
    assert not _sources().keys() - reached, "move it to tests/, or use it"


@pytest.mark.parametrize("package", _packages())
def test_folder_can_be_taken_in_at_a_glance(package: str) -> None:
    assert len(edges(package, _sources())) <= MOST_ENTRIES, "make a room for some of them"


def test_row_that_is_wrong_says_what_to_do() -> None:
    graph: dict[str, set[str]] = {"a": {"b"}, "b": set(), "c": set()}
    assert objections("x", None, graph) == ["add a row: | `x/` | `b` `c` `a` | one sentence |"]
    assert objections("x", ["b", "a", "c"], graph) == []
    assert objections("x", ["a", "b", "d"], graph) == [
        "add c to the row",
        "take d out of the row: it is not there",
        "a imports b, which is to its right: move one of them, or the import",
    ]


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
    assert layers(edges("edge_sdk", sources)) == ([], ["a", "b"])


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
