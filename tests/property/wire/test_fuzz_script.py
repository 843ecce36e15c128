"""A few seconds of `scripts/fuzz`; run by hand it throws a million inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANGS_S

FUZZ = Path(__file__).resolve().parents[3] / "scripts" / "fuzz"


def test_decoders_let_out_only_errors_of_the_protocol() -> None:
    pytest.importorskip("zstandard")
    command = [sys.executable, str(FUZZ), "--inputs", "6000", "--seed", "11"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "6,000 inputs" in ran.stdout
    assert "only errors of the protocol came out" in ran.stdout
    # Each decoder has seen inputs that it accepts, so that what it does with those is tried too.
    rows = [line.rsplit(maxsplit=4) for line in ran.stdout.splitlines()[1:-2]]
    assert len(rows) >= 18
    for name, _, accepted, _, _ in rows:
        assert int(accepted.replace(",", "")) > 0, name
