"""Settings of `tessera-coordinator serve`: a TOML file, then the environment, checked once.

Every table of the file is a class here. Settings that a run in Python shares take their default and
meaning from the classes of such a run (`same_as`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from coordinator.aggregate.memory import MemoryType
from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.pairings import (
    fitting_growth,
    fitting_masks,
    fitting_rescale,
    fitting_widths,
)
from coordinator.aggregate.published import find_recipe, recipe_preset
from coordinator.aggregate.robust import RECOMMENDED, SERVED, Robust, RobustName
from coordinator.aggregate.rules import AsyncRule, Rule, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.config import RunConfig, check_levels
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.state import RoundsConfig, Selection
from coordinator.service.admission.demands import Demands
from coordinator.service.outgoing.canary import CanarySettings
from coordinator.service.service import ServiceConfig
from coordinator.service.store import Keeping
from coordinator.task.graphs.child import locate
from edge_sdk.data.format import DataFormat
from edge_sdk.device.config import DeviceConfig
from edge_sdk.program.settings import (
    NOT_A_KEY,
    Count,
    Example,
    Natural,
    Seconds,
    Share,
    Within,
    check_fields,
    load_settings,
    same_as,
)
from edge_sdk.program.settings.choices import EncodingText
from edge_sdk.program.settings.reader import read_toml
from edge_sdk.program.settings.reference import render_example
from edge_sdk.program.settings.types import entries, keys
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import GraphError, MessageError
from edge_sdk.protocol.messages.local_rule import CLIP_NORM, Classes, LocalRule, Widths
from edge_sdk.protocol.messages.survey import MAX_SURVEY_SAMPLES, MAX_SURVEYED
from edge_sdk.protocol.messages.topics import check_name
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.protocol.task.description import InputDescription, check_names
from edge_sdk.transport.settings import BrokerSettings, PortNumber, is_loopback

IDENTITY = "identity"
PROCESS_FILE = "coordinator.toml"
"""The file of `ProcessConfig`, in a folder of run files."""
PROCESS_LOCK = "serve.lock"
"""File in the folder of `ProcessConfig`, held by the process."""
SHARED_TABLES = ("broker", "join", "http")
"""Tables of a run's file that are in `PROCESS_FILE` where a process has many runs."""
ROUNDS = 50
UPDATES = 500
"""Default length of an asynchronous run; `ROUNDS` is that of a synchronous one."""

LeastPrecision = Literal["fp32", "fp16"]
NoticeKind = Literal["finished", "stalled", "accuracy_fell", "quarantined", "failed"]
NOTICES: tuple[NoticeKind, ...] = (
    "finished",
    "stalled",
    "accuracy_fell",
    "quarantined",
    "failed",
)

T = TypeVar("T")

