"""Machines as files below a folder: what /proc, /sys and a few others show on each."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

Content = Mapping[str, str]


def build(root: Path, *contents: Content) -> Path:
    """Write files, later contents over earlier ones; a path that ends in / is a folder."""
    for content in contents:
        for path, text in content.items():
            file = root / path
            (file if path.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                file.write_text(text)
    return root


def program(root: Path, name: str, script: str, folder: str = "usr/bin") -> Path:
    """A program of the machine: a shell script."""
    file = root / folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


# -- parts ---------------------------------------------------------------------------------------


def kernel(cpus: str, total_kb: int, available_kb: int, *, allowed: str | None = None) -> Content:
    """What every Linux has."""
    return {
        "proc/self/status": (
            "Name:\tpython3\nUmask:\t0022\nVmRSS:\t   31000 kB\n"
            f"Cpus_allowed:\tff\nCpus_allowed_list:\t{allowed or cpus}\nMems_allowed_list:\t0\n"
        ),
        "sys/devices/system/cpu/online": f"{cpus}\n",
        "proc/loadavg": "0.52 0.58 0.59 1/571 12345\n",
        "proc/stat": "cpu  1000 0 500 8000 400 0 100 0 0 0\ncpu0 500 0 250 4000 200 0 50 0 0 0\n",
        "proc/meminfo": (
            f"MemTotal:       {total_kb} kB\nMemFree:          204800 kB\n"
            f"MemAvailable:   {available_kb} kB\nHugePages_Total:       0\n"
        ),
        "proc/pressure/cpu": (
            "some avg10=12.34 avg60=8.00 avg300=2.00 total=3629909699\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        ),
        "proc/pressure/memory": (
            "some avg10=1.50 avg60=0.20 avg300=0.05 total=243062854\n"
            "full avg10=0.70 avg60=0.10 avg300=0.02 total=149223319\n"
        ),
        "proc/net/route": (
            "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
            "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
            "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
            "eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
        ),
        "proc/net/dev": net_dev(1_000_000, 200_000),
        "sys/class/net/eth0/uevent": "INTERFACE=eth0\nIFINDEX=2\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    }


def net_dev(received: int, sent: int) -> str:
    return (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs "
        "drop fifo colls carrier compressed\n"
        "    lo: 9999999    1000    0    0    0     0          0         0  9999999    1000    0 "
        "   0    0     0       0          0\n"
        f"  eth0: {received}    5000    0    0    0     0          0         0  {sent}    3000    "
        "0    0    0     0       0          0\n"
    )


def policy(first: int, cpus: str, max_khz: int, now_khz: int, capacity: int) -> Content:
    """A cpufreq policy and the capacity of its cores."""
    folder = f"sys/devices/system/cpu/cpufreq/policy{first}"
    return {
        f"{folder}/affected_cpus": f"{cpus}\n",
        f"{folder}/cpuinfo_max_freq": f"{max_khz}\n",
        f"{folder}/scaling_cur_freq": f"{now_khz}\n",
        **{
            f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{capacity}\n" for cpu in cpus.split()
        },
    }


def zone(number: int, kind: str, milli: int, *trips: tuple[str, int]) -> Content:
    folder = f"sys/class/thermal/thermal_zone{number}"
    content = {f"{folder}/type": f"{kind}\n", f"{folder}/temp": f"{milli}\n"}
    for index, (name, temp) in enumerate(trips):
        content[f"{folder}/trip_point_{index}_type"] = f"{name}\n"
        content[f"{folder}/trip_point_{index}_temp"] = f"{temp}\n"
    return content


def cooling(number: int, kind: str, state: int) -> Content:
    folder = f"sys/class/thermal/cooling_device{number}"
    return {
        f"{folder}/type": f"{kind}\n",
        f"{folder}/cur_state": f"{state}\n",
        f"{folder}/max_state": "3\n",
    }


def supply(name: str, **values: str | int) -> Content:
    return {f"sys/class/power_supply/{name}/{key}": f"{value}\n" for key, value in values.items()}


def model(name: str) -> Content:
    return {"proc/device-tree/model": f"{name}\0"}


def iio_chip(address: str, number: int, *rails: tuple[str, int]) -> Content:
    """An INA3221 under JetPack 4: milliwatts."""
    folder = f"sys/bus/i2c/drivers/ina3221x/{address}/iio:device{number}"
    content: dict[str, str] = {f"sys/bus/i2c/drivers/ina3221x/{address}/name": "ina3221x\n"}
    for channel, (label, milliwatts) in enumerate(rails):
        content[f"{folder}/rail_name_{channel}"] = f"{label}\n"
        content[f"{folder}/in_power{channel}_input"] = f"{milliwatts}\n"
        content[f"{folder}/in_voltage{channel}_input"] = "5000\n"
    return content


def hwmon_chip(address: str, number: int, *rails: tuple[str, int, int]) -> Content:
    """An INA3221 under JetPack 5 and 6: millivolts and milliamperes; 7 sums up shunt voltages."""
    chip = f"sys/bus/i2c/drivers/ina3221/{address}"
    folder = f"{chip}/hwmon/hwmon{number}"
    content: dict[str, str] = {
        f"{chip}/name": "ina3221\n",
        f"{folder}/name": "ina3221\n",
        f"{folder}/in7_label": "sum of shunt voltages\n",
        f"{folder}/in7_input": "12\n",
    }
    for channel, (label, millivolts, milliamperes) in enumerate(rails, start=1):
        content[f"{folder}/in{channel}_label"] = f"{label}\n"
        content[f"{folder}/in{channel}_input"] = f"{millivolts}\n"
        content[f"{folder}/curr{channel}_input"] = f"{milliamperes}\n"
        content[f"{folder}/in{channel + 3}_input"] = "4\n"
    return content


def rails(millivolts: int, **milliamperes: int) -> list[tuple[str, int, int]]:
    """Rails of one voltage, for `hwmon_chip`."""
    return [(label, millivolts, current) for label, current in milliamperes.items()]


def gpu(name: str, kind: str, load: int) -> Content:
    return {
        f"sys/class/devfreq/{name}/device/of_node/name": f"{kind}\0",
        f"sys/class/devfreq/{name}/device/load": f"{load}\n",
        "sys/class/devfreq/15480000.nvdec/device/of_node/name": "nvdec\0",
    }


def nvpmodel_files(number: int, *names: str) -> Content:
    table = "".join(
        f"# mode\n< POWER_MODEL ID={index} NAME={name} >\nCPU_ONLINE CORE_0 1\n\n"
        for index, name in enumerate(names)
    )
    return {
        "var/lib/nvpmodel/status": f"pmode:{number:04d} fmode:quiet\n",
        "etc/nvpmodel.conf": f"{table}< PM_CONFIG DEFAULT=0 >\n",
    }


NO_SUPPLIES: Content = {"sys/class/power_supply/": ""}


# -- machines ------------------------------------------------------------------------------------


def raspberry_pi_5(root: Path) -> Path:
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-3", 8_254_464, 7_000_064),
        model("Raspberry Pi 5 Model B Rev 1.0"),
        policy(0, "0 1 2 3", 2_400_000, 1_500_000, 1024),
        zone(0, "cpu-thermal", 47_200, ("critical", 110_000), ("active", 50_000)),
        cooling(0, "pwm-fan", 1),
        {
            "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled": "0\n",
            "sys/class/hwmon/hwmon0/name": "cpu_thermal\n",
            "sys/class/hwmon/hwmon0/temp1_input": "47200\n",
            "sys/class/hwmon/hwmon2/name": "rpi_volt\n",
            "sys/class/hwmon/hwmon2/in0_lcrit_alarm": "0\n",
        },
    )


def raspberry_pi_3b_plus(root: Path) -> Path:
    """Hot and on a weak supply: capped, soft limit, undervoltage now and before."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-3", 996_352, 600_000),
        model("Raspberry Pi 3 Model B Plus Rev 1.3"),
        policy(0, "0 1 2 3", 1_400_000, 1_200_000, 1024),
        zone(0, "cpu-thermal", 61_800, ("hot", 80_000)),
        {"sys/devices/platform/soc/soc:firmware/get_throttled": "d0009\n"},
    )


