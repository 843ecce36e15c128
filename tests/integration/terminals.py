"""Terminals in which a document's commands are typed as printed.

A block belongs to the terminal that the line before it names, `<!-- terminal: kitchen -->`. A block
that ends with a program that goes on says so: `<!-- terminal: kitchen, keeps running -->`. Before
the next block is typed in its terminal, it must have ended, or is stopped with Ctrl-C, as by the
reader. `CODE` stands for the code that the coordinator printed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edge_sdk.program.processes import ChildProcess, Children
from tests.integration.test_docs import ROOT, Block, blocks_of
from tests.waiting import HANGS_S, until

KEEPS_RUNNING = ", keeps running"


@dataclass
class Terminal:
    """A shell's folder and programs, and the program that runs in it now, if any."""

    name: str
    children: Children
    folder: Path
    log_folder: Path
    environment: dict[str, str]
    child: ChildProcess | None = None
    starts: int = 0

    @property
    def _place(self) -> Path:
        """File in which the shell leaves its folder."""
        return self.log_folder / f"{self.name}.folder"

    def type(self, text: str) -> str:
        """Run a block to its end and return its output; the folder stays as it left it."""
        self.interrupt()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{text}\npwd > '{self._place}'"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANGS_S,
        )
        assert done.returncode == 0, f"{self.name}: {text}{done.stdout}{done.stderr}"
        self.folder = Path(self._place.read_text().strip())
        return done.stdout + done.stderr

    def start(self, text: str) -> None:
        """Start a block whose last program goes on."""
        self.interrupt()
        *before, last = text.splitlines()
        # Under its name only when it is complete: it is read as soon as it is there.
        place = f"pwd > '{self._place}.part' && mv '{self._place}.part' '{self._place}'"
        script = "\n".join([*before, place, f"exec {last}"])
        self.starts += 1
        log = self.log_folder / f"{self.name}-{self.starts}.log"
        self._place.unlink(missing_ok=True)
        line = ["/usr/bin/env", "-C", str(self.folder), "bash", "-euc", script]
        self.child = self.children.start(self.name, line, log, self.environment)
        until(self._place.exists, self.child.last_words)
        self.folder = Path(self._place.read_text().strip())

    def output(self) -> str:
        """Return what the program has printed so far."""
        return self._running().log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the program's output has this; fails if it ends before."""
        child = self._running()

        def found() -> bool:
            ended = not child.is_running  # asked before the output is read
            return bool(re.search(pattern, self.output(), re.MULTILINE)) or ended

        until(found, child.last_words)
        match = re.search(pattern, self.output(), re.MULTILINE)
        assert match, child.last_words()
        return match

    def ended(self) -> int:
        """Wait until the program has ended by itself and return its exit code."""
        child = self._running()
        until(lambda: not child.is_running, self.output)
        self.child = None
        return child.process.returncode

    def _running(self) -> ChildProcess:
        assert self.child is not None, f"nothing was started in terminal {self.name}"
        return self.child

    def interrupt(self) -> None:
        """Press Ctrl-C, if a program is running."""
        if self.child is not None:
            self.child.signal(signal.SIGINT)
            assert self.ended() in (0, 130)


@dataclass
class Walkthrough:
    """A document's blocks, typed one after the other in their terminals."""

    document: str
    children: Children
    folder: Path
    programs: dict[str, Path]
    """Where the programs of a terminal are, if not beside this Python."""
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Variables that are set in a terminal."""
    terminals: dict[str, Terminal] = field(default_factory=dict)
    code: str = "CODE"

    def __post_init__(self) -> None:
        everything = blocks_of((ROOT / self.document).read_text(), self.document)
        self._blocks: Iterator[Block] = iter(
            [block for block in everything if block.terminal is not None]
        )

    def next(self) -> tuple[Terminal, str]:
        """Type the next block; returns its terminal, and its output if it has ended."""
        block = next(self._blocks)
        assert block.terminal is not None
        name = block.terminal.removesuffix(KEEPS_RUNNING)
        terminal = self.terminals.setdefault(name, self._open(name))
        text = re.sub(r"\bCODE\b", self.code, block.text)
        if block.terminal.endswith(KEEPS_RUNNING):
            terminal.start(text)
            return terminal, ""
        return terminal, terminal.type(text)

    def finish(self) -> None:
        """Check that every block was typed."""
        left = [block.place for block in self._blocks]
        assert not left, f"not typed: {left}"

    def _open(self, name: str) -> Terminal:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
            "HOME": str(self.folder)
        }
        if name in self.programs:
            environment["PATH"] = f"{self.programs[name]}{os.pathsep}{environment['PATH']}"
        return Terminal(name, self.children, self.folder, self.folder.parent, environment)
