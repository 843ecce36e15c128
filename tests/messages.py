"""Messages with plain values, for tests to which only some of their values matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Movement, RoundOpen
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.uploads import Outgoing

OPENING = RoundOpen(
    round=1,
    plan_hash="a" * 64,
    local_rule=LocalRule(learning_rate=0.1),
    steps=1,
    batch_size=1,
    bid_s=1,
    train_deadline_s=1,
)
MOVEMENT = Movement(
    device="pi",
    round=1,
    plan_hash="a" * 64,
    payload=b"blocks",
    statistics={},
    learning_rate=0.1,
    level=1.0,
    samples=1,
    loss=1.0,
    train_s=1.0,
)


def make_opening(round: int = 1, **changes: Any) -> RoundOpen:
    return replace(OPENING, round=round, **changes)


def make_movement(
    plan: ModelPlan,
    groups: Groups | None = None,
    value: float | Float32 = 1.0,
    *,
    statistic: float = 0.0,
    encoding: Encoding | None = None,
    **changes: Any,
) -> Movement:
    """A movement of these groups, or all, with one value everywhere, or these in block order."""
    groups = plan.all_groups() if groups is None else groups
    ids = plan.block_ids(plan.choose(groups))
    values = np.full(int(plan.block_sizes[ids].sum()), value, dtype=np.float32)
    payload = encode_blocks(plan, groups, Blocks(ids, values), encoding or Encoding(), stream(0))
    whole = {each.name: np.full(each.shape, statistic, each.dtype) for each in plan.buffers}
    cut = plan.cut_buffers(whole, groups)
    statistics = {each.name: cut[each.name] for each in plan.buffers if each.statistic}
    made = replace(MOVEMENT, plan_hash=plan.hash, payload=payload, statistics=statistics)
    return replace(made, **changes)


def make_outgoing(data: bytes = b"x", **changes: Any) -> Outgoing:
    """An upload; its `offer` is what a device says first."""
    usual = {"device": "pi", "run": "0" * 16, "round": 1, "answers": None, "chunk_bytes": 1024}
    return Outgoing(data, **{**usual, **changes})
