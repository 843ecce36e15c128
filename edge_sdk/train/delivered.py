"""A model that was delivered to this device: one file, which any process may use at any time.

    <state_dir>/<task>/<device>/model.bin

    file    = magic, SHA-256 of all that follows, size of the header as 8 bytes, header, arrays
    header  = msgpack { "v": 1, "type": "model", … }: facts, plan, manifest, graphs, table of arrays
    arrays  = weights and buffers, little-endian, row-major, each at a multiple of 64 bytes

The file is complete in itself: it needs neither the broker nor the chunks it came from. It is
replaced as a whole, so a reader sees the old model or the new one, and a reader that has it open
keeps what it has. The hash is checked whenever the file is opened; nothing in it is executed but
the graphs, by onnxruntime.

    model = Model.open("tessera-state", "digits")
    scores = model(x)
    scores = model(*model.read("new.csv"))
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import SEEK_SET
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from edge_sdk.data.block import Block
from edge_sdk.data.conversion import Converter
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.source import open_data
from edge_sdk.program.files import write_whole
from edge_sdk.protocol.errors import MessageError, ProtocolError, TensorError, TesseraError
from edge_sdk.protocol.messages.fields import count, number, pack_map, unpack_map
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.graphs import Manifest

if TYPE_CHECKING:
    from edge_sdk.train.inference import Predictor

MODEL_FILE = "model.bin"
MAGIC = b"tessera-model-1\n"
ALIGNED = 64
_HASH = len(MAGIC)
_SIZE = _HASH + 32
_HEADER = _SIZE + 8


class ModelError(TesseraError):
    """No model was delivered yet, or its file cannot be used."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeliveredModel:
    """A level of a task's model, and all that is needed to run it."""

    task: str
    run: str
    round: int
    level: float
    groups: Mapping[str, tuple[int, ...]]
    rescale: float
    plan: ModelPlan
    manifest: Manifest
    graphs: Mapping[str, bytes]
    """The graphs that run this level forward, by SHA-256."""
    weights: Mapping[str, Array]
    buffers: Mapping[str, Array]
    accuracy: float | None = None
    """Accuracy on the coordinator's data, or on that of many devices; None: not known."""
    own_accuracy: float | None = None
    """Accuracy on this device's data when it came; None: not measured."""

    @property
    def digest(self) -> str:
        """SHA-256 over weights and buffers, as in the metadata of an exported file."""
        return arrays_digest({**self.weights, **self.buffers})


