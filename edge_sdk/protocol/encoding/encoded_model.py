"""The whole model, encoded once; the blocks of each device are cut out of it.

The papers' compression `C(·)` acts on the way down: the coordinator encodes θ once per round, each
device receives its own blocks of the result, and all train from the same `C(θ)`.

Law: `decode_blocks(plan, model.cut(S)) == (S, plan.select(model.decoded, S))`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_sdk.protocol.encoding.codec import (
    Part,
    decode_parts,
    encode_parts,
    join_message,
    part_specs,
)
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.plan.blocks import Float32, block_runs
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import Groups, ModelPlan


@dataclass(frozen=True, slots=True, eq=False)
class EncodedModel:
    """A model's blocks, encoded one by one. Made by `encode_model`."""

    plan: ModelPlan
    encoding: Encoding
    parts: tuple[Part, ...]
    offsets: tuple[Indices, ...]
    """Per part: the start of every block's numbers, with their end as last entry."""

    @property
    def decoded(self) -> Float32:
        """`C(θ)` in block order, as devices decode it; read-only. fp32 is no copy."""
        decoded: Float32 = decode_parts(self.parts, self.plan.block_sizes, self.encoding).view()
        decoded.flags.writeable = False
        return decoded

    def cut(self, groups: Groups) -> bytes:
        """Make the message with a submodel's blocks. Raises `GroupError`."""
        chosen = self.plan.choose(groups)
        parts = self._take(self.plan.block_ids(chosen))
        return join_message(self.plan, chosen, self.encoding, parts)

    def payload(self, ids: Indices) -> bytes | memoryview:
        """Return the bytes of some blocks (ascending ids) without a header, never compressed.

        `decode_payload` reads them, under this encoding without zstd. They are not copied if one
        part has them all.
        """
        parts = [part.data.cast("B") for part in self._take(ids)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, ids: Indices) -> list[Part]:
        if len(ids) == self.plan.block_count:
            return list(self.parts)
        return [
            np.concatenate([part[whole] for whole, _ in block_runs(ids, offsets)])
            for part, offsets in zip(self.parts, self.offsets, strict=True)
        ]


def encode_model(
    plan: ModelPlan, theta: Float32, encoding: Encoding, stream: np.random.Generator
) -> EncodedModel:
    """Encode the whole model, given in block order. Raises `BlockError` if it is not the plan's.

    fp32 is not copied: `theta` must not change while the result is in use.
    """
    if theta.shape != (plan.parameters,) or theta.dtype != np.float32:
        raise BlockError(
            f"{theta.dtype} of shape {theta.shape} is not the model's vector of "
            f"{plan.parameters} float32 values"
        )
    parts = encode_parts(theta, plan.block_sizes, encoding, stream)
    offsets = tuple(
        np.concatenate(([0], np.cumsum(spec.counts)))
        for spec in part_specs(plan.block_sizes, encoding)
    )
    return EncodedModel(plan, encoding, tuple(parts), offsets)


def compression_noise(theta: Float32, decoded: Float32) -> float:
    """Compute the theorems' `w₂² = ‖C(θ) − θ‖² / ‖θ‖²`; 0 for zeros that arrive as such."""
    lost = total = 0.0
    for start in range(0, len(theta), 2**16):  # piecewise: float64 copies of a model are large
        exact = theta[start : start + 2**16].astype(np.float64)
        error = decoded[start : start + 2**16] - exact
        lost += float(error @ error)
        total += float(exact @ exact)
    return lost / total if lost else 0.0
