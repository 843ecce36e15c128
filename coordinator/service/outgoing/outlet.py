"""Ways for devices to get the model: through chunks on a broker, or directly from RAM.

An outlet is what a course asks when the model has changed, when a device is told of a round, and
when the version that a device trained from matters. `BrokerOutlet` is that of a served run; the
in-process federation has one of its own (`coordinator/simulate/ram.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from coordinator.aggregate.arrivals import GroupsByAxis
from coordinator.aggregate.model import PLAIN, GlobalModel
from coordinator.service.outgoing.publishing import Published, Publisher
from edge_sdk.protocol.chunks import Chunks
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.packs.index import unpack_model
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream

PUBLISHING_SHARE = 0.2
"""Of the time, at most, that goes into publishing versions of an asynchronous run."""
MAX_EARLIER = 8
"""Versions, the newest, that are held for devices that may be evaluating them."""


class ModelOutlet(Protocol):
    """Gives devices the model, and knows which version each of them has."""

    def publish(self) -> None:
        """Offer the present model to everybody."""

    def opening(self, opening: RoundOpen) -> RoundOpen:
        """An opening for everybody, as it leaves: with the version that is offered."""

    def opening_for(self, device: str, opening: RoundOpen) -> RoundOpen:
        """An opening for one device of an asynchronous run, with the newest version there is."""

    def reserve(self, device: str, round: int, groups: GroupsByAxis) -> None:
        """Keep these groups of the version that a device was told of, for it and for the rule."""

    def fetched_bytes(self, device: str, groups: GroupsByAxis) -> int:
        """Bytes that a device fetched to train these groups, of the version it was told of."""

    def applied(self, device: str, groups: GroupsByAxis) -> int:
        """A device's movement is about to be applied; returns how many updates old its start is."""

    def left(self, device: str) -> None:
        """Stop holding versions that a device might evaluate: it is gone."""


class BrokerOutlet:
    """Publishes versions as chunks. A device is served the version that its opening named.

    In an asynchronous run a version is published when a device is to be told of it, the link has
    taken the one before, and publishing does not take too much of the time. Otherwise the device is
    told of the newest version there is; the age of its movement counts from that one.
    """

    def __init__(
        self,
        model: GlobalModel,
        publisher: Publisher,
        chunks: Chunks,
        *,
        run: str,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._chunks = chunks
        self._run = run
        self._clock = clock
        self._told: dict[str, Published] = {}
        """The version that each device of an asynchronous run was last told of."""
        self._earlier: dict[str, int] = {}
        """The version that each device that is there last trained from: it may be evaluating it.
        Of all versions, the newest `MAX_EARLIER`."""
        self._evaluators: dict[int, set[str]] = {}
        """The same, by version."""
        self._publish_after = clock()
        self._changed: set[int] = set()
        """Packs that differ from the version that was published last."""
        self._published: Published
        self._newest: tuple[EncodedModel, dict[str, Array]]
        """Chunks published last, which most devices will ask for."""

    def publish(self) -> None:
        """See `ModelOutlet`."""
        self._publish()

    def opening(self, opening: RoundOpen) -> RoundOpen:
        """See `ModelOutlet`."""
        return self._stamped(opening)

    def opening_for(self, device: str, opening: RoundOpen) -> RoundOpen:
        """See `ModelOutlet`."""
        self._publish_if_due()
        self._told[device] = self._published
        return self._stamped(opening)

    def reserve(self, device: str, round: int, groups: GroupsByAxis) -> None:
        """See `ModelOutlet`."""
        model, published = self._model, self._told[device]
        if published is self._published:
            encoded, buffers = self._newest
            message, cut = encoded.cut(groups), model.plan.cut_buffers(buffers, groups)
        else:
            blocks, cut = unpack_model(model.plan, published.index, groups, self._chunks)
            # Values that were decoded are reserved as they are: fp32 draws nothing at random.
            message = encode_blocks(model.plan, groups, blocks, PLAIN, stream(0, "reserved"))
        model.hold(device, round, message, cut)

    def fetched_bytes(self, device: str, groups: GroupsByAxis) -> int:
        """See `ModelOutlet`."""
        published = self._told.get(device, self._published)
        return published.needed_bytes(self._model.plan, groups)

    def applied(self, device: str, groups: GroupsByAxis) -> int:
        """See `ModelOutlet`."""
        plan, version = self._model.plan, self._told.pop(device).version
        self.hold(device, version)
        self._changed.update(find_packs(plan).of_submodel(plan, plan.choose(groups)))
        return self._model.version - version

    def left(self, device: str) -> None:
        """See `ModelOutlet`."""
        version = self._earlier.pop(device, None)
        if version is not None:
            self._evaluators[version].discard(device)
            if not self._evaluators[version]:
                del self._evaluators[version]

    def hold(self, device: str, version: int) -> None:
        """Let a device evaluate a version, as long as it is among the newest that are held."""
        self.left(device)
        self._earlier[device] = version
        self._evaluators.setdefault(version, set()).add(device)
        if len(self._evaluators) > MAX_EARLIER:
            for name in self._evaluators.pop(min(self._evaluators)):
                del self._earlier[name]

    def _stamped(self, opening: RoundOpen) -> RoundOpen:
        return replace(opening, run=self._run, model=self._published.blob)

    def _publish_if_due(self) -> None:
        last = self._published
        is_newest = last.version == self._model.version
        if is_newest or not self._publisher.drained or self._clock() < self._publish_after:
            return
        held = {each.version for each in self._told.values()}
        held |= {last.version, *self._evaluators}
        # int8 is rounded at random, so that all of a version is another.
        since = None if self._model.serve().encoding.kind == "int8" else last
        self._publish(held, since=since, changed=self._changed)

    def _publish(
        self,
        versions: Iterable[int] = (),
        *,
        since: Published | None = None,
        changed: Collection[int] = (),
    ) -> None:
        """Publish the present model, and clear all but these versions and the last two."""
        begun, model, encoded = self._clock(), self._model, self._model.serve()
        self._published = self._publisher.publish_model(
            model.plan, model.version, encoded, model.buffers, since=since, changed=changed
        )
        self._newest = (encoded, model.buffers)
        self._publisher.keep_models({model.version, model.version - 1, *versions})
        self._changed.clear()
        now = self._clock()
        self._publish_after = now + (now - begun) * (1 / PUBLISHING_SHARE - 1)
