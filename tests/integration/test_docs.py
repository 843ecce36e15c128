"""What the documents show is what happens."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    device, example = blocks("README.md", "python")
    names: dict[str, object] = {}
    exec(compile(device, "README.md", "exec"), names)
    assert inspect.iscoroutinefunction(names["take_part"])
    exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["100%", "75%", "50%", "25%"]


def test_python_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("docs/python.md", "python")
    exec(compile(example, "docs/python.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert "'0.weight': (16, 20)" in printed[0]
    assert [line.split()[0] for line in printed[1:]] == ["1", "2", "3", "4"]
    assert "skip" in "".join(printed)


def test_readme_has_exactly_two_commands_that_exist() -> None:
    commands = [block.strip() for block in blocks("README.md", "bash")]
    assert commands == ["bash scripts/demo", "bash scripts/check"]
    assert all((ROOT / command.split()[1]).is_file() for command in commands)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / document).parent / link).exists(), link


def test_architecture_names_only_what_exists() -> None:
    """Names in the first column are paths; a bare one lies beside the one before it."""
    text = (ROOT / "docs/architecture.md").read_text()
    for row in re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        for name in (first, *(f"{Path(first).parent}/{other}" for other in others)):
            assert (ROOT / name).exists(), f"{name} in {row}"
