"""The global model: weights in block order, buffers, and their encoding for devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.robust.sums import PIECE, over_shards
from coordinator.aggregate.rules import AsyncRule
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.aggregate.rules.fed_raa import FedRaa
from coordinator.aggregate.rules.pending import Pending
from coordinator.aggregate.screening import block_squares
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.encoding.encoded_model import EncodedModel, compression_noise, encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.plan.blocks import Float32, block_runs, select_blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream

PLAIN = Encoding()


class GlobalModel:
    """θ and the buffers of one task, and `C(θ)`, the model that devices get.

    θ changes only in `commit`, `mix` and `settle`, and there all at once.
    """

    def __init__(
        self,
        plan: ModelPlan,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        *,
        encoding: Encoding = PLAIN,
        seed: int = 0,
    ) -> None:
        """Copy the model. It travels in `encoding`, which rounds at random from `seed`."""
        plan.check_buffers(buffers)
        self.plan = plan
        self.theta: Float32 = plan.flatten(weights)
        self.buffers = {name: array.copy() for name, array in buffers.items()}
        self.version = 0
        """Number of times θ has changed."""
        self.pending: Pending | None = None
        """Movements that were accepted and have not moved θ yet; None: there are none."""
        self.control: Float32 | None = None
        """The global control variate of the present version, in block order; None: the rule has
        none. Set with every version (`steer`)."""
        self._encoding = encoding
        self._seed = seed
        self._digest: str | None = None
        self._served: EncodedModel | None = None
        self._served_control: EncodedModel | None = None
        self._reserved: dict[tuple[str, int], tuple[bytes, dict[str, Array]]] = {}

    def at(self, theta: Float32, buffers: Mapping[str, Array], version: int) -> GlobalModel:
        """Return another version, which travels in the same encoding."""
        weights = self.plan.unflatten(theta)
        other = GlobalModel(self.plan, weights, buffers, encoding=self._encoding, seed=self._seed)
        other.version = version
        return other

    @property
    def encoding(self) -> Encoding:
        """The encoding in which devices get the model."""
        return self._encoding

    @property
    def weights(self) -> dict[str, Float32]:
        """Weights by tensor name (copies)."""
        return self.plan.unflatten(self.theta)

    @property
    def digest(self) -> str:
        """SHA-256 over weights and buffers: equal models, equal digests."""
        if self._digest is None:
            digest = hashlib.sha256(self.theta.data)
            for name in sorted(self.buffers):
                digest.update(name.encode())
                digest.update(self.buffers[name].tobytes())
            self._digest = digest.hexdigest()
        return self._digest

    @property
    def norms(self) -> NDArray[np.float64]:
        """Squared norm of the weights of each block."""
        return block_squares(self.theta, self.plan.block_sizes)

    @property
    def noise(self) -> float:
        """`w₂²`: error that the encoding adds on the way to the devices; 0 if it is lossless."""
        if self._encoding.kind == "fp32":
            return 0.0
        return compression_noise(self.theta, self.serve().decoded)

    def serve(self) -> EncodedModel:
        """Encode the present model for devices, once a version."""
        if self._served is None:
            random = stream(self._seed, "downlink", self.version)
            self._served = encode_model(self.plan, self.theta, self._encoding, random)
        return self._served

    def steer(self, sums: Float32, devices: int) -> None:
        """Set the global variate of the present version: the mean over all devices."""
        self.control = sums / np.float32(max(1, devices))
        self._served_control = None

    def serve_control(self) -> EncodedModel | None:
        """Encode the global variate for devices, once a version; None: there is none."""
        if self.control is not None and self._served_control is None:
            random = stream(self._seed, "control", self.version)
            self._served_control = encode_model(self.plan, self.control, self._encoding, random)
        return self._served_control

    def reserved(self, device: str, round: int) -> tuple[bytes, dict[str, Array]] | None:
        """The encoded blocks and the buffers that are kept for a device; None: nothing is."""
        return self._reserved.get((device, round))

    def reserve(self, device: str, round: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the present model of these groups for a device, whatever comes after."""
        buffers = self.plan.cut_buffers(self.buffers, groups)
        self.hold(device, round, self.serve().cut(groups), buffers)

    def hold(self, device: str, round: int, message: bytes, buffers: dict[str, Array]) -> None:
        """Keep encoded blocks and buffers for a device: those of a version that it was told of."""
        self._reserved[device, round] = (message, buffers)

    def release(self, device: str, round: int) -> None:
        """Give up a reserved model."""
        self._reserved.pop((device, round), None)

    def commit(
        self,
        movement: Float32,
        arrivals: Sequence[Arrival],
        *,
        median: bool = False,
        threads: int = 1,
    ) -> None:
        """Move θ; statistics become the mean, or the median, over the arrivals of the whole model.

        The memory of `movement` becomes that of the new θ. Raises `StateError`, and the model has
        not changed, if the result is not finite.
        """
        now, theta = self.theta, movement

        def work(start: int, end: int) -> None:
            for low in range(start, end, PIECE):
                part = theta[low : min(low + PIECE, end)]
                np.add(now[low : low + len(part)], part, out=part)
                if not np.isfinite([part.min(), part.max()]).all():
                    raise StateError("the rule moved the model to numbers that are not finite")

        over_shards(len(theta), threads, work)
        self._become(theta, mean_statistics(self.plan, self.buffers, arrivals, median=median))

    def mix(self, rule: AsyncRule, arrival: Arrival, age: int) -> None:
        """Let one arrival count as the rule says, and release its fragment.

        Its movement and statistics are mixed into the model, or collected (`pending`) until there
        are enough of them. Raises `StateError`, and nothing has changed.
        """
        part = arrival.contribution
        reserved = self._reserved.get((part.device, part.made))
        if reserved is None:
            raise StateError(f"nothing is reserved for {part.device!r} in round {part.made}")
        if isinstance(rule, FedBuff):
            self._collect(rule, arrival, age)
        elif isinstance(rule, FedRaa):
            _, start = decode_blocks(self.plan, reserved[0])
            self._mix_in(rule, arrival, start.values, age)
        else:
            raise StateError(f"{type(rule).__name__} says nothing about arrivals")
        self.release(part.device, part.made)

    def _mix_in(self, rule: FedRaa, arrival: Arrival, start: Float32, age: int) -> None:
        part = arrival.contribution
        now = select_blocks(self.theta, part.blocks.ids, self.plan.block_offsets)
        mixed = rule.mix(now.values, start, part.blocks.values, age)
        theta = self.theta.copy()
        for whole, within in block_runs(part.blocks.ids, self.plan.block_offsets):
            theta[whole] = mixed[within]
        heard = mean_statistics(self.plan, self.buffers, [arrival])
        alpha = rule.mixing(age)
        buffers = dict(self.buffers)
        for buffer in self.plan.buffers:
            if buffer.statistic:
                old, new = self.buffers[buffer.name], heard[buffer.name]
                buffers[buffer.name] = np.asarray(old + alpha * (new - old), dtype=old.dtype)
        self._become(theta, buffers)

    def _collect(self, rule: FedBuff, arrival: Arrival, age: int) -> None:
        before = Pending.first(self.plan) if self.pending is None else self.pending
        pending = before.adding(self.plan, arrival, rule.trust(age))
        if pending.number < rule.size:
            self.pending = pending
        else:
            self._move_by(rule, pending)

    def settle(self, rule: AsyncRule) -> None:
        """Let the collected movements move the model, however few they are; nothing without any."""
        if self.pending is not None and isinstance(rule, FedBuff):
            self._move_by(rule, self.pending)

    def _move_by(self, rule: FedBuff, pending: Pending) -> None:
        theta = self.theta + pending.movement(self.plan, rule.server_rate)
        if not np.isfinite(theta).all():
            raise StateError("the rule moved the model to numbers that are not finite")
        self.pending = None
        self._become(theta, pending.mixed(self.plan, self.buffers))

    def _become(self, theta: Float32, buffers: dict[str, Array]) -> None:
        self.theta, self.buffers = theta, buffers
        self.version += 1
        self._served = self._digest = None


def mean_statistics(
    plan: ModelPlan,
    buffers: Mapping[str, Array],
    arrivals: Sequence[Arrival],
    *,
    median: bool = False,
) -> dict[str, Array]:
    """Average statistics over the devices that trained the whole model; other buffers stay.

    Statistics of a submodel are of another model: mixed in, they can make good weights useless.
    `median` takes each number's median instead.
    """
    whole = plan.choose(plan.full_groups())
    heard = [
        arrival.movement.statistics for arrival in arrivals if plan.choose(arrival.groups) == whole
    ]
    if not heard:
        return dict(buffers)
    new = dict(buffers)
    for buffer in plan.buffers:
        if buffer.statistic:
            name, dtype = buffer.name, buffers[buffer.name].dtype
            if median:
                new[name] = np.asarray(np.median([each[name] for each in heard], axis=0), dtype)
            else:
                total = sum((each[name] for each in heard), np.zeros(buffer.shape))
                new[name] = np.asarray(total / len(heard), dtype=dtype)
    return new
