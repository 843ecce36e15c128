"""Settings that an operator may change while a run lasts: those that a round starts with.

A change holds from the next round on, in an asynchronous run from the next time that a device is
asked. Everything else is fixed for a run: the graphs are made for it, memory or movements under way
would not fit, or devices follow it only when they are started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from coordinator.errors import ConfigError
from coordinator.rounds.config import RunConfig, SettingValue
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from edge_sdk.program.settings import Within
from edge_sdk.program.settings.reader import nearest
from edge_sdk.program.settings.types import FieldType, convert, kinds
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.local_rule import LocalRule

Settings = Mapping[str, SettingValue]
"""Values of settings by name."""

LOCAL = ("learning_rate", "momentum", "weight_decay", "sam_radius", "proximal")
"""Settings of the devices' training, which lie in the local rule."""
COMMON = (
    *LOCAL,
    "steps",
    "min_devices",
    "bid_s",
    "train_deadline_s",
    "target_accuracy",
    "patience",
    "quarantine_after",
    "rms_limit",
    "samples_limit",
)
IN_ROUNDS = (
    "participants",
    "over_selection",
    "quorum",
    "min_participants",
    "away_s",
    "cohort_limit",
    "survey_every",
    "rounds",
)
WITHOUT_ROUNDS = ("rest_s", "updates")

FIXED: Mapping[str, str] = {
    **dict.fromkeys(
        ("batch_size", "levels", "widths", "classes", "distillation"),
        "the task's graphs are made for it",
    ),
    **dict.fromkeys(
        ("rule", "damping", "server_optimizer", "memory_type", "max_staleness"),
        "the run's memory and moments are made for it",
    ),
    **dict.fromkeys(("up", "clip_norm", "rescale"), "movements under way are judged by it"),
    **dict.fromkeys(("mask", "seed", "grow", "robust"), "the rounds so far follow from it"),
    **dict.fromkeys(("down", "threads", "keep_last", "keep_every"), "it is read at the start"),
}
"""Reasons why a setting stays as it is until the run is stopped, or for ever."""


def steerable(machine: RunConfig) -> tuple[str, ...]:
    """Names of the settings that can be changed in a run."""
    return (*COMMON, *(IN_ROUNDS if isinstance(machine, RoundsConfig) else WITHOUT_ROUNDS))


def length_of(names: Iterable[str]) -> str:
    """Return the name of the setting with the run's length."""
    return "rounds" if "rounds" in names else "updates"


def values_of(machine: RunConfig) -> dict[str, SettingValue]:
    """Return the values of all settings that can be changed."""
    return {
        name: getattr(machine.local_rule if name in LOCAL else machine, name)
        for name in steerable(machine)
    }


AnyRunConfig = TypeVar("AnyRunConfig", RoundsConfig, FragmentsConfig)


def with_settings(machine: AnyRunConfig, changed: Settings) -> AnyRunConfig:
    """Return a run's settings with some values changed. Raises `ConfigError` if they do not fit."""
    known = {name: value for name, value in changed.items() if name in steerable(machine)}
    if not known:
        return machine
    local = {name: value for name, value in known.items() if name in LOCAL}
    others = {name: value for name, value in known.items() if name not in LOCAL}
    try:
        rule = replace(machine.local_rule, **local) if local else machine.local_rule  # type: ignore[arg-type]
    except MessageError as error:
        raise ConfigError(str(error)) from error
    if isinstance(machine, RoundsConfig) and "rounds" in others:
        others["planned"] = machine.planned or machine.rounds  # those of run.toml
    return replace(machine, local_rule=rule, **others)  # type: ignore[arg-type]


def check_fits(machine: RunConfig, *, measured: bool, max_devices: int) -> None:
    """Raise `ConfigError` unless a run can go on by its settings.

    `measured` is True if the coordinator measures the accuracy.
    """
    for name in ("target_accuracy", "patience"):
        if getattr(machine, name) is not None and not measured:
            raise ConfigError(
                f"{name} needs the accuracy, which is not measured: give test data in "
                "task.evaluation, and start serve again"
            )
    if machine.min_devices > max_devices:
        raise ConfigError(
            f"min_devices = {machine.min_devices}: no round would ever begin, because max_devices "
            f"is {max_devices}"
        )


def check_name(name: str, names: Iterable[str]) -> None:
    """Raise `ConfigError`, with advice, unless a setting is one of those that can be changed."""
    names = list(names)
    if name in names and name not in ("rounds", "updates"):
        return
    if name in ("rounds", "updates"):
        own = length_of(names)
        raise ConfigError(f"{name}: a run's {own} are added: tessera-coordinator rounds RUN +20")
    if name in FIXED:
        raise ConfigError(
            f"{name} cannot be changed in a run that has begun: {FIXED[name]}. Known are "
            f"{', '.join(names)}"
        )
    if name in (*IN_ROUNDS, *WITHOUT_ROUNDS):
        kind = "synchronous" if name in IN_ROUNDS else "asynchronous"
        raise ConfigError(f"{name} is a setting of {kind} runs, and this run is none")
    raise ConfigError(f"{name!r} is no setting that can be changed{nearest(name, names)}")


def read_value(name: str, value: object) -> SettingValue:
    """Return the value that is meant; text is read as on a command line, and `none` is None.

    Raises `ConfigError`. Values that do not fit others are found by `with_settings`.
    """
    kind = _kind(name)
    spelt = isinstance(value, str)
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", "")):
        if kind.optional:
            return None
        raise ConfigError(f"{name} = none: it must have a value, {_words(kind)}")
    try:
        found: SettingValue = convert(
            kind, value.strip() if isinstance(value, str) else value, Path(), spelt
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} = {value!r:.80}: must be {error}") from error
    if name in LOCAL:  # its ranges are not in its types
        try:
            replace(LocalRule(learning_rate=0.1), **{name: found})  # type: ignore[arg-type]
        except MessageError as error:
            raise ConfigError(str(error)) from error
    return found


def _kind(name: str) -> FieldType:
    for owner in (LocalRule,) if name in LOCAL else (RoundsConfig, FragmentsConfig):
        known = kinds(owner)
        if name in known:
            return known[name]
    raise ConfigError(f"{name!r} is no setting that can be changed")


def _words(kind: FieldType) -> str:
    within = kind.mark(Within)
    return "a number" if within is None else f"{within}"
