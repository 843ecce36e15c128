"""The mean and variance that every BatchNorm of a model sees in one batch, computed by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from coordinator.task.tracing.program import SubmodelForward, in_rows


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
    rows = in_rows(buffers, forward.buffer_rows)
    with torch.no_grad():
        own = in_rows(weights, forward.weight_rows)
        run.run(*own, *rows, *constants, *inputs, *scales, *masks)
    found = {}
    for places, values in run.seen.items():
        var, mean = torch.var_mean(torch.cat(values), dim=0, correction=0)
        found[places] = (mean, var)
    return in_buffers(found, rows, forward.buffer_rows)


SeenMoments = Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Mean and variance by the identities of the two arrays that a BatchNorm keeps them in."""


def in_buffers(
    moments: SeenMoments, rows: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[tuple[int, torch.Tensor]]:
    """Return (number of the buffer, value), mean then variance, stacked as the buffers are.

    `rows` are the arrays that the pass was given, `counts` the rows of every buffer (`in_rows`).
    """
    numbers = [number for number, count in enumerate(counts) for _ in range(count or 1)]
    owner = {id(row): number for row, number in zip(rows, numbers, strict=True)}
    order = {id(row): place for place, row in enumerate(rows)}
    found: dict[int, list[torch.Tensor]] = {}
    for places in sorted(moments, key=lambda each: order[each[0]]):
        for place, value in zip(places, moments[places], strict=True):
            found.setdefault(owner[place], []).append(value)
    pairs = dict.fromkeys(tuple(owner[place] for place in places) for places in moments)
    return [
        (number, torch.stack(found[number]) if counts[number] else found[number][0])
        for pair in pairs
        for number in pair
    ]


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
