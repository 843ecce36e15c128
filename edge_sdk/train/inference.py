"""Runs the model on the device's data, with onnxruntime and numpy alone.

`Predictor` runs the evaluate graph of a task with given weights; `ExportedModel` runs an ONNX file
with its weights inside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import GraphError, TensorError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.onnx import (
    CPU,
    MAX_SESSIONS,
    RUNTIME_ERRORS,
    Graphs,
    fed,
    numpy_dtype,
    scale_feeds,
)
from edge_sdk.train.statistics import Moments, batches, moments_of

MOST_SESSIONS = 32
"""Most sessions kept open for predictions."""


class Predictor:
    """Predicts with the model of a task, or with a submodel of it."""

    def __init__(
        self,
        plan: ModelPlan,
        manifest: Manifest,
        files: Mapping[str, bytes],
        *,
        providers: Sequence[str] = CPU,
        threads: int = 1,
    ) -> None:
        """See `edge_sdk.train.onnx.Graphs`."""
        self._graphs = Graphs(plan, manifest, files, providers=providers, threads=threads)
        # Levels are run in turn; where each has graphs of its own, none is opened again.
        used = [entry for entry in manifest.graphs if entry.kind in ("evaluate", "statistics")]
        own = MOST_SESSIONS if any(entry.slots for entry in used) else len(used)
        self._graphs.max_sessions = max(MAX_SESSIONS, min(own, MOST_SESSIONS))

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""
        return self._graphs.plan

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers: those in use once a graph has run, before that those requested."""
        return self._graphs.providers

    def predict(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
        batch_size: int = 256,
    ) -> Array:
        """Compute the model's outputs for all samples, at most `batch_size` at a time.

        `groups` None: the whole model; else `weights` and `buffers` are the submodel's, and
        `rescale` is that of its training (`LocalRule`). Raises `TensorError` for arrays that do not
        fit, `GraphError` when no graph does.
        """
        plan, manifest = self.plan, self._graphs.manifest
        groups = plan.full_groups() if groups is None else groups
        plan.check(weights, groups)
        plan.check_buffers(buffers, groups)
        manifest.data.check_inputs(inputs)
        samples = _samples(inputs)
        kept = plan.kept_atoms(plan.choose(groups))
        limit = manifest.largest_batch("evaluate", kept)
        if batch_size < 1:
            raise TensorError(f"batch_size must be at least 1, not {batch_size}")
        rows = batch_size if limit is None else max(1, min(batch_size, limit))
        fixed = _fixed(plan, weights, buffers, groups, rescale)
        parts = [
            self._part(fixed, [array[at : at + rows] for array in inputs], kept)
            for at in range(0, samples, rows)
        ]
        return np.concatenate(parts)

    def moments(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
        batch_size: int = 64,
    ) -> Moments | None:
        """Compute a submodel's BatchNorm moments over these samples, a batch at a time.

        The pass is forward only, in training mode without dropout: it needs no more memory than a
        prediction. A last batch of one sample is left out, and so is a short one where a graph is
        made for one batch size; samples that do not fill one batch are repeated. None: the model
        has no BatchNorm. Raises as `predict`.
        """
        plan, manifest = self.plan, self._graphs.manifest
        groups = plan.full_groups() if groups is None else groups
        if not any(entry.kind == "statistics" for entry in manifest.graphs):
            return None
        plan.check(weights, groups)
        plan.check_buffers(buffers, groups)
        manifest.data.check_inputs(inputs)
        kept = plan.kept_atoms(plan.choose(groups))
        limit = manifest.largest_batch("statistics", kept)
        if limit == 0:
            manifest.pick("statistics", kept, batch_size)  # says which graphs there are
        rows, least = (batch_size, 2) if limit is None else (limit, limit)
        _samples(inputs)
        fixed = _fixed(plan, weights, buffers, groups, rescale)
        found = [self._moments(fixed, part, kept) for part in batches(inputs, rows, least)]
        return reduce(Moments.merged, found)

    def _moments(
        self, fixed: Mapping[str, Array], inputs: Sequence[Array], kept: Sequence[int]
    ) -> Moments:
        size = len(inputs[0])
        entry = self._graphs.manifest.pick("statistics", kept, size)
        feeds = {name: array for name, array in fixed.items() if name in entry.input_names}
        feeds |= fed(entry, {f"x{n}": array for n, array in enumerate(inputs)}, kept, size)
        ports = {port.name: port for port in entry.inputs}
        for mask in entry.masks:
            shape = ports[mask.port].shape(kept, size)
            feeds[mask.port] = np.ones(shape, dtype=np.float32)
        outputs = self._graphs.run(entry, feeds, kept, size)
        return moments_of(size, {name.removeprefix("n:"): each for name, each in outputs.items()})

    def _part(
        self, fixed: Mapping[str, Array], inputs: Sequence[Array], kept: Sequence[int]
    ) -> Array:
        size = len(inputs[0])
        entry = self._graphs.manifest.pick("evaluate", kept, size)
        arrays = {f"x{number}": array for number, array in enumerate(inputs)}
        scales = {name: array for name, array in fixed.items() if name.startswith("s:")}
        if any(scale != 1 for scale in scales.values()) and not entry.input_names & scales.keys():
            raise GraphError(f"{entry} cannot rescale: it was made by an older version")
        feeds = {name: array for name, array in fixed.items() if name in entry.input_names}
        feeds |= fed(entry, arrays, kept, size)
        padded = size if entry.batch is None else entry.batch
        outputs = self._graphs.run(entry, feeds, kept, padded)["outputs"]
        return _without_padding(outputs, padded, size, str(entry))


