"""Settings of a device: a TOML file, then the environment, then flags; later ones win."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from edge_sdk.data.format import DataFormat
from edge_sdk.decide.decision import Policy
from edge_sdk.machine.probe import ProbeName
from edge_sdk.program.settings import (
    PREFIX,
    Count,
    Example,
    Flat,
    Natural,
    Share,
    Short,
    Spelling,
    Within,
    check_fields,
    load_settings,
)
from edge_sdk.program.settings.reference import render_example, write_example
from edge_sdk.protocol.errors import ConfigError, MessageError
from edge_sdk.protocol.messages.condition import check_labels
from edge_sdk.protocol.messages.local_rule import Precision
from edge_sdk.protocol.messages.topics import (
    BULK,
    COORDINATOR,
    MAX_DEVICE_CHARACTERS,
    VIEWER,
    check_device,
    check_name,
    is_named,
)
from edge_sdk.transport.settings import BrokerSettings

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Deliver = Literal["latest", "best", "off"]

COORDINATOR_TABLES = (
    "task",
    "run",
    "inputs",
    "rule",
    "server_optimizer",
    "robust",
    "mask",
    "round",
    "join",
    "http",
    "devices",
    "delivery",
    "notify",
)
"""Tables of the coordinator's file. Their variables are none of ours, and no mistake."""


def default_name() -> str:
    """A name for this machine: its host name, as far as it fits into a topic."""
    name = re.sub(r"[^a-z0-9._-]+", "-", platform.node().lower()).strip("._-")
    if is_named(name, COORDINATOR) or is_named(name, VIEWER):
        name = f"device-{name}"
    return re.sub(f"({BULK})+$", "", name[:MAX_DEVICE_CHARACTERS]) or "device"


def _path(value: Any, base: Path) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return str(base / Path(value).expanduser())


def _read_board(value: Any, base: Path) -> str:
    """A profile's name, or its file, which is made absolute."""
    path = _path(value, base)
    return path if value.endswith(".toml") else str(value)


def _read_source(value: Any, base: Path) -> str:
    """Where data comes from; files are made absolute, modules left alone."""
    path = _path(value, base)
    place, colon, function = str(value).rpartition(":")
    if not colon:
        return path
    return f"{_path(place, base)}:{function}" if place.endswith(".py") else str(value)


