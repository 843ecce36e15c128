"""The file of a sweep: settings of an experiment, of which any may be a list of values.

    [run]
    rounds = 20
    seed = [0, 1, 2]           # a list of values: one case for each

    [[rule]]                   # a table given several times is a list too
    name = "ra-fed"

    [[rule]]
    name = "ram-fed"
    options.damping = 0.9

The sweep is every combination of them. A setting that is a list by itself, such as
`fleet.levels = [1.0, 0.5]`, is one value; a list of such lists is swept. Named `[[cases]]` are laid
over the rest of the file, one after the other, each swept on its own.

A case is known by its settings, so a file that changes keeps the results of all cases that it still
has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, get_origin

from benchmarks.fleet.config import StudyConfig, make_study
from benchmarks.report.options import UsageError
from coordinator.errors import ConfigError
from edge_sdk.program.settings import read_toml
from edge_sdk.program.settings.types import keys

NO_RESULT = ("simulation.processes", "simulation.cohort")
"""Settings that change no result, and so do not make another case."""
QUICK_ROUNDS = 3
SEED = "run.seed"

Settings = Mapping[str, Any]
"""Values by key, such as `run.rounds`."""


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One experiment of a sweep."""

    name: str
    """Name that the file gives; empty if there are no named cases."""
    settings: Settings
    """The settings that the file gives."""
    config: StudyConfig
    id: str
    """Short text that is the same for the same experiment."""
    varied: tuple[str, ...] = ()
    """Settings in which the cases of the file differ."""

    @classmethod
    def of(cls, name: str, settings: Settings, config: StudyConfig) -> SweepCase:
        """Make a case, and find its id. Raises `ConfigError` for a population that is not there."""
        plain = {key: value for key, value in config.plain().items() if key not in NO_RESULT}
        population = config.fleet.population or ""
        if population.endswith(".toml"):  # known by what it says, not where it lies
            try:
                content = Path(population).read_bytes()
            except OSError as error:
                raise ConfigError(f"fleet.population = {population!r}: {error.strerror}") from error
            plain["fleet.population"] = sha256(content).hexdigest()
        text = json.dumps([name, plain], sort_keys=True)
        return cls(name, settings, config, sha256(text.encode()).hexdigest()[:16])

    @property
    def row(self) -> dict[str, Any]:
        """The part that every row of its results has: the case, and all its settings."""
        return {"id": self.id, "case": self.name, **self.config.plain()}

    @property
    def slug(self) -> str:
        """Its name for people, as a part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", str(self).lower()).strip("-")

    def __str__(self) -> str:
        """Name it for people."""
        words = [self.name] if self.name else []
        words += [f"{key} {self.settings[key]}" for key in self.varied if key in self.settings]
        return ", ".join([*words, f"seed {self.config.run.seed}"])


def read_cases(path: Path, *, quick: bool = False) -> list[SweepCase]:
    """Read the cases of a file, those of the first seed first.

    `quick`: experiments have at most 3 rounds. Raises `ConfigError`: which case and key.
    """
    content = read_toml(path)
    named = content.pop("cases", [{}])
    if not isinstance(named, list) or not all(isinstance(each, Mapping) for each in named):
        raise ConfigError(f"{path}: cases must be tables [[cases]], each with a name")
    found: dict[str, SweepCase] = {}
    for number, each in enumerate(named, 1):
        own = dict(each)
        name = str(own.pop("name", "" if len(named) == 1 else number))
        label = f"{path}: case {name}: " if name else f"{path}: "
        for settings in combinations(_laid_over(content, own), label):
            config = make_study(settings, label=label, base=path.parent)
            if quick:
                settings = {**settings, **_shortened(config)}
                config = make_study(settings, label=label, base=path.parent)
            case = SweepCase.of(name, settings, config)
            found.setdefault(case.id, case)
    cases = list(found.values())
    seeds = list(dict.fromkeys(case.config.run.seed for case in cases))
    varied = _varied(cases)
    cases.sort(key=lambda case: seeds.index(case.config.run.seed))
    return [replace(case, varied=varied) for case in cases]


def combinations(content: Mapping[str, Any], label: str = "") -> list[dict[str, Any]]:
    """Return the settings of every case of a file's tables. Raises `ConfigError`."""
    return _choices("", content, label)


def check_data(cases: Iterable[SweepCase], data_dir: Path | None) -> None:
    """Raise `UsageError` for data that is not there, before hours are spent."""
    for case in cases:
        name = case.config.data.name
        if not case.config.simulation.train or name == "digits":
            continue
        if data_dir is None or not (data_dir / name).is_dir():
            where = "" if data_dir is None else f", which {data_dir} does not hold"
            raise UsageError(f"data set {name!r}{where}: give --data DIR, the folder with {name}/")


def _varied(cases: Iterable[SweepCase]) -> tuple[str, ...]:
    """Return the settings in which cases of one name differ, but for the seed."""
    values: dict[tuple[str, str], set[str]] = {}
    for case in cases:
        for key, value in case.settings.items():
            values.setdefault((case.name, key), set()).add(repr(value))
    found = dict.fromkeys(key for (_, key), known in values.items() if len(known) > 1)
    return tuple(key for key in found if key != SEED)


def _choices(key: str, value: Any, label: str) -> list[dict[str, Any]]:
    if isinstance(value, Mapping):
        inside = f"{key}." if key else ""
        every = [_choices(f"{inside}{name}", each, label) for name, each in value.items()]
        return [
            {name: value for part in parts for name, value in part.items()}
            for parts in product(*every)
        ]
    if isinstance(value, list) and _is_swept(key, value):
        if not value:
            raise ConfigError(f"{label}{key} = []: give at least one value")
        return [choice for each in value for choice in _choices(key, each, label)]
    return [{key: value}]


def _is_swept(key: str, value: list[Any]) -> bool:
    return key not in _lists() or (bool(value) and all(isinstance(each, list) for each in value))


@cache
def _lists() -> frozenset[str]:
    """Keys of settings that are lists by themselves."""
    return frozenset(key.dotted for key in keys(StudyConfig) if get_origin(key.kind.plain) is tuple)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[key] = _laid_over(under, value) if both and under is not None else value
    return merged


def _shortened(config: StudyConfig) -> dict[str, Any]:
    reports = min(config.reports, QUICK_ROUNDS)
    if config.asynchronous:
        return {"run.updates": reports * config.round.min_devices}
    return {"run.rounds": reports}