def _fixed(
    plan: ModelPlan,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    groups: Groups,
    rescale: float,
) -> dict[str, Array]:
    """Return the inputs that stay the same for every batch, by name."""
    return {
        **{f"w:{name}": array for name, array in weights.items()},
        **{f"b:{name}": array for name, array in buffers.items()},
        **scale_feeds(plan, groups, rescale),
    }


@dataclass(frozen=True, slots=True)
class Inferred:
    """A model's outputs for some data, and the time of each batch."""

    outputs: Array
    batch_seconds: tuple[float, ...]

    @property
    def seconds_per_batch(self) -> float:
        """Median time per batch: the first batch includes the start."""
        return float(np.median(self.batch_seconds))


class ExportedModel:
    """An ONNX file with its weights inside, from any source: samples come first everywhere."""

    def __init__(self, path: Path, *, providers: Sequence[str] = CPU) -> None:
        """Raises `GraphError` when the file cannot be loaded or a provider is not available."""
        import onnxruntime

        available = onnxruntime.get_available_providers()
        if unknown := [name for name in providers if name not in available]:
            raise GraphError(
                f"this onnxruntime has no provider {unknown[0]!r}; it has {', '.join(available)}"
            )
        if not path.is_file():
            raise GraphError(f"no model: {path} is {'a folder' if path.is_dir() else 'not there'}")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=list(providers)
            )
        except RUNTIME_ERRORS as error:
            raise GraphError(
                f"onnxruntime {onnxruntime.__version__} cannot load {path}: {error}"
            ) from error
        self._path = path
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        fixed = {n.shape[0] for n in self._inputs.values() if n.shape and _is_size(n.shape[0])}
        if not self._inputs or len(fixed) > 1 or not all(n.shape for n in self._inputs.values()):
            raise GraphError(f"{path} takes {self._described()}: samples must come first")
        self._batch: int | None = fixed.pop() if fixed else None

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers in use, preferred first."""
        return tuple(self._session.get_providers())

    @property
    def data(self) -> DataSpec | None:
        """The data it takes, if the file's metadata says so (`tessera-coordinator export`)."""
        facts = self._session.get_modelmeta().custom_metadata_map.get("tessera.data", "{}")
        try:
            return DataSpec.from_dict(json.loads(facts))
        except (ValueError, GraphError):
            return None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of class 0, 1 …; empty: the file does not name them."""
        return () if self.data is None else self.data.classes

    def predict(
        self,
        data: Mapping[str, Array],
        *,
        batch_size: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Inferred:
        """Compute the first output for all samples, at most `batch_size` at a time.

        `data` are arrays by the model's input names, or x0, x1 … in the model's order. A model made
        for one batch size gets exactly that many samples, with the last one repeated if necessary.
        Raises `TensorError` for data that the model does not take.
        """
        if batch_size < 1:
            raise TensorError(f"batch_size must be at least 1, not {batch_size}")
        arrays = self._named(data)
        for name, array in arrays.items():
            _check_fits(name, array, self._inputs[name])
        samples = _samples(list(arrays.values()))
        rows = self._batch or batch_size
        parts, seconds = [], []
        for at in range(0, samples, rows):
            size = min(rows, samples - at)
            padded = self._batch or size
            feeds = {name: _padded(array[at : at + size], padded) for name, array in arrays.items()}
            start = clock()
            output = self._run(feeds)
            seconds.append(clock() - start)
            parts.append(_without_padding(output, padded, size, str(self._path)))
        return Inferred(np.concatenate(parts), tuple(seconds))

    def _run(self, feeds: Mapping[str, Array]) -> Array:
        try:
            output: Any = self._session.run(None, dict(feeds))[0]
        except RUNTIME_ERRORS as error:
            raise GraphError(f"{self._path} failed on this data: {error}") from error
        if not isinstance(output, np.ndarray) or output.dtype.kind not in "biuf":
            raise GraphError(f"the first output of {self._path} is not an array of numbers")
        return output

    def _named(self, data: Mapping[str, Array]) -> dict[str, Array]:
        names = list(self._inputs)
        if set(data) == set(names):
            return {name: data[name] for name in names}
        by_place = [f"x{number}" for number in range(len(names))]
        if set(data) == set(by_place):
            return {name: data[place] for name, place in zip(names, by_place, strict=True)}
        raise TensorError(f"the data has {', '.join(data)}; the model takes {self._described()}")

    def _described(self) -> str:
        return ", ".join(_words(node) for node in self._inputs.values()) or "no inputs"


def accuracy(outputs: Array, labels: Array) -> float | None:
    """Share of labels that have the highest score; None when these are not classes and scores.

    Scores have their classes along the second dimension, and otherwise the labels' shape. Raises
    `TensorError` for labels of other samples, or of classes that the outputs do not have.
    """
    if len(labels.shape) == 0 or len(labels) != len(outputs):
        raise TensorError(f"labels have shape {labels.shape}; there are {len(outputs)} samples")
    shape = outputs.shape[:1] + outputs.shape[2:]
    if labels.dtype.kind not in "iu" or outputs.ndim < 2 or labels.shape != shape:
        return None
    classes, low, high = outputs.shape[1], int(labels.min()), int(labels.max())
    if classes < 2:
        return None
    if not 0 <= low <= high < classes:
        raise TensorError(
            f"labels are classes {low} to {high}; the model has classes 0 to {classes - 1}"
        )
    return float(np.mean(outputs.argmax(axis=1) == labels))


def sample_accuracies(outputs: Array, labels: Array) -> NDArray[np.float64] | None:
    """Share of each sample's labels that have the highest score; else as `accuracy`."""
    if accuracy(outputs, labels) is None:
        return None
    right = (outputs.argmax(axis=1) == labels).reshape(len(labels), -1)
    shares: NDArray[np.float64] = right.mean(axis=1)
    return shares


