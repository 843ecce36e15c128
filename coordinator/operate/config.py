"""What `tessera-coordinator serve` is told: a TOML file, checked once.

Paths are relative to the file. Every table of the file is a class here; a key that is not known is
an error that suggests the nearest. The broker's password may come from the environment instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from coordinator.aggregate.memory import Dtype
from coordinator.aggregate.pairings import fitting_masks
from coordinator.aggregate.rules import FedRaa, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.service.admission.limits import MAX_DEVICES
from coordinator.service.store import Keeping
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import EncodingError, MessageError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.topics import check_name
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.settings import MAX_CHUNK_BYTES, BrokerSettings

PASSWORD = "TESSERA_BROKER_PASSWORD"  # noqa: S105  the name of a variable
ROUNDS = 50
UPDATES = 500
"""Of a run that does not say how long it is."""

T = TypeVar("T")
_Toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """What is trained: `source` is "file.py:function" or "package.module:function"."""

    name: str
    source: str
    evaluation: str | None = None
    """The coordinator's own test data: a function likewise, or an .npz file; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """How long, with which numbers, and where it is kept."""

    folder: Path
    rounds: int | None = None
    updates: int | None = None
    """`rounds` of a synchronous run, `updates` of an asynchronous one; None: a usual number."""
    steps: int = 10
    batch_size: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    sam_radius: float = 0.0
    proximal: float = 0.0
    rescale: float = 0.5
    seed: int = 0
    up: str = "fp32"
    """How movements travel; `down` likewise for the model."""
    down: str = "fp32"
    memory_type: str = "fp32"
    max_staleness: int = 50
    rms_limit: float = 100.0
    threads: int = 1
    keep_last: int = 5
    keep_every: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTable:
    """A rule or a mask policy by name, with options."""

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTable:
    """When rounds open and close, and when the run stops."""

    min_devices: int = 1
    bid_s: float = 10.0
    train_s: float = 600.0
    rest_s: float = 30.0
    participants: int | None = None
    over_selection: float = 1.0
    quorum: float = 1.0
    min_participants: int = 1
    target_accuracy: float | None = None
    patience: int | None = None
    away_s: float = 10.0
    max_devices: int = MAX_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTable:
    """Where the broker is (`BrokerSettings`), or `embedded`: one that is started here."""

    embedded: bool = False
    host: str = "127.0.0.1"
    port: int | None = None
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    bulk_certificate: Path | None = None
    bulk_key: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    chunk_bytes: int = MAX_CHUNK_BYTES
    keepalive_s: int = 30
    allow_plaintext: bool = False
    probe: bool = True
    """Whether the broker is tried out at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """A checked configuration. Made by `read_config`."""

    task: TaskTable
    run: RunTable
    rule: ChoiceTable
    mask: ChoiceTable
    round: RoundTable
    broker: BrokerTable
    base: Path
    """The folder that sources and paths are relative to."""

    def __post_init__(self) -> None:
        try:
            check_name(self.task.name, "task")
        except MessageError as error:
            raise ConfigError(f"[task] name: {error}") from error
        run, broker = self.run, self.broker
        if run.memory_type not in get_args(Dtype):
            known = ", ".join(get_args(Dtype))
            raise ConfigError(f"[run] memory_type is one of {known}, not {run.memory_type!r}")
        for name in ("keep_last", "keep_every", "threads"):
            if getattr(run, name) < 1:
                raise ConfigError(f"[run] {name} must be at least 1, not {getattr(run, name)}")
        if self.round.max_devices < self.round.min_devices:
            raise ConfigError(
                f"[round] max_devices ({self.round.max_devices}) is below min_devices "
                f"({self.round.min_devices}): no round would ever begin"
            )
        for name in ("up", "down"):
            _encoding(name, getattr(run, name))
        asynchronous = isinstance(self.make_rule(), FedRaa)
        for name, wrong in (("rounds", asynchronous), ("updates", not asynchronous)):
            if wrong and getattr(run, name) is not None:
                right = "updates" if name == "rounds" else "rounds"
                raise ConfigError(f"[run] {name} does not go with this rule; it counts {right}")
        watches = self.round.target_accuracy is not None or self.round.patience is not None
        if watches and self.task.evaluation is None:
            raise ConfigError(
                "[round] target_accuracy and patience need the accuracy: name test data as "
                "[task] evaluation"
            )
        if watches and asynchronous:
            raise ConfigError("[round] target_accuracy and patience are for synchronous rules")
        if broker.embedded and (broker.tls or broker.ca or broker.username):
            raise ConfigError("[broker] embedded = true starts a broker: remove tls, ca, username")
        if not broker.embedded:
            self.broker_settings()

    def make_rule(self) -> Any:
        """The server's rule. Raises `ConfigError`."""
        return make_rule(self.rule.name or "ram-fed", **self.rule.options)

    def machine(self, plan: ModelPlan) -> RoundsConfig | FragmentsConfig:
        """What the state machine is told. Raises `ConfigError`."""
        run, round, rule = self.run, self.round, self.make_rule()
        common: dict[str, Any] = {
            "plan": plan,
            "rule": rule,
            "masks": make_masks(self.mask.name or fitting_masks(rule), **self.mask.options),
            "local_rule": self._local_rule(),
            "steps": run.steps,
            "batch_size": run.batch_size,
            "min_devices": round.min_devices,
            "seed": run.seed,
            "encoding": _encoding("up", run.up),
            "rms_limit": run.rms_limit,
            "bid_s": round.bid_s,
            "train_s": round.train_s,
        }
        if isinstance(rule, FedRaa):
            return FragmentsConfig(**common, updates=run.updates or UPDATES, rest_s=round.rest_s)
        return RoundsConfig(
            **common,
            rounds=run.rounds or ROUNDS,
            max_staleness=run.max_staleness,
            participants=round.participants,
            over_selection=round.over_selection,
            quorum=round.quorum,
            min_participants=round.min_participants,
            target_accuracy=round.target_accuracy,
            patience=round.patience,
            away_s=round.away_s,
        )

    @property
    def down(self) -> Encoding:
        """How the model travels."""
        return _encoding("down", self.run.down)

    @property
    def keeping(self) -> Keeping:
        """How the run is kept on disk."""
        run = self.run
        dtype: Any = run.memory_type
        return Keeping(
            keep_last=run.keep_last,
            keep_every=run.keep_every,
            memory_dtype=dtype,
            threads=run.threads,
        )

    def broker_settings(self) -> BrokerSettings:
        """How to reach the broker. Raises `LinkError`."""
        broker = self.broker
        return BrokerSettings(
            host=broker.host,
            port=broker.port or (8883 if broker.tls else 1883),
            tls=broker.tls,
            ca=broker.ca,
            certificate=broker.certificate,
            key=broker.key,
            bulk_certificate=broker.bulk_certificate,
            bulk_key=broker.bulk_key,
            username=broker.username,
            password=broker.password or os.environ.get(PASSWORD),
            chunk_bytes=broker.chunk_bytes,
            keepalive_s=broker.keepalive_s,
            allow_plaintext=broker.allow_plaintext,
        )

    def _local_rule(self) -> LocalRule:
        values = {entry.name: getattr(self.run, entry.name) for entry in fields(LocalRule)}
        try:
            return LocalRule(**values)
        except MessageError as error:
            raise ConfigError(f"[run] {error}") from error


