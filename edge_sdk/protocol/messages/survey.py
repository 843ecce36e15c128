"""Surveys: forward passes on the devices' own data that tell what a level is like.

    Survey, wants statistics ▶ SurveyFinding: count, mean and M2 of every BatchNorm's channels
    Survey, wants evaluation ▶ SurveyFinding: accuracy with the merged statistics, which it names

A device answers with a `SurveyFinding` for every level: numbers, or the reason why it has none.

    statistics = msgpack { "v": 1, "type": "statistics", "levels": [ level … ] }
    level      = [ share of the model, { name of a buffer: its values } ]

are the merged statistics of all levels, as a blob; values are float32, row-major, little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from edge_sdk.protocol.canonical import text
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.fields import binary, number, pack_map, unpack_map
from edge_sdk.protocol.messages.round import MAX_LEVELS, MAX_REASON_CHARACTERS, MAX_SAMPLES
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan

Wants = Literal["statistics", "evaluation"]
"""What a survey asks for: BatchNorm moments, or the accuracy with the merged statistics."""

WANTS: tuple[Wants, ...] = ("statistics", "evaluation")
MAX_SURVEY_SAMPLES = 2**20
"""Most samples of one device that a survey may ask for."""
MAX_SURVEYED = 1000
"""Most devices that a survey may name."""
MAX_STATISTICS_BYTES = 2**26
"""Largest statistics of all levels: 16 million channels."""
_STATISTICS = "statistics"
_MEAN, _VARIANCE = "running_mean", "running_var"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Asks all devices to run some levels of a round's model forward, on their own data."""

    round: int
    """The round that made the model."""
    plan_hash: str
    wants: Wants
    levels: tuple[float, ...]
    """Shares of the model, largest first."""
    groups: tuple[Mapping[str, tuple[int, ...]], ...]
    """The groups that each level means."""
    rescale: float
    """See `LocalRule`: that of the levels' training."""
    samples: int
    """Most samples to use."""
    batch_size: int
    wait_s: float
    """Seconds for which findings are useful, from the survey on."""
    devices: tuple[str, ...] = ()
    """The devices that are asked; empty: all."""
    run: str = ""
    model: Blob | None = None
    """The index of the model; None: the model arrives in another way."""
    statistics: Blob | None = None
    """BatchNorm statistics of the levels, for an evaluation; None: they arrive in another way."""

    def __post_init__(self) -> None:
        if self.wants not in WANTS:
            raise MessageError(f"a survey wants one of {', '.join(WANTS)}, not {self.wants!r}")
        if any(not 0 < level <= 1 for level in self.levels) or list(self.levels) != sorted(
            set(self.levels), reverse=True
        ):
            raise MessageError(f"levels are shares in (0, 1], largest first, not {self.levels}")
        if not 1 <= len(self.levels) <= MAX_LEVELS or len(self.levels) != len(self.groups):
            raise MessageError(f"a survey of {len(self.levels)} levels, {len(self.groups)} groups")
        if self.round < 1 or self.batch_size < 1:
            raise MessageError(f"a survey of round {self.round}, batches of {self.batch_size}")
        if len(self.devices) > MAX_SURVEYED:
            raise MessageError(f"{len(self.devices)} devices are too many to name")
        if not 1 <= self.samples <= MAX_SURVEY_SAMPLES:
            raise MessageError(f"samples are 1 to {MAX_SURVEY_SAMPLES}, not {self.samples}")
        if not (math.isfinite(self.wait_s) and self.wait_s > 0):
            raise MessageError(f"wait_s must be above 0 seconds, not {self.wait_s!r}")
        if not (math.isfinite(self.rescale) and self.rescale >= 0):
            raise MessageError(f"rescale must not be below 0: {self.rescale!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyFinding:
    """One device's answer to a survey, for one level.

    `means` and `m2s` are float32, row-major, little-endian, by name of the buffer that holds the
    running mean or variance; an M2 is the variance (divided by n) times `samples`.
    """

    device: str
    round: int
    wants: Wants
    level: float
    samples: int
    """Samples it is based on; 0: the device did not run the level."""
    run: str = ""
    reason: str = ""
    """Why it did not."""
    means: Mapping[str, bytes] = field(default_factory=dict)
    m2s: Mapping[str, bytes] = field(default_factory=dict)
    accuracy: float | None = None
    """Share of correct answers, of an evaluation; None: the task has no such notion."""

    def __post_init__(self) -> None:
        if self.wants not in WANTS:
            raise MessageError(f"a finding is one of {', '.join(WANTS)}, not {self.wants!r}")
        if self.round < 1 or not 0 <= self.samples <= MAX_SAMPLES:
            raise MessageError(f"a finding of {self.samples} samples in round {self.round}")
        if not (math.isfinite(self.level) and 0 < self.level <= 1):
            raise MessageError(f"a level is a share in (0, 1], not {self.level!r}")
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise MessageError(f"an accuracy is a share in [0, 1], not {self.accuracy!r}")
        if not self.samples and (self.means or self.m2s or self.accuracy is not None):
            raise MessageError("a finding without samples has no numbers")
        if any(len(each) % 4 for each in (*self.means.values(), *self.m2s.values())):
            raise MessageError("means and M2 are float32, of 4 bytes each")


def write_floats(array: Array) -> bytes:
    """Write an array as float32, row-major, little-endian."""
    return np.asarray(array, dtype="<f4").tobytes()


def encode_statistics(levels: Mapping[float, Mapping[str, Array]]) -> bytes:
    """Write the statistics of levels, by name of their buffers. Inverse of `decode_statistics`."""
    content = [
        [level, {name: write_floats(array) for name, array in statistics.items()}]
        for level, statistics in levels.items()
    ]
    return pack_map(_STATISTICS, {"levels": content})


def decode_statistics(
    plan: ModelPlan, groups: Mapping[float, Groups], data: bytes
) -> dict[float, dict[str, Array]]:
    """Read the statistics of levels that mean these groups; skips all other levels.

    Raises only `MessageError`.
    """
    content = unpack_map(data, "statistics", MAX_STATISTICS_BYTES)
    if content.get("type") != _STATISTICS:
        raise MessageError("these bytes are not statistics")
    try:
        found = {}
        for level, arrays in content["levels"]:
            if (share := number(level)) in groups:
                found[share] = read_statistics(plan, groups[share], arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"the statistics are wrong: {str(error)[:200]}") from error
    return found


def read_statistics(plan: ModelPlan, groups: Groups, arrays: Any) -> dict[str, Array]:
    """Read a submodel's float statistics from foreign bytes by name. Raises `MessageError`.

    The sizes are checked against the plan before anything is copied, the numbers afterwards: all
    are finite. Names may be missing, but none may be added.
    """
    shapes = statistic_shapes(plan, groups)
    found: dict[str, Array] = {}
    try:
        for name, data in arrays.items():
            shape = shapes[text(name)]
            if len(binary(data)) != 4 * math.prod(shape):
                raise MessageError(f"{name!r} has {len(data)} bytes; its shape is {shape}")
            values = np.frombuffer(data, dtype="<f4").reshape(shape).astype(np.float32)
            if not np.isfinite(values).all():
                raise MessageError(f"{name!r} is not finite")
            found[name] = values
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MessageError(f"statistics of another model: {str(error)[:200]}") from error
    return found


def statistic_shapes(plan: ModelPlan, groups: Groups) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a submodel's float statistics, by name."""
    kept = plan.kept_atoms(plan.choose(groups))
    return {
        buffer.name: tuple(
            dim.size if dim.axis is None else dim.outer * kept[dim.axis] * dim.inner
            for dim in buffer.dims
        )
        for buffer in plan.buffers
        if buffer.statistic and buffer.dtype.startswith("float")
    }


def norm_pairs(plan: ModelPlan) -> tuple[tuple[str, str], ...]:
    """Return the buffers that hold the running mean and variance of each BatchNorm, in order.

    Empty: the model has none whose buffers have the names that torch gives them.
    """
    names = {
        buffer.name
        for buffer in plan.buffers
        if buffer.statistic and buffer.dtype.startswith("float")
    }
    pairs = [
        (name, name.removesuffix(_MEAN) + _VARIANCE)
        for buffer in plan.buffers
        if (name := buffer.name) in names and name.endswith(_MEAN)
    ]
    return tuple(pair for pair in pairs if pair[1] in names)


def largest_finding(plan: ModelPlan) -> int:
    """Return the most bytes that a finding of this plan can have, as a message."""
    shapes = statistic_shapes(plan, plan.all_groups())
    sizes = [len(name.encode()) + 8 + 4 * math.prod(shape) for name, shape in shapes.items()]
    return sum(sizes) + 4 * MAX_REASON_CHARACTERS + 1024