def _check_fits(name: str, array: Array, node: Any) -> None:
    """Raise `TensorError` unless type and shape fit the model, where it fixes them."""
    fits = array.dtype.name == numpy_dtype(node.type) and array.ndim == len(node.shape)
    sizes = zip(array.shape[1:], node.shape[1:], strict=False)
    if not fits or any(_is_size(wanted) and size != wanted for size, wanted in sizes):
        raise TensorError(
            f"{name!r} is {array.dtype.name} of shape {array.shape} in the data; "
            f"the model takes {_words(node)}"
        )


def _words(node: Any) -> str:
    """Describe an input for people; open sizes appear by their names, or as `?`."""
    sizes = ", ".join("?" if size is None else str(size) for size in node.shape)
    return f"{node.name!r}, {numpy_dtype(node.type)} of shape ({sizes})"


def _is_size(size: object) -> bool:
    """True if a model fixes a size; onnxruntime gives a name or None for open ones."""
    return isinstance(size, int)


def _padded(array: Array, samples: int) -> Array:
    """Repeat the last sample: unlike zeros, it is certainly valid data for the model."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if len(array) == samples:
        return np.ascontiguousarray(array)
    rows = np.broadcast_to(array[-1:], (samples - len(array), *array.shape[1:]))
    return np.concatenate([array, rows])


def _without_padding(outputs: Array, padded: int, size: int, what: str) -> Array:
    """Return the outputs of the first `size` of `padded` samples."""
    if outputs.ndim == 0 or len(outputs) % padded:
        raise GraphError(f"{what}: outputs of shape {outputs.shape} are not one per sample")
    return outputs[: len(outputs) // padded * size]


def _samples(inputs: Sequence[Array]) -> int:
    counts = {len(array) if array.ndim else 0 for array in inputs}
    if len(counts) != 1 or 0 in counts:
        raise TensorError(f"all inputs need equally many samples, at least one; got {counts or 0}")
    return counts.pop()
