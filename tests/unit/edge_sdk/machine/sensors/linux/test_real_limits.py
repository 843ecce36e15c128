"""Limits that this machine's kernel really sets: a quota, a memory limit, an affinity mask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from edge_sdk.machine.probe import choose_probe
from edge_sdk.machine.snapshot import Snapshot
from tests.waiting import HANGS_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")

ROOT = Path(__file__).resolve().parents[6]
LOOK = (
    "import json\n"
    "from edge_sdk.machine.probe import choose_probe\n"
    "print(json.dumps(choose_probe(name='linux').snapshot().to_dict()))\n"
)
MB = 1 << 20


def look(preparation: str) -> Snapshot:
    """What a new process sees once it has put itself under a limit."""
    result = subprocess.run(
        [sys.executable, "-c", preparation + LOOK],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=HANGS_S,
    )
    return Snapshot.from_dict(json.loads(result.stdout))


def join(group: Path) -> str:
    return f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"


def mounts(controller: str) -> Iterator[Path]:
    """Where groups with this controller can be made, versions 1 and 2."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        at = Path(place.split(" ")[4])
        if kind.startswith("cgroup ") and controller in kind.split(" ")[2].split(","):
            yield at
        controllers = at / "cgroup.subtree_control"
        if kind.startswith("cgroup2 ") and controller in controllers.read_text().split():
            yield at


def make_group(controller: str) -> Path:
    for mount in mounts(controller):
        group = mount / f"tessera-test-{os.getpid()}-{uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        return group
    return pytest.skip(f"no control group with {controller} can be made here")


def remove_group(group: Path) -> None:
    # The kernel lets go of a process a little after it was reaped.
    until(lambda: removed(group))
    assert not group.exists()


def removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@pytest.fixture
def quota_group() -> Iterator[Path]:
    """A group with 0.3 of a core, and inside it one without a limit of its own."""
    outer = make_group("cpu")
    inner = outer / "inner"
    try:
        if (outer / "cpu.max").exists():
            (outer / "cpu.max").write_text("30000 100000")
        else:
            (outer / "cpu.cfs_period_us").write_text("100000")
            (outer / "cpu.cfs_quota_us").write_text("30000")
        inner.mkdir()
        yield inner
    finally:
        if inner.exists():
            remove_group(inner)
        remove_group(outer)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    group = make_group("memory")
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(500 * MB))
        yield group
    finally:
        remove_group(group)


def test_cpu_quota_of_an_outer_group_is_seen(quota_group: Path) -> None:
    assert look(join(quota_group)).cpu.cores == 0.3


def test_memory_limit_of_a_group_is_seen(memory_group: Path) -> None:
    memory = look(join(memory_group)).memory
    assert memory.total_bytes == 500 * MB
    assert memory.available_bytes is not None
    # An interpreter with numpy takes some of it, and nowhere near all.
    assert 200 * MB < memory.available_bytes < 500 * MB


def test_affinity_mask_is_seen() -> None:
    one = min(os.sched_getaffinity(0))
    cores = look(f"import os; os.sched_setaffinity(0, {{{one}}})\n").cpu.cores
    own = choose_probe(name="linux").snapshot().cpu.cores
    assert own is not None
    assert cores == min(1, own)
