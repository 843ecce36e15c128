"""SECURITY.md names tests that exist, one for each statement."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
CITED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def test_cited_tests_exist() -> None:
    assert len(CITED) > 30
    for path, name in CITED:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def test_every_statement_cites_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    statements = [row for row in rows if "shown by" not in row]
    assert len(statements) == len(CITED)
    assert all("`tests/" in row for row in statements)
