"""Runs every case of interruption and writes the results to docs/interruptions.md.

    python -m tests.interruptions.matrix [--workers 2] [--out FILE] [-k EXPRESSION]

The table holds what the cases recorded while they ran (`conftest.py`): a test's docstring, the
rounds of its worlds, and its notes. Exit code 1 means that a case failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from tests.interruptions.programs import ROOT

HEAD = """\
# Interruptions

This page shows what happens to a run when something breaks. `python -m tests.interruptions.matrix`
writes it and runs every case: a small federation (digits, two devices, a few rounds) of real
programs on a real Mosquitto, through a TCP proxy that can cut, delay, throttle and silence
connections, and hold or change single messages. The cases are in `tests/interruptions`; the quick
ones are part of the normal test run.

Every case ends with these checks:

- every round is finished, and all programs that were not killed end with exit code 0;
- no movement is counted twice;
- every `counted` receipt is for a movement that the history counts;
- no program logs an unexpected error;
- where it says *bit for bit*, the model equals that of the same run without interruption.

## The order of a commit

The parts of a commit are done side by side, in threads beside the coordinator's loop
(`coordinator/service/courses/rounds.py`). Where the order matters, one waits for the other:

1. The rule moves the model, in memory alone. Until step 3, a crash leaves the last checkpoint, the
   journal and the kept movements: the round closes again, to the same bits.
2. In any order: the model's chunks go to the disk and the broker, which no opening names yet; new
   segments and sums of the memory go to disk, which its index does not name yet.
3. The checkpoint, with the round's line of history in it. If the process ends before step 4, memory
   is behind: the checkpoint is removed, and the round closes again.
4. The memory's index, in one transaction, once the checkpoint and what the index names are on disk.
5. The line of history; then the journal and the kept movements are removed.
6. Verdicts go to the devices, and the next round opens, once the broker has all chunks.
7. Files that nothing names any more are removed. A start does the same.

Movements that arrive meanwhile wait for step 6: whether they count must not depend on when the
process ends. Orders of operators are taken at once; one about a device holds from the commit on.

## Crashes at every step

`bash scripts/crash` fails every file operation, and ends the coordinator at every message, of small
runs of `ram-fed`, `ccfl-2`, `fed-raa` and `fedbuff` in memory, and then finishes them: 14,654
points. Each is tried as a kill (with and without the messages that were on their way), an
input/output error, a torn and a short write, a full disk, and a power cut that loses what was not
synced, in up to seven plausible ways. A point survives if the model's bits, the history and the
receipts are those of the run that nobody disturbed; one that does not is printed with the way to
repeat it alone. SQLite, which keeps the index of a memory, counts as one step for each commit: what
happens within a commit is left to SQLite's own tests. In one of the runs, work beside the loop is
put off and done in the reverse order. `bash scripts/crash --processes` ends real coordinators with
`kill -9` on a real Mosquitto, before operations on files and at random times.
`tessera-bench durability` measures both the survivors and what durability costs.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A case that ran."""

    part: str
    done: str
    happened: str
    outcome: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and write the table; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.interruptions.matrix")
    parser.add_argument("--workers", default="2", help="cases at a time (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "interruptions.md")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only the cases that match")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="tessera-matrix-") as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "-q", "-m", "", "-n", options.workers, "-k", options.k]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        done = subprocess.run(
            [sys.executable, *command, str(Path(__file__).parent)], cwd=ROOT, check=False
        )
        cases = read_cases(ElementTree.parse(report).getroot())
    options.out.write_text(HEAD + "".join(table(cases)))
    print(f"{len(cases)} cases: {options.out}")
    return done.returncode


def read_cases(report: ElementTree.Element) -> list[Case]:
    """Read the cases of a JUnit report, in the order of their files."""
    cases = []
    for test in report.iter("testcase"):
        found = [(each.get("name"), each.get("value") or "") for each in test.iter("property")]
        done = next((value for name, value in found if name == "done"), test.get("name", ""))
        bad = next(
            (kind for kind in ("failure", "error", "skipped") if test.find(kind) is not None), ""
        )
        cases.append(
            Case(
                part=test.get("classname", ""),
                done=done,
                happened="; ".join(value for name, value in found if name == "happened"),
                outcome={"": "passed", "skipped": "skipped"}.get(bad, "**failed**"),
                seconds=float(test.get("time", "0")),
            )
        )
    return sorted(cases, key=lambda case: (case.part, case.done, case.happened))


def table(cases: Iterable[Case]) -> Iterable[str]:
    """Write a table for each file of cases, with the file's docstring as its heading."""
    part = ""
    for case in cases:
        if case.part != part:
            part = case.part
            words = (import_module(part).__doc__ or part).strip().splitlines()[0].rstrip(".")
            yield f"\n## {words}\n\n| what was done | outcome | what happened | s |\n"
            yield "|---|---|---|---|\n"
        cells = (case.done, case.outcome, case.happened, f"{case.seconds:.0f}")
        yield f"| {' | '.join(map(_cell, cells))} |\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main())
