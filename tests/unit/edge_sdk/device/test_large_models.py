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
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Assignment, Bid, RoundOpen
from edge_sdk.protocol.packs.index import Unpacking, pack_model
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.transport.uploads import Outgoing
from tests.messages import make_opening

CHUNK_BYTES = 2**18


@pytest.fixture(scope="module")
def task() -> PreparedTask:
    """A perceptron of 1.8 million parameters."""
    return prepare_perceptron((256, 1024, 1024, 512))


class Chunked:
    """The model as a broker would bring it."""

    gives_away = True

    def __init__(self, model: SavedModel) -> None:
        self._plan = plan = model.plan
        encoded = encode_model(plan, plan.flatten(model.weights), Encoding(), stream(0))
        self._index, self._chunks = pack_model(plan, encoded, model.buffers, CHUNK_BYTES)

    def fetch(self, assignment: Assignment, _: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        unpacking = Unpacking(self._plan, self._index, assignment.groups)
        for name in unpacking.needed:
            unpacking.take(name, self._chunks[name])
        blocks, buffers = unpacking.result()
        blocks.values.flags.writeable = True
        return blocks, buffers

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


def test_round_takes_three_times_the_model(task: PreparedTask, tmp_path: Path) -> None:
    app = make_app(task, tmp_path, Chunked(task.model))
    for round in (1, 2):  # the first opens the session
        [bid] = app.receive(opening(task, round))
        assert isinstance(bid, Bid)
        assert bid.level == 1.0
        with allocated() as peak:
            [movement] = app.receive(assigned(task, round))
        assert isinstance(movement, StoredMovement)
    # Weights before and after, gradients; nothing else is as large, not even half.
    assert 2.9 * task.full_bytes < peak.value < 3.4 * task.full_bytes


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


def test_movement_is_what_a_copying_device_would_make(task: PreparedTask, tmp_path: Path) -> None:
    """Memory that is used twice changes no bit."""

    class Copied(Chunked):
        gives_away = False

    made = []
    for source in (Chunked(task.model), Copied(task.model)):
        app = make_app(task, tmp_path / type(source).__name__, source)
        for round in (1, 2):
            app.receive(opening(task, round))
            [movement] = app.receive(assigned(task, round))
            assert isinstance(movement, StoredMovement)
            made.append(np.frombuffer(movement.data, np.uint8)[-task.full_bytes :].tobytes())
    assert made[:2] == made[2:]
    assert np.isfinite(np.frombuffer(made[0], np.float32)).all()
