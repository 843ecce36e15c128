from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.system import LinuxSources, network_manager, parse_cpus
from edge_sdk.machine.sensors.rates import Rates
from edge_sdk.machine.snapshot import CoreClass
from tests.unit.edge_sdk.machine.machines import build, kernel, laptop, net_dev, pixel_6


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sources(root: Path, clock: Clock | None = None) -> LinuxSources:
    return LinuxSources(Files(root), clock or Clock())


def test_cpu_of_big_little_has_its_classes_fastest_first(tmp_path: Path) -> None:
    cpu = sources(pixel_6(tmp_path)).cpu().cpu
    assert cpu.cores == 8
    assert cpu.max_mhz == 2802
    assert cpu.classes == (
        CoreClass(cores=2, max_mhz=2802.0, capacity=1024.0),
        CoreClass(cores=2, max_mhz=2253.0, capacity=498.0),
        CoreClass(cores=4, max_mhz=1803.0, capacity=160.0),
    )
    assert cpu.mhz == pytest.approx((4 * 738 + 2 * 400 + 2 * 500) / 8)


def test_cpu_counts_only_allowed_cores_that_are_online(tmp_path: Path) -> None:
    build(pixel_6(tmp_path), kernel("0-3,6", 1, 1, allowed="2-7"))
    cpu = sources(tmp_path).cpu().cpu
    assert cpu.cores == 3
    assert [each.cores for each in cpu.classes or ()] == [1, 2]


def test_cores_are_cut_by_a_quota(tmp_path: Path) -> None:
    build(laptop(tmp_path), {"sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert sources(tmp_path).cpu().cpu.cores == 2.5
    build(tmp_path, {"sys/fs/cgroup/cpu.max": "9900000 100000\n"})
    assert sources(tmp_path).cpu().cpu.cores == 8
    build(tmp_path, {"sys/fs/cgroup/cpu.max": "?\n"})
    assert sources(tmp_path).cpu().cpu.cores is None


def test_cpu_load_and_pressure(tmp_path: Path) -> None:
    cpu = sources(laptop(tmp_path)).cpu().cpu
    assert (cpu.load, cpu.pressure) == (0.52, 12.34)


def test_load_is_asked_of_the_system_where_its_file_is_hidden() -> None:
    class Hidden(Files):
        def text(self, path: str) -> str | None:
            return None if path == "proc/loadavg" else super().text(path)

    load = LinuxSources(Hidden(), Clock()).cpu().cpu.load
    assert load is not None
    assert load >= 0


def test_cpu_without_its_files_is_unknown(tmp_path: Path) -> None:
    assert sources(tmp_path).cpu().known() == {}


def test_busy_is_what_was_used_since_the_earlier_look(tmp_path: Path) -> None:
    clock = Clock()
    linux = sources(laptop(tmp_path), clock)
    assert linux.cpu().cpu.busy is None
    clock.now += 2
    # 60 busy and 140 idle or waiting for disks.
    build(tmp_path, {"proc/stat": "cpu  1040 0 510 8100 440 0 110 0 0 0\n"})
    assert linux.cpu().cpu.busy == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("0-3,6", {0, 1, 2, 3, 6}),
        ("0 1 2", {0, 1, 2}),
        ("", None),
        ("3-", None),
        ("0-99999", None),
        ("x", None),
        ("2-1", set()),
    ],
)
def test_cpu_list(text: str, cpus: Iterable[int] | None) -> None:
    assert parse_cpus(text) == cpus


def test_memory_of_the_machine(tmp_path: Path) -> None:
    memory = sources(laptop(tmp_path)).memory().memory
    assert memory.total_bytes == 16_000_000 * 1024
    assert memory.available_bytes == 9_000_000 * 1024
    assert memory.pressure == 1.5


def test_memory_is_the_least_of_machine_and_group(tmp_path: Path) -> None:
    group = {
        "sys/fs/cgroup/memory.max": "1000000000\n",
        "sys/fs/cgroup/memory.current": "400000000\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 50000000\n",
    }
    memory = sources(build(laptop(tmp_path), group)).memory().memory
    assert (memory.total_bytes, memory.available_bytes) == (1e9, 6.5e8)
    build(tmp_path, {"proc/meminfo": "MemTotal: 900000 kB\nMemAvailable: 100000 kB\n"})
    memory = sources(tmp_path).memory().memory
    assert (memory.total_bytes, memory.available_bytes) == (900_000 * 1024, 100_000 * 1024)


def test_memory_behind_an_unknown_limit_is_unknown(tmp_path: Path) -> None:
    build(laptop(tmp_path), {"sys/fs/cgroup/memory.max": "1000000000\n"})
    assert sources(tmp_path).memory().memory.available_bytes is None


def test_memory_of_an_old_kernel_is_not_guessed(tmp_path: Path) -> None:
    build(laptop(tmp_path), {"proc/meminfo": "MemTotal: 900000 kB\nMemFree: 800000 kB\n"})
    memory = sources(tmp_path).memory().memory
    assert (memory.total_bytes, memory.available_bytes) == (900_000 * 1024, None)


def test_network_tells_traffic_of_the_default_route(tmp_path: Path) -> None:
    clock = Clock()
    linux = sources(laptop(tmp_path), clock)
    assert linux.network().known() == {}
    clock.now += 4
    build(tmp_path, {"proc/net/dev": net_dev(1_000_000 + 4_000, 200_000 + 8_000)})
    network = linux.network().network
    assert (network.down_bytes_per_s, network.up_bytes_per_s) == (1_000, 2_000)
    assert network.metered is None


@pytest.mark.parametrize(
    ("interface", "uevent", "metered"),
    [
        ("wwan0", "", True),
        ("rmnet_data1", "", True),
        ("usb0", "DEVTYPE=wwan\nINTERFACE=usb0\n", True),
        ("usb0", "DEVTYPE=gadget\n", None),
        ("ppp0", "", None),
    ],
)
def test_modem_is_metered(
    tmp_path: Path, interface: str, uevent: str, metered: bool | None
) -> None:
    route = f"{interface}\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    build(tmp_path, {"proc/net/route": route, f"sys/class/net/{interface}/uevent": uevent})
    assert sources(tmp_path).network().network.metered is metered


@pytest.mark.parametrize(
    ("output", "metered"),
    [
        ("u 0\n", None),
        ("u 1\n", True),
        ("u 2\n", False),
        ("u 3\n", True),
        ("u 4\n", False),
        ("u 9\n", None),
        ("", None),
    ],
)
def test_network_manager_says_metered(output: str, metered: bool | None) -> None:
    assert network_manager(Files()).parse(output).network.metered is metered


def test_rates_need_two_looks_some_time_apart() -> None:
    clock = Clock()
    rates = Rates(clock)
    assert rates.since("eth0", 100.0) is None
    clock.now += 0.1
    assert rates.since("eth0", 900.0) is None
    clock.now += 0.9
    assert rates.since("eth0", 300.0) == (200.0,)
    clock.now += 0.1
    assert rates.since("eth0", 301.0) == (200.0,)


def test_rates_start_anew_with_another_key_or_a_counter_that_went_back() -> None:
    clock = Clock()
    rates = Rates(clock)
    rates.since("eth0", 100.0)
    clock.now += 1
    assert rates.since("wlan0", 500.0) is None
    clock.now += 1
    assert rates.since("wlan0", 10.0) is None
    clock.now += 1
    assert rates.since("wlan0", 15.0) == (5.0,)
