"""A process that advances, writes and commits until it is killed: `writer FOLDER DTYPE KILL_AT`.

At the KILL_AT-th call that touches a file it kills itself; 0: never. It says `ready`, and then
every round that it committed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from coordinator.aggregate.memory import DiskMemory, Memory, MemoryConfig, MemoryType
from tests.contract.memory.oracle import PLAN, movement

DEVICES = ("ada", "bob", "eve", "kim")


def config(dtype: MemoryType) -> MemoryConfig:
    return MemoryConfig(memory_type=dtype, damping=0.8, max_staleness=3)


def one_round(memory: Memory, now: int) -> None:
    """What happens in a round, always the same."""
    stream = np.random.default_rng(now)
    memory.advance(now)
    memory.write(
        [
            movement(
                device,
                max(1, now - int(stream.integers(0, 3))),
                np.flatnonzero(stream.random(PLAN.block_count) < 0.5).tolist(),
                int(stream.integers(2**32)),
            )
            for device in DEVICES
            if stream.random() < 0.7
        ]
    )
    memory.commit()


def kill_at(call: int) -> None:
    """Die at the given number of calls that write, sync, delete or open a file."""
    left = call

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counting

    for name in ("pwrite", "fsync", "unlink", "open", "ftruncate"):
        setattr(os, name, counted(getattr(os, name)))


def main() -> None:
    folder, dtype, call = sys.argv[1:]
    memory = DiskMemory(Path(folder), PLAN, config(cast(MemoryType, dtype)), reserve_bytes=0)
    if int(call):
        kill_at(int(call))
    print("ready", flush=True)
    while True:
        one_round(memory, memory.now + 1)
        print(memory.now, flush=True)


if __name__ == "__main__":
    main()