DataSource = Annotated[
    str,
    Spelling(_read_source, "a folder, a file, file.py:function or package.module:function"),
    Example("data"),
]
BoardName = Annotated[
    str,
    Spelling(_read_board, "the name of a profile, or a file that ends in .toml"),
    Example("raspberry_pi_4"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The device to pretend to be, for the demo and for trying things out."""

    fleet: Annotated[Path, Example("mixed.toml")]
    """File of the fleet (docs/devices.md)."""
    member: Annotated[str, Example("pixel-4")]
    """Name of the device in that fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTask:
    """One of several tasks, highest priority first; what is not set is as for the whole device.
    `tasks = ["digits", "sounds"]` is enough where nothing differs. Raises `ConfigError`."""

    task: Annotated[str, Example("sounds")]
    """Name of the task."""
    priority: Annotated[Count | None, Example(1)] = None
    """Its priority, 1 for the highest; tasks of the same one take turns, the one longest not served
    first. Without it, the place in the list."""
    data: DataSource | None = None
    """The device's own data for this task."""
    format: DataFormat | None = None
    """How that data is to be read."""
    level: Share | None = None
    """Largest share of this task's model that the device trains."""
    participation: Share | None = None
    """Largest share of this task's rounds to take part in."""
    evaluate_every: Natural | None = None
    """Rounds between evaluations."""
    deliver: Deliver | None = None
    """Model of this task to keep ready for inference."""

    def __post_init__(self) -> None:
        try:
            check_name(self.task, "task")
        except MessageError as error:
            raise ConfigError(str(error)) from error
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Settings of a device. Raises `ConfigError` for values that make no sense."""

    task: Annotated[str, Example("digits")] = ""
    """Task to take part in, by the coordinator's name for it. Required, unless `tasks` names
    several."""
    name: Annotated[str, Example("kitchen-pi")] = ""
    """Name of this device, unique in its fleet: 1 to 59 of a-z 0-9 . _ - (without it, the host
    name)."""
    data: DataSource | None = None
    """The device's own data, which never leaves it: a file or folder of arrays, tables, images or
    sound (docs/data.md), or a function that returns arrays, as `file.py:function` or
    `package.module:function`."""
    data_mb: Annotated[Count | None, Example(64)] = None
    """Megabytes of data to hold in memory; more is converted once, to a file in `state_dir` that is
    mapped. Without it, a quarter of the free memory."""
    state_dir: Path = Path("tessera-state")
    """Folder for what must survive a restart: movements without a receipt, chunks of the model."""
    cache_mb: Count = 256
    """Megabytes that chunks may take on disk; those that a round needs are kept in any case."""
    policy: Annotated[Policy, Flat] = field(default_factory=Policy)
    weigh: bool = True
    """Look at battery, memory, heat and time before every round; false trains `level` without
    looking."""
    board: BoardName | None = None
    """Profile of this machine, for numbers that no sensor tells: a name from docs/devices.md or a
    file."""
    probe: Annotated[ProbeName | None, Example("linux")] = None
    """Sensors to read; without it, recognised."""
    threads: Count = 1
    """Threads that one graph runs on."""
    tune: bool = True
    """Compute convolutions in the ways that are fastest on this machine, found out once for each
    task, while there is nothing else to do (needs `weigh`). If false, as every machine can: equal
    seeds then give equal bits."""
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    """Execution providers of onnxruntime, preferred first."""
    precision: Precision = "auto"
    """Precision of the products in training, in runs with `precision = "fp16"`: `fp16`, `fp32`, or
    `auto`, which is fp16 on the execution providers of CUDA and TensorRT and fp32 elsewhere."""
    evaluate_every: Natural = 0
    """Rounds between evaluations of the whole model on the device's own data. With 0, there are
    none; the device then answers surveys without accuracies, and never tries a model for inference
    before others get it (docs/inference.md)."""
    deliver: Deliver = "latest"
    """Model of the task to keep ready for inference: the newest, the one with the best accuracy, or
    none (docs/inference.md)."""
    deliver_margin: Annotated[float, Within(least=0, most=1)] = 0.05
    """Most that a new model may be worse than the old one, by this device's own evaluation: in
    accuracy, or as a share of the loss where there is no accuracy. Else the old one is kept."""
    stay: bool = False
    """Wait for the next run when one is finished."""
    connect_s: Annotated[float, Within(least=0)] = 0.0
    """Seconds after which to give up when the broker cannot be reached at the start; 0 means
    never."""
    seed: Natural = 0
    """Seed of batches and dropout; runs with the same seeds repeat."""
    log_format: LogFormat = "text"
    """Form of log lines; `json` writes one object per line."""
    log_level: LogLevel = "info"
    """Least important messages to log."""
    share_condition: bool = True
    """Tell the coordinator's operator how this device is, now and then: battery, temperature,
    memory, energy, labels, profile, version, last error (docs/privacy.md). If false, the device
    shares only what rounds need, and a coordinator that asks for labels, memory or a profile does
    not let it take part."""
    labels: Annotated[dict[str, str], Example({"site": "berlin"})] = field(default_factory=dict)
    """Labels of this device, by which its operator finds it and may choose who takes part."""
    tasks: tuple[Annotated[DeviceTask, Short("task")], ...] = ()
    emulate: Emulated | None = None
    format: DataFormat = field(default_factory=DataFormat)
    broker: BrokerSettings = field(default_factory=BrokerSettings)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", default_name())
        if not self.task:
            if not self.tasks:
                raise ConfigError(
                    "task is missing; set it in the file, or as TESSERA_TASK; or tasks, for several"
                )
            object.__setattr__(self, "task", self.tasks[0].task)
        self._check_tasks()
        try:
            check_name(self.task, "task")
            check_device(self.name)
            check_labels(self.labels)
        except MessageError as error:
            raise ConfigError(str(error)) from error
        check_fields(self)
        if not self.providers:
            raise ConfigError("providers = []: name one, such as CPUExecutionProvider")

    @property
    def tries_models(self) -> bool:
        """True if this device may try a new model before others get it, and say how good it is."""
        return self.deliver == "latest" and self.evaluate_every > 0

    def _check_tasks(self) -> None:
        names = [each.task for each in self.tasks]
        if names and self.task != names[0]:
            raise ConfigError(
                f"task = {self.task!r} and tasks are both set: add it to tasks, or remove it"
            )
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"tasks names {name!r} more than once")

    def by_task(self) -> tuple[DeviceConfig, ...]:
        """Return the settings for each task, the highest priority first; `tasks` is then empty."""
        if not self.tasks:
            return (self,)
        order = self.priorities()
        return tuple(self._for(each) for each in sorted(self.tasks, key=lambda it: order[it.task]))

    def priorities(self) -> dict[str, int]:
        """Return the priority of every task; the lower number goes first."""
        if not self.tasks:
            return {self.task: 1}
        return {each.task: each.priority or place for place, each in enumerate(self.tasks, 1)}

    def _for(self, own: DeviceTask) -> DeviceConfig:
        policy = replace(
            self.policy,
            level=own.level or self.policy.level,
            participation=own.participation or self.policy.participation,
        )
        every = self.evaluate_every if own.evaluate_every is None else own.evaluate_every
        return replace(
            self,
            task=own.task,
            tasks=(),
            policy=policy,
            data=own.data or self.data,
            format=own.format or self.format,
            evaluate_every=every,
            deliver=own.deliver or self.deliver,
        )


def load_config(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> DeviceConfig:
    """The settings of a device. `environment` None: that of the process. Raises `ConfigError`."""
    return load_settings(
        DeviceConfig,
        path,
        environment=environment,
        flags=flags,
        others=[f"{PREFIX}{table.upper()}_" for table in COORDINATOR_TABLES],
        absent=f"tessera-device init {path} writes one to start from",
    )


DIGITS = "digits.csv"
"""Sixty handwritten digits of 8 × 8 pixels from 0 to 1, with the digit last: data for a first try.

From the "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, CC BY 4.0).
"""


def digits_table() -> str:
    """Return the example data's text."""
    return Path(__file__).parents[1].joinpath("data", DIGITS).read_text(encoding="utf-8")


def write_default(path: str | Path) -> None:
    """Write a commented file to start from, and example data beside it, unless that is there.

    Raises `ConfigError` if a file of this name is there already.
    """
    given = {"task": "digits", "name": default_name(), "data": DIGITS}
    write_example(path, render_default(given))
    data = Path(path).absolute().parent / DIGITS
    if not data.exists():
        write_example(data, digits_table())


def render_default(given: Mapping[str, Any]) -> str:
    """A commented file that sets these keys and a broker on this machine."""
    return render_example(
        DeviceConfig,
        {**given, "broker.host": "127.0.0.1", "broker.port": 1883},
        "Settings of a device. Start it with\n"
        "  tessera-device run --config device.toml\n"
        "Paths are relative to this file. Lines that are commented out show defaults, or examples "
        "where there is none. docs/configuration.md has the same as a table.",
    )
