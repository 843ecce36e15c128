"""A large model is in a device's memory as few times as possible, from its chunks to its upload.

Memory is what numpy and Python allocate, as `tracemalloc` counts it: the same on every machine.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

from benchmarks.network.stage.tasks import PreparedTask, prepare_perceptron
from coordinator.task.saved_model import SavedModel
from edge_sdk.decide.decision import Policy
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.stores.movements import FolderMovements, StoredMovement
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.movement import decode_movement
from edge_sdk.protocol.messages.round import Assignment, Bid, RoundOpen
from edge_sdk.protocol.packs.index import Unpacking, pack_model
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array, Raw
from edge_sdk.protocol.streams import stream
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.transport.uploads import Outgoing
from tests.messages import make_opening

CHUNK_BYTES = 2**18
SGD = LocalRule(learning_rate=0.1)


@pytest.fixture(scope="module")
def task() -> PreparedTask:
    """A perceptron of 1.8 million parameters."""
    return prepare_perceptron((256, 1024, 1024, 512))


class Chunked:
    """The model as a broker would bring it."""

    def __init__(self, model: SavedModel) -> None:
        self._plan = plan = model.plan
        encoded = encode_model(plan, plan.flatten(model.weights), Encoding(), stream(0))
        self._index, self._chunks = pack_model(plan, encoded, model.buffers, CHUNK_BYTES)

    def fetch(self, assignment: Assignment, _: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        unpacking = self._unpacked(assignment, None)
        blocks, buffers = unpacking.result()
        return replace(blocks, room=unpacking.room), buffers

    def fetch_again(self, assignment: Assignment, _: RoundOpen, room: Raw | None) -> Blocks:
        return self._unpacked(assignment, room).result()[0]

    def _unpacked(self, assignment: Assignment, room: Raw | None) -> Unpacking:
        unpacking = Unpacking(self._plan, self._index, assignment.groups, room)
        for name in unpacking.needed:
            unpacking.take(name, self._chunks[name])
        return unpacking

    def fetch_control(self, assignment: Assignment, opened: RoundOpen) -> Blocks:
        raise AssertionError


class Peak:
    """Most bytes allocated at once in a block."""

    value = 0


@contextmanager
def allocated() -> Iterator[Peak]:
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.value = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def make_app(task: PreparedTask, folder: Path, source: Chunked) -> DeviceApp[StoredMovement]:
    model = task.model
    return DeviceApp(
        "pi",
        backend=OnnxBackend(model.plan, model.manifest, model.files),
        data=task.data,
        policy=Policy(),
        source=source,
        seed=0,
        movements=FolderMovements(folder),
    )


def opening(task: PreparedTask, round: int) -> RoundOpen:
    return make_opening(round, plan_hash=task.model.plan.hash, steps=2, batch_size=32)


def assigned(task: PreparedTask, round: int) -> Assignment:
    return Assignment(device="pi", round=round, groups=task.model.plan.full_groups())


def test_round_takes_twice_the_model(task: PreparedTask, tmp_path: Path) -> None:
    app = make_app(task, tmp_path, Chunked(task.model))
    for round in (1, 2):  # the first opens the session
        [bid] = app.receive(opening(task, round))
        assert isinstance(bid, Bid)
        assert bid.level == 1.0
        with allocated() as peak:
            [movement] = app.receive(assigned(task, round))
        assert isinstance(movement, StoredMovement)
    # Weights and gradients; nothing else is as large, not even half.
    assert 1.9 * task.full_bytes < peak.value < 2.4 * task.full_bytes


def test_upload_is_the_file_and_no_copy(task: PreparedTask, tmp_path: Path) -> None:
    app = make_app(task, tmp_path, Chunked(task.model))
    app.receive(opening(task, 1))
    [movement] = app.receive(assigned(task, 1))
    assert isinstance(movement, StoredMovement)
    with allocated() as peak:
        upload = Outgoing(
            movement.data,
            device="pi",
            run="0" * 16,
            round=1,
            answers=None,
            chunk_bytes=CHUNK_BYTES,
            sha256=movement.sha256,
        )
    assert peak.value < CHUNK_BYTES
    hashed = Outgoing(
        bytes(movement.data),
        device="pi",
        run="0" * 16,
        round=1,
        answers=None,
        chunk_bytes=CHUNK_BYTES,
    )
    assert upload.offer == hashed.offer


def test_training_needs_room_for_gradients_alone(task: PreparedTask, tmp_path: Path) -> None:
    """Of what it is given it makes nothing new, and every step writes to the same memory."""
    peaks = []
    for steps in (2, 6):
        job_app = make_app(task, tmp_path / str(steps), Chunked(task.model))
        job_app.receive(replace(opening(task, 1), steps=steps))
        with allocated() as peak:
            job_app.receive(assigned(task, 1))
        peaks.append(peak.value)
    assert abs(peaks[0] - peaks[1]) < 0.1 * task.full_bytes


@pytest.mark.parametrize(
    "rule",
    [
        SGD,
        replace(SGD, momentum=0.9, weight_decay=0.01, clip_norm=1.0),
        replace(SGD, proximal=0.1),
        replace(SGD, sam_radius=0.05),
    ],
    ids=["plain", "momentum", "proximal", "sam"],
)
@pytest.mark.parametrize("up", ["fp32", "int8", "top-k:0.1"])
def test_movement_is_what_a_copying_device_would_make(
    task: PreparedTask, tmp_path: Path, rule: LocalRule, up: str
) -> None:
    """Memory that is used twice changes no bit, nor do weights that are read again."""

    class Copied(Chunked):
        def fetch(self, assignment: Assignment, _: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
            return self._unpacked(assignment, None).result()

    made = []
    for source in (Chunked(task.model), Copied(task.model)):
        app = make_app(task, tmp_path / type(source).__name__, source)
        for round in (1, 2):
            opened = replace(opening(task, round), local_rule=rule, up=Encoding.parse(up))
            app.receive(opened)
            [movement] = app.receive(assigned(task, round))
            assert isinstance(movement, StoredMovement)
            payload = decode_movement(movement.data).payload
            made.append((len(payload), decode_blocks(task.model.plan, bytes(payload))[1].values))
    for given, copied in zip(made[:2], made[2:], strict=True):
        assert given[0] == copied[0]
        assert np.array_equal(given[1], copied[1])
        assert np.isfinite(given[1]).all()
        assert np.any(given[1])


def test_training_needs_no_more_for_weight_decay(task: PreparedTask, tmp_path: Path) -> None:
    """Values made of a large array on the way are made in parts."""
    peaks = []
    for decay in (0.0, 0.01):
        app = make_app(task, tmp_path / str(decay), Chunked(task.model))
        rule = replace(SGD, weight_decay=decay)
        app.receive(replace(opening(task, 1), local_rule=rule))
        with allocated() as peak:
            app.receive(assigned(task, 1))
        peaks.append(peak.value)
    assert abs(peaks[0] - peaks[1]) < 0.1 * task.full_bytes
