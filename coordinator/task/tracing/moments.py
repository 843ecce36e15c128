"""The mean and variance that every BatchNorm of a model sees in one batch, computed by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from coordinator.task.tracing.program import SubmodelForward


def batch_moments(
    forward: SubmodelForward,
    weights: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
) -> list[tuple[int, torch.Tensor]]:
    """Run a training-mode forward pass; return (number of the buffer, value), mean then variance.

    Variances are divided by n. A layer that runs several times sees its inputs as one batch. May
    change `buffers`.
    """
    run = _Noting(forward.module)
    constants = [constant.to(inputs[0].device) for constant in forward.constants]
    with torch.no_grad():
        run.run(*weights, *buffers, *constants, *inputs, *scales, *masks)
    numbers = {id(buffer): number for number, buffer in enumerate(buffers)}
    found = []
    for (first, second), values in run.seen.items():
        var, mean = torch.var_mean(torch.cat(values), dim=0, correction=0)
        found += [(numbers[first], mean), (numbers[second], var)]
    return found


class _Noting(fx.Interpreter):
    """Notes the input of every BatchNorm in training mode, one row per value of a channel."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.batch_norm.default and args[5] and args[3] is not None:
            rows = args[0].movedim(1, -1).reshape(-1, args[0].shape[1])
            self.seen.setdefault((id(args[3]), id(args[4])), []).append(rows)
        return super().call_function(target, args, kwargs)
