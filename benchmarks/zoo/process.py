"""The process of one model: `python -m benchmarks.zoo.process KEY FILE SECONDS [BEFORE]`.

BEFORE is a file with an earlier outcome. FILE holds the outcome so far, so that a process that is
ended leaves what it had found. It ends itself after so many seconds of computing, however busy the
machine is.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from benchmarks.zoo.names import ZOO
from benchmarks.zoo.outcome import read_outcomes, write_outcomes
from benchmarks.zoo.trial import run_trial


def main(key: str, file: str, limit_s: str, before: str = "") -> None:
    """Try one model and write its outcome after every step."""
    seconds = max(1, round(float(limit_s)))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    earlier = read_outcomes(Path(before)).get(key) if before else None
    for outcome in run_trial(ZOO[key], earlier):
        write_outcomes(Path(file), [outcome])


if __name__ == "__main__":
    main(*sys.argv[1:])
