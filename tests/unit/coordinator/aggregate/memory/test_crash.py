"""`kill -9` anywhere leaves one commit or the next, to the bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.memory import DiskMemory, Memory, MemoryType, RamMemory
from tests.contract.memory.oracle import PLAN
from tests.unit.coordinator.aggregate.memory.writer import DEVICES, config, one_round
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[5]


def bits(memory: Memory) -> list[bytes]:
    """Everything a memory holds."""
    held = [memory.total.tobytes(), memory.weight.tobytes(), memory.entries.tobytes()]
    for device in DEVICES:
        held.append(memory.rounds(device).tobytes())
        for piece in memory.recall(device):
            held += [repr(piece.made).encode(), piece.blocks.values.tobytes()]
    return held


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_killed_writer_leaves_a_whole_commit(tmp_path: Path, dtype: MemoryType) -> None:
    stream = np.random.default_rng(3)
    reference = RamMemory(PLAN, config(dtype))
    for kill in range(8):
        # Every third is killed from outside, at any instruction; the others at a call to a file.
        call = 0 if kill % 3 == 2 else int(stream.integers(1, 120))
        command = [sys.executable, "-m", "tests.unit.coordinator.aggregate.memory.writer"]
        with subprocess.Popen(
            [*command, str(tmp_path), dtype, str(call)], stdout=subprocess.PIPE, cwd=ROOT
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            if not call:
                for _ in range(int(stream.integers(1, 20))):
                    assert writer.stdout.readline()
                writer.kill()
            writer.stdout.read()  # or it might wait for somebody to hear it
            assert writer.wait(timeout=HANGS_S) == -signal.SIGKILL
        memory = DiskMemory(tmp_path, PLAN, config(dtype), reserve_bytes=0)
        while reference.now < memory.now:
            one_round(reference, reference.now + 1)
        assert reference.now == memory.now
        assert bits(memory) == bits(reference)
        files = {path.name for path in tmp_path.glob("segment-*")}
        memory.close()
        assert {path.name for path in tmp_path.glob("segment-*")} == files
    assert reference.now > 8
