"""What a submodel must compute: the original module with everything outside it set to zero.

Masks are made element by element from a plan's dimensions; nothing here slices.
"""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import torch
from torch import nn

from coordinator.task.tracing.trace import TracedModel, trace_model
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim, Segment, Tensor
from tests.unit.coordinator.task.tracing.zoo import MODELS

Parts = int | tuple[float, ...]
Choice = dict[str, tuple[int, ...]]

RATIOS = (5.0, 10.0, 20.0, 30.0, 35.0)


@cache
def traced(name: str, parts: Parts = 4) -> tuple[nn.Module, TracedModel]:
    """A roughened model of the zoo and its trace. Do not change either."""
    family = MODELS[name]
    model = roughen(family.model(seed=1), seed=2)
    if isinstance(parts, int):
        return model, trace_model(model, family.inputs(2), groups=parts)
    return model, trace_model(model, family.inputs(2), ratios=parts)


def roughen(model: nn.Module, seed: int) -> nn.Module:
    """Give every bias, norm and statistic a value: initial zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_floating_point():
                continue
            if tensor.ndim < 2:  # away from 0; positive, as some are variances
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                noise = torch.empty_like(tensor).normal_(std=0.05, generator=generator)
                tensor.add_(noise)
    return model


def random_groups(plan: ModelPlan, rng: np.random.Generator) -> Choice:
    """Any number of groups, anywhere, for each axis on its own."""
    choice: Choice = {}
    for axis in plan.axes:
        count = len(axis.groups)
        some = rng.choice(count, size=rng.integers(1, count + 1), replace=False)
        choice[axis.name] = tuple(sorted(some.tolist()))
    return choice


def _kept(plan: ModelPlan, part: Dim | Segment, choice: Choice) -> Array:
    """True where the submodel holds the index of a dimension, or of a segment of it."""
    if part.axis is None:
        return np.ones(part.size, dtype=bool)
    axis = plan.axes[part.axis]
    group_of_atom = np.repeat(np.arange(len(axis.groups)), axis.groups)
    atom = np.arange(part.size) // part.inner % axis.atoms
    return np.isin(group_of_atom[atom], choice[axis.name])


def mask(plan: ModelPlan, tensor: Tensor, choice: Choice) -> Array:
    """True where the submodel holds the element of the full tensor."""
    held = np.ones(tensor.shape, dtype=bool)
    for position, dim in enumerate(tensor.dims):
        parts = dim.segments or (dim,)
        kept = np.concatenate([_kept(plan, part, choice) for part in parts])
        held &= kept.reshape([-1 if d == position else 1 for d in range(held.ndim)])
    return held


def masked_module(model: nn.Module, plan: ModelPlan, choice: Choice) -> nn.Module:
    """A copy of the module, full width, with zeros where the submodel has no parameter."""
    dense = copy.deepcopy(model)
    described = {tensor.name: tensor for tensor in (*plan.tensors, *plan.buffers)}
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            parameter.mul_(torch.from_numpy(mask(plan, described[name], choice)))
    return dense.eval()
