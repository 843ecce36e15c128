"""The job as a bare torch loop on one thread: one model, device after device."""

from __future__ import annotations

import sys

from turns import Turns, make_model, read_job, train


def main(path: str) -> None:
    """Take a share of a round's steps in every turn."""
    job, turns = read_job(path), Turns()
    model, number = make_model(job), 0
    devices = max(1, round(job["participants"] * job["bare_share"]))
    while turns.begin():
        for _ in range(devices):
            train(job, model, number % job["devices"], number)
            number += 1
        turns.end(devices * job["steps"])


if __name__ == "__main__":
    main(sys.argv[1])
