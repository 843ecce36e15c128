"""The file of finished runs: a line of JSON each, so that a study can stop and go on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report.record import append_line, read_lines
from benchmarks.studies.levels.trial import Trial, TrialOutcome


def read_record(path: Path) -> dict[Trial, TrialOutcome]:
    """Read the outcomes in a file, by case; a file that does not exist has none.

    A last line that was cut off is left out. Raises `UsageError` for a file of anything else.
    """
    return {outcome.case: outcome for outcome in read_lines(path, _parse)}


def _parse(fields: dict[str, Any]) -> TrialOutcome:
    return TrialOutcome(**{**fields, "case": Trial(**fields["case"])})


def append_outcome(path: Path, outcome: TrialOutcome) -> None:
    """Add an outcome to the file."""
    append_line(path, outcome.plain())


def merge_records(paths: Iterable[Path]) -> dict[Trial, TrialOutcome]:
    """Read several files; of two outcomes of a case, the later file's counts."""
    found: dict[Trial, TrialOutcome] = {}
    for path in paths:
        found |= read_record(path)
    return found
