"""The oracle: the whole module trained with zeros and masked gradients instead of being cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim, Segment, Tensor

Choice = Mapping[str, tuple[int, ...]]


def _kept(plan: ModelPlan, part: Dim | Segment, choice: Choice) -> Array:
    """True where the submodel holds the index of a dimension, or of a segment of it."""
    if part.axis is None:
        return np.ones(part.size, dtype=bool)
    axis = plan.axes[part.axis]
    group_of_atom = np.repeat(np.arange(len(axis.groups)), axis.groups)
    atom = np.arange(part.size) // part.inner % axis.atoms
    return np.isin(group_of_atom[atom], choice[axis.name])


def held(plan: ModelPlan, tensor: Tensor, choice: Choice) -> Array:
    """True where the submodel holds the element of the full tensor."""
    mask = np.ones(tensor.shape, dtype=bool)
    for position, dim in enumerate(tensor.dims):
        parts = dim.segments or (dim,)
        kept = np.concatenate([_kept(plan, part, choice) for part in parts])
        mask &= kept.reshape([-1 if d == position else 1 for d in range(mask.ndim)])
    return mask


@dataclass
class Dense:
    """What became of the whole module; `norms` are the gradients' before clipping."""

    movement: dict[str, Array]
    buffers: dict[str, Array]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train(
    model: nn.Module,
    masks: Mapping[str, Array],
    rule: LocalRule,
    batches: Sequence[Batch],
) -> Dense:
    """Local training as `LocalRule` describes it, by autograd and `torch.optim.SGD`."""
    model = copy.deepcopy(model).train()
    parameters = dict(model.named_parameters())
    ones_and_zeros = {name: torch.from_numpy(mask) for name, mask in masks.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.mul_(ones_and_zeros[name])
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = torch.optim.SGD(
        parameters.values(), rule.learning_rate, rule.momentum, weight_decay=rule.weight_decay
    )
    dense = Dense({}, {})

    def backward(batch: Batch) -> float:
        outputs = model(*(torch.from_numpy(array) for array in batch.inputs))
        loss = F.cross_entropy(outputs, torch.from_numpy(batch.targets))
        drift = sum(((parameters[name] - start[name]) ** 2).sum() for name in parameters)
        objective = loss + rule.proximal / 2 * drift
        grads = torch.autograd.grad(objective, list(parameters.values()))
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            parameter.grad = grad * ones_and_zeros[name]
        return loss.item()

    def gradients() -> list[torch.Tensor]:
        return [each.grad for each in parameters.values() if each.grad is not None]

    def gradient_norm() -> float:
        return torch.cat([grad.flatten() for grad in gradients()]).pow(2).sum().sqrt().item()

    for batch in batches:
        dense.losses.append(backward(batch))
        if rule.sam_radius:
            here = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            length = gradient_norm()
            with torch.no_grad():
                for parameter, grad in zip(parameters.values(), gradients(), strict=True):
                    parameter.add_(grad * (rule.sam_radius / length))
            backward(batch)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(here[name])
        dense.norms.append(gradient_norm())
        if rule.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters.values(), rule.clip_norm)
        optimizer.step()
    for name, parameter in parameters.items():
        dense.movement[name] = (parameter.detach() - start[name]).numpy()
    dense.buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    return dense