TABLES: dict[str, type[Any]] = {
    "task": TaskTable,
    "run": RunTable,
    "rule": ChoiceTable,
    "mask": ChoiceTable,
    "round": RoundTable,
    "broker": BrokerTable,
}


def read_config(path: Path) -> ServeConfig:
    """The configuration in a file. Raises `ConfigError` or `LinkError`, naming the key."""
    try:
        content = _Toml.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; tessera-coordinator init writes a file to "
            "start from"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    _check_keys(content, TABLES, f"{path}: table")
    base = path.absolute().parent
    tables = {
        name: _read_table(name, table, content.get(name, {}), base)
        for name, table in TABLES.items()
    }
    return ServeConfig(**tables, base=base)


def _read_table(name: str, table: type[T], content: Any, base: Path) -> T:
    if not isinstance(content, Mapping):
        raise ConfigError(f"[{name}] is a table, not {content!r}")
    known: Any = table
    hints, entries = get_type_hints(table), {entry.name: entry for entry in fields(known)}
    _check_keys(content, entries, f"[{name}]: key")
    values = {}
    for key, entry in entries.items():
        if key in content:
            values[key] = _value(f"[{name}] {key}", hints[key], content[key], base)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"[{name}] {key} is missing")
    return table(**values)


def _check_keys(content: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for key in content:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{what} {key!r} is not known; {hint}")


def _value(what: str, hint: Any, value: Any, base: Path) -> Any:
    """A value of the type that a table wants. Raises `ConfigError`."""
    kinds = tuple(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    if hint == dict[str, Any]:
        kinds = (dict,)
    kind = kinds[0]
    if kind is Path and isinstance(value, str) and value:
        return base / Path(value).expanduser()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
        raise ConfigError(f"{what} is {words.get(kind, 'text')}, not {value!r}")
    return value


def _encoding(name: str, text: str) -> Encoding:
    try:
        return Encoding.parse(text)
    except EncodingError as error:
        raise ConfigError(f"[run] {name}: {error}") from error


EXAMPLE = """\
# A run of tessera-coordinator. Start it with
#   tessera-coordinator serve --config {name}
# Paths are relative to this file. What is commented out shows its default.

[task]
# Devices find their task by this name.
name = "digits"
# The model, as code that only the coordinator has: "file.py:function" or "module:function".
source = "{source}:make_task"
# Test data, for the accuracy after every round: a function, or an .npz file with x and y.
evaluation = "{source}:evaluation"

[run]
# Everything the run needs to go on after a stop. A folder that is not there yet is a new run.
folder = "run"
rounds = 30
# Local training: steps of SGD on batches of this size.
steps = 10
batch_size = 32
learning_rate = 0.1
momentum = 0.5
# weight_decay = 0.0
# proximal = 0.0
# sam_radius = 0.0
# clip_norm = 1.0         # default: none
# How movements (up) and the model (down) travel: fp32, fp16, int8, top-k:0.1; +zstd behind any.
# up = "fp32"
# down = "fp32"
# How memory holds its values: fp32, fp16 or int8.
# memory_type = "fp32"
# Rounds after which a late movement is of no use.
# max_staleness = 50
# Movements with a block this many times larger than usual are rejected.
# rms_limit = 100.0
# seed = 0
# Checkpoints that are kept: the last few, and every so-manyth.
# keep_last = 5
# keep_every = 50

[rule]
# How movements are put together: tessera-coordinator demo --rule list names all.
name = "ram-fed"
# [rule.options]
# damping = 0.9

# [mask]
# Which groups devices train; the default serves the rule best.
# name = "coverage"

[round]
# Devices that must be there before the first round.
min_devices = 2
# How long bids and movements are waited for, in seconds.
bid_s = 10.0
train_s = 600.0
# away_s = 10.0           # likewise, for devices that left when all others have answered
# max_devices = 10000     # names that are listened to
# participants = 10       # movements wanted per round; default: everybody's
# over_selection = 1.0    # pick this many more
# quorum = 1.0            # close when this share of the movements wanted is there
# min_participants = 1    # with fewer offers a round is void
# target_accuracy = 0.95  # stop when the model is this good; default: go on
# patience = 10           # stop after this many rounds without a better one; default: go on

[broker]
# A broker of its own on this machine, for trials. For a real one: its host, and how to get in.
embedded = true
# host = "broker.example.org"
# port = 8883
# tls = true
# ca = "ca.pem"           # default: what this machine trusts
# certificate = "coordinator.pem"
# key = "coordinator.key"
# bulk_certificate = "coordinator-bulk.pem"  # default: the same for both connections
# bulk_key = "coordinator-bulk.key"
# username = "coordinator"
# password = "…"          # or the environment variable TESSERA_BROKER_PASSWORD
# allow_plaintext = false # true: no TLS to another machine: everybody on the way can read the
                          # password, the model and movements, and change them
# chunk_bytes = 262144    # 98304 suits AWS IoT Core
"""
"""What `init` writes; `name` and `source` are filled in."""
