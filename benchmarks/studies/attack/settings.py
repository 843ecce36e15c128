"""Settings: data, model and devices of a run, the backdoor's trigger, and who attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.models import mlp
from benchmarks.studies.levels.fleets import FLEETS, LEVELS
from benchmarks.studies.levels.settings import LevelSetting
from edge_sdk.protocol.plan.layout import Array

DEVICES = 20
ATTACKERS = 4
"""A fifth of the devices."""
RATE, MOMENTUM, SERVER_MOMENTUM = 0.1, 0.5, 0.5
"""As in the file that `tessera-coordinator init` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackSetting:
    """Data and model, and a trigger for them."""

    base: LevelSetting
    classes: int
    patch: tuple[int, ...]
    """Size of the trigger along the last axes of a sample; it lies at their end."""
    value: float
    """Value of the trigger, which is at the edge of what samples hold."""
    goal: int = 0
    """The class that a backdoor makes of every sample with the trigger."""

    def stamp(self, inputs: Array) -> Array:
        """Return the samples with the trigger on them."""
        stamped: Array = inputs.copy()
        place: tuple[Any, ...] = (..., *(slice(-size, None) for size in self.patch))
        stamped[place] = self.value
        return stamped


def _setting(
    folder: str, widths: tuple[int, ...], samples: int | None = None, rounds: int = 30
) -> LevelSetting:
    return LevelSetting(
        folder=folder,
        make=partial(mlp, *widths),
        devices=DEVICES,
        rounds=rounds,
        steps=10,
        rates=(RATE,),
        momentum=MOMENTUM,
        train_samples=samples,
    )


SETTINGS: dict[str, AttackSetting] = {
    "har": AttackSetting(
        base=_setting("uci_har", (9 * 128, 64, 32, 6)), classes=6, patch=(9, 8), value=5.0
    ),
    "fmnist": AttackSetting(
        base=_setting("fashion_mnist", (784, 64, 64, 10), 12_000),
        classes=10,
        patch=(4, 4),
        value=1.0,
    ),
    "digits": AttackSetting(
        base=_setting("", (64, 64, 64, 10), rounds=20), classes=10, patch=(2, 2), value=1.0
    ),
}
"""Settings by name. In `har` a device is a person; the others are dealt out by Dirichlet(0.3)."""


def device_levels() -> list[float]:
    """Return the level of every device: as many of each, as far as they can be divided."""
    return FLEETS["thirds"].levels(DEVICES)


def choose_attackers(levels: Sequence[float], count: int) -> list[int]:
    """Return the numbers of the devices that attack, spread equally over the levels.

    Beginning with the largest level: its devices hold every block.
    """
    queues = [[n for n, level in enumerate(levels) if level == each] for each in LEVELS]
    found: list[int] = []
    while len(found) < min(count, len(levels)):
        for queue in queues:
            if queue and len(found) < count:
                found.append(queue.pop(0))
    return sorted(found)
