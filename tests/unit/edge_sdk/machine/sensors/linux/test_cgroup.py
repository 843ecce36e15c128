from __future__ import annotations

import math
from pathlib import Path

import pytest

from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.cgroup import CgroupLimits, group_folders, read_limits
from tests.unit.edge_sdk.machine.machines import Content, build

MB = 1 << 20
NO_LIMIT = "9223372036854771712\n"

V2 = {
    "proc/self/cgroup": "0::/user.slice/app.scope\n",
    "proc/self/mountinfo": (
        "23 27 0:22 / /sys rw,relatime - sysfs sysfs rw\n"
        "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    ),
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
    "proc/self/mountinfo": (
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    ),
}


def limits(root: Path, *contents: Content) -> CgroupLimits:
    return read_limits(Files(build(root, *contents)))


def v2_memory(folder: str, limit: str, used: int, inactive: int = 0, high: str = "max") -> Content:
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.high": f"{high}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 123\ninactive_file {inactive}\nactive_file 5\n",
    }


def test_no_groups_is_no_limit(tmp_path: Path) -> None:
    assert limits(tmp_path) == CgroupLimits(math.inf, math.inf, math.inf)


def test_quota_of_v2_is_the_least_over_ancestors(tmp_path: Path) -> None:
    own, parent = "sys/fs/cgroup/user.slice/app.scope/cpu.max", "sys/fs/cgroup/user.slice/cpu.max"
    assert limits(tmp_path, V2, {own: "max 100000\n", parent: "30000 100000\n"}).cpus == 0.3
    assert limits(tmp_path, {own: "20000 100000\n"}).cpus == 0.2
    assert limits(tmp_path, {own: "max 100000\n", parent: "max 100000\n"}).cpus == math.inf


def test_quota_of_v1_is_the_least_over_ancestors(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/cpu,cpuacct"
    own = {
        f"{base}/docker/abc/cpu.cfs_quota_us": "-1\n",
        f"{base}/docker/abc/cpu.cfs_period_us": "100000\n",
    }
    parent = {
        f"{base}/docker/cpu.cfs_quota_us": "150000\n",
        f"{base}/docker/cpu.cfs_period_us": "100000\n",
    }
    assert limits(tmp_path, V1, own).cpus == math.inf
    assert limits(tmp_path, parent).cpus == 1.5


def test_memory_left_of_v2_counts_each_group_with_its_own_use(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        V2,
        v2_memory("user.slice/app.scope", str(500 * MB), 100 * MB),
        v2_memory("user.slice", str(900 * MB), 800 * MB, inactive=50 * MB),
    )
    assert found.memory_bytes == 500 * MB
    assert found.available_bytes == 150 * MB  # the parent's 900 − 800 + 50, less than our 400


def test_memory_high_limits_like_memory_max(tmp_path: Path) -> None:
    content = v2_memory("user.slice", "max", 100 * MB, high=str(300 * MB))
    assert limits(tmp_path, V2, content) == CgroupLimits(math.inf, 300 * MB, 200 * MB)


def test_memory_used_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    content = v2_memory("user.slice", "max", 400 * MB, high=str(300 * MB))
    assert limits(tmp_path, V2, content).available_bytes == 0


def test_memory_of_v1_has_a_number_for_no_limit(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    content = {
        f"{base}/memory.limit_in_bytes": NO_LIMIT,
        f"{base}/docker/memory.limit_in_bytes": NO_LIMIT,
        f"{base}/docker/abc/memory.limit_in_bytes": NO_LIMIT,
    }
    assert limits(tmp_path, V1, content).available_bytes == math.inf
    limited = {
        f"{base}/docker/abc/memory.limit_in_bytes": f"{256 * MB}\n",
        f"{base}/docker/abc/memory.usage_in_bytes": f"{200 * MB}\n",
        f"{base}/docker/abc/memory.stat": f"inactive_file 4096\ntotal_inactive_file {20 * MB}\n",
    }
    assert limits(tmp_path, limited) == CgroupLimits(math.inf, 256 * MB, 76 * MB)


@pytest.mark.parametrize("ours", ["/docker/abc", "/../elsewhere", "/docker/abcdef"])
def test_group_outside_of_the_mount_is_the_mount_itself(tmp_path: Path, ours: str) -> None:
    """A container without a namespace of its own sees its group mounted at the top."""
    content = {
        "proc/self/cgroup": f"4:memory:{ours}\n",
        "proc/self/mountinfo": (
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        ),
    }
    assert group_folders(Files(build(tmp_path, content))) == ["sys/fs/cgroup/memory"]


def test_group_below_a_mounted_group_is_found(tmp_path: Path) -> None:
    content = {
        "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
        "proc/self/mountinfo": "35 31 0:32 /docker/abc /a\\040b ro - cgroup cgroup rw,memory\n",
    }
    assert group_folders(Files(build(tmp_path, content))) == ["a b/inner", "a b"]


def test_hybrid_reads_both_versions(tmp_path: Path) -> None:
    mounts = V1["proc/self/mountinfo"] + (
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    content = {**V1, "proc/self/mountinfo": mounts}
    assert "sys/fs/cgroup/unified" in group_folders(Files(build(tmp_path, content)))


@pytest.mark.parametrize(
    ("file", "text"),
    [("cpu.max", "half"), ("cpu.max", ""), ("cpu.max", "0 0"), ("cpu.max", "-5 100000")],
)
def test_quota_that_makes_no_sense_is_unknown_not_unlimited(
    tmp_path: Path, file: str, text: str
) -> None:
    assert limits(tmp_path, V2, {f"sys/fs/cgroup/user.slice/{file}": text}).cpus is None


def test_memory_limit_without_its_use_leaves_an_unknown_amount(tmp_path: Path) -> None:
    content = {"sys/fs/cgroup/user.slice/memory.max": "104857600\n"}
    assert limits(tmp_path, V2, content) == CgroupLimits(math.inf, 100 * MB, None)


def test_memory_limit_that_makes_no_sense_is_unknown(tmp_path: Path) -> None:
    content = {"sys/fs/cgroup/user.slice/memory.max": "lots\n"}
    assert limits(tmp_path, V2, content) == CgroupLimits(math.inf, None, None)
