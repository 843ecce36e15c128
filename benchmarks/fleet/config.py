"""Settings of a simulated experiment: data, model, fleet, and a run's own settings.

The tables `run`, `rule`, `mask`, `server_optimizer`, `robust` and `round` are those of a run's file
(docs/configuration.md), with the same defaults, so an experiment says nothing in other words than a
run does. Everything is a plain value that a record can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.data.dealing import DataPartition
from benchmarks.models import FAMILIES
from coordinator.aggregate.memory import MemoryType
from coordinator.aggregate.published import recipe_preset
from coordinator.aggregate.rules import AsyncRule
from coordinator.errors import ConfigError
from coordinator.operate.config import (
    ROUNDS,
    UPDATES,
    MaskTable,
    RobustTable,
    RoundTable,
    RuleTable,
    RunTable,
    ServeConfig,
    ServerOptimizerTable,
    TaskTable,
)
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.state import RoundsConfig
from coordinator.simulate.fleet.cohorts import COHORT
from coordinator.simulate.fleet.engines.engine import TrainingEngine
from coordinator.simulate.fleet.engines.local import local_engine
from coordinator.simulate.fleet.engines.ray import RayEngine
from edge_sdk.decide.decision import Phase, Schedule
from edge_sdk.program.settings import (
    NOT_A_KEY,
    Count,
    Example,
    Share,
    Spelling,
    Within,
    check_fields,
    nearest,
    read_keys,
)
from edge_sdk.program.settings.types import keys
from edge_sdk.protocol.plan.plan import ModelPlan, Regions

EngineName = Literal["processes", "ray"]

DIGITS = "digits"
DIGITS_CNN = "digits-cnn"
MODELS = (DIGITS_CNN, *FAMILIES)
"""Names of models: the demo's, and the families of benchmarks."""
USUAL_MODELS = {
    DIGITS: DIGITS_CNN,
    "mnist": "lenet-28",
    "fashion_mnist": "lenet-28",
    "cifar10": "cnn",
    "uci_har": "sensor-cnn",
    "ag_news": "news",
}
"""Models of data sets, where none is named."""
UNTRAINED = "cnn"
"""Model of a study without training, where none is named."""


def _read_place(value: Any, base: Path) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return str(base / value) if value.endswith(".toml") else value


