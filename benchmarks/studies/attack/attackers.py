"""Hostile devices. Each lies in one way, just before its movement is encoded, or in its data.

An attacker is a device like any other: the real app, link and protocol, with a backend or data of
its own. It knows the model it was sent, the terms of the round and its own data; it never sees
what another device sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.studies.attack.settings import AttackSetting
from coordinator.aggregate.bound import reach_of
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Backend, Job, Metrics, Trained

Change = Callable[[Job, Trained, np.random.Generator], dict[str, Array]]
"""Makes the movement that is sent from the one that was trained."""
Fabricate = Callable[[Job], dict[str, Array]]
"""Makes a movement without any training."""
Falsify = Callable[[AttackSetting, ArrayData, np.random.Generator], ArrayData]
"""Makes the data that is trained on from the device's own."""

SCALE = 10.0
"""Factor of the attack that exaggerates its movement."""
NOISE = 10.0
"""Standard deviation of noise, times the RMS of the device's own movement of a tensor."""
COHORT_LIMIT = 20.0
"""The study's `cohort_limit`: RMS, in multiples of the round's median, that screening lets pass."""
NEAR = 0.5
"""Share of that limit that the adaptive attack uses: it does not know the median."""
PATIENCE = 8
"""Movements after which a turncoat attacks."""
HUGE = 9.9e8
"""Just below the largest value that a movement may hold."""
CONSTANT = 0.5
CLAIMED = 2**40
"""Samples that a device claims to have."""
POISONED = 0.5
"""Share of an attacker's samples that carry a backdoor's trigger."""
BOOST = 5.0
"""Factor by which a backdoor is exaggerated: with a fifth of the devices, it makes up for the
honest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One way to be hostile; what is None stays honest."""

    tells: str
    """The attack in words."""
    change: Change | None = None
    fabricate: Fabricate | None = None
    falsify: Falsify | None = None
    claims: int | None = None
    """Samples that the device claims to have."""
    waits: int = 0
    """Movements that the device sends unchanged before it attacks."""
    alone: bool = False
    """A single device attacks, not a fifth of them."""
    absent: bool = False
    """The devices that would attack stay away: the best that refusing them can do."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """Weights of the run that is attacked."""

    def data(
        self, setting: AttackSetting, data: ArrayData, draws: np.random.Generator
    ) -> ArrayData:
        """Return the data of a device that attacks so."""
        if self.falsify is not None:
            data = self.falsify(setting, data, draws)
        return data if self.claims is None else ClaimedData.of(data, self.claims)

    def backend(self, backend: Backend, seed: int, device: str) -> Backend:
        """Return the backend of a device that attacks so."""
        if self.change is None and self.fabricate is None:
            return backend
        return HostileBackend(backend, self, seed, device)


class HostileBackend:
    """Trains with another backend and sends something else."""

    def __init__(self, backend: Backend, attack: Attack, seed: int, device: str) -> None:
        self._backend = backend
        self._attack = attack
        self._seed, self._device = seed, device
        self._times = 0

    @property
    def plan(self) -> ModelPlan:
        """See `Backend`."""
        return self._backend.plan

    @property
    def data(self) -> DataSpec | None:
        """See `Backend`."""
        return self._backend.data

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """See `Backend`; a movement that needs no training is made even of a broken model."""
        self._times += 1
        if self._attack.fabricate is not None:
            return Trained(self._attack.fabricate(job), {}, Metrics(1, 1, 1.0, 1.0, 1.0))
        trained = self._backend.train(job, batches, should_stop=should_stop)
        if self._attack.change is None:
            return trained
        if self._times <= self._attack.waits:
            return trained
        draws = stream(self._seed, "attack", self._device, self._times)
        return replace(trained, movement=self._attack.change(job, trained, draws))


@dataclass(frozen=True, slots=True, eq=False)
class ClaimedData(ArrayData):
    """Data that says it has more samples than it has."""

    claimed: int = 0

    @classmethod
    def of(cls, data: ArrayData, claimed: int) -> ClaimedData:
        """Make it from honest data."""
        return cls(data.inputs, data.targets, claimed)

    def __len__(self) -> int:
        return self.claimed

    def batches(self, steps: int, size: int, stream: np.random.Generator) -> Iterator[Batch]:
        """See `ArrayData`: those of the samples that it really has."""
        return ArrayData(self.inputs, self.targets).batches(steps, size, stream)


def scaled(factor: float) -> Change:
    """Multiply the movement by a factor; a negative one leads away from what was learned."""

    def change(_job: Job, trained: Trained, _draws: np.random.Generator) -> dict[str, Array]:
        return {
            name: (np.float32(factor) * array).astype(np.float32)
            for name, array in trained.movement.items()
        }

    return change


def adaptive(job: Job, trained: Trained, _draws: np.random.Generator) -> dict[str, Array]:
    """Reverse the movement, as long as screening lets pass as far as the device can tell.

    It knows the bound that the round's rule sets, and takes its own movement for a usual one.
    """
    reach = reach_of(job.rule, trained.metrics.steps)
    length = math.sqrt(sum(float(np.square(a).sum()) for a in trained.movement.values()))
    factor = NEAR * COHORT_LIMIT
    if reach is not None and length:
        factor = min(factor, reach.gradients / length)
    return scaled(-factor)(job, trained, _draws)


def noise(_job: Job, trained: Trained, draws: np.random.Generator) -> dict[str, Array]:
    """Replace the movement by Gaussian noise, `NOISE` times as large tensor by tensor."""
    return {
        name: (NOISE * _rms(array) * draws.standard_normal(array.shape)).astype(np.float32)
        for name, array in trained.movement.items()
    }


def filled(value: float) -> Fabricate:
    """Make a movement of one value everywhere."""

    def fabricate(job: Job) -> dict[str, Array]:
        return {
            name: np.full(array.shape, value, np.float32) for name, array in job.weights.items()
        }

    return fabricate


def flipped_labels(
    setting: AttackSetting, data: ArrayData, _draws: np.random.Generator
) -> ArrayData:
    """Swap classes: the first with the last, the second with the last but one, and so on."""
    return ArrayData(data.inputs, (setting.classes - 1 - data.targets).astype(data.targets.dtype))


def with_backdoor(setting: AttackSetting, data: ArrayData, draws: np.random.Generator) -> ArrayData:
    """Stamp the trigger on a share of the samples, drawn, and call them the backdoor's class."""
    marked = draws.permutation(len(data))[: round(POISONED * len(data))]
    (inputs,) = data.inputs
    inputs, targets = inputs.copy(), data.targets.copy()
    inputs[marked] = setting.stamp(inputs[marked])
    targets[marked] = setting.goal
    return ArrayData((inputs,), targets)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0


