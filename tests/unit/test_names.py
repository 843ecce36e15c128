"""A public class name means one thing in the whole project."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edge_sdk", "coordinator", "benchmarks", "devices")


def names(text: str) -> Iterator[tuple[str, bool]]:
    """Public names a module defines for types, and whether each is a class of its own.

    An alias is no class: two modules may both say `Groups = tuple[int, ...]`.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            made = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("NewType")
            if made or (name[0].isupper() and not name.isupper()):
                yield name, made


def clashes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Names of classes that another module gives to a class or an alias, and where."""
    places: dict[str, list[str]] = defaultdict(list)
    classes: set[str] = set()
    for module, text in texts.items():
        for name, is_class in names(text):
            if not name.startswith("_"):
                places[name].append(module)
                classes |= {name} if is_class else set()
    return {name: found for name, found in places.items() if name in classes and len(found) > 1}


def test_public_class_name_means_one_thing() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = clashes({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    assert not found, f"rename so that each says which is meant: {found}"


def test_clash_of_a_class_with_an_alias_or_new_type_is_found() -> None:
    texts = {
        "a": "class Heat: ...\nclass _Own: ...\nSizes = tuple[int, ...]",
        "b": "Heat = float\nclass _Own: ...\nSizes = tuple[int, ...]\nName = NewType('Name', str)",
        "c": "Name = str\nLIMIT = 3",
    }
    assert clashes(texts) == {"Heat": ["a", "b"], "Name": ["b", "c"]}
