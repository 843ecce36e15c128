"""Ways for devices to get the model: through chunks on a broker, or directly from RAM.

A course calls its outlet when the model has changed, when a device is told of a round, and to find
the version that a device trained from. `BrokerOutlet` serves a run over a broker; the in-process
federation has its own outlet (`coordinator/simulate/ram.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from coordinator.aggregate.arrivals import GroupsByAxis
from coordinator.aggregate.model import PLAIN, GlobalModel
from coordinator.service.outgoing.publishing import Published, Publisher
from coordinator.task.levels import LevelScore, LevelScores
from edge_sdk.protocol.chunks import Blob, Chunks
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.delivery import Choice, ModelNotice
from edge_sdk.protocol.messages.epoch import LONGEST
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.survey import Survey, encode_statistics
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.protocol.packs.index import unpack_model
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream

log = logging.getLogger(__name__)

PUBLISHING_SHARE = 0.2
"""Largest share of time that an asynchronous run spends on publishing versions."""
MAX_EARLIER = 8
"""Number of newest versions held for devices that may be evaluating them."""

LevelStatistics = Mapping[float, Mapping[str, Array]]
"""Statistics of levels, by name of their buffers."""


class ModelOutlet(Protocol):
    """Gives devices the model and tracks which version each of them has."""

    def publish(self) -> None:
        """Offer the current model to all devices."""

    def pack(self) -> Callable[[], None]:
        """Make the current model ready to be offered, in any thread.

        The loop then calls what is returned, which offers it and takes no time. Meanwhile nobody
        may ask the outlet for another model.
        """

    def opening(self, opening: RoundOpen, device: str | None = None) -> RoundOpen:
        """Return an opening, completed with the offered version.

        `device` is the one it is for in an asynchronous run, which gets the newest version.
        """

    def survey(self, survey: Survey) -> Survey:
        """Return a survey, completed with the offered version and its statistics."""

    def publish_statistics(self, levels: LevelStatistics) -> None:
        """Offer statistics of the levels of the offered version."""

    def deliver(
        self, choices: Collection[Choice], round: int, scores: LevelScores, *, final: bool = False
    ) -> bool:
        """Offer the current model, which this round made, to devices for inference.

        `final`: no other model follows. Returns False if it is not offered: it is not published
        yet, or no level of it is ready to use.
        """

    def deliver_earlier(
        self, choices: Collection[Choice], model: GlobalModel, round: int, scores: LevelScores
    ) -> None:
        """Offer an earlier model, which this round made, to devices for inference."""

    def deliver_none(self, choice: Choice) -> None:
        """Offer no model for inference."""

    def reserve(self, device: str, round: int, groups: GroupsByAxis) -> None:
        """Keep these groups of the version a device was told of, for the device and the rule."""

    def fetched_bytes(self, device: str, groups: GroupsByAxis) -> int:
        """Bytes a device fetched to train these groups of the version it was told of."""

    def applied(self, device: str, groups: GroupsByAxis) -> int:
        """Note that a device's movement is about to be applied; returns its age in updates."""

    def left(self, device: str) -> None:
        """Stop holding versions for a device that has left."""