def arrays_digest(arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 over names, types, shapes and values, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = _little(arrays[name])
        digest.update(f"{name}\n{array.dtype.name}\n{list(array.shape)}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


# -- files ---------------------------------------------------------------------------------------


def write_delivered(path: Path, model: DeliveredModel) -> None:
    """Replace the file of a model; after a crash it is the old one or the new one."""
    arrays = {f"w:{name}": each for name, each in model.weights.items()}
    arrays |= {f"b:{name}": each for name, each in model.buffers.items()}
    table, at = [], 0
    for name, array in arrays.items():
        table.append([name, array.dtype.name, list(array.shape), at])
        at += _padded(array.nbytes)
    header = pack_map(
        "model",
        {
            "task": model.task,
            "run": model.run,
            "round": model.round,
            "level": model.level,
            "groups": {axis: list(ids) for axis, ids in model.groups.items()},
            "rescale": model.rescale,
            "plan": model.plan.encoded,
            "manifest": model.manifest.encoded,
            "graphs": dict(model.graphs),
            "arrays": table,
            "accuracy": model.accuracy,
            "own_accuracy": model.own_accuracy,
        },
    )

    def write(stream: BinaryIO) -> None:
        digest = hashlib.sha256()

        def put(data: bytes) -> None:
            digest.update(data)
            stream.write(data)

        stream.write(MAGIC + bytes(32))
        put(len(header).to_bytes(8, "little"))
        put(header.ljust(_padded(_HEADER + len(header)) - _HEADER, b"\0"))
        for array in arrays.values():
            data = _little(array).tobytes()
            put(data.ljust(_padded(len(data)), b"\0"))
        stream.seek(_HASH, SEEK_SET)
        stream.write(digest.digest())

    write_whole(path, write)


def read_delivered(path: Path) -> DeliveredModel:
    """Read and check the file of a model. Raises `ModelError`."""
    try:
        # Not mapped: a program that changes the file in place would end this one by a signal.
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is not there") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if len(data) < _HEADER:
        raise ModelError(_damage(path, "it is cut short"))
    if data[:_HASH] != MAGIC:
        raise ModelError(_damage(path, "it is not a model that this version knows"))
    if hashlib.sha256(data[_SIZE:]).digest() != data[_HASH:_SIZE]:
        raise ModelError(_damage(path, "its SHA-256 does not match its bytes"))
    try:
        return _decode(data)
    except (ProtocolError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(_damage(path, str(error))) from error


def _decode(data: memoryview) -> DeliveredModel:
    header = int.from_bytes(data[_SIZE:_HEADER], "little")
    content = unpack_map(data[_HEADER : _HEADER + header], "a model", len(data))
    if content.get("type") != "model":
        raise MessageError("it does not hold a model")
    start = _padded(_HEADER + header)
    arrays = {
        name: np.ndarray(tuple(shape), np.dtype(dtype).newbyteorder("<"), data, start + at)
        for name, dtype, shape, at in content["arrays"]
    }
    plan, manifest = decode_plan(content["plan"]), decode_manifest(content["manifest"])
    manifest.check(plan)
    groups = {axis: tuple(ids) for axis, ids in content["groups"].items()}
    weights = {n.removeprefix("w:"): each for n, each in arrays.items() if n.startswith("w:")}
    buffers = {n.removeprefix("b:"): each for n, each in arrays.items() if n.startswith("b:")}
    plan.check(weights, groups)
    plan.check_buffers(buffers, groups)
    return DeliveredModel(
        task=str(content["task"]),
        run=str(content["run"]),
        round=count(content["round"]),
        level=number(content["level"]),
        groups=groups,
        rescale=number(content["rescale"]),
        plan=plan,
        manifest=manifest,
        graphs=content["graphs"],
        weights=weights,
        buffers=buffers,
        accuracy=content["accuracy"],
        own_accuracy=content["own_accuracy"],
    )


def _damage(path: Path, problem: str) -> str:
    return (
        f"{path} is damaged: {problem}. Delete it; tessera-device run fetches the model again as "
        "soon as it is connected"
    )


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _little(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)


# -- for programs --------------------------------------------------------------------------------


class Model:
    """The model that a device keeps ready for inference. Training may go on in another process."""

    def __init__(
        self,
        path: Path,
        delivered: DeliveredModel,
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int = 1,
    ) -> None:
        """Made by `Model.open`."""
        self._path = path
        self._options: dict[str, Any] = {"providers": tuple(providers), "threads": threads}
        self._use(delivered)

    @classmethod
    def open(
        cls,
        state_dir: str | Path,
        task: str,
        *,
        device: str | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        threads: int = 1,
    ) -> Model:
        """Open the model of a task in a device's `state_dir`.

        `device` is needed only if devices of several names keep their state there. Raises
        `ModelError`, which says what to do, if there is no usable model.
        """
        path = find_delivered(Path(state_dir), task, device)
        return cls(path, read_delivered(path), providers=providers, threads=threads)

    def __call__(self, *inputs: Array, batch_size: int = 256) -> Array:
        """Return the model's outputs; each input is an array of samples, in the model's order.

        At most `batch_size` samples are run at a time.
        Arrays are converted as training converts them: types to the model's, and uint8 images are
        scaled. Raises `TensorError` for data that does not fit.
        """
        model = self.delivered
        raw = tuple(np.atleast_1d(each) for each in inputs)
        block = Block(raw, None, "the data, sample {}".format, "ready")
        try:
            arrays, _ = Converter(model.manifest.data, DataFormat()).convert(block)
        except DataError as error:
            raise TensorError(str(error)) from error
        return self.predictor.predict(
            model.weights,
            model.buffers,
            arrays,
            groups=model.groups,
            rescale=model.rescale,
            batch_size=batch_size,
        )

    def read(self, place: str | Path, format: DataFormat | None = None) -> tuple[Array, ...]:
        """Read samples from files, in the model's form; labels are not needed (docs/data.md).

        `format` says what the files do not say themselves, as `[format]` does. Raises `DataError`.
        """
        source = open_data(str(place), format)
        return source.read(self.delivered.manifest.data, labelled=False).data.inputs

    def refresh(self) -> bool:
        """Turn to the newest model; returns True if a new one had been delivered.

        Raises `ModelError`, and keeps the present model, if the new one cannot be used.
        """
        if self._seen == _identity(self._path):
            return False
        self._use(read_delivered(self._path))
        return True

    def _use(self, delivered: DeliveredModel) -> None:
        self._seen = _identity(self._path)
        self.delivered = delivered
        """The model and its facts."""
        self._predictor: Predictor | None = None

    @property
    def predictor(self) -> Predictor:
        """Runs the graphs; made when it is first needed, because that loads onnxruntime."""
        if self._predictor is None:
            from edge_sdk.train.inference import Predictor

            model = self.delivered
            self._predictor = Predictor(model.plan, model.manifest, model.graphs, **self._options)
        return self._predictor

    @property
    def run(self) -> str:
        """The run that trained it."""
        return self.delivered.run

    @property
    def round(self) -> int:
        """The round that made it."""
        return self.delivered.round

    @property
    def level(self) -> float:
        """The share of the whole model that it is."""
        return self.delivered.level

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of class 0, 1 …; empty: the task does not name them."""
        return self.delivered.manifest.data.classes

    @property
    def accuracy(self) -> float | None:
        """Its accuracy as the coordinator knows it; None: it does not."""
        return self.delivered.accuracy


def find_delivered(state_dir: Path, task: str, device: str | None = None) -> Path:
    """Return the file of a task's model in a device's state folder. Raises `ModelError`."""
    if device is not None:
        found = [state_dir / task / device / MODEL_FILE]
    else:
        found = sorted((state_dir / task).glob(f"*/{MODEL_FILE}"))
    if len(found) > 1:
        names = ", ".join(path.parent.name for path in found)
        raise ModelError(f"{state_dir / task} has models of several devices ({names}): name one")
    if found and found[0].is_file():
        return found[0]
    tasks = []
    if state_dir.is_dir():  # `_device` is no task's
        tasks = [path.name for path in state_dir.iterdir() if path.name[0] not in "._"]
    if task not in tasks:
        known = f"it has {', '.join(sorted(tasks))}" if tasks else "there is no device's state"
        raise ModelError(
            f"{state_dir} has no model of task {task!r}: {known}. Name the state_dir of the "
            "device's configuration, and its task"
        )
    raise ModelError(
        f"no model of task {task!r} was delivered to {state_dir} yet: while a run goes on, a "
        'device fetches one about once a minute, with deliver = "latest" or "best"'
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
