"""Parts that drivers share: the job, its samples and its model, and rounds on demand.

A driver is started with the path of the job. It prints `{"ready": true}` once a first round is
done. Each line on its standard input then asks for one round, and is answered with its steps and
seconds as a line of JSON. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

PeerSettings = Mapping[str, Any]
"""The job, as its file has it."""


def read_job(path: str) -> PeerSettings:
    """Read the job; this process trains on one thread from here on."""
    torch.set_num_threads(1)
    job: PeerSettings = json.loads(Path(path).read_text(encoding="utf-8"))
    return job


@lru_cache(maxsize=1)
def _samples(folder: str) -> tuple[Any, Any]:
    return (
        np.load(Path(folder) / "inputs.npy", mmap_mode="r"),
        np.load(Path(folder) / "targets.npy", mmap_mode="r"),
    )


def samples_of(job: PeerSettings, device: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a device."""
    inputs, targets = _samples(job["folder"])
    rows = slice(device * job["samples"], (device + 1) * job["samples"])
    return torch.from_numpy(np.array(inputs[rows])), torch.from_numpy(np.array(targets[rows]))


def make_model(job: PeerSettings) -> nn.Sequential:
    """Make the perceptron of the job."""
    torch.manual_seed(job["seed"])
    widths, layers = job["widths"], list[nn.Module]()
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches(
    job: PeerSettings, device: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a device's steps: passes through its samples in drawn orders."""
    inputs, targets = samples_of(job, device)
    random, steps = np.random.default_rng(seed), 0
    while True:
        order = torch.from_numpy(random.permutation(job["samples"]))
        for rows in torch.split(order, job["batch"]):
            if steps == job["steps"]:
                return
            steps += 1
            yield inputs[rows], targets[rows]


def train(job: PeerSettings, model: nn.Module, device: int, seed: int) -> float:
    """Take a device's steps, as one writes them in torch; return the last loss."""
    optimiser = torch.optim.SGD(model.parameters(), job["learning_rate"], job["momentum"])
    loss = torch.zeros(())
    for inputs, targets in batches(job, device, seed):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        torch.autograd.backward(loss)
        optimiser.step()
    return loss.item()


class Turns:
    """Tells when to begin a round, and what came of it."""

    def __init__(self) -> None:
        # Simulators print to standard output as they like: what they print goes to the log.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._began = 0.0
        self._rounds = 0

    def begin(self) -> bool:
        """Wait for the next round to be asked for; False: there are no more."""
        if self._rounds and not sys.stdin.readline():
            return False
        self._began = time.perf_counter()
        return True

    def end(self, steps: int) -> None:
        """Tell that a round is done; the first one is a warm-up."""
        seconds = time.perf_counter() - self._began
        self._rounds += 1
        said = {"ready": True} if self._rounds == 1 else {"steps": steps, "seconds": seconds}
        print(json.dumps(said), file=self._out, flush=True)
