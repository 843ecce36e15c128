"""What is known of a phone or board, every number with where it comes from.

    TesseraError
    └── BoardError       a profile or fleet that cannot be; names the file, the key and what to do

A profile is a TOML file of `devices/`; docs/devices.md describes the format. Its rules:

- A number is a `Quantity`. Its unit is the end of its key: `_mb` (1024² bytes), `_w`, `_wh`, `_v`,
  `_c`, `_ghz`, `_mbit_s`; a `_ratio` has none.
- A number nobody knows is absent: None here, never zero.
- Speed counts in reference cores: 1.0 does what one core of an Intel Core i3-8100 does in the same
  time, the yardstick that scores 1000 points in Geekbench 5.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from edge_sdk.protocol.errors import TesseraError

Provenance = Literal["measured", "datasheet", "derived", "assumed"]
Kind = Literal["phone", "board", "computer"]
LinkKind = Literal["wifi", "ethernet", "mobile"]
Sensor = Literal["skin", "chip"]


class BoardError(TesseraError):
    """A profile or fleet that cannot be; the text names file and key and says what to do."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, where it comes from, and of what kind that is. Raises `BoardError`."""

    value: float
    source: str
    """A citation, the arithmetic (`derived`) or the reasoning (`assumed`)."""
    provenance: Provenance
    """`measured` by somebody who says how; `derived` by arithmetic from cited numbers."""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise BoardError(f"value = {self.value!r}: must be a number")
        if not isinstance(self.source, str) or not self.source.strip():
            raise BoardError(f"source = {self.source!r}: must say where the number comes from")
        if self.provenance not in get_args(Provenance):
            raise BoardError(_not_one_of("provenance", self.provenance, get_args(Provenance)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpec:
    """CPU cores of one class."""

    core: str
    count: Quantity
    ghz: Quantity | None = None
    """The highest clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """RAM; on Jetsons CPU and GPU share it."""

    memory_mb: Quantity
    app_mb: Quantity | None = None
    """What one process can use while the system goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSpec:
    """How fast the CPU trains, in reference cores."""

    speed_ratio: Quantity | None = None
    """With all cores."""
    one_core_ratio: Quantity | None = None
    """With one thread on the fastest core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSpec:
    """Watts of the whole device, or of what the source names."""

    idle_w: Quantity | None = None
    """Awake with nothing to do, the screen off."""
    train_w: Quantity | None = None
    """With all cores busy; idle is included."""
    wifi_send_w: Quantity | None = None
    wifi_receive_w: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatterySpec:
    """A device without one is on mains."""

    battery_wh: Quantity
    battery_v: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """What is usual where the device stands, over the link named."""

    link: LinkKind | None = None
    up_mbit_s: Quantity | None = None
    down_mbit_s: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatSpec:
    """When the device slows itself down, and by how much."""

    sensor: Sensor | None = None
    """What `throttle_c` is the temperature of."""
    throttle_c: Quantity | None = None
    sustained_ratio: Quantity | None = None
    """Speed when hot over speed when cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """What could train beside the CPU; `SpeedSpec` leaves it out."""

    title: str
    fp32_gflops: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A profile. Raises `BoardError` for numbers out of range or that contradict each other."""

    name: str
    """Lower-case letters, digits and `_`; that of its file in `devices/`."""
    title: str
    kind: Kind
    soc: str
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
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise BoardError(f"name = {self.name!r}: use lower-case letters, digits and '_'")
        if not self.cores:
            raise BoardError("cores: give at least one class, as a table [[cores]]")
        for key, quantity in self.quantities():
            _check_range(key, quantity.value)
        _check_order("memory.app_mb", self.memory.app_mb, "memory_mb", self.memory.memory_mb)
        _check_order("power.idle_w", self.power.idle_w, "train_w", self.power.train_w)
        _check_order(
            "speed.one_core_ratio", self.speed.one_core_ratio, "speed_ratio", self.speed.speed_ratio
        )
        if self.kind == "phone" and self.battery is None:
            raise BoardError("battery: a phone has one; give battery_wh")

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Every number that is known, with its key, such as `power.idle_w`, `cores[0].ghz`."""
        for index, cores in enumerate(self.cores):
            yield from _quantities(f"cores[{index}]", cores)
        for name in SECTIONS:
            yield from _quantities(name, getattr(self, name))


# -- what keys there are -------------------------------------------------------------------------

SECTIONS: dict[str, type[Any]] = {
    "memory": MemorySpec,
    "speed": SpeedSpec,
    "power": PowerSpec,
    "battery": BatterySpec,
    "network": NetworkSpec,
    "heat": HeatSpec,
    "gpu": GpuSpec,
}
"""The tables of a profile besides `[[cores]]`, in the order they are written."""

LIMITS: dict[str, tuple[float, float]] = {
    "count": (1, 256),
    "ghz": (0.1, 10),
    "memory_mb": (64, 4_194_304),
    "app_mb": (8, 4_194_304),
    "speed_ratio": (0.001, 1000),
    "one_core_ratio": (0.001, 100),
    "idle_w": (0.001, 1000),
    "train_w": (0.01, 2000),
    "wifi_send_w": (0.001, 50),
    "wifi_receive_w": (0.001, 50),
    "battery_wh": (0.1, 1000),
    "battery_v": (1, 60),
    "up_mbit_s": (0.001, 100_000),
    "down_mbit_s": (0.001, 100_000),
    "throttle_c": (25, 130),
    "sustained_ratio": (0.05, 1),
    "fp32_gflops": (0.1, 1_000_000),
}
"""Every number a profile may give, with the least and the greatest that makes sense."""

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(Kind),
    "link": get_args(LinkKind),
    "sensor": get_args(Sensor),
}
"""Keys that name one of a few things. Those neither here nor in `LIMITS` are texts."""

_TEXTS = ("name", "title", "kind", "soc")
_WHOLE = ("count",)
_PLACES = {
    each.name: name
    for name, table in SECTIONS.items()
    for each in fields(table)
    if each.name not in _TEXTS
}
"""In which table a key belongs."""


# -- reading -------------------------------------------------------------------------------------


KINDS = ("phones", "jetsons", "raspberry_pis")
"""The folders of `devices/` that hold profiles."""


def load_board(path: Path) -> Board:
    """The profile in a file. Raises `BoardError`, which names the file and the key."""
    content = read_toml(path)
    try:
        return _read_board(content)
    except BoardError as error:
        raise BoardError(f"{path}: {error}") from error


def find_board(name: str) -> Board:
    """A profile that ships with the project, such as `jetson_nano`. Raises `BoardError`."""
    paths = shipped_boards()
    if name not in paths:
        raise BoardError(f"there is no profile {name!r}{nearest(name, tuple(paths))}")
    return load_board(paths[name])


def shipped_boards() -> dict[str, Path]:
    """The profiles that ship with the project, by name, sorted. Raises `BoardError`."""
    paths = (path for kind in KINDS for path in (shipped() / kind).glob("*.toml"))
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def shipped() -> Path:
    """The folder of the profiles that ship with the project. Raises `BoardError`."""
    try:
        # By name: the SDK works without the profiles, and must not import what builds upon it.
        return Path(str(resources.files("devices")))
    except ModuleNotFoundError as error:
        raise BoardError("the package devices, which has the profiles, is not installed") from error


def _read_board(content: Mapping[str, Any]) -> Board:
    check_keys(content, (*_TEXTS, "cores", *SECTIONS), places=_PLACES)
    values: dict[str, Any] = {key: _read_text(content, key, key) for key in _TEXTS}
    classes = _required(content, "cores", "cores")
    if not isinstance(classes, list):
        raise BoardError("cores: must be tables [[cores]], one for each class of cores")
    values["cores"] = tuple(
        _read_section(CoreSpec, table, f"cores[{index}]") for index, table in enumerate(classes)
    )
    for name, section in SECTIONS.items():
        if name in content:
            values[name] = _read_section(section, content[name], name)
    if "memory" not in values:
        raise BoardError("memory is missing: give [memory.memory_mb]")
    return Board(**values)


_T = TypeVar("_T")


def _read_section(section: type[_T], table: Any, where: str) -> _T:
    if not isinstance(table, dict):
        raise BoardError(f"{where} = {table!r}: must be a table [{where}]")
    known = _fields(section)
    check_keys(table, [each.name for each in known], where, _PLACES)
    values: dict[str, Any] = {}
    for each in known:
        key = f"{where}.{each.name}"
        if each.name not in table and each.default is None:
            continue
        if each.name in LIMITS:
            values[each.name] = _read_quantity(_required(table, each.name, key), key)
        else:
            values[each.name] = _read_text(table, each.name, key)
    return section(**values)


def _read_quantity(table: Any, where: str) -> Quantity:
    if not isinstance(table, dict):
        raise BoardError(
            f"{where} = {table!r}: must be a table [{where}] with value, source and provenance"
        )
    names = [each.name for each in fields(Quantity)]
    check_keys(table, names, where)
    values = {name: _required(table, name, f"{where}.{name}") for name in names}
    try:
        return Quantity(**values)
    except BoardError as error:
        raise BoardError(f"{where}.{error}") from error


def _read_text(table: Mapping[str, Any], name: str, where: str) -> str:
    text = _required(table, name, where)
    if not isinstance(text, str) or not text.strip():
        raise BoardError(f"{where} = {text!r}: must be a text in quotes")
    if name in CHOICES and text not in CHOICES[name]:
        raise BoardError(_not_one_of(where, text, CHOICES[name]))
    return text


def _required(table: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in table:
        raise BoardError(f"{where} is missing")
    return table[name]


def _check_range(key: str, value: float) -> None:
    name = key.rpartition(".")[2]
    least, greatest = LIMITS[name]
    if not least <= value <= greatest:  # not a number fails as well
        raise BoardError(f"{key}.value = {value!r}: must be from {least:g} to {greatest:g}")
    if name in _WHOLE and not math.floor(value) == value:
        raise BoardError(f"{key}.value = {value!r}: must be a whole number")


def _check_order(key: str, less: Quantity | None, name: str, more: Quantity | None) -> None:
    if less is not None and more is not None and less.value > more.value:
        raise BoardError(f"{key}.value = {less.value:g}: cannot exceed {name} = {more.value:g}")


def _quantities(where: str, section: Any) -> Iterator[tuple[str, Quantity]]:
    for each in _fields(type(section)) if section is not None else ():
        value = getattr(section, each.name)
        if isinstance(value, Quantity):
            yield f"{where}.{each.name}", value


def _fields(section: type[Any]) -> tuple[Field[Any], ...]:
    return fields(section)


# -- keys and files, for fleets too --------------------------------------------------------------


def check_keys(
    table: Mapping[str, Any],
    known: Iterable[str],
    where: str = "",
    places: Mapping[str, str] | None = None,
) -> None:
    """Raise `BoardError` for a key that is not known, with the known one that looks most alike.

    `places`: keys that other tables have, each with the name of its table.
    """
    known = list(known)
    for key in table:
        if key not in known:
            own = f"{where}.{key}" if where else key
            raise BoardError(f"{own} is not a known key{nearest(key, known, places)}")


def nearest(text: str, known: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """Advice to put behind a complaint: the known text that looks most alike, or all of them."""
    known, places = list(known), places or {}
    if close := difflib.get_close_matches(text, [*known, *places], n=1, cutoff=0.6):
        table = "" if close[0] in known else f" in [{places[close[0]]}]"
        return f"; did you mean {close[0]!r}{table}?"
    return f"; known are {', '.join(known)}"


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises `BoardError`."""
    # JetPack's Python 3.10 has no tomllib; tomli is the same under its old name.
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        toml = importlib.import_module(name)
        content: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except ModuleNotFoundError as error:
        raise BoardError(f"{path} cannot be read: Python 3.10 needs pip install tomli") from error
    except FileNotFoundError as error:
        raise BoardError(f"{path} is not there") from error
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise BoardError(f"{path} cannot be read: {error}") from error
    return content


def _not_one_of(key: str, value: Any, known: tuple[str, ...]) -> str:
    return f"{key} = {value!r}: must be one of {', '.join(known)}"


# -- writing -------------------------------------------------------------------------------------


def write_board(path: Path, board: Board) -> None:
    """Write a profile that `load_board` reads back equal. Raises `BoardError`."""
    try:
        path.write_text(render_board(board), encoding="utf-8", newline="\n")
    except (OSError, UnicodeEncodeError) as error:
        raise BoardError(f"{path} cannot be written: {error}") from error


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
