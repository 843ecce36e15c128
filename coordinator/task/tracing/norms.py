"""Normalisation layers with a copy of their scale and shift for every level (NeFL).

`decouple_norms` replaces the parameters of shape [C] by ones of shape [copies, C], of which the
layer uses the sum over copies. A submodel keeps exactly one copy, that of its level, so the sum is
this copy; the others are not in it. To a plan, copies are an axis of alternatives
(`edge_sdk.protocol.plan.specs.Axis`), one for the whole model.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from coordinator.errors import TraceError

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)
"""Layers that can be decoupled."""


class NormCopies(nn.Module):
    """A normalisation layer whose scale and shift are the sum of several copies."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: nn.Module, copies: int) -> None:
        """Takes over `norm` and its parameters; every copy starts as they are."""
        super().__init__()
        self.norm = norm
        self._by_channel = not isinstance(norm, nn.LayerNorm)
        for name in ("weight", "bias"):
            old = getattr(norm, name)
            own = None
            if old is not None:
                values = old.detach().expand(copies, *old.shape).clone()
                own = nn.Parameter(values, requires_grad=old.requires_grad)
            self.register_parameter(name, own)
            norm.register_parameter(name, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise, then scale and shift."""
        x = self.norm(x)
        if self.weight is not None:
            x = x * self._placed(self.weight.sum(0), x)
        if self.bias is not None:
            x = x + self._placed(self.bias.sum(0), x)
        return x

    def _placed(self, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Line up values of channels with dimension 1; those of LayerNorm are the last ones."""
        return values.reshape(-1, *[1] * (x.ndim - 2)) if self._by_channel else values


def decouple_norms(model: nn.Module, copies: int) -> nn.Module:
    """Return the model with a copy of every norm's scale and shift for each level.

    Give as many copies as `make_task` gets groups: then every width has its own. With `n` copies, a
    level takes number `⌊level · n⌋`, counted from 1, and at least the first. The given model stays
    as it is; every copy starts with its values. Only BatchNorm, GroupNorm and LayerNorm are
    decoupled. Raises `TraceError` if the model has no such layer with a scale or shift.
    """
    if copies < 2:
        raise TraceError(f"decoupled norms need at least 2 copies, not {copies}")
    model = deepcopy(model)
    found = {
        id(norm): NormCopies(norm, copies)
        for norm in list(model.modules())
        if isinstance(norm, NORMS) and list(norm.parameters())
    }
    if not found:
        raise TraceError(
            "there is no BatchNorm, GroupNorm or LayerNorm with a scale or shift to decouple"
        )
    if id(model) in found:
        return found[id(model)]
    for path, norm in list(model.named_modules(remove_duplicate=False)):
        if id(norm) in found:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, found[id(norm)])
    return model


def copied_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters whose dimension 0 is copies."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, NormCopies)
        for name, _ in module.named_parameters(recurse=False)
    ]
