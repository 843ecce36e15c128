"""Levels of a study's devices by name, as papers deal them out.

    full              all train the whole model
    L, S, MIX         RAM-Fed: 2 of 4 regions, 1 of 4, half of the devices each
    low, medium, high Every Parameter Matters: some train all of the model, others 3/4 or half of it

A level is a share of the units of every axis. The papers speak of shares of *parameters*: on a
network with one hidden layer the two are nearly the same, and between two narrowed layers a level
`l` leaves `l²` of the parameters. `plan.cost_at(level)` has the `parameter_share` of a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.errors import ConfigError
from edge_sdk.decide.decision import Policy
from edge_sdk.program.records import replace
from edge_sdk.program.settings import nearest

LEVEL_PRESETS: Mapping[str, tuple[float, ...]] = {
    "full": (1.0,),
    "L": (0.5,),
    "S": (0.25,),
    "MIX": (0.5, 0.25),
    "low": (1.0,) * 6 + (0.75,) * 4,
    "medium": (1.0,) * 4 + (0.75,) * 6,
    "high": (1.0,) * 3 + (0.75,) + (0.5,) * 6,
}
"""Levels that repeat from device to device.

Those of Every Parameter Matters are for ten devices; with one set of groups for all narrow devices
the least covered parameter has 6, 4 and 3 of them, as in the paper's Table 1.
"""


def preset_levels(name: str, devices: int) -> tuple[float, ...]:
    """Return the level of every device. Raises `ConfigError` for an unknown preset.

    A preset's levels are spread over the devices in its proportions: of any ten neighbours, and of
    any two in `MIX`, each level has its part.
    """
    if name not in LEVEL_PRESETS:
        raise ConfigError(f"there is no preset {name!r}{nearest(name, LEVEL_PRESETS)}")
    pattern = LEVEL_PRESETS[name]
    return tuple(pattern[number % len(pattern)] for number in range(devices))


def at_level(policy: Policy, level: float) -> Policy:
    """Return an owner's limits with this level and no smaller one: train it, or skip."""
    return replace(policy, level=level, levels=(level,))


def study_policies(
    policy: Policy, levels: Sequence[float] | None = None, shares: Sequence[float] | None = None
) -> tuple[Policy, ...]:
    """Return the limits of every device, with its level and its share of rounds."""
    devices = len(levels if levels is not None else shares or ())
    if levels is not None and shares is not None and len(levels) != len(shares):
        raise ConfigError(f"{len(levels)} levels and {len(shares)} shares: give one of each")
    made = []
    for number in range(devices):
        own = policy if levels is None else at_level(policy, levels[number])
        made.append(own if shares is None else replace(own, participation=shares[number]))
    return tuple(made)
