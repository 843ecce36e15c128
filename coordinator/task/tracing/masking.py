"""Operators that draw random numbers, rewritten with a mask that is given.

A mask holds zeros where something is dropped, and `1 / (1 - p)` elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from coordinator.task.tracing.walk import arguments, memory_of, operator_name

aten = torch.ops.aten


def mask_in(
    new: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], mask: fx.Node, p: float
) -> fx.Node:
    """Add to the new graph what the node of the old one computes with this mask."""
    name, keep = operator_name(node), 1 - p
    in_place = node.target._schema.name.endswith("_")  # type: ignore[union-attr]
    if name == "scaled_dot_product_attention":
        given = {key: _copied(value, copies) for key, value in arguments(node).items()}
        del given["dropout_p"]
        return new.call_function(attention, (), {**given, "mask": mask})
    if name == "rand":  # the sum of keep and this has the floor that the mask says
        return new.call_function(aten.mul.Tensor, (mask, keep * (1 - keep / 2)))
    source = copies[node.all_input_nodes[0]]
    if name == "bernoulli":
        drawn = new.call_function(aten.mul.Tensor, (mask, keep))
        return new.call_function(aten.copy_.default, (source, drawn)) if in_place else drawn
    # Writing into a view has no plain form, so it is done only where somebody would notice.
    noticed = in_place and _read_later(node)
    return new.call_function(aten.mul_.Tensor if noticed else aten.mul.Tensor, (source, mask))


def _read_later(node: fx.Node) -> bool:
    """Tell whether the memory an operator writes to is read after it under another name."""
    source, owner = node.all_input_nodes[0], memory_of(node.all_input_nodes[0])
    while True:
        if any(user > node for user in source.users):
            return True
        if source is owner:
            return False
        source = source.all_input_nodes[0]


def _copied(value: Any, copies: Mapping[fx.Node, fx.Node]) -> Any:
    return copies[value] if isinstance(value, fx.Node) else value


def attention(
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Compute torch's scaled dot-product attention with dropout by this mask."""
    if enable_gqa:
        key, value = (_shared(each, query.shape[-3]) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(ahead.logical_not(), float("-inf"))
    if attn_mask is None:
        return (scores.softmax(-1) * mask) @ value
    if attn_mask.dtype is torch.bool:
        hidden = attn_mask.logical_not()
    else:
        scores = scores + attn_mask
        hidden = scores == float("-inf")
    # A row that sees nothing is zero, as in torch; with −∞ it would be NaN, and so its gradient.
    sees = hidden.logical_not().to(scores.dtype).amax(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -1e9)
    return (scores.softmax(-1) * (sees * mask)) @ value


def _shared(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat each of these heads for its neighbours until there are `count`."""
    *lead, own, length, width = heads.shape
    times = count // own
    wide = heads.unsqueeze(-3).expand(*lead, own, times, length, width)
    return wide.reshape(*lead, count, length, width)