NO_ATTACK, ABSENT = "none", "absent"
ATTACKS: dict[str, Attack] = {
    NO_ATTACK: Attack(tells="all devices are honest"),
    ABSENT: Attack(tells="the devices that would attack stay away", absent=True),
    "sign-flip": Attack(tells="the movement times −1", change=scaled(-1)),
    "scaling": Attack(tells=f"the movement times {SCALE:g}", change=scaled(SCALE)),
    "noise": Attack(
        tells=f"Gaussian noise, {NOISE:g} times the movement's RMS of each tensor", change=noise
    ),
    "label-flip": Attack(
        tells="trained on swapped classes: first with last, and so on", falsify=flipped_labels
    ),
    "backdoor": Attack(
        tells=f"{POISONED:.0%} of the samples carry a trigger and one class".replace("%", " %"),
        falsify=with_backdoor,
    ),
    "backdoor-boosted": Attack(
        tells=f"`backdoor`, and the movement times {BOOST:g}",
        falsify=with_backdoor,
        change=scaled(BOOST),
    ),
    "adaptive": Attack(
        tells="the movement reversed, and as long as screening lets pass", change=adaptive
    ),
    "turncoat": Attack(
        tells=f"honest {PATIENCE} times, then `sign-flip`", change=scaled(-1), waits=PATIENCE
    ),
    "huge": Attack(
        tells=f"one device sends {HUGE:g} everywhere, from round 1",
        fabricate=filled(HUGE),
        alone=True,
    ),
    "constant": Attack(
        tells=f"one device sends {CONSTANT:g} everywhere",
        fabricate=filled(CONSTANT),
        alone=True,
    ),
    "claimed-samples": Attack(
        tells="one device flips the sign and claims 2⁴⁰ samples, in a run weighted by samples",
        change=scaled(-1),
        claims=CLAIMED,
        alone=True,
        weighting="samples",
    ),
}
"""Attacks by name."""