Positive = Annotated[float, Within(above=0)]
NotNegative = Annotated[float, Within(least=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The task: a model and the name devices find it by."""

    name: Annotated[str, Example("digits")]
    """Name by which devices find the task."""
    source: Annotated[str, Example("task.py:make_task")]
    """The model, as code that only the coordinator has: `file.py:function` or
    `package.module:function`."""
    evaluation: Annotated[str | None, Example("task.py:evaluation")] = None
    """Test data for the accuracy after every round: a function, or a file or folder that is read
    as devices read theirs (docs/data.md; `[format]` below is for it). Without it, the accuracy is
    not measured; of a model with BatchNorm, devices measure it now and
    then (survey_every), if their owners allow that (evaluate_every)."""
    classes: Annotated[tuple[str, ...], Example(["cat", "dog"])] = ()
    """Names of class 0, 1 …, so that devices can sort samples by name. They replace those that the
    task's code gives."""

    def __post_init__(self) -> None:
        try:
            check_name(self.name, "task")
        except MessageError as error:
            raise ConfigError(f"name: {error}") from error
        try:
            check_names("classes", self.classes)
        except GraphError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsTable:
    """The model's first input: how devices make it from their files (docs/data.md). If a key is
    set, the table replaces what the task's code says of this input."""

    features: Annotated[tuple[str, ...], Example(["temperature", "humidity"])] = same_as(
        InputDescription, "features"
    )
    range: Annotated[tuple[float, ...], Example([0.0, 1.0])] = ()
    """Lowest and highest value the model was made for. Pixels and sound are scaled to it."""
    mean: Annotated[tuple[float, ...], Example([0.5])] = same_as(InputDescription, "mean")
    deviation: Annotated[tuple[float, ...], Example([0.25])] = same_as(
        InputDescription, "deviation"
    )
    window: Annotated[Count | None, Example(128)] = same_as(InputDescription, "window")
    sample_rate: Annotated[Count | None, Example(16000)] = same_as(InputDescription, "sample_rate")
    mels: Annotated[Count | None, Example(40)] = same_as(InputDescription, "mels")
    frame: Annotated[Count | None, Example(400)] = same_as(InputDescription, "frame")
    hop: Annotated[Count | None, Example(160)] = same_as(InputDescription, "hop")

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            self.description()
        except GraphError as error:
            raise ConfigError(str(error)) from error

    def description(self) -> InputDescription:
        """Return what the table says. Raises `GraphError` for a contradiction."""
        given: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        return InputDescription(**{**given, "range": self.range or None})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """The run: its folder, its length, and how devices train."""

    folder: Annotated[Path, Example("run")]
    """Folder for everything that the run needs to resume after a stop; a new one starts a new
    run."""
    rounds: Annotated[Count | None, Example(ROUNDS)] = None
    """Rounds of a synchronous run; without it, 50."""
    updates: Annotated[Count | None, Example(UPDATES)] = None
    """Updates of an asynchronous run; without it, 500."""
    recipe: Annotated[str | None, Example("fjord")] = None
    """Published system, which sets the rule, the masks and the devices' training together
    (docs/algorithms.md). `tessera-coordinator demo --recipe list` names all."""
    steps: Count = 10
    """Steps of SGD that a device makes in a round."""
    batch_size: Count = 32
    """Samples of a step."""
    learning_rate: Positive = 0.1
    """Learning rate of the devices."""
    momentum: Annotated[float, Within(least=0, below=1)] = same_as(LocalRule, "momentum")
    """Momentum of the devices; it starts at 0 every round."""
    weight_decay: NotNegative = same_as(LocalRule, "weight_decay")
    """Weight decay of the devices."""
    clip_norm: Annotated[NotNegative | None, Example(20.0)] = None
    """Norm to which longer gradients are clipped; 0 never clips. It bounds how far a device can
    move the model, and a longer movement is rejected. Without it, 20, which training that goes well
    hardly ever reaches, and 0 with a recipe."""
    sam_radius: NotNegative = same_as(LocalRule, "sam_radius")
    """Radius of sharpness-aware minimisation; 0 is plain SGD."""
    proximal: NotNegative = same_as(LocalRule, "proximal")
    """Strength of the pull towards the weights that the round began with (FedProx)."""
    rescale: Annotated[NotNegative | None, Example(0.5)] = None
    """Exponent by which inputs of narrowed layers grow: (1 / level) ^ rescale. 0 is the papers'
    reading. Without it, 0 where a step trains several widths, else 0.5."""
    widths: Annotated[Widths | None, Example("ordered-dropout")] = None
    """Submodels that a step trains: `own`, the assigned one; `ordered-dropout`, one drawn from the
    own and the narrower ones; `sandwich`, the own and a drawn narrower one. Without it,
    `ordered-dropout` where rule and masks allow it, so that every level becomes a model
    (docs/levels.md)."""
    distillation: Annotated[float, Within(least=0, most=1)] = same_as(LocalRule, "distillation")
    """Share of the wide outputs in the narrow submodel's targets, with `sandwich`."""
    classes: Classes = same_as(LocalRule, "classes")
    """Classes whose scores count in local training: `all`, or a device's `own`, which leaves out
    those that it has no sample of (with cross-entropy)."""
    precision: LeastPrecision = "fp32"
    """Least precise products of training that devices may choose. `fp16` also compiles graphs that
    multiply in fp16, with weights, optimiser, losses and norms in fp32, for devices with hardware
    that gains from it (docs/graphs.md); those of a run that exists stay as they are."""
    levels: tuple[Share, ...] = same_as(RunConfig, "levels")
    grow: Annotated[float | None, Within(least=0, below=1), Example(0.0)] = None
    """Share of the rounds in which the model grows: they train at most a level that rises step by
    step from the smallest of `levels` to the whole model, which saves energy and traffic. Without
    it, 0.5 where devices train several widths, else 0: what devices can afford, from the first
    round on (docs/levels.md)."""
    seed: Natural = 0
    """Seed of everything random; runs with the same seeds repeat."""
    up: EncodingText = same_as(RunConfig, "up")
    down: EncodingText = field(default_factory=Encoding)
    """Encoding of the model that devices fetch, with the same choices."""
    memory_type: MemoryType = same_as(Keeping, "memory_type")
    max_staleness: Count = same_as(RoundsConfig, "max_staleness")
    rms_limit: Annotated[float, Within(above=1)] = same_as(RunConfig, "rms_limit")
    """A movement with a block this many times larger than usual is rejected."""
    cohort_limit: Annotated[float, Within(above=1)] = same_as(RoundsConfig, "cohort_limit")
    """A movement with a block this many times larger than the median of its round is rejected."""
    samples_limit: Annotated[float, Within(least=1)] = same_as(RunConfig, "samples_limit")
    quarantine_after: Natural = same_as(RunConfig, "quarantine_after")
    robust: Annotated[RobustName | None, Example(RECOMMENDED)] = None
    """Defence against bad devices (docs/algorithms.md): `none`; `clip`, at a fixed norm;
    `clip-median`, at the median of the round; and on top of the latter `median`, `trimmed-mean`,
    `geometric-median` or `multi-krum` instead of the mean; `root` weighs devices by their agreement
    with data of yours. `[robust]` has their numbers. Without it, `none`."""
    threads: Annotated[Count | None, Example(4)] = same_as(Keeping, "threads")
    keep_last: Count = same_as(Keeping, "keep_last")
    keep_every: Count = same_as(Keeping, "keep_every")
    tensorboard: Annotated[Path | None, Example("tensorboard")] = None
    """Folder for TensorBoard's files, one number for each round and quantity (extra
    `tensorboard`); without it, none are written."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_levels(self.levels)
        if self.distillation and self.widths not in (None, "sandwich"):
            raise ConfigError(
                f"distillation = {self.distillation}: needs the wide outputs; set widths to "
                "sandwich"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTable:
    """The rule that aggregates movements. `tessera-coordinator demo --rule list` names all."""

    name: str = "ram-fed"
    """Name of the rule."""
    options: Annotated[dict[str, Any], Example({"damping": 0.9})] = field(default_factory=dict)
    """Options of the rule (docs/algorithms.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizerTable(ServerOptimizer):
    """The server's optimiser, for synchronous rules (docs/algorithms.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustTable:
    """Numbers of the defence against bad devices, which `robust` in `[run]` names
    (docs/algorithms.md)."""

    norm: Annotated[float | None, Within(above=0), Example(1.0)] = same_as(Robust, "norm")
    factor: Annotated[float, Within(above=0)] = same_as(Robust, "factor")
    hostile: Annotated[float, Within(above=0, below=0.5)] = same_as(Robust, "hostile")
    agreement: Annotated[float | None, Within(least=-1, below=0), Example(-0.15)] = same_as(
        Robust, "agreement"
    )
    data: Annotated[str | None, Example("task.py:root")] = None
    """Data of the operator that `root` trains on, needed for it: a function, or a file or folder
    that is read as devices read theirs (`[format]` below is for it). A few samples of every class
    are enough."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTable:
    """The mask policy, which picks the groups that devices train."""

    name: Annotated[str | None, Example("coverage")] = None
    """Name of the policy, or `file.py:Class` for one of your own (docs/algorithms.md), which runs
    in the coordinator; without it, the best one for the rule. `tessera-coordinator demo --mask
    list` names all."""
    options: Annotated[dict[str, Any], Example({"tied": True})] = field(default_factory=dict)
    """Options of the policy (docs/algorithms.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTable:
    """Rounds: when they open and close, and when the run stops."""

    min_devices: Count = 1
    """Devices that must be present for a round to open; below that, the run waits. An asynchronous
    run needs them only at its start."""
    bid_s: Seconds = same_as(RunConfig, "bid_s")
    train_deadline_s: Seconds = same_as(RunConfig, "train_deadline_s")
    away_s: Seconds = same_as(RoundsConfig, "away_s")
    rest_s: Seconds = same_as(FragmentsConfig, "rest_s")
    participants: Annotated[Count | None, Example(10)] = same_as(RoundsConfig, "participants")
    select: Selection = same_as(RoundsConfig, "select")
    over_selection: Annotated[float, Within(least=1)] = same_as(RoundsConfig, "over_selection")
    quorum: Annotated[Share | None, Example(0.9)] = same_as(RoundsConfig, "quorum")
    min_participants: Natural = same_as(RoundsConfig, "min_participants")
    target_accuracy: Annotated[Share | None, Example(0.95)] = same_as(RunConfig, "target_accuracy")
    patience: Annotated[Count | None, Example(10)] = same_as(RunConfig, "patience")
    survey_every: Natural = same_as(RunConfig, "survey_every")
    survey_devices: Annotated[int, Within(least=1, most=MAX_SURVEYED)] = same_as(
        RunConfig, "survey_devices"
    )
    survey_samples: Annotated[int, Within(least=1, most=MAX_SURVEY_SAMPLES)] = same_as(
        RunConfig, "survey_samples"
    )
    survey_s: Seconds = same_as(RunConfig, "survey_s")
    max_devices: Count = same_as(ServiceConfig, "max_devices")
    """Most devices to listen to; further names are ignored."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_devices < self.min_devices:
            raise ConfigError(
                f"max_devices = {self.max_devices}: must be at least min_devices "
                f"({self.min_devices}), or no round would ever begin"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTable(BrokerSettings):
    """The broker, and how to reach it; or an embedded one, which needs no settings."""

    embedded: bool = False
    """Start a broker with the run. Also where the file has no [broker] table at all."""
    tls_port: PortNumber = 0
    """Port of the embedded broker for devices that have joined; 0 means the first free one of 8883,
    8885 …, which a run then keeps. (`port` is then for programs on this machine.)"""
    probe: bool = True
    """Test the broker at the start."""
    status_topics: bool = False
    """Tell MQTT dashboards the state of the run and its devices: retained JSON on `view/status` and
    `view/fleet`, for viewers (docs/operate.md). Off, because a broker with rules of your own may
    let every device read it."""
    status_s: Annotated[float, Within(least=1)] = 5.0
    """Least seconds between two such messages."""

    def __post_init__(self) -> None:
        if not self.embedded:
            BrokerSettings.__post_init__(self)
        elif self.tls or self.ca or self.username:
            raise ConfigError("embedded = true starts a broker: remove tls, ca, username")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTable:
    """How devices join: with codes, over HTTPS (docs/deploy.md)."""

    enabled: bool | None = None
    """Let devices join with `tessera-device join`; without it, if the broker is embedded. A broker
    that is not embedded needs TLS."""
    host: Annotated[str | None, Example("coordinator.example.org")] = None
    """Name or address under which devices reach this machine; without it, its address in the local
    network. `localhost` keeps broker and joining on this machine."""
    port: PortNumber = 0
    """Port at which devices join; 0 means the first free one of 8884, 8886 …, which a run then
    keeps."""
    authority: Annotated[Path | None, Example("identity")] = None
    """Folder of the authority that signs devices' certificates; without it, `identity` beside this
    file, or in the run's folder if this file's folder is read-only. A broker that is not embedded
    must trust it."""
    devices: Annotated[Count | None, Example(10)] = None
    """Devices that the printed code lets in; without it, `min_devices`."""
    hours: Annotated[float, Within(above=0, most=8_784)] = 24.0
    """Hours that the printed code is valid."""

    def __post_init__(self) -> None:
        check_fields(self)
        host = self.host
        if host is not None and (not host or "/" in host or any(c.isspace() for c in host)):
            raise ConfigError(f"host = {host!r}: give a name or an address, without a port")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyTable:
    """Notices: news of the run, sent to a URL as JSON (docs/operate.md)."""

    url: Annotated[str | None, Example("https://example.org/tessera")] = None
    """URL that notices are sent to; without it, none are sent."""
    events: tuple[NoticeKind, ...] = NOTICES
    """News to send: the run is complete, no round comes, the accuracy fell, a device was
    quarantined, the run failed."""
    stalled_minutes: Positive = 60.0
    """Minutes without a committed round after which a run counts as stalled."""
    fell_points: Positive = 5.0
    """Points that the accuracy of the level to deploy has to be below the best …"""
    fell_rounds: Count = 3
    """… and rounds in a row, until that is told."""
    signing_key: Annotated[Path | None, Example("notify.key")] = None
    """File with a key that signs notices: the header X-Tessera-Signature then has their
    HMAC-SHA256."""
    ca: Annotated[Path | None, Example("ca.pem")] = None
    """Certificate authority of an https URL; without it, the system's."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.url is None:
            return
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            fits = None
        if not fits or not self.url.isprintable() or " " in self.url or "@" in parts.netloc:
            raise ConfigError(
                "url: give an http or https URL with a host, and without a user's name"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryTable(CanarySettings):
    """Models for inference: who gets a new one first (docs/inference.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesTable(Demands):
    """Who may take part; without a key, everybody. A device that does not fit is told why, and
    `status` shows it as barred (docs/operate.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTable:
    """The operator's page with its API and metrics (docs/api-http.md). It is served to this machine
    alone unless `host` says otherwise."""

    enabled: bool = True
    """Serve the page."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` means every address of this machine. Any but this machine's
    own loopback needs `certificate` and `key`."""
    port: PortNumber = 0
    """Port to listen on; 0 means the first free one of 8080, 8081 …, which a run then keeps."""
    names: Annotated[tuple[str, ...], Example(["fl.example.org"])] = ()
    """Names under which browsers reach the page, besides `localhost`, `host` and addresses.
    Requests for other names are refused."""
    tokens: Annotated[Path | None, Example("tokens.txt")] = None
    """File with one line `ROLE NAME TOKEN` for everybody who may sign in; ROLE is `read` or
    `operate`. Without it, one token of each role is made and kept in the folder `http` of the
    run's."""
    certificate: Annotated[Path | None, Example("fullchain.pem")] = None
    """TLS certificate with its chain, in PEM format. A renewed file is noticed within a minute."""
    key: Annotated[Path | None, Example("privkey.pem")] = None
    """Private key of `certificate`."""
    plain: bool = False
    """Serve other machines without TLS: for a proxy that adds it."""
    open_metrics: bool = False
    """Give `/metrics` to anybody who can connect, without a token."""
    device_metrics: bool = False
    """Add series of every device to `/metrics`. They are many: 11 for each device."""
    session_hours: Annotated[float, Within(above=0, most=744)] = 12.0
    """Hours until a browser has to sign in again."""
    alive_s: Seconds = 600.0
    """Seconds without a sign of life from the run's loop after which `/healthz` reports failure. A
    loop aggregates and tests the model in between: set it longer than that takes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.host or "/" in self.host or any(c.isspace() for c in self.host):
            raise ConfigError(f"host = {self.host!r}: give a name or an address, without a port")
        for name in self.names:
            if not name or any(c in "/:@" or c.isspace() for c in name):
                raise ConfigError(f"names: {name!r} is no name of a machine: no scheme, no port")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("certificate and key belong together: set both or neither")
        if not (is_loopback(self.host) or self.certificate or self.plain):
            raise ConfigError(
                f"host = {self.host!r} lets other machines connect, so tokens need TLS: set "
                "certificate and key; or plain = true if a proxy in front of it does TLS"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of a coordinator, checked. Made by `read_config`."""

    task: TaskTable
    run: RunTable
    inputs: InputsTable = field(default_factory=InputsTable)
    rule: RuleTable = field(default_factory=RuleTable)
    server_optimizer: ServerOptimizerTable = field(default_factory=ServerOptimizerTable)
    robust: RobustTable = field(default_factory=RobustTable)
    mask: MaskTable = field(default_factory=MaskTable)
    round: RoundTable = field(default_factory=RoundTable)
    format: DataFormat = field(default_factory=DataFormat)
    broker: BrokerTable = field(default_factory=lambda: BrokerTable(embedded=True))
    join: JoinTable = field(default_factory=JoinTable)
    delivery: DeliveryTable = field(default_factory=DeliveryTable)
    notify: NotifyTable = field(default_factory=NotifyTable)
    devices: DevicesTable = field(default_factory=DevicesTable)
    http: HttpTable = field(default_factory=HttpTable)
    base: Path = field(default=Path(), metadata=NOT_A_KEY)
    """Folder to which sources are relative."""

    def __post_init__(self) -> None:
        run, round = self.run, self.round
        asynchronous = isinstance(self.make_rule(), AsyncRule)
        for name, wrong in (("rounds", asynchronous), ("updates", not asynchronous)):
            if wrong and getattr(run, name) is not None:
                right = "updates" if name == "rounds" else "rounds"
                raise ConfigError(f"run.{name} does not fit this rule: set run.{right} instead")
        watches = round.target_accuracy is not None or round.patience is not None
        if watches and self.task.evaluation is None:
            raise ConfigError(
                "round.target_accuracy and round.patience need the accuracy: give test data in "
                "task.evaluation"
            )
        if asynchronous and run.grow:
            raise ConfigError("run.grow is for rounds, and this rule has none: remove it")
        if asynchronous and self.server_optimizer.name != "none":
            raise ConfigError(
                f"{self.rule.name} moves the model at every arrival; server_optimizer is for "
                "synchronous rules: remove it"
            )
        if asynchronous and run.robust not in (None, "none"):
            raise ConfigError(
                f"{self.rule.name} moves the model at every arrival; run.robust compares the "
                "movements of a round: remove it, or use a synchronous rule"
            )
        if (run.robust == "root") != (self.robust.data is not None):
            raise ConfigError(
                'run.robust = "root" and robust.data, the data it trains on, go together: set both '
                "or neither"
            )
        self.make_robust()
        _check_join(self.broker, self.join)

    def make_robust(self) -> Robust:
        """Make the defence against bad devices. Raises `ConfigError`.

        Without run.robust there is none in an asynchronous run, and with a recipe.
        """
        bare = self.run.recipe is not None or isinstance(self.make_rule(), AsyncRule)
        name = self.run.robust or ("none" if bare else SERVED)
        return _pick(Robust, self.robust, name=name)

    @property
    def can_join(self) -> bool:
        """True if devices can join with codes.

        At a broker of one's own they need TLS: otherwise all would get the coordinator's password.
        """
        return _can_join(self.broker, self.join)

    @property
    def authority(self) -> Path:
        """Folder of the authority that signs devices' certificates.

        Without `join.authority`: `identity` beside the file, or in the run's folder if nobody can
        write beside the file.
        """
        return _authority(self.join, self.base, self.run.folder)

    def described(self, data: DataSpec) -> DataSpec:
        """Return the task's data with the names and meanings that these settings give.

        Raises `ConfigError` if they do not fit the model.
        """
        first, rest = self.inputs.description(), data.descriptions[1:]
        try:
            return data.described(
                classes=self.task.classes or None,
                inputs=None if first == InputDescription() else (first, *rest),
            )
        except GraphError as error:
            raise ConfigError(f"[inputs] and task.classes do not fit the model: {error}") from error

    def make_rule(self) -> Rule | AsyncRule:
        """Make the server's rule. Raises `ConfigError`."""
        return make_rule(self.rule.name, **self.rule.options)

    def machine(self, plan: ModelPlan) -> RoundsConfig | FragmentsConfig:
        """Make the settings of the state machine. Raises `ConfigError`."""
        if self.run.recipe is not None:
            find_recipe(self.run.recipe).check_model(plan)
        rule = self.make_rule()
        local_rule = self._local_rule(rule, plan)
        masks = self.mask.name or fitting_masks(rule, local_rule.widths)
        common: dict[str, Any] = {
            "plan": plan,
            "rule": rule,
            "masks": make_masks(locate(masks, self.base), **self.mask.options),
            "local_rule": local_rule,
        }
        if isinstance(rule, AsyncRule):
            updates = self.run.updates or UPDATES
            return _pick(FragmentsConfig, self.run, self.round, **common, updates=updates)
        common["rounds"] = self.run.rounds or ROUNDS
        common["server_optimizer"] = self.server_optimizer
        common["robust"] = self.make_robust()
        common["grow"] = self.run.grow
        if self.run.grow is None:
            common["grow"] = fitting_growth(rule, common["masks"], local_rule.widths, plan)
        return _pick(RoundsConfig, self.run, self.round, **common)

    def _local_rule(self, rule: Rule | AsyncRule, plan: ModelPlan) -> LocalRule:
        run = self.run
        fitting = fitting_widths(rule, self.mask.name, alternatives=plan.has_alternatives)
        widths = run.widths or ("sandwich" if run.distillation else fitting)
        rescale = fitting_rescale(widths) if run.rescale is None else run.rescale
        clip = (0 if run.recipe else CLIP_NORM) if run.clip_norm is None else run.clip_norm
        return _pick(LocalRule, run, widths=widths, rescale=rescale, clip_norm=clip or None)

    @property
    def keeping(self) -> Keeping:
        """Storage of the run on disk."""
        return _pick(Keeping, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Settings that all runs of one process share, checked. Made by `read_process_config`."""

    folder: Path = Path("coordinator")
    """Folder for what the process keeps: the embedded broker's files, join codes, the socket for
    commands."""
    broker: BrokerTable = field(default_factory=lambda: BrokerTable(embedded=True))
    join: JoinTable = field(default_factory=JoinTable)
    http: HttpTable = field(default_factory=HttpTable)
    base: Path = field(default=Path(), metadata=NOT_A_KEY)
    """Folder of the run files."""

    def __post_init__(self) -> None:
        _check_join(self.broker, self.join)
        broker = self.broker
        if broker.certificate is not None and TASK_MARK not in str(broker.certificate):
            raise ConfigError(
                f"broker.certificate = {str(broker.certificate)!r}: a broker lets one connection "
                "in by a certificate, and every run needs its own. Enroll a coordinator for each "
                f"(tessera-coordinator enroll --coordinator TASK), and put {TASK_MARK} for the "
                "task's name into certificate, key, bulk_certificate and bulk_key"
            )

    @property
    def can_join(self) -> bool:
        """As that of `ServeConfig`."""
        return _can_join(self.broker, self.join)

    @property
    def authority(self) -> Path:
        """Folder of the authority: `identity` beside the run files, as for one run."""
        return _authority(self.join, self.base, self.folder)

    def broker_of(self, task: str) -> BrokerTable:
        """Return the broker as the run of a task reaches it."""
        names = ("certificate", "key", "bulk_certificate", "bulk_key")
        files = {name: getattr(self.broker, name) for name in names}
        filled: dict[str, Any] = {
            name: Path(str(path).replace(TASK_MARK, task))
            for name, path in files.items()
            if path is not None
        }
        return replace(self.broker, **filled) if filled else self.broker


TASK_MARK = "{task}"
"""Stands for the task's name in file names of `ProcessConfig`."""


def _check_join(broker: BrokerTable, join: JoinTable) -> None:
    if broker.embedded or not join.enabled:
        return
    if broker.tls and join.authority is None:
        raise ConfigError(
            "join.enabled needs join.authority, the folder of the authority that signs the "
            "certificates of this broker's devices: name it"
        )


def _can_join(broker: BrokerTable, join: JoinTable) -> bool:
    enabled = join.enabled
    return broker.embedded if enabled is None else enabled and (broker.embedded or broker.tls)


def _authority(join: JoinTable, base: Path, folder: Path) -> Path:
    if join.authority is not None:
        return base / join.authority
    beside, inside = base / IDENTITY, folder / IDENTITY
    if inside.is_dir():  # once chosen, it stays
        return inside
    written = beside if beside.exists() else base
    return beside if os.access(written, os.W_OK | os.X_OK) else inside


def _pick(cls: type[T], *tables: Any, **others: Any) -> T:
    """Make a value of this class from its keys in the tables, and from `others`."""
    given = {each.name: getattr(table, each.name) for table in tables for each in fields(table)}
    return cls(**{name: given[name] for name in entries(cls) if name in given} | others)


def read_config(path: str | Path, *, environment: Mapping[str, str] | None = None) -> ServeConfig:
    """Read a file of settings. `environment` None means the process's. Raises `ConfigError`."""
    config = load_settings(
        ServeConfig,
        path,
        environment=environment,
        others=[key.variable for key in keys(DeviceConfig)],
        absent=f"tessera-coordinator init {path} writes one to start from",
        preset=recipe_preset,
    )
    return replace(config, base=Path(path).absolute().parent)


def read_run(path: Path, process: ProcessConfig) -> ServeConfig:
    """Read the file of a run of a process with many. Raises `ConfigError`.

    Variables do not count: they would be for all runs alike.
    """
    for table in SHARED_TABLES:
        if table in read_toml(path):
            raise ConfigError(
                f"{path}: [{table}] is for all runs of the process: move it to "
                f"{path.parent / PROCESS_FILE} and remove it here"
            )
    config = load_settings(ServeConfig, path, environment={}, preset=recipe_preset)
    join = replace(process.join, authority=process.authority)
    return replace(
        config,
        base=path.absolute().parent,
        broker=process.broker_of(config.task.name),
        join=join,
        http=process.http,
    )


def read_process_config(
    folder: Path, *, environment: Mapping[str, str] | None = None
) -> ProcessConfig:
    """Read `coordinator.toml` in a folder of run files; the defaults if there is none.

    `environment` None means the process's. Raises `ConfigError`.
    """
    path = folder / PROCESS_FILE
    config = load_settings(
        ProcessConfig,
        path if path.exists() else None,
        environment=environment,
        others=[key.variable for key in keys(DeviceConfig)],
    )
    base = folder.absolute()
    return replace(config, base=base, folder=base / config.folder)


def process_folder(runs: Path) -> Path | None:
    """Return the folder of the process that serves, or served, a folder of run files; None: none.

    Raises `ConfigError`.
    """
    if (runs / PROCESS_LOCK).is_file():
        return runs
    found = read_process_config(runs).folder
    return found if (found / PROCESS_LOCK).is_file() else None


def render_process_default() -> str:
    """Write a commented `coordinator.toml` to start from."""
    return render_example(
        ProcessConfig,
        {"broker.embedded": True},
        "Settings that all runs in this folder share. Start them with\n"
        "  tessera-coordinator serve --runs .\n"
        "Paths are relative to this file. Lines that are commented out show defaults, or examples "
        "where there is none. docs/configuration.md has the same as a table.",
    )


def render_default(name: str = "run.toml", source: str = "task.py") -> str:
    """Write a commented file to start from: the task in `source`, with an embedded broker."""
    given = {
        "task.name": "digits",
        "task.source": f"{source}:make_task",
        "task.evaluation": f"{source}:evaluation",
        "run.folder": "run",
        "run.rounds": 30,
        "run.steps": 10,
        "run.batch_size": 32,
        "run.learning_rate": 0.1,
        "run.momentum": 0.5,
        "rule.name": "ram-fed",
        "server_optimizer.name": "momentum",
        "server_optimizer.beta1": 0.5,
        "round.min_devices": 2,
        "broker.embedded": True,
    }
    return render_example(
        ServeConfig,
        given,
        f"Settings of a run. Start it with\n  tessera-coordinator serve --config {name}\n"
        "Paths are relative to this file. Lines that are commented out show defaults, or examples "
        "where there is none. docs/configuration.md has the same as a table.",
    )
