"""The training of simulated devices: one cohort at a time, in this process or another.

A cohort is some orders for devices whose model has the same version. Graphs and sessions are made
once per process and serve every device. What a device makes depends on its order, the data and the
seed alone, so the cohorts and the processes they go to change no bit of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulate.fleet.shared import ArrayPlace, DealtData, attach, map_data, view_of
from coordinator.simulate.fleet.training import NO_DRAWS, MadeMovement
from edge_sdk.program.processes import limit_threads
from edge_sdk.protocol.encoding.codec import decode_blocks, encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding, available_encodings
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Backend, Job

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class CohortTerms:
    """Terms of a training that all devices of a cohort share."""

    rule: LocalRule
    steps: int
    batch_size: int
    up: Encoding


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOrder:
    """One device's training."""

    device: str
    number: int
    round: int
    groups: Groups
    widths: tuple[Groups, ...] = ()
    message: bytes | None = None
    """The blocks to train from, and `buffers` with them; None: the cohort's model has them."""
    buffers: Mapping[str, Array] | None = None
    correction: Float32 | None = None
    """Values, in block order, that are added to every gradient of its blocks; None: nothing is."""


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """Orders that are trained one after the other, in one process."""

    terms: CohortTerms
    theta: Float32
    """The model in block order."""
    buffers: Mapping[str, Array]
    orders: tuple[DeviceOrder, ...]
    tray: str = ""
    """Name of the shared memory for the payloads; empty: they come with the result."""


@dataclass(frozen=True, slots=True, eq=False)
class CohortResult:
    """Results of a cohort, in the order of its orders; a text is why a training failed."""

    made: list[MadeMovement | str]
    ends: tuple[int, ...] = ()
    """Ends of the payloads in the tray, which are then left out of `made`."""


class Hands:
    """Trains cohorts of one task."""

    def __init__(self, plan: ModelPlan, backend: Backend, dealt: DealtData, seed: int) -> None:
        self._plan = plan
        self._backend = backend
        self._dealt = dealt
        self._seed = seed
        self._available = available_encodings()

    def work(self, cohort: Cohort) -> list[MadeMovement | str]:
        """Train a cohort; a text is the reason why a device's training failed."""
        weights = self._plan.unflatten(cohort.theta)
        return [self._attempt(order, cohort, weights) for order in cohort.orders]

    def _attempt(
        self, order: DeviceOrder, cohort: Cohort, weights: Mapping[str, Array]
    ) -> MadeMovement | str:
        try:
            return self._train(order, cohort, weights)
        except TesseraError as error:
            return str(error)

    def _train(
        self, order: DeviceOrder, cohort: Cohort, weights: Mapping[str, Array]
    ) -> MadeMovement:
        plan, terms, groups = self._plan, cohort.terms, order.groups
        names = self._seed, order.device, order.round
        if order.message is None:
            own = plan.cut(weights, groups)
            buffers = plan.cut_buffers(cohort.buffers, groups)
        else:
            own = plan.assemble(decode_blocks(plan, order.message)[1], groups)
            buffers = dict(order.buffers or {})
        targets = self._dealt.data.targets
        everything = terms.rule.classes == "all"
        classes = () if everything else np.unique(targets[self._dealt.part(order.number)]).tolist()
        job = Job(
            groups=groups,
            weights=own,
            buffers=buffers,
            rule=terms.rule,
            mask_stream=stream(*names, "dropout"),
            widths=order.widths,
            width_stream=stream(*names, "widths") if order.widths else NO_DRAWS,
            classes=tuple(classes),
            correction=self._correction(order),
        )
        batches = self._dealt.batches(
            order.number, terms.steps, terms.batch_size, stream(*names, "batches")
        )
        trained = self._backend.train(job, batches)
        encoding = terms.up.agreed(self._available)
        blocks = plan.scatter(trained.movement, groups)
        rounding = stream(*names, "encoding") if encoding.kind == "int8" else NO_DRAWS
        payload = encode_blocks(plan, groups, blocks, encoding, rounding)
        return MadeMovement(payload, trained.metrics.mean_loss, trained.statistics)

    def _correction(self, order: DeviceOrder) -> Mapping[str, Array] | None:
        if order.correction is None:
            return None
        ids = self._plan.block_ids(self._plan.choose(order.groups))
        return self._plan.assemble(Blocks(ids, order.correction), order.groups)


@dataclass(frozen=True, slots=True)
class Tools:
    """Values that another process needs to train cohorts."""

    plan: bytes
    manifest: Manifest
    files: Mapping[str, bytes]
    places: tuple[ArrayPlace, ...]
    seed: int


_hands: Hands
_mapped: list[SharedMemory]
_trays: dict[str, SharedMemory] = {}


def begin(tools: Tools) -> None:
    """Make ready to train in a process of our own, which ends with the one that started it."""
    global _hands, _mapped
    limit_threads(os.environ)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    from edge_sdk.train.onnx import OnnxBackend

    plan = decode_plan(tools.plan)
    dealt, _mapped = map_data(tools.places)
    _hands = Hands(plan, OnnxBackend(plan, tools.manifest, tools.files), dealt, tools.seed)


def work(cohort: Cohort) -> CohortResult:
    """Train a cohort in a process that has begun."""
    made = _hands.work(cohort)
    if not cohort.tray:
        return CohortResult(made)
    if cohort.tray not in _trays:
        _trays[cohort.tray] = attach(cohort.tray)
    tray, left, ends, end = view_of(_trays[cohort.tray]), list[MadeMovement | str](), list[int](), 0
    for each in made:
        if isinstance(each, MadeMovement):
            tray[end : end + len(each.payload)] = each.payload
            end += len(each.payload)
            each = replace(each, payload=b"")
        left.append(each)
        ends.append(end)
    return CohortResult(left, tuple(ends))


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
