"""What a device is told: a TOML file, then the environment, then flags; later ones win.

    TesseraError
    └── ConfigError      a key or a value that cannot be; names it, where it is, and what to do

Every key has a variable `TESSERA_<KEY>`, those of a table `TESSERA_<TABLE>_<KEY>`, such as
`TESSERA_BROKER_HOST`. Paths in the file are relative to its folder, others to the present one.
"""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from edge_sdk.decide.decision import Policy
from edge_sdk.decide.gates import Limits, parse_hours
from edge_sdk.protocol.errors import MessageError, TesseraError
from edge_sdk.protocol.messages.topics import (
    BULK,
    COORDINATOR,
    MAX_DEVICE_CHARACTERS,
    check_device,
    check_name,
)
from edge_sdk.transport.settings import BrokerSettings, LinkError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

PREFIX = "TESSERA_"


class ConfigError(TesseraError):
    """A key or a value that cannot be; the text names it and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """Which device to pretend to be, for the demo and for trying things out."""

    fleet: Path
    """Its file (docs/devices.md)."""
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """All that a device is told. Raises `ConfigError` for values that make no sense."""

    task: str
    name: str = field(default_factory=lambda: default_name())
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    state_dir: Path = Path("tessera-state")
    """Movements without a receipt, chunks, counters: what must outlive a restart."""
    data: str | None = None
    """A folder of .npz files, or `file.py:function`, or `package.module:function`."""
    policy: Policy = field(default_factory=Policy)
    weigh: bool = True
    """Look at the machine before every round; False: train the owner's level, come what may."""
    probe: str | None = None
    """Which sensors there are, such as `jetson`; None: found out."""
    board: str | None = None
    """What machine this is, for numbers without a sensor: a profile's name or file."""
    emulate: Emulated | None = None
    """The device to emulate (`edge_sdk.decide.emulation`); `None` means this device is real."""
    seed: int = 0
    threads: int = 1
    """That one graph runs on."""
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    """onnxruntime's execution providers, preferred first."""
    cache_mb: int = 256
    """Of chunks on disk; what a round needs is kept, however much it is."""
    evaluate_every: int = 0
    """Rounds between evaluations of the whole model on the device's own data; 0: never."""
    stay: bool = False
    """Wait for the next run when one is finished."""
    connect_s: float = 0.0
    """Give up when the broker could not be reached for so long after the start; 0: never."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        try:
            check_name(self.task, "task")
            check_device(self.name)
        except MessageError as error:
            raise ConfigError(str(error)) from error
        for key, least in (("threads", 1), ("cache_mb", 1), ("evaluate_every", 0), ("seed", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"{key} = {getattr(self, key)}: must be at least {least}")
        if not 0 <= self.connect_s < float("inf"):
            raise ConfigError(f"connect_s = {self.connect_s}: must be 0 (never) or more seconds")
        if not self.providers:
            raise ConfigError("providers = []: name one, such as CPUExecutionProvider")
        for key, known in (("log_format", LogFormat), ("log_level", LogLevel)):
            if getattr(self, key) not in get_args(known):
                names = ", ".join(get_args(known))
                raise ConfigError(f"{key} = {getattr(self, key)!r}: must be one of {names}")


def default_name() -> str:
    """A name for this machine: its host name, as far as it fits into a topic."""
    name = re.sub(r"[^a-z0-9._-]+", "-", platform.node().lower()).strip("._-")
    if name == COORDINATOR or name.startswith(COORDINATOR + "-"):
        name = f"device-{name}"
    return re.sub(f"({BULK})+$", "", name[:MAX_DEVICE_CHARACTERS]) or "device"


# -- what keys there are -------------------------------------------------------------------------


def _text(value: Any, _: Path) -> str:
    if not isinstance(value, str):
        raise TypeError("a text in quotes")
    return value


def _whole(value: Any, _: Path) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("a whole number")
    return value


def _number(value: Any, _: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("a number")
    return float(value)


def _switch(value: Any, _: Path) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _path(value: Any, base: Path) -> Path:
    return base / Path(_text(value, base)).expanduser()


def _names(value: Any, base: Path) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list):
        raise TypeError("a list of texts")
    return tuple(_text(each, base) for each in value)


def _numbers(value: Any, base: Path) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise TypeError("a list of numbers")
    return tuple(_number(each, base) for each in parts)


def _hours(value: Any, base: Path) -> tuple[int, int]:
    try:
        return parse_hours(_text(value, base))
    except ValueError as error:
        raise TypeError("hours of the local day, such as 22:30-07:00") from error


def _board(value: Any, base: Path) -> str:
    """A profile's name, or its file, which is made absolute."""
    return str(_path(value, base)) if _text(value, base).endswith(".toml") else value


