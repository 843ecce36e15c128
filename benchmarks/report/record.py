"""A study's file of finished runs: a line of JSON each, so that the study can stop and go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.report.options import UsageError
from edge_sdk.program import files

T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read and parse every line of a file; a file that does not exist has none.

    A last line that was cut off is left out. Raises `UsageError` for a file of anything else.
    """
    if not path.exists():
        return []
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            run = parse(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise UsageError(
                f"{path}, line {number} is not a run of this study: {error}"
            ) from error
        found.append(run)
    return found


def append_line(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run to the file, behind a line that was cut off."""
    files.append_line(path, (json.dumps(run) + "\n").encode(), synced=False)