def raspberry_pi_zero_2w(root: Path) -> Path:
    """A kernel without the firmware's files."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-3", 426_000, 250_000),
        model("Raspberry Pi Zero 2 W Rev 1.0"),
        zone(0, "cpu-thermal", 40_000),
    )


def jetson_nano(root: Path) -> Path:
    """JetPack 4."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-3", 4_059_136, 3_000_000),
        model("NVIDIA Jetson Nano Developer Kit"),
        policy(0, "0 1 2 3", 1_479_000, 1_428_000, 1024),
        zone(0, "AO-therm", 45_000),
        zone(1, "CPU-therm", 38_500, ("passive", 97_000), ("critical", 101_500)),
        zone(3, "PMIC-Die", 100_000),
        zone(5, "PLL-therm", -256_000),
        iio_chip("6-0040", 0, ("POM_5V_IN", 2540), ("POM_5V_GPU", 40), ("POM_5V_CPU", 490)),
        gpu("57000000.gpu", "gpu", 125),
        nvpmodel_files(0, "MAXN", "5W"),
    )


def jetson_tx2(root: Path) -> Path:
    """JetPack 4, Denver cores off."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0,3-5", 8_048_640, 6_000_000, allowed="0-5"),
        model("NVIDIA Jetson TX2 Developer Kit"),
        policy(0, "0 3 4 5", 2_035_200, 345_600, 1024),
        iio_chip("0-0040", 0, ("VDD_SYS_GPU", 76), ("VDD_SYS_SOC", 460), ("VDD_4V0_WIFI", 19)),
        iio_chip("0-0041", 1, ("VDD_IN", 2251), ("VDD_SYS_CPU", 152), ("VDD_SYS_DDR", 345)),
        gpu("17000000.gp10b", "gp10b", 0),
        nvpmodel_files(3, "MAXN", "MAXQ", "MAXP_CORE_ALL", "MAXP_CORE_ARM", "MAXP_CORE_DENVER"),
    )


def jetson_xavier_nx(root: Path) -> Path:
    """JetPack 5."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-5", 7_000_000, 5_000_000),
        model("NVIDIA Jetson Xavier NX Developer Kit"),
        policy(0, "0 1 2 3 4 5", 1_907_200, 1_190_400, 1024),
        zone(0, "CPU-therm", 42_000, ("passive", 95_500), ("critical", 104_000)),
        cooling(0, "cpu-throttle-alert", 0),
        hwmon_chip("7-0040", 3, *rails(4960, VDD_IN=880, VDD_CPU_GPU_CV=160, VDD_SOC=200)),
        gpu("17000000.gv11b", "gv11b", 990),
        nvpmodel_files(8, *(f"MODE_{index}" for index in range(8)), "MODE_20W_6CORE"),
    )