def _source(value: Any, base: Path) -> str:
    """Where data comes from; files are made absolute, modules left alone."""
    place, colon, function = _text(value, base).rpartition(":")
    if not colon:
        return str(_path(value, base))
    return f"{_path(place, base)}:{function}" if place.endswith(".py") else value


Reader = Callable[[Any, Path], Any]

KEYS: dict[str, Reader] = {
    "task": _text,
    "name": _text,
    "state_dir": _path,
    "data": _source,
    "level": _number,
    "participation": _number,
    "schedule": _text,
    "keeps_copy": _switch,
    "compute": _number,
    "bytes_per_s": _number,
    "levels": _numbers,
    "prefer": _text,
    "max_gap": _whole,
    "weigh": _switch,
    "probe": _text,
    "board": _board,
    "limits.battery_floor": _number,
    "limits.heat_margin_c": _number,
    "limits.allow_metered": _switch,
    "limits.memory_pressure": _number,
    "limits.quiet_hours": _hours,
    "limits.memory_share": _number,
    "limits.battery_share": _number,
    "limits.energy_wh_per_day": _number,
    "seed": _whole,
    "threads": _whole,
    "providers": _names,
    "cache_mb": _whole,
    "evaluate_every": _whole,
    "stay": _switch,
    "connect_s": _number,
    "log_format": _text,
    "log_level": _text,
    "emulate.fleet": _path,
    "emulate.member": _text,
    "broker.host": _text,
    "broker.port": _whole,
    "broker.tls": _switch,
    "broker.ca": _path,
    "broker.certificate": _path,
    "broker.key": _path,
    "broker.bulk_certificate": _path,
    "broker.bulk_key": _path,
    "broker.username": _text,
    "broker.password": _text,
    "broker.password_file": _path,
    "broker.keepalive_s": _whole,
    "broker.allow_plaintext": _switch,
}
"""Every key, those of tables with the table's name in front, and how its value is read."""

POLICY_KEYS = (
    "level",
    "levels",
    "participation",
    "schedule",
    "prefer",
    "max_gap",
    "keeps_copy",
    "compute",
    "bytes_per_s",
)
SHARES = ("memory_share", "battery_share", "energy_wh_per_day")
"""Keys of [limits] that do not close a gate."""


# -- from file, environment and flags ------------------------------------------------------------


def load_config(
    path: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> DeviceConfig:
    """The configuration. `environment` None: that of the process. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    if path is not None:
        for key, value in _flat(_read_toml(path), path).items():
            values[key] = _read(key, value, path.absolute().parent, f"{path}: {key}")
    here = Path()
    found = os.environ if environment is None else environment
    for key in KEYS:
        variable = PREFIX + key.upper().replace(".", "_")
        if variable in found:
            values[key] = _read(key, found[variable], here, variable)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = _read(key, value, here, f"--{key.replace('_', '-')}")
    return _build(values)


def _build(values: dict[str, Any]) -> DeviceConfig:
    if "task" not in values:
        raise ConfigError(
            'task is missing: write task = "…" into the configuration, as the coordinator calls '
            "it (or --task, or TESSERA_TASK)"
        )
    broker = {key[7:]: values.pop(key) for key in list(values) if key.startswith("broker.")}
    if (file := broker.pop("password_file", None)) is not None:
        if "password" in broker:
            raise ConfigError("broker.password and broker.password_file are both set; give one")
        broker["password"] = _read_secret(file)
    if emulate := {key[8:]: values.pop(key) for key in list(values) if key.startswith("emulate.")}:
        for key in ("fleet", "member"):
            if key not in emulate:
                raise ConfigError(f"emulate.{key} is missing: [emulate] names a fleet and a member")
        values["emulate"] = Emulated(**emulate)
    limits = {key[7:]: values.pop(key) for key in list(values) if key.startswith("limits.")}
    policy = {key: values.pop(key) for key in POLICY_KEYS if key in values}
    policy |= {key: limits.pop(key) for key in SHARES if key in limits}
    try:
        made = Policy(**policy, limits=Limits(**limits))
        return DeviceConfig(**values, broker=BrokerSettings(**broker), policy=made)
    except LinkError as error:
        raise ConfigError(f"[broker] {error}") from error
    except ValueError as error:
        raise ConfigError(f"[limits] {error}") from error
    except MessageError as error:
        raise ConfigError(str(error)) from error


def _read(key: str, value: Any, base: Path, where: str) -> Any:
    try:
        return KEYS[key](value, base)
    except (TypeError, ValueError) as error:
        wanted = str(error) if isinstance(error, TypeError) else "a number"
        raise ConfigError(f"{where} = {value!r}: must be {wanted}") from error


def _flat(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Keys of tables with the table's name in front. Raises `ConfigError` for unknown ones."""
    tables = {key.partition(".")[0] for key in KEYS if "." in key}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key in tables and isinstance(value, dict):
            flat |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            flat[key] = value
    for key in flat:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(key)}")
    return flat


