"""Documents show what happens: every block in them is run as printed, or says why it is not.

    python          all of a document, in order, in one namespace
    console, bash   all of a document, in order, in one folder that has a copy of examples/
    toml            read by the loader it is for
    text, conf, ini shown only

A block that cannot be run has `<!-- not run: why -->` on the line before it. A block that has
`<!-- terminal: name -->` there is run by test_walkthrough.py, in a terminal of that name.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.fleet.sweep.grid import read_cases
from coordinator import simulate
from coordinator.operate.config import read_config
from edge_sdk import load_board, load_config, load_fleet

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
SHELL = {"console", "bash", "sh"}
SHOWN = {"text", "conf", "ini"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `why_not` is why it is not run, `terminal` where it is, if not here."""

    place: str
    kind: str
    text: str
    why_not: str | None
    terminal: str | None = None


def blocks_of(text: str, document: str) -> list[Block]:
    found, lines = [], text.splitlines()
    number = 0
    while number < len(lines):
        if fence := re.fullmatch(r"( *)```(\S*)", lines[number]):
            before = lines[number - 1] if number else ""
            marker = re.fullmatch(r" *<!-- not run: (.+) -->", before)
            terminal = re.fullmatch(r" *<!-- terminal: (.+) -->", before)
            end = lines.index(f"{fence[1]}```", number + 1)
            content = "".join(f"{line}\n" for line in lines[number + 1 : end])
            place = f"{document}:{number + 1}"
            why_not, where = (each[1] if each else None for each in (marker, terminal))
            found.append(Block(place, fence[2], content, why_not, where))
            number = end
        number += 1
    return found


def blocks(document: str, *kinds: str) -> list[Block]:
    """Those that are run."""
    all_of_it = blocks_of((ROOT / document).read_text(), document)
    return [
        block
        for block in all_of_it
        if block.kind in kinds and block.why_not is None and block.terminal is None
    ]


def having(*kinds: str) -> list[str]:
    return [document for document in DOCUMENTS if blocks(document, *kinds)]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Becomes the present folder; what a command writes stays in it.

    Others may enter it, unlike pytest's own: where root runs the tests, Mosquitto is another user.
    """
    with TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        shutil.copytree(ROOT / "examples", path / "examples")
        monkeypatch.chdir(path)
        yield path
        monkeypatch.undo()


def run_python(document: str) -> dict[str, object]:
    names: dict[str, object] = {}
    for block in blocks(document, "python"):
        exec(compile(block.text, block.place, "exec"), names)
    return names


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("document", having("python"))
def test_python_runs(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python(document)
    printed = capsys.readouterr().out.splitlines()
    if document == "docs/plans.md":
        assert [line.split(":")[0] for line in printed[:4]] == ["100%", "75%", "50%", "25%"]
    elif document == "docs/python.md":
        assert inspect.iscoroutinefunction(names["take_part"])
        assert "'0.weight': (16, 20)" in printed[0]
        assert [line.split()[0] for line in printed[1:5]] == ["1", "2", "3", "4"]
        levels = ["level 100%", "level 75%", "level 50%", "level 25%", "deploy"]
        assert all(map(str.startswith, printed[5:], levels))
        assert len(printed) == 10
        assert "skip" in "".join(printed)


@pytest.mark.parametrize("document", having("python"))
def test_python_uses_only_the_two_doors(document: str) -> None:
    for block in blocks(document, "python"):
        modules = re.findall(r"^from ((?:edge_sdk|coordinator)\S*) ", block.text, re.MULTILINE)
        assert set(modules) <= {"edge_sdk", "coordinator"}, block.place
        assert len(modules) == len(set(modules)), f"{block.place}: one import line a package"


@pytest.mark.parametrize("document", having(*SHELL))
def test_commands_run(document: str, folder: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
    }
    for block in blocks(document, *SHELL):
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, f"{block.place}: {ended.stdout}{ended.stderr}"


def read_sweep(path: Path) -> object:
    (path.parent / "all-new.toml").write_text('[[kinds]]\nboard = "raspberry_pi_5"\n')
    return read_cases(path)


LOADERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "soc = ": ("my_board.toml", load_board),
    "[[members]]": ("fleet.toml", load_fleet),
    "[[kinds]]": ("night.toml", simulate.load_population),
    "deliver = ": ("device.toml", load_config),
    "tasks = ": ("device.toml", load_config),
    "[[tasks]]": ("device.toml", load_config),
    "[simulation]": ("sweep.toml", read_sweep),
    "[[cases]]": ("cases.toml", read_cases),
    "[devices]": ("run.toml", read_config),
    "status_topics = ": ("run.toml", read_config),
    "[task]": ("run.toml", read_config),
    "[notify]": ("run.toml", read_config),
    "[delivery]": ("run.toml", read_config),
}
"""The file that a TOML block is, and its reader, by a line that only this kind of file has."""


@pytest.mark.parametrize("document", having("toml"))
def test_toml_is_read_by_what_it_is_for(document: str, tmp_path: Path) -> None:
    for block in blocks(document, "toml"):
        kinds = [LOADERS[line] for line in LOADERS if f"\n{line}" in block.text]
        assert len(kinds) == 1, f"{block.place}: give this kind of file a reader in LOADERS"
        ((name, load),) = kinds
        (tmp_path / name).write_text(block.text)
        load(tmp_path / name)


def test_every_block_is_run_or_says_why_not() -> None:
    everything = [b for name in DOCUMENTS for b in blocks_of((ROOT / name).read_text(), name)]
    for block in everything:
        if block.why_not is not None:
            print(f"{block.place} not run: {block.why_not}")
        assert block.kind in {"python", "toml"} | SHELL | SHOWN, (
            f"{block.place}: say what {block.kind!r} is: python, console, toml, or text, which is "
            "only shown"
        )
        assert block.kind not in SHOWN or block.why_not is None, f"{block.place} is never run"


def test_block_and_its_marker_are_found() -> None:
    text = "<!-- not run: needs root -->\n```console\nsudo ls\n```\n\n```text\na\n```\n"
    text += "<!-- terminal: left -->\n```console\nls\n```\n"
    assert blocks_of(text, "a.md") == [
        Block("a.md:2", "console", "sudo ls\n", "needs root"),
        Block("a.md:6", "text", "a\n", None),
        Block("a.md:10", "console", "ls\n", None, "left"),
    ]


def test_readme_has_exactly_two_commands_that_exist() -> None:
    everything = blocks_of((ROOT / "README.md").read_text(), "README.md")
    commands = [block.text.strip() for block in everything if block.kind == "bash"]
    assert commands == ["bash scripts/demo", "bash scripts/check"]
    assert all((ROOT / command.split()[1]).is_file() for command in commands)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / document).parent / link).exists(), link
