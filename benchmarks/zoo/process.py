"""The process of one model: `python -m benchmarks.zoo.process KEY FILE`.

The file holds the outcome so far, so that a process that is ended leaves what it had found.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.zoo.names import ZOO
from benchmarks.zoo.outcome import write_outcomes
from benchmarks.zoo.trial import run_trial


def main(key: str, file: str) -> None:
    """Try one model and write its outcome after every step."""
    for outcome in run_trial(ZOO[key]):
        write_outcomes(Path(file), [outcome])


if __name__ == "__main__":
    main(*sys.argv[1:])
