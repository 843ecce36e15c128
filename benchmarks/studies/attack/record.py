"""The file of finished runs: a line of JSON each, so that the study can stop and go on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report.record import append_line, read_lines
from benchmarks.studies.attack.trial import AttackOutcome, AttackTrial


def read_attacks(paths: Iterable[Path]) -> dict[AttackTrial, AttackOutcome]:
    """Read the outcomes in some files, by case; of two of a case, the later file's counts.

    A file that does not exist has none. Raises `UsageError` for a file of anything else.
    """
    return {each.case: each for path in paths for each in read_lines(path, _parse)}


def append_attack(path: Path, outcome: AttackOutcome) -> None:
    """Add an outcome to a file."""
    append_line(path, outcome.plain())


def _parse(fields: dict[str, Any]) -> AttackOutcome:
    return AttackOutcome(**{**fields, "case": AttackTrial(**fields["case"])})