def _nearest(key: str) -> str:
    """Advice: the known key that looks most alike, in the same table or another."""
    close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.6)
    if not close:
        own = key.rpartition(".")[2]
        lasts = {known.rpartition(".")[2]: known for known in KEYS}
        close = [lasts[last] for last in difflib.get_close_matches(own, lasts, n=1, cutoff=0.6)]
    if not close:
        return f"; known are {', '.join(KEYS)}"
    table, dot, last = close[0].rpartition(".")
    return f"; did you mean {last!r}{f' in [{table}]' if dot else ''}?"


def _read_toml(path: Path) -> dict[str, Any]:
    # JetPack's Python 3.10 has no tomllib; tomli is the same under its old name.
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        toml = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path} cannot be read: Python 3.10 needs the package tomli (pip install tomli), or "
            "give every setting as a TESSERA_… variable or flag"
        ) from error
    try:
        content: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not there; tessera-device init {path} writes one to start from"
        ) from error
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return content


def _read_secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"broker.password_file cannot be read: {error}") from error


# -- a file to start from ------------------------------------------------------------------------

DEFAULT = """\
# What this device is told. Every key may also be given as a variable, TESSERA_<KEY> or
# TESSERA_BROKER_<KEY>, or, the common ones, as a flag of `tessera-device run`.
# Lines that begin with # show the defaults.

# What is trained, as the coordinator calls it, and who this is: 1 to 59 of a-z 0-9 . _ -
task = "digits"
name = "{name}"

# The device's own data: a folder of .npz files with x (or x0, x1 ...) and y, or a function
# load() that returns arrays, as "file.py:function" or "package.module:function". It never leaves
# the device. Paths are relative to this file.
data = "data"

# What must outlive a restart: movements without a receipt, chunks of the model.
# state_dir = "tessera-state"
# cache_mb = 256

# How much of the model this device trains at most, and in how many of the rounds. Before every
# round it looks at its battery, memory, heat and the time there is, and trains the largest of
# these levels that fits, or skips and says why; see `tessera-device explain`.
# level = 1.0
# levels = [1.0, 0.75, 0.5, 0.25]
# participation = 1.0
# schedule = "round-robin"          # or "ad-hoc": by lot
# prefer = "smaller"                # when energy is short: a smaller level, or "rarer" rounds
# max_gap = 10                      # train the smallest level at least every so many rounds
# keeps_copy = true                 # lets the last movement speak for a round that is skipped
# weigh = true                      # false: train `level` without looking

# What machine this is, for numbers that no sensor tells (docs/devices.md), and whose sensors to
# read: linux, raspberry-pi, jetson, android, macos, windows. Without it: found out.
# board = "raspberry_pi_4"
# probe = "linux"

# threads = 1
# providers = ["CPUExecutionProvider"]

# Every so many rounds, tell the coordinator how good the model is on this data; 0: never.
# evaluate_every = 0

# Wait for the next run when one is finished.
# stay = false

# Give up when the broker cannot be reached for so many seconds after the start; 0: never.
# connect_s = 0

# Where batches and dropout are drawn from; runs with the same seeds repeat.
# seed = 0

# log_format = "text"               # or "json": one object per line
# log_level = "info"                # debug, info, warning, error

[limits]
# battery_floor = 30                # percent; below it, train only while charging
# battery_share = 0.1               # of a full battery that training may take in a day
# energy_wh_per_day = 1.5           # the same in watt-hours
# heat_margin_c = 10                # degrees to stay below where the system slows down
# memory_share = 0.8                # of the memory that is free
# memory_pressure = 10              # percent of time in which programs wait for memory
# allow_metered = false
# quiet_hours = "22:30-07:00"       # local time, in which nothing is trained

[emulate]
# fleet = "mixed.toml"              # to try things out: pretend to be a device of this fleet
# member = "pixel-4"

[broker]
host = "127.0.0.1"
port = 1883
# tls = false                       # needed for a broker on another machine
# ca = "ca.pem"                     # without it: what this machine trusts
# certificate = "device.pem"        # ours, where the broker asks for one; see docs/brokers.md
# key = "device.key"
# bulk_certificate = "device-bulk.pem"  # of the connection for chunks; without it: the same
# bulk_key = "device-bulk.key"
# username = "{name}"
# password_file = "password"        # or password = "..."
# keepalive_s = 30
# allow_plaintext = false           # true: no TLS to another machine: everybody on the way can
                                    # read the password and the model, and change both
"""


def write_default(path: Path) -> None:
    """Write a commented configuration. Raises `ConfigError` if something is there already."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(DEFAULT.format(name=default_name()))
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already and is left as it is") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
