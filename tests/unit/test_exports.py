"""The two doors, `edge_sdk` and `coordinator`, give what docs/python.md lists, and nothing else."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/python.md"
DOORS = ("edge_sdk", "coordinator")


def listed(package: str) -> list[str]:
    """Names in the first column of the package's table."""
    _, found, table = DOCUMENT.read_text().partition(f"| from `{package}` | is |\n")
    assert found, f"docs/python.md has no table of {package}"
    rows = table.split("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("package", DOORS)
def test_exports_are_those_the_guide_lists(package: str) -> None:
    names = import_module(package).__all__
    assert names == sorted(names)
    assert sorted(listed(package)) == names


@pytest.mark.parametrize(
    ("package", "name"), [(door, name) for door in DOORS for name in listed(door)]
)
def test_export_exists_and_says_what_it_is(package: str, name: str) -> None:
    found = getattr(import_module(package), name)
    assert found.__name__ == name
    assert inspect.getdoc(found), f"{package}.{name} has no docstring"


@pytest.mark.parametrize("package", DOORS)
def test_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"{package!r} has no attribute 'nothing'"):
        import_module(package).nothing  # noqa: B018
