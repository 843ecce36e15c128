"""The components of a training step at a level, as far as a task's plan and manifest tell."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge_sdk.protocol.errors import GroupError
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.plan.specs import Axis
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.protocol.task.graphs import Kind, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One training step at a level."""

    samples: int
    """Samples computed: those of the batch and its padding."""
    macs: int
    """Multiply-accumulates of the loss and its gradients."""
    weight_bytes: int
    activation_bytes: int
    """Bytes of all intermediate tensors, as if none were freed; 0: unknown."""


def work_at(plan: ModelPlan, manifest: Manifest | None, level: float, batch: int) -> Work:
    """Return the most work a step at this level can be.

    `manifest` None: from the plan alone, which knows no activations. Raises `GroupError` unless
    0 < level ≤ 1, `GraphError` when no gradient graph fits.
    """
    if manifest is None:
        bound = plan.cost_at(level)
        return Work(
            samples=batch,
            macs=3 * batch * bound.macs,
            weight_bytes=bound.bytes_fp32,
            activation_bytes=0,
        )
    run = manifest.cost_at(plan, level, batch)
    kept = tuple(axis.atoms_at(level) for axis in plan.axes)
    entry = manifest.pick("gradient", kept, batch)
    return Work(
        samples=batch if entry.batch is None else entry.batch,
        macs=run.step_macs,
        weight_bytes=run.weight_bytes,
        activation_bytes=run.activation_bytes,
    )


def work_of(plan: ModelPlan, manifest: Manifest | None, groups: Groups, batch: int) -> Work:
    """Return the work of a step of these groups. Raises as `work_at`."""
    if manifest is None:
        return Work(
            samples=batch,
            macs=3 * batch * plan.submodel_macs(groups),
            weight_bytes=4 * plan.submodel_parameters(groups),
            activation_bytes=0,
        )
    kept = plan.kept_atoms(plan.choose(groups))
    entry = manifest.pick("gradient", kept, batch)
    return Work(
        samples=batch if entry.batch is None else entry.batch,
        macs=entry.macs(kept, batch),
        weight_bytes=entry.weight_bytes(kept),
        activation_bytes=entry.activation_bytes(kept, batch),
    )


def forward_work(plan: ModelPlan, manifest: Manifest | None, groups: Groups, batch: int) -> Work:
    """Return the work of a forward pass over one batch. Raises as `work_at`.

    In training mode, where the task has statistics to compute; other models compute the same in
    both modes.
    """
    if manifest is None:
        return Work(
            samples=batch,
            macs=batch * plan.submodel_macs(groups),
            weight_bytes=4 * plan.submodel_parameters(groups),
            activation_bytes=0,
        )
    kept = plan.kept_atoms(plan.choose(groups))
    kind: Kind = "statistics"
    if manifest.largest_batch(kind, kept) == 0:
        kind = "evaluate"
    largest = manifest.largest_batch(kind, kept)
    size = batch if largest is None else largest
    entry = manifest.pick(kind, kept, max(1, size))
    return Work(
        samples=size,
        macs=entry.macs(kept, size),
        weight_bytes=entry.weight_bytes(kept),
        activation_bytes=entry.activation_bytes(kept, size),
    )


def narrower_levels(opened: RoundOpen, level: float) -> tuple[float, ...]:
    """Return the levels that a device at this one trains besides its own, largest first."""
    if opened.local_rule.widths == "own":
        return ()
    return tuple(each for each in opened.levels if each < level)


def batch_bytes(data: DataSpec, batch: int) -> int:
    """Bytes of this many samples, including targets."""
    specs = (*data.inputs, data.targets)
    return batch * sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in specs)


def largest_groups(plan: ModelPlan, level: float) -> dict[str, tuple[int, ...]]:
    """Return the largest groups that a device at this level may be assigned. Raises `GroupError`.

    With equal groups: the level's number of them, the largest. With unequal groups: the fullest
    set that stays within the level.
    """
    if not 0 < level <= 1:
        raise GroupError(f"a level is a share in (0, 1], not {level!r}")
    return {axis.name: _largest(axis, level) for axis in plan.axes}


def _largest(axis: Axis, level: float) -> tuple[int, ...]:
    by_size = sorted(range(len(axis.groups)), key=lambda group: -axis.groups[group])
    if axis.equal:
        return tuple(sorted(by_size[: axis.wanted(level)]))
    # Bit n of a row is set if the groups so far can hold exactly n atoms together.
    rows = [1]
    for atoms in axis.groups:
        rows.append(rows[-1] | rows[-1] << atoms)
    left, taken = axis.atoms_at(level), []
    for group in reversed(range(len(axis.groups))):
        if not rows[group] >> left & 1:
            taken.append(group)
            left -= axis.groups[group]
    return tuple(sorted(taken))
