"""Small plans and situations for mask policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.masks import Situation
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.protocol.streams import stream


def chain(*axes: tuple[int, ...]) -> ModelPlan:
    """A multilayer perceptron whose hidden layers have these groups."""
    named = tuple(Axis(f"h{n}", groups) for n, groups in enumerate(axes))
    widths = [axis.atoms for axis in named]
    tensors = [Tensor("in", "float32", (Dim(widths[0], 0), Dim(3)))]
    for n, width in enumerate(widths):
        tensors.append(Tensor(f"bias{n}", "float32", (Dim(width, n),)))
        if n:
            dims = (Dim(width, n), Dim(widths[n - 1], n - 1))
            tensors.append(Tensor(f"weight{n}", "float32", dims))
    last = len(widths) - 1
    tensors.append(Tensor("out", "float32", (Dim(2), Dim(widths[last], last))))
    tensors.append(Tensor("out.bias", "float32", (Dim(2),)))
    return ModelPlan(axes=named, tensors=tuple(tensors))


def situation_of(
    plan: ModelPlan,
    offers: Sequence[float | Bid],
    *,
    seed: int = 0,
    round: int = 1,
    last_covered: Sequence[int] | None = None,
    times_covered: Sequence[int] | None = None,
    norms: Sequence[float] | None = None,
    importance: Sequence[float] | None = None,
) -> Situation:
    """Devices `d000`, `d001`, … that offer these levels; nothing covered and norms 1 by default."""
    nothing = [0] * plan.block_count
    return Situation(
        plan=plan,
        round=round,
        offers=[
            offer
            if isinstance(offer, Bid)
            else Bid(device=f"d{n:03}", round=round, level=offer, reason="test")
            for n, offer in enumerate(offers)
        ],
        last_covered=np.array(nothing if last_covered is None else last_covered, dtype=np.int64),
        times_covered=np.array(nothing if times_covered is None else times_covered, dtype=np.int64),
        norms=np.ones(plan.block_count) if norms is None else np.array(norms, dtype=np.float64),
        stream=stream(seed, "masks", round),
        importance=None if importance is None else np.array(importance, dtype=np.float64),
    )
