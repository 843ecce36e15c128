"""The folder of a run: its place, its results so far, and its files."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.device.measure import device_figures
from benchmarks.device.report.plots import write_plots
from benchmarks.device.report.report import write_report
from benchmarks.device.results import FILE, Results, read_results, write_results
from benchmarks.report.options import RUNS, UsageError


def now() -> str:
    """Return the current time: ISO 8601, UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def begun(out: Path | None, resume: bool) -> tuple[Path, Results | None]:
    """Return the folder of the run and its results so far; None: it is new.

    `out` None: a new folder or, to resume, the newest incomplete one. Raises `UsageError` and
    `ResultsError`.
    """
    if resume:
        folder = _newest() if out is None else out
        return folder, read_results(folder / FILE)
    folder = RUNS / now().replace(":", "").removesuffix("Z") if out is None else out
    if (folder / FILE).exists():
        raise UsageError(
            f"{folder} already has results: add --resume to continue, or name another folder"
        )
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"--out {folder}: cannot write to {there}; name another folder")
    return folder, None


def _newest() -> Path:
    for file in sorted(RUNS.glob(f"*/{FILE}"), reverse=True):
        if not read_results(file).complete:
            return file.parent
    raise UsageError(f"no run to resume in {RUNS}/: name its folder with --out")


def keep(folder: Path, results: Results) -> None:
    """Write the results as they are now. Raises `OSError`."""
    write_results(folder / FILE, results, device_figures(results))


def keep_report(folder: Path, results: Results) -> None:
    """Write the results, the plots and the report. Raises `OSError`."""
    keep(folder, results)
    write_plots(results, folder)
    write_report(results, folder)