def jetson_agx_xavier(root: Path) -> Path:
    """JetPack 5; no rail is the total."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-7", 32_000_000, 28_000_000),
        model("Jetson-AGX"),
        hwmon_chip("1-0040", 4, *rails(19000, GPU=0, CPU=30, SOC=80)),
        hwmon_chip("1-0041", 5, ("CV", 19000, 0), ("VDDRQ", 19000, 24), ("SYS5V", 5000, 400)),
        gpu("17000000.gv11b", "gv11b", 0),
        nvpmodel_files(0, "MAXN"),
    )


def jetson_orin_nano(root: Path) -> Path:
    """JetPack 6, throttled."""
    return build(
        root,
        NO_SUPPLIES,
        kernel("0-5", 7_800_000, 5_600_000),
        model("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"),
        policy(0, "0 1 2 3", 1_728_000, 1_728_000, 1024),
        policy(4, "4 5", 1_728_000, 729_600, 1024),
        zone(0, "cpu-thermal", 99_100, ("passive", 99_000), ("critical", 104_500)),
        zone(1, "gpu-thermal", 97_500),
        zone(2, "cv0-thermal", -256_000),
        cooling(0, "pwm-fan", 3),
        cooling(1, "thermal-cpufreq-0", 2),
        hwmon_chip(
            "1-0040", 1, ("VDD_IN", 5072, 2960), *rails(5064, VDD_CPU_GPU_CV=1300, VDD_SOC=600)
        ),
        gpu("17000000.gpu", "gpu", 407),
        nvpmodel_files(2, "15W", "25W", "MAXN_SUPER", "7W"),
    )


def jetson_agx_orin(root: Path) -> Path:
    """JetPack 6; no rail is the total, one channel is not connected, a USB-C port is no battery."""
    return build(
        root,
        kernel("0-11", 64_000_000, 60_000_000),
        model("NVIDIA Jetson AGX Orin Developer Kit"),
        hwmon_chip(
            "1-0040", 2, *rails(19000, VDD_GPU_SOC=200, VDD_CPU_CV=100), ("VIN_SYS_5V0", 5000, 700)
        ),
        hwmon_chip("1-0041", 3, ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 150)),
        gpu("17000000.gpu", "gpu", 0),
        nvpmodel_files(3, "MAXN", "MODE_15W", "MODE_30W", "MODE_50W"),
        supply("ucsi-source-psy-2-00081", type="USB", online=0),
    )


def pixel_6(root: Path) -> Path:
    """Android: no /proc/stat, /proc/loadavg, /proc/net; two, two and four cores."""
    content = dict(kernel("0-7", 7_700_000, 3_100_000, allowed="0-7"))
    for hidden in ("proc/stat", "proc/loadavg", "proc/net/route", "proc/net/dev"):
        del content[hidden]
    return build(
        root,
        content,
        {"system/bin/app_process": "", "system/build.prop": ""},
        policy(0, "0 1 2 3", 1_803_000, 738_000, 160),
        policy(4, "4 5", 2_253_000, 400_000, 498),
        policy(6, "6 7", 2_802_000, 500_000, 1024),
    )


def laptop(root: Path) -> Path:
    """Discharging, with a mouse that has a battery of its own."""
    return build(
        root,
        kernel("0-7", 16_000_000, 9_000_000),
        zone(0, "acpitz", 52_000, ("critical", 103_000), ("hot", -274_000)),
        zone(1, "INT3400 Thermal", 20),
        cooling(0, "Processor", 0),
        supply("BAT0", type="Battery", present=1, status="Discharging", capacity=63),
        supply("BAT0", power_now=8_450_000, voltage_now=11_800_000),
        supply("BAT0", energy_full=50_000_000, energy_now=31_500_000),
        supply("AC", type="Mains", online=0),
        supply("hidpp_battery_0", type="Battery", scope="Device", status="Discharging", capacity=5),
    )


MACHINES: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (
        *(raspberry_pi_5, raspberry_pi_3b_plus, raspberry_pi_zero_2w, jetson_nano, jetson_tx2),
        *(jetson_xavier_nx, jetson_agx_xavier, jetson_orin_nano, jetson_agx_orin),
        *(pixel_6, laptop),
    )
}
