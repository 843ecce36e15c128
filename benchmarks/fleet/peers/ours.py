"""The job on our own simulation, as a program with the same manners as the drivers of others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.fleet.peers.drivers.turns import Turns, read_job
from benchmarks.fleet.training import TrainingConfig, TrainingJob
from edge_sdk.data.arrays import ArrayData

ROUNDS = 10**6
"""Rounds of the simulation: more than anybody asks for."""


def main(path: str) -> None:
    """Do rounds while they are asked for."""
    job, turns, before = read_job(path), Turns(), 0
    inputs, targets = (
        np.load(Path(job["folder"]) / f"{name}.npy", mmap_mode="r")
        for name in ("inputs", "targets")
    )
    config = TrainingConfig(
        devices=job["devices"],
        participants=job["participants"],
        steps=job["steps"],
        batch=job["batch"],
        samples=job["samples"],
    )
    training = TrainingJob("mlp", config, ArrayData((inputs,), targets))
    rounds = training.rounds(job["processes"], ROUNDS)
    while turns.begin():
        trained = next(rounds)
        turns.end((trained - before) * config.steps)
        before = trained
    rounds.close()


if __name__ == "__main__":
    main(sys.argv[1])