class BrokerOutlet:
    """Publishes versions as chunks. Each device gets the version that its opening named.

    An asynchronous run publishes a version when a device needs an opening, if the link has accepted
    the previous version and publishing does not take too much time. Otherwise the device is told of
    the newest published version, and the age of its movement counts from that one.
    """

    def __init__(
        self,
        model: GlobalModel,
        publisher: Publisher,
        chunks: Chunks,
        *,
        run: str,
        clock: Callable[[], float],
        needs_statistics: bool = False,
    ) -> None:
        """`needs_statistics` is True if levels are of no use without statistics of their own."""
        self._needs_statistics = needs_statistics
        self._delivered: dict[Choice, int] = {}
        """Versions that devices fetch for inference."""
        self._announced: dict[Choice, tuple[Published, int, LevelScores]] = {}
        """What was announced last: version, round and scores."""
        self.canary: float | None = None
        """Devices whose draw is below this try the model that is announced on `canary`."""
        self.decided = 0
        """Newest round whose model was tried and decided on; 0: none was."""
        self._warned = False
        self._model = model
        self._publisher = publisher
        self._chunks = chunks
        self._run = run
        self._clock = clock
        self._told: dict[str, Published] = {}
        """Version that each device of an asynchronous run was last told of."""
        self._earlier: dict[str, int] = {}
        """Version that each present device last trained from and may be evaluating; only the newest
        `MAX_EARLIER` versions."""
        self._evaluators: dict[int, set[str]] = {}
        """The same devices, by version."""
        self._publish_after = clock()
        self._changed: set[int] = set()
        """Packs that differ from the last published version."""
        self._published: Published
        self._control: Published | None = None
        """The global variate of the published version; None: the rule has none."""
        self._statistics: tuple[int, Blob | None] = -1, None
        """Statistics of levels that were last published, and the version they belong to."""
        self._newest: tuple[EncodedModel, dict[str, Array]]
        """The model as last published, which most devices will ask for."""

    def publish(
        self,
        versions: Iterable[int] = (),
        *,
        since: Published | None = None,
        changed: Collection[int] = (),
    ) -> None:
        """Publish the current model, and clear all versions but these and the last two."""
        self.pack(versions, since=since, changed=changed)()

    def pack(
        self,
        versions: Iterable[int] = (),
        *,
        since: Published | None = None,
        changed: Collection[int] = (),
    ) -> Callable[[], None]:
        """See `ModelOutlet` and `publish`."""
        begun, model, encoded = self._clock(), self._model, self._model.serve()
        published, new = self._publisher.pack_model(
            model.plan, model.version, encoded, model.buffers, since=since, changed=changed
        )
        control, more = self._pack_control()
        kept = {model.version, model.version - 1, *versions, *self._delivered.values()}
        gone = self._publisher.keep_models(kept)

        def offer() -> None:
            self._published, self._control = published, control
            self._newest = (encoded, model.buffers)
            self._publisher.send([*new, *more])
            self._publisher.clear(gone)
            self._changed = self._waiting()
            now = self._clock()
            self._publish_after = now + (now - begun) * (1 / PUBLISHING_SHARE - 1)

        return offer

    def _waiting(self) -> set[int]:
        """Return the packs that movements which were collected will change later."""
        pending, packs = self._model.pending, find_packs(self._model.plan)
        if pending is None:
            return set()
        if pending.whole:
            return set(range(len(packs)))
        return set(packs.pack_of_block[pending.held > 0].tolist())

    def _pack_control(self) -> tuple[Published | None, list[bytes]]:
        """Store the global variate, in packs as those of the model but without statistics."""
        model, encoded = self._model, self._model.serve_control()
        if encoded is None:
            return None, []
        nothing = {name: np.zeros_like(array) for name, array in model.buffers.items()}
        return self._publisher.pack_model(model.plan, model.version, encoded, nothing, control=True)

    def opening(self, opening: RoundOpen, device: str | None = None) -> RoundOpen:
        """See `ModelOutlet`."""
        if device is not None:
            self._publish_if_due()
            self._told[device] = self._published
        published, statistics = self._published, self._statistics_of(self._published)
        control = self._control.blob if self._control is not None and opening.variates else None
        return replace(
            opening, run=self._run, model=published.blob, statistics=statistics, control=control
        )

    def survey(self, survey: Survey) -> Survey:
        """See `ModelOutlet`."""
        published, statistics = self._published, self._statistics_of(self._published)
        return replace(survey, run=self._run, model=published.blob, statistics=statistics)

    def publish_statistics(self, levels: LevelStatistics) -> None:
        """See `ModelOutlet`."""
        blob = self._publisher.publish_statistics(encode_statistics(levels))
        self._statistics = self._published.version, blob

    def deliver(
        self, choices: Collection[Choice], round: int, scores: LevelScores, *, final: bool = False
    ) -> bool:
        """See `ModelOutlet`."""
        if self._published.version != self._model.version:
            if final:
                self.publish()
            else:
                self._publish_if_due()
        published = self._published
        ready = self._ready(scores)
        if published.version != self._model.version or not ready or round < 1:
            return False
        if self._needs_statistics and self._statistics_of(published) is None:
            self.publish_statistics({each.level: each.statistics for each in ready})
        announced = [self._announce(choice, published, round, scores) for choice in choices]
        return all(announced)

    def deliver_earlier(
        self, choices: Collection[Choice], model: GlobalModel, round: int, scores: LevelScores
    ) -> None:
        """See `ModelOutlet`."""
        if not self._ready(scores):
            return
        published = self._publisher.publish_model(
            model.plan, model.version, model.serve(), model.buffers
        )
        for choice in choices:
            self._announce(choice, published, round, scores)

    def deliver_none(self, choice: Choice) -> None:
        """See `ModelOutlet`."""
        self._delivered.pop(choice, None)
        self._announced.pop(choice, None)
        self._publisher.say_model(choice, None)

    @property
    def version(self) -> int:
        """Version of the current model, published or not."""
        return self._model.version

    def promote(self, choices: Collection[Choice]) -> None:
        """Announce the model that some devices try to all of them."""
        found = self._announced.get("canary")
        if found is not None:
            for choice in choices:
                self._announce(choice, *found)

    def announce_again(self, choice: Choice) -> None:
        """Announce a model again, if one was announced: something else in its notice changed."""
        if (found := self._announced.get(choice)) is not None:
            self._announce(choice, *found)

    def _ready(self, scores: LevelScores) -> list[LevelScore]:
        """Return the levels that can be used as they are."""
        return [each for each in scores.levels if each.statistics or not self._needs_statistics]

    def _announce(
        self, choice: Choice, published: Published, round: int, scores: LevelScores
    ) -> bool:
        """Announce a model; returns False if not even its largest level fits into a message."""
        ready = self._ready(scores)
        statistics = None
        if self._needs_statistics:
            content = encode_statistics({each.level: each.statistics for each in ready})
            statistics = self._publisher.publish_statistics(content, choice)
        whole = ModelNotice(
            round=round,
            plan_hash=self._model.plan.hash,
            levels=tuple(each.level for each in ready),
            groups=tuple({axis: tuple(ids) for axis, ids in each.groups.items()} for each in ready),
            accuracies=tuple(each.accuracy for each in ready),
            rescale=scores.rescale,
            run=self._run,
            model=published.blob,
            statistics=statistics,
            canary=self.canary if choice == "canary" else None,
            decided=0 if choice == "canary" else self.decided,
        )
        notice = _shortened(whole)
        if notice != whole and not self._warned:
            self._warned = True
            log.warning(
                "a model for inference has %d levels, which do not fit into one message: only its "
                "largest %d are delivered; set fewer `levels` in [run]",
                *(len(ready), len(notice.levels) if notice is not None else 0),
                extra={"facts": {"event": "delivery"}},
            )
        if notice is None:
            self._delivered.pop(choice, None)
            self._announced.pop(choice, None)
        else:
            self._delivered[choice] = published.version
            self._announced[choice] = published, round, scores
        self._publisher.say_model(choice, notice)
        return notice is not None

    def _statistics_of(self, published: Published) -> Blob | None:
        """Return the statistics that belong to a version; None if there are none."""
        version, blob = self._statistics
        return blob if version == published.version else None

    def reserve(self, device: str, round: int, groups: GroupsByAxis) -> None:
        """See `ModelOutlet`."""
        model, published = self._model, self._told[device]
        if published is self._published:
            encoded, buffers = self._newest
            message, cut = encoded.cut(groups), model.plan.cut_buffers(buffers, groups)
        else:
            blocks, cut = unpack_model(model.plan, published.index, groups, self._chunks)
            # Decoded values are reserved unchanged: fp32 involves no random rounding.
            message = encode_blocks(model.plan, groups, blocks, PLAIN, stream(0, "reserved"))
        model.hold(device, round, message, cut)

    def fetched_bytes(self, device: str, groups: GroupsByAxis) -> int:
        """See `ModelOutlet`."""
        published, plan = self._told.get(device, self._published), self._model.plan
        control = 0 if self._control is None else self._control.needed_bytes(plan, groups)
        return control + published.needed_bytes(plan, groups)

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
        """Let a device evaluate a version while it is among the newest versions held."""
        self.left(device)
        self._earlier[device] = version
        self._evaluators.setdefault(version, set()).add(device)
        if len(self._evaluators) > MAX_EARLIER:
            for name in self._evaluators.pop(min(self._evaluators)):
                del self._earlier[name]

    def _publish_if_due(self) -> None:
        last = self._published
        is_newest = last.version == self._model.version
        if is_newest or not self._publisher.drained or self._clock() < self._publish_after:
            return
        held = {each.version for each in self._told.values()}
        held |= {last.version, *self._evaluators}
        # int8 rounds at random, so every pack differs between versions.
        since = None if self._model.serve().encoding.kind == "int8" else last
        self.publish(held, since=since, changed=self._changed)


def _shortened(notice: ModelNotice) -> ModelNotice | None:
    """Return a notice without the smallest levels that a message has no room for; None: no room."""
    for count in range(len(notice.levels), 0, -1):
        fewer = replace(
            notice,
            levels=notice.levels[:count],
            groups=notice.groups[:count],
            accuracies=notice.accuracies[:count],
        )
        try:
            encode_message(fewer, LONGEST)
        except MessageError:
            continue
        return fewer
    return None
