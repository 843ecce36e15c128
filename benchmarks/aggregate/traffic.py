"""Bytes that a device sends and receives in a round, by level and encoding.

Messages are really encoded, including headers: up a movement, down the device's blocks of the whole
model, which is encoded once for all. Values are normally distributed, as weights and movements
nearly are; the savings of zstd depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from benchmarks.aggregate.rounds import perceptron_plan, random_groups, random_values
from benchmarks.report.figures import Figure
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding, available_encodings
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream

KINDS = ("fp32", "fp16", "int8", "top-k:0.1")

METHOD = (
    "Lengths of encoded messages of a perceptron's submodels with random groups; shares are of the "
    "same direction's fp32 values of the whole model. Weights are normal with variance 1 ÷ fan-in, "
    "movements normal."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """The model."""

    inputs: int = 256
    widths: tuple[int, ...] = (512, 512, 512, 512)
    outputs: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One level and encoding; shares are of `full_bytes`, the whole model's values in fp32."""

    level: float
    encoding: str
    up_bytes: int
    down_bytes: int
    full_bytes: int

    @property
    def up_share(self) -> float:
        """Share of the whole model's fp32 bytes."""
        return self.up_bytes / self.full_bytes

    @property
    def down_share(self) -> float:
        """Share of the whole model's fp32 bytes."""
        return self.down_bytes / self.full_bytes


def encodings() -> list[Encoding]:
    """Return the encodings to measure: each kind, also with zstd where that is installed."""
    suffixes = ("", "+zstd") if "zstd" in available_encodings() else ("",)
    return [Encoding.parse(kind + suffix) for kind in KINDS for suffix in suffixes]


def measure_traffic(
    config: TrafficConfig, tick: Callable[[], None] = lambda: None
) -> list[TrafficRow]:
    """Encode at every level; `tick` is called once for each of `encodings()`."""
    plan, draws = (
        perceptron_plan(config.inputs, config.widths, config.outputs),
        stream(0, "traffic"),
    )
    theta = random_weights(plan, draws)
    movement = random_values(plan.parameters, draws)
    groups = {level: random_groups(plan, level, draws) for level in LEVELS}
    rows = []
    for encoding in encodings():
        model = encode_model(plan, theta, encoding, draws)
        for level, chosen in groups.items():
            ids = plan.block_ids(plan.choose(chosen))
            blocks = Blocks(ids, movement[: int(plan.block_sizes[ids].sum())])
            rows.append(
                TrafficRow(
                    level=level,
                    encoding=str(encoding),
                    up_bytes=len(encode_blocks(plan, chosen, blocks, encoding, draws)),
                    down_bytes=len(model.cut(chosen)),
                    full_bytes=4 * plan.parameters,
                )
            )
        tick()
    return rows


def random_weights(plan: ModelPlan, draws: np.random.Generator) -> Float32:
    """Draw a new model in block order: normal weights of variance 1 ÷ fan-in, biases zero."""
    return plan.flatten(
        {
            tensor.name: draws.standard_normal(tensor.shape, dtype=np.float32)
            * np.float32(1 / sqrt(tensor.shape[1]))
            if len(tensor.shape) == 2
            else np.zeros(tensor.shape, dtype=np.float32)
            for tensor in plan.tensors
        }
    )


def traffic_figures(rows: Sequence[TrafficRow]) -> list[Figure]:
    """Return the figures of `measure_traffic`."""
    return [
        Figure(
            f"aggregate.bytes.{row.level * 100:.0f}.{_word(row.encoding)}.{way}_over_full",
            share,
            "×",
        )
        for row in rows
        for way, share in (("up", row.up_share), ("down", row.down_share))
    ]


def _word(encoding: str) -> str:
    """Turn an encoding into part of a figure's name: `top-k:0.1+zstd` is `top-k-01_zstd`."""
    return encoding.replace(":", "-").replace(".", "").replace("+", "_")