FilePlace = Annotated[str, Spelling(_read_place, "a file (.toml), or a name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyDataTable(DataPartition):
    """The data, and who has which of it."""

    name: str = DIGITS
    """Data set: `digits`, which scikit-learn brings, or the name of a folder of data."""
    samples: Annotated[Count | None, Example(6000)] = None
    """Training samples to use, drawn; without it, all."""
    check_samples: Annotated[Count | None, Example(1000)] = None
    """Most samples of validation, and of the test, to measure with; without it, all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyModelTable:
    """The model."""

    name: Annotated[str | None, Example("lenet-28")] = None
    """Name of the model; without it, the usual one of the data."""
    groups: Count = 4
    """Groups that every axis is cut into."""
    ratios: tuple[Share, ...] = ()
    """Sizes of the groups, as shares; without them, equal ones."""
    regions: Regions = "width"
    """Cut widths, or depth."""
    decoupled: bool = False
    """Norms of every level are kept apart, which some recipes ask for."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name is not None and self.name not in MODELS:
            raise ConfigError(f"name = {self.name!r}: no such model{nearest(self.name, MODELS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFleetTable:
    """The devices: a population from a file, a shipped fleet, or an ideal fleet, whose devices are
    always there and differ only as the lists say, dealt in turn."""

    population: FilePlace | None = None
    """File of a population (docs/fleets.md), or the name of a shipped fleet; without it, an ideal
    fleet."""
    devices: Annotated[Count | None, Example(20)] = None
    """Devices of a shipped fleet (without it, one of each member) or of an ideal one (10)."""
    levels: tuple[Share, ...] = (1.0,)
    """Levels that the devices of an ideal fleet train, in turn."""
    participation: tuple[Share, ...] = (1.0,)
    """Shares of the rounds in which they train, in turn."""
    schedule: Schedule = "round-robin"
    """Rounds of a smaller share: evenly spread, or drawn by lot (`ad-hoc`)."""
    phase: Phase = "own"
    """Evenly spread rounds: every device has its `own`, or all of one share have `common` ones."""
    speeds: tuple[Annotated[float, Within(above=0)], ...] = (1.0,)
    """Their speeds, in turn, as multiples of `board`'s."""
    board: str = "raspberry_pi_5"
    """Profile of an ideal fleet's devices: a name from docs/devices.md."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.population is not None:
            for name in ("levels", "participation", "speeds"):
                if getattr(self, name) != (1.0,):
                    raise ConfigError(f"{name}: for an ideal fleet, not a population: leave it out")
        if self.population is not None and self.population.endswith(".toml") and self.devices:
            raise ConfigError("devices: for fleets by name: a population has its own counts")
        for name in ("levels", "participation", "speeds"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: give at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRunTable(RunTable):
    """The run: its length, and how devices train; the keys of `[run]` in a run's file."""

    folder: Path = field(default=Path(), metadata=NOT_A_KEY)
    memory_type: MemoryType = field(default="fp16", metadata=NOT_A_KEY)
    keep_last: int = field(default=1, metadata=NOT_A_KEY)
    keep_every: int = field(default=1, metadata=NOT_A_KEY)
    tensorboard: Path | None = field(default=None, metadata=NOT_A_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRobustTable(RobustTable):
    """Numbers of the defence against bad devices; the keys of `[robust]` in a run's file."""

    data: str | None = field(default=None, metadata=NOT_A_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationTable:
    """Settings of the simulation itself."""

    train: bool = True
    """Really train; without it, movements are zeros of the right size, and only time, energy and
    traffic are simulated."""
    evaluate_every: Count = 1
    """Rounds from one evaluation to the next; the last round always has one."""
    processes: Count = 1
    """Processes that train; with `ray` and no address, those of the cluster that is started. It
    changes no result."""
    cohort: Count = COHORT
    """Devices that a process trains at a time. It changes no result."""
    engine: EngineName = "processes"
    """Train on this machine, or on a Ray cluster (`ray`, an extra). It changes no result."""
    ray_address: Annotated[str | None, Example("10.0.0.1:6379")] = None
    """Head node of a Ray cluster that runs, or `auto` for the one of this machine; without it, one
    is started here."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ray_address is not None and self.engine != "ray":
            raise ConfigError('ray_address: only with engine = "ray"')
        if self.ray_address is not None and self.processes != 1:
            raise ConfigError("processes: a Ray cluster that runs has its own: leave it out")
        self.make_engine()

    def make_engine(self) -> TrainingEngine:
        """Return the engine that trains. Raises `ConfigError`."""
        if self.engine == "ray":
            workers = self.processes if self.ray_address is None else None
            return RayEngine(self.ray_address, workers=workers)
        return local_engine(self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """Settings of a simulated experiment, checked. Made by `make_study`."""

    data: StudyDataTable = field(default_factory=StudyDataTable)
    model: StudyModelTable = field(default_factory=StudyModelTable)
    fleet: StudyFleetTable = field(default_factory=StudyFleetTable)
    run: StudyRunTable = field(default_factory=StudyRunTable)
    rule: RuleTable = field(default_factory=RuleTable)
    mask: MaskTable = field(default_factory=MaskTable)
    server_optimizer: ServerOptimizerTable = field(default_factory=ServerOptimizerTable)
    robust: StudyRobustTable = field(default_factory=StudyRobustTable)
    round: RoundTable = field(default_factory=RoundTable)
    simulation: SimulationTable = field(default_factory=SimulationTable)

    def __post_init__(self) -> None:
        if self.run.robust == "root":
            raise ConfigError('run.robust = "root" trains on the coordinator, which has no data')
        self._served()

    @property
    def model_name(self) -> str:
        """Name of the model. Raises `ConfigError` for data that has no usual one."""
        if self.model.name is not None:
            return self.model.name
        if not self.simulation.train:
            return UNTRAINED
        if self.data.name not in USUAL_MODELS:
            raise ConfigError(f"model.name: {self.data.name} has no usual model; name one")
        return USUAL_MODELS[self.data.name]

    @property
    def asynchronous(self) -> bool:
        """True if every arrival moves the model, and there are no rounds."""
        return isinstance(self._served().make_rule(), AsyncRule)

    @property
    def reports(self) -> int:
        """Rounds that the experiment tells of, unless it stops early.

        An asynchronous one tells of every `min_devices` updates.
        """
        if self.asynchronous:
            return -(-(self.run.updates or UPDATES) // self.round.min_devices)
        return self.run.rounds or ROUNDS

    def machine(self, plan: ModelPlan) -> RoundsConfig | FragmentsConfig:
        """Make the settings of the coordinator's state machine. Raises `ConfigError`."""
        return self._served().machine(plan)

    def plain(self) -> dict[str, Any]:
        """Return every setting by its key, such as `run.rounds`, as values that JSON can hold."""
        found: dict[str, Any] = {}
        for key in keys(StudyConfig):
            table, name = key.path
            value, form = getattr(getattr(self, table), name), key.kind.mark(Spelling)
            if isinstance(value, Mapping):
                found |= {f"{key.dotted}.{each}": value[each] for each in value}
            elif value is not None and form is not None:
                found[key.dotted] = form.write(value)
            else:
                found[key.dotted] = list(value) if isinstance(value, tuple) else value
        return {**found, "model.name": self.model_name}

    def _served(self) -> ServeConfig:
        """Return the settings of a run like this one."""
        return ServeConfig(
            task=TaskTable(name="study", source="study.py:make_task", evaluation="study.py:data"),
            run=self.run,
            rule=self.rule,
            mask=self.mask,
            server_optimizer=self.server_optimizer,
            robust=self.robust,
            round=self.round,
        )


def make_study(
    settings: Mapping[str, Any], *, label: str = "", base: Path | None = None
) -> StudyConfig:
    """Make the settings of an experiment from values by key, such as `{"run.rounds": 20}`.

    A recipe (`run.recipe`) sets rule, masks and local training. Errors begin with `label`; files
    are relative to `base`, None: to the present folder. Raises `ConfigError`.
    """
    return read_keys(StudyConfig, settings, label=label, base=base, preset=recipe_preset)
