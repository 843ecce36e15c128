"""A mask policy of one's own: "path/to/file.py:Class" or "package.module:Class".

The file is the operator's own code. It runs in the coordinator's process, with all its rights: name
only files that you would run yourself. Its class follows `MaskPolicy`; its fields, if it is a
dataclass, are the options. Before a run starts, the policy is tried on a made-up round and checked
against the laws of the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, cast

import numpy as np

from coordinator.errors import ConfigError
from coordinator.masks.contract import MaskPolicy, Masks
from coordinator.masks.situation import Situation
from coordinator.task.graphs.child import load_function
from edge_sdk.program.settings import read_table
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis
from edge_sdk.protocol.streams import stream

TRIAL_LEVELS = (1.0, 0.5, 0.25)


def is_reference(name: str) -> bool:
    """Tell if the name of a mask policy refers to code."""
    return ":" in name


def make_own(reference: str, options: Mapping[str, Any]) -> MaskPolicy:
    """Make a policy from the class that a reference names. Raises `ConfigError`."""
    what = f"mask policy {reference!r}"
    cls = _load(reference, what)
    if not isinstance(cls, type):
        raise ConfigError(f"{what}: this is {type(cls).__name__}, not a class")
    missing = [name for name in ("uses_norms", "longest_gap") if not hasattr(cls, name)]
    if "__call__" not in dir(cls) or missing:
        wanted = ", ".join(missing or ["__call__"])
        raise ConfigError(
            f"{what} is no mask policy: it has no {wanted}; docs/algorithms.md has an example"
        )
    if is_dataclass(cls):
        policy: Any = read_table(cls, options, label=f"{what}: ")
    elif options:
        raise ConfigError(f"{what} takes no options: make it a dataclass, whose fields they are")
    else:
        policy = _guarded(what, cls)
    return cast(MaskPolicy, policy)


def try_masks(masks: MaskPolicy, plan: ModelPlan, what: str) -> None:
    """Try a policy on a made-up round of three devices. Raises `ConfigError` if it breaks a law."""
    chosen = [_guarded(f"mask policy {what}", lambda: masks(_trial(plan))) for _ in range(2)]
    if chosen[0] != chosen[1]:
        raise ConfigError(
            f"mask policy {what} gives two answers to one situation: draw from situation.stream "
            "alone, and remember nothing"
        )
    if problem := _problem(plan, _trial(plan).levels, chosen[0]):
        raise ConfigError(f"mask policy {what}: {problem}")
    gap = _guarded(f"mask policy {what}", lambda: masks.longest_gap(plan, TRIAL_LEVELS))
    if gap is not None and not isinstance(gap, int):
        raise ConfigError(f"mask policy {what}: longest_gap is a number of rounds or None")


def _load(reference: str, what: str) -> Any:
    try:
        return load_function(reference, "class")
    except TesseraError as error:
        raise ConfigError(f"{what}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error


def _guarded(what: str, call: Any) -> Any:
    """Return what a call of the operator's code returns. Raises `ConfigError`."""
    try:
        return call()
    except TesseraError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} failed on a made-up round: {type(error).__name__}: {error}"
        ) from error


def _trial(plan: ModelPlan) -> Situation:
    nothing = np.zeros(plan.block_count, dtype=np.int64)
    return Situation(
        plan=plan,
        round=1,
        offers=[
            Bid(device=f"trial-{number}", round=1, level=level, reason="a trial")
            for number, level in enumerate(TRIAL_LEVELS)
        ],
        last_covered=nothing,
        times_covered=nothing,
        norms=np.ones(plan.block_count),
        stream=stream(0, "masks", "trial"),
    )


def _problem(plan: ModelPlan, levels: Mapping[str, float], chosen: Masks) -> str | None:
    """Tell which law of `MaskPolicy` a choice of groups breaks; None: none."""
    if not isinstance(chosen, dict) or list(chosen) != list(levels):
        return "the answer is a dict with every offering device, in the order of the offers"
    for device, level in levels.items():
        if set(chosen[device]) != {axis.name for axis in plan.axes}:
            return f"groups are named for every axis: {', '.join(axis.name for axis in plan.axes)}"
        for axis in plan.axes:
            groups = chosen[device][axis.name]
            if problem := _wrong(axis, level, groups):
                return (
                    f"a device that offers {level:g} gets {groups!r} of axis {axis.name}: {problem}"
                )
    return None


def _wrong(axis: Axis, level: float, groups: tuple[int, ...]) -> str | None:
    known = range(len(axis.groups))
    if not isinstance(groups, tuple) or not all(group in known for group in groups):
        return f"give a tuple of numbers from 0 to {len(axis.groups) - 1}"
    if list(groups) != sorted(set(groups)) or not groups:
        return "give at least one group, each once, ascending"
    if axis.alternatives:
        own = axis.alternative(level)
        return None if groups == (own,) else f"of alternatives, this level has {own}"
    room = max(level * axis.atoms + 1e-6, min(axis.groups))
    over = sum(axis.groups[group] for group in groups) > room
    if axis.equal:
        over = len(groups) > axis.wanted(level)
    return "that is more than it offers" if over else None
