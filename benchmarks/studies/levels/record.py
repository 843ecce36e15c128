"""The file of finished runs: a line of JSON each, so that a study can stop and go on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report.options import UsageError
from benchmarks.studies.levels.trial import Trial, TrialOutcome


def read_record(path: Path) -> dict[Trial, TrialOutcome]:
    """Read the outcomes in a file, by case; a file that does not exist has none.

    A last line that was cut off is left out. Raises `UsageError` for a file of anything else.
    """
    if not path.exists():
        return {}
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            outcome = TrialOutcome(**{**fields, "case": Trial(**fields["case"])})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise UsageError(
                f"{path}, line {number} is not a run of this study: {error}"
            ) from error
        found[outcome.case] = outcome
    return found


def append_outcome(path: Path, outcome: TrialOutcome) -> None:
    """Add an outcome to the file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        if text and not text.endswith("\n"):
            file.write("\n")  # behind a line that was cut off
        file.write(json.dumps(outcome.plain()) + "\n")


def merge_records(paths: Iterable[Path]) -> dict[Trial, TrialOutcome]:
    """Read several files; of two outcomes of a case, the later file's counts."""
    found: dict[Trial, TrialOutcome] = {}
    for path in paths:
        found |= read_record(path)
    return found
