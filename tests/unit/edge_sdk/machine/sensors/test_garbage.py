"""Whatever sensors say, a probe never raises and never says what cannot be."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.machine.probe import choose_probe
from edge_sdk.machine.sensors.android import parse_battery, parse_wifi
from edge_sdk.machine.sensors.desktop import parse_ioreg, parse_pmset, parse_powershell
from edge_sdk.machine.snapshot import Snapshot
from tests.unit.edge_sdk.machine.machines import MACHINES
from tests.unit.edge_sdk.machine.sensors.linux.test_linux import Clock

LIKELY = [b"", b"\0", b"-1", b"0", b"nan", b"inf", b"1e9", b"max", b"9" * 400, b"\xff\xfe"]
LIKELY += [b"-274000", b"0 0", b"0-8191", b"8192", b"1 2 3 4 5 6 7 8 9 10", b"cpu ", b"u 1"]
LIKELY += [
    b"0::/../..",
    b"0::/\n",
    b" - cgroup2 cgroup2 rw",
    "²٣".encode(),
    b"4" * 31,
    b"{}",
    b"some avg10=",
]


@contextmanager
def watched() -> Iterator[list[logging.LogRecord]]:
    """Errors that the probe had to catch."""
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Collect(logging.ERROR)
    logger = logging.getLogger("edge_sdk.machine.probe")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


garbage = st.sampled_from(LIKELY) | st.binary(max_size=60)


@pytest.mark.parametrize("name", list(MACHINES))
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), content=st.lists(garbage, min_size=1, max_size=20))
def test_garbage_in_sensor_files_never_raises(name: str, seed: int, content: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = MACHINES[name](Path(folder))
        files = sorted(path for path in root.rglob("*") if path.is_file())
        chosen = random.Random(seed)
        # Every file of a machine, or a few of them.
        broken = files if seed % 3 == 0 else chosen.sample(files, min(len(files), len(content)))
        for index, path in enumerate(broken):
            path.write_bytes(content[index % len(content)])
        clock = Clock()
        probe = choose_probe(root, clock=clock)
        with watched() as errors:
            for _ in range(2):
                snapshot = probe.snapshot()
                assert snapshot.credible() == (snapshot, [])
                assert Snapshot.from_dict(snapshot.to_dict()) == snapshot
                clock.now += 1
        probe.close()
        # Not even the last line of defence, which takes any error for an unknown, was needed.
        assert errors == []


@pytest.mark.parametrize("name", list(MACHINES))
def test_missing_files_never_raise(name: str, tmp_path: Path) -> None:
    root = MACHINES[name](tmp_path)
    forced = choose_probe(root).name
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        path.unlink()
        probe = choose_probe(root, name=forced)
        probe.snapshot()
        probe.close()


@given(st.binary(max_size=80) | st.sampled_from(LIKELY))
def test_garbage_from_commands_is_refused_or_credible(data: bytes) -> None:
    output = data.decode("utf-8", "replace")
    for parse in (parse_battery, parse_wifi, parse_ioreg, parse_pmset, parse_powershell):
        try:
            snapshot = parse(output)
        except Exception:
            continue  # The background takes any of them for no answer.
        checked, _ = snapshot.credible()
        assert checked.credible() == (checked, [])
