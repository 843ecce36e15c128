"""Profiles of phones and boards: every number with where it comes from.

A profile is a TOML file of `devices/`; docs/devices.md describes the format. Its rules:

- A number is a `Quantity`. Its unit is the end of its key: `_mb` (1024² bytes), `_w`, `_wh`, `_v`,
  `_c`, `_ghz`, `_mbit_s`; a `_ratio` has none.
- A number nobody knows is absent: None here, never zero.
- Speed counts in reference cores: 1.0 does what one core of an Intel Core i3-8100 does in the same
  time, the yardstick that scores 1000 points in Geekbench 5.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from edge_sdk.program.settings import Within, check_fields, nearest, read_table, read_toml
from edge_sdk.program.settings.types import kinds
from edge_sdk.protocol.errors import ConfigError

Provenance = Literal["measured", "datasheet", "derived", "assumed"]
Kind = Literal["phone", "board", "computer"]
LinkKind = Literal["wifi", "ethernet", "mobile"]
Sensor = Literal["skin", "chip"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, where it comes from, and of what kind that is. Raises `ConfigError`."""

    value: float
    """The number; its unit is the end of its key."""
    source: str
    """A citation, the arithmetic (`derived`) or the reasoning (`assumed`)."""
    provenance: Provenance
    """`measured` by somebody who says how; `derived` by arithmetic from cited numbers."""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise ConfigError(f"value = {self.value!r}: must be a number")
        if not self.source.strip():
            raise ConfigError(f"source = {self.source!r}: must say where the number comes from")
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpec:
    """CPU cores of one class."""

    core: str
    """Name of the core, such as Cortex-A57."""
    count: Annotated[Quantity, Within(least=1, most=256)]
    ghz: Annotated[Quantity | None, Within(least=0.1, most=10)] = None
    """The highest clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """RAM; on Jetsons CPU and GPU share it."""

    memory_mb: Annotated[Quantity, Within(least=64, most=4_194_304)]
    app_mb: Annotated[Quantity | None, Within(least=8, most=4_194_304)] = None
    """Memory that one process can use while the system runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSpec:
    """Training speed of the CPU, in reference cores."""

    speed_ratio: Annotated[Quantity | None, Within(least=0.001, most=1000)] = None
    """With all cores."""
    one_core_ratio: Annotated[Quantity | None, Within(least=0.001, most=100)] = None
    """With one thread on the fastest core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSpec:
    """Watts of the whole device, or of what the source names."""

    idle_w: Annotated[Quantity | None, Within(least=0.001, most=1000)] = None
    """Awake with nothing to do, the screen off."""
    train_w: Annotated[Quantity | None, Within(least=0.01, most=2000)] = None
    """With all cores busy; idle is included."""
    wifi_send_w: Annotated[Quantity | None, Within(least=0.001, most=50)] = None
    wifi_receive_w: Annotated[Quantity | None, Within(least=0.001, most=50)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatterySpec:
    """A device without one is on mains."""

    battery_wh: Annotated[Quantity, Within(least=0.1, most=1000)]
    battery_v: Annotated[Quantity | None, Within(least=1, most=60)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """Usual speeds at the device, over the named link."""

    link: LinkKind | None = None
    up_mbit_s: Annotated[Quantity | None, Within(least=0.001, most=100_000)] = None
    down_mbit_s: Annotated[Quantity | None, Within(least=0.001, most=100_000)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatSpec:
    """When the device slows itself down, and by how much."""

    sensor: Sensor | None = None
    """Part whose temperature `throttle_c` is."""
    throttle_c: Annotated[Quantity | None, Within(least=25, most=130)] = None
    sustained_ratio: Annotated[Quantity | None, Within(least=0.05, most=1)] = None
    """Speed when hot over speed when cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Processor that could train beside the CPU; `SpeedSpec` leaves it out."""

    title: str
    fp32_gflops: Annotated[Quantity | None, Within(least=0.1, most=1_000_000)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A profile. Raises `ConfigError` for numbers out of range or that contradict each other."""

    name: str
    """Lower-case letters, digits and `_`; that of its file in `devices/`."""
    title: str
    """The device's name for people."""
    kind: Kind
    """Sort of device; a phone has a battery."""
    soc: str
    """Its chip."""
    cores: tuple[CoreSpec, ...]
    """Fastest class first."""
    memory: MemorySpec
    speed: SpeedSpec = field(default_factory=SpeedSpec)
    power: PowerSpec = field(default_factory=PowerSpec)
    battery: BatterySpec | None = None
    network: NetworkSpec = field(default_factory=NetworkSpec)
    heat: HeatSpec = field(default_factory=HeatSpec)
    gpu: GpuSpec | None = None

    def __post_init__(self) -> None:
        for key in ("title", "soc"):
            if not getattr(self, key).strip():
                raise ConfigError(f"{key} = {getattr(self, key)!r}: must be a text in quotes")
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise ConfigError(f"name = {self.name!r}: use lower-case letters, digits and '_'")
        if not self.cores:
            raise ConfigError("cores: give at least one class, as a table [[cores]]")
        for key, quantity in self.quantities():
            _check_range(key, quantity.value)
        _check_order("memory.app_mb", self.memory.app_mb, "memory_mb", self.memory.memory_mb)
        _check_order("power.idle_w", self.power.idle_w, "train_w", self.power.train_w)
        _check_order(
            "speed.one_core_ratio", self.speed.one_core_ratio, "speed_ratio", self.speed.speed_ratio
        )
        if self.kind == "phone" and self.battery is None:
            raise ConfigError("battery: a phone has one; give battery_wh")

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Every number that is known, with its key, such as `power.idle_w`, `cores[0].ghz`."""
        for index, cores in enumerate(self.cores):
            yield from _quantities(f"cores[{index}]", cores)
        for name in SECTIONS:
            yield from _quantities(name, getattr(self, name))


# -- what keys there are -------------------------------------------------------------------------

SECTIONS: dict[str, type[Any]] = {
    name: kind.table for name, kind in kinds(Board).items() if kind.table is not None
}
"""The tables of a profile besides `[[cores]]`, in the order they are written."""

LIMITS: dict[str, Within] = {
    name: within
    for table in [*SECTIONS.values(), CoreSpec]
    for name, kind in kinds(table).items()
    if (within := kind.mark(Within)) is not None
}
"""Every number a profile may give, with the range that makes sense."""

_TEXTS = ("name", "title", "kind", "soc")
_WHOLE = ("count",)


# -- reading -------------------------------------------------------------------------------------


KINDS = ("phones", "jetsons", "raspberry_pis")
"""The folders of `devices/` that hold profiles."""


def load_board(path: str | Path) -> Board:
    """The profile in a file. Raises `ConfigError`, which names the file and the key."""
    return read_table(Board, read_toml(path), label=f"{path}: ", base=Path(path).parent)


def find_board(name: str) -> Board:
    """A profile that ships with the project, such as `jetson_nano`. Raises `ConfigError`."""
    paths = shipped_boards()
    if name not in paths:
        raise ConfigError(f"there is no profile {name!r}{nearest(name, tuple(paths))}")
    return load_board(paths[name])


def shipped_boards() -> dict[str, Path]:
    """The profiles that ship with the project, by name, sorted. Raises `ConfigError`."""
    paths = (path for kind in KINDS for path in (shipped() / kind).glob("*.toml"))
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def shipped() -> Path:
    """The folder of the profiles that ship with the project. Raises `ConfigError`."""
    try:
        # By name: the SDK works without the profiles, and must not import what builds upon it.
        return Path(str(resources.files("devices")))
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the package devices, which has the profiles, is not installed"
        ) from error


def _check_range(key: str, value: float) -> None:
    name = key.rpartition(".")[2]
    if not LIMITS[name].holds(value):
        raise ConfigError(f"{key}.value = {value!r}: must be {LIMITS[name]}")
    if name in _WHOLE and not math.floor(value) == value:
        raise ConfigError(f"{key}.value = {value!r}: must be a whole number")


def _check_order(key: str, less: Quantity | None, name: str, more: Quantity | None) -> None:
    if less is not None and more is not None and less.value > more.value:
        raise ConfigError(f"{key}.value = {less.value:g}: cannot exceed {name} = {more.value:g}")


def _quantities(where: str, section: Any) -> Iterator[tuple[str, Quantity]]:
    for each in _fields(type(section)) if section is not None else ():
        value = getattr(section, each.name)
        if isinstance(value, Quantity):
            yield f"{where}.{each.name}", value


def _fields(section: type[Any]) -> tuple[Field[Any], ...]:
    return fields(section)


# -- writing -------------------------------------------------------------------------------------


def write_board(path: Path, board: Board) -> None:
    """Write a profile that `load_board` reads back equal. Raises `ConfigError`."""
    try:
        path.write_text(render_board(board), encoding="utf-8", newline="\n")
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def render_board(board: Board) -> str:
    """A profile as TOML. One board has one text, so that changes to a file show what changed."""
    lines = [f"{key} = {_quoted(getattr(board, key))}" for key in _TEXTS]
    for cores in board.cores:
        lines += [
            "",
            "[[cores]]",
            f"core = {_quoted(cores.core)}",
            *_render_quantities("cores", cores),
        ]
    for name in SECTIONS:
        section = getattr(board, name)
        if section is not None:
            lines += [*_render_texts(name, section), *_render_quantities(name, section)]
    return "\n".join(lines) + "\n"


def _render_texts(name: str, section: Any) -> list[str]:
    values = [(each.name, getattr(section, each.name)) for each in _fields(type(section))]
    texts = [f"{key} = {_quoted(value)}" for key, value in values if isinstance(value, str)]
    return ["", f"[{name}]", *texts] if texts else []


def _render_quantities(name: str, section: Any) -> list[str]:
    lines = []
    for key, quantity in _quantities(name, section):
        value = float(quantity.value)
        lines += [
            "",
            f"[{key}]",
            f"value = {int(value) if value.is_integer() else value!r}",
            f"source = {_quoted(quantity.source)}",
            f"provenance = {_quoted(quantity.provenance)}",
        ]
    return lines


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's; JSON alone lets a raw DEL pass.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
