"""The onnx backend: trains shipped graphs with onnxruntime and numpy alone.

The coordinator compiled the model and its gradient (`edge_sdk.protocol.task.graphs`); the steps are
taken here, in numpy, by the rules that the torch backend uses. Everything is checked before it
runs: a file's hash, its opset, its inputs and outputs against the manifest, the manifest against
the plan, and every array's type and shape against the graph.

onnxruntime lends memory in both directions, so whatever outlives a call is copied: the trained
weights are ours from the start and become the movement. Large gradients go into arrays of ours, the
same in every step (io binding): its own would be a second copy of the model, made anew each time.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import (
    onnxruntime_pybind11_state as _state,
)

from edge_sdk.data.arrays import Batch
from edge_sdk.machine.libraries import release_code
from edge_sdk.protocol.errors import GraphError, TensorError, TrainingError
from edge_sdk.protocol.messages.local_rule import Precision
from edge_sdk.protocol.plan.layout import ROOM_BYTES, Array, Raw, arrays_in_one
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.task.codec import (
    NO_WAYS,
    fitted,
    graph_nodes,
    graph_opsets,
    without_ways,
)
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.protocol.task.graphs import (
    CONTRIBUTED,
    GraphEntry,
    Kind,
    Manifest,
    Port,
    Ways,
)
from edge_sdk.train.backend import Job, Objective, Trained, check_movement, draw_mask, take_steps
from edge_sdk.train.local import Arrays, LocalSteps, axis_scales
from edge_sdk.train.nested import NestedObjective
from edge_sdk.train.tuning import Tuned, fastest, ways_at

log = logging.getLogger(__name__)

CPU = ("CPUExecutionProvider",)

GAINING = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
"""Execution providers whose hardware multiplies float16 several times as fast as float32. CPUs take
longer for it (docs/graphs.md)."""

MAX_SESSIONS = 4
"""Sessions kept open, at the least: of two submodels, at one or two batch sizes."""

LARGE_BYTES = 2**20
"""Size from which an output gets an array of ours."""

RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(
        error
        for error in vars(_state).values()
        if isinstance(error, type) and issubclass(error, Exception)
    ),
)
"""onnxruntime's errors, which have no common base class."""

_TYPES = {"float": "float32", "double": "float64"}
"""onnxruntime's type names where they differ from numpy's."""


class Graphs:
    """A task's graphs, checked and ready to run."""

    def __init__(
        self,
        plan: ModelPlan,
        manifest: Manifest,
        files: Mapping[str, bytes],
        *,
        providers: Sequence[str] = CPU,
        threads: int = 1,
        lean: bool = False,
    ) -> None:
        """`files`: ONNX files by SHA-256; a missing one is an error only when needed. `lean`: the
        runtime's code leaves memory when what needed it is done; it comes back where it is used.

        Raises `GraphError` when plan, manifest, files and runtime do not belong together,
        `TrainingError` for a provider that this onnxruntime does not have.
        """
        if threads < 1:
            raise TrainingError(f"threads must be at least 1, not {threads}")
        available = onnxruntime.get_available_providers()
        if unknown := [name for name in providers if name not in available]:
            raise TrainingError(
                f"this onnxruntime has no provider {unknown[0]!r}; it has {', '.join(available)}"
            )
        if not providers:
            raise TrainingError(f"name at least one provider of {', '.join(available)}")
        self._lean = lean
        self._release()
        _check_runtime(manifest, onnxruntime.__version__)
        manifest.check(plan)
        self.plan = plan
        self.manifest = manifest
        self._files = files
        self._threads = threads
        self._providers = tuple(providers)
        self.tuned: tuple[Tuned, ...] = ()
        """Ways to compute values, by level; without any, each takes its default."""
        self._sessions: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self._shapes: dict[tuple[object, ...], dict[str, tuple[int, ...]]] = {}
        self.max_sessions = MAX_SESSIONS
        """Sessions kept open."""
        for entry in manifest.graphs:
            if entry.sha256 in files:
                self._checked_file(entry)

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers: those in use once a graph has run, before that those requested."""
        for session in self._sessions.values():
            return tuple(session.get_providers())
        return self._providers

    def open(self, entry: GraphEntry, kept: Sequence[int], batch: int) -> None:
        """Load a graph, so that any problem with it shows before it is needed."""
        self._session(entry, kept, batch)

    def close(self) -> None:
        """Close all sessions; the next run opens its own."""
        self._sessions.clear()

    def run(
        self,
        entry: GraphEntry,
        feeds: Mapping[str, Array],
        kept: Sequence[int],
        batch: int,
        held: HeldOutputs | None = None,
    ) -> dict[str, Array]:
        """Run the graph and return its outputs by name. Raises `TensorError` for wrong inputs.

        `held`: arrays for large outputs, which the next run with the same ones writes over.
        """
        shapes = self._shapes_of(entry, tuple(kept), batch)
        for port in entry.inputs:
            if port.name not in feeds:
                raise TensorError(f"{entry} needs {port.name!r}, which was not given")
            _check_array(port.name, feeds[port.name], port.dtype, shapes[port.name])
        session = self._session(entry, kept, batch)
        names = [port.name for port in entry.outputs]
        large = {} if held is None else held.arrays(entry, shapes, feeds)
        try:
            if large:
                outputs = _run_bound(session, names, feeds, large)
            else:
                outputs = session.run(names, dict(feeds))
        except RUNTIME_ERRORS as error:
            if not self._departs(entry, kept, batch):
                raise TrainingError(f"{entry} failed: {error}") from error
            tuned, self.tuned = self.tuned, ()
            try:
                found = self.run(entry, feeds, kept, batch, held)
            except TrainingError:
                self.tuned = tuned  # the ways are not at fault
                raise
            self._forget_ways(entry, error)
            return found
        for port, array in zip(entry.outputs, outputs, strict=True):
            if array.shape != (shape := shapes[port.name]):
                raise GraphError(
                    f"{entry} gave {port.name!r} with shape {array.shape}; "
                    f"the manifest says {shape}"
                )
        # The rules work in place; a provider may give arrays that forbid it.
        return {
            name: array if array.flags.writeable else array.copy()
            for name, array in zip(names, outputs, strict=True)
        }

    def _shapes_of(
        self, entry: GraphEntry, kept: tuple[int, ...], batch: int
    ) -> dict[str, tuple[int, ...]]:
        """Return shapes of all inputs and outputs. They stay the same for a whole round."""
        key = (entry.sha256, kept, batch)
        if key not in self._shapes:
            if len(self._shapes) >= self.max_sessions:
                self._shapes.clear()
            ports = (*entry.inputs, *entry.outputs)
            self._shapes[key] = {port.name: port.shape(kept, batch) for port in ports}
        return self._shapes[key]

    def _session(self, entry: GraphEntry, kept: Sequence[int], batch: int) -> Any:
        """Return an open session; in the default ways if the runtime refuses those chosen."""
        ways = ways_at(self.tuned, kept)
        if (key := _session_key(entry, kept, batch, ways)) not in self._sessions:
            try:
                opened = self.session(entry, kept, batch, ways)
            except GraphError as error:
                if not self._departs(entry, kept, batch):
                    raise
                opened = self.session(entry, kept, batch, NO_WAYS)
                self._forget_ways(entry, error)
                key = _session_key(entry, kept, batch, NO_WAYS)
            self._sessions[key] = opened
            while len(self._sessions) > self.max_sessions:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def _departs(self, entry: GraphEntry, kept: Sequence[int], batch: int) -> bool:
        """True if a place of the graph is not computed in its default way."""
        taken = entry.options(ways_at(self.tuned, kept), kept, batch)
        return any(
            option is not place.options[0]
            for place, option in zip(entry.places, taken, strict=True)
        )

    def _forget_ways(self, entry: GraphEntry, error: Exception) -> None:
        log.warning("%s: all values are computed in the default ways from now on: %s", entry, error)
        self.tuned = ()
        self.close()

    def session(
        self,
        entry: GraphEntry,
        kept: Sequence[int],
        batch: int,
        ways: Ways,
        profile: str | None = None,
    ) -> Any:
        """Open a session that is not kept. `profile`: where the runtime writes its times."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        # A memory pattern is a second block for all activations, beside the one they first grew
        # into: up to half as much memory again, and no time saved.
        options.enable_mem_pattern = False
        # Planning which tensor may take whose place makes a large graph open five times as slowly;
        # the arena finds the same places at run time.
        options.enable_mem_reuse = False
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        file = fitted(entry, self._checked_file(entry), kept, batch, ways)
        # A cut can bring bytes to light that no other cut shows.
        if not graph_opsets(file)[1].items() <= self._opsets(entry).items():
            raise GraphError(f"the file of {entry} has other operators in some of its ways")
        try:
            session = onnxruntime.InferenceSession(
                file,
                options,
                providers=list(self._providers),
            )
        except RUNTIME_ERRORS as error:
            raise GraphError(
                f"onnxruntime {onnxruntime.__version__} cannot load {entry} "
                f"of opset {self.manifest.opset}: {error}"
            ) from error
        self._release()  # a training step takes half of what opening a graph took
        for side, ports, nodes in (
            ("inputs", entry.inputs, session.get_inputs()),
            ("outputs", entry.outputs, session.get_outputs()),
        ):
            has = {node.name: (numpy_dtype(node.type), len(node.shape)) for node in nodes}
            says = {port.name: (port.dtype, len(port.dims)) for port in ports}
            if has != says:
                name = min(name for name in {*has, *says} if has.get(name) != says.get(name))
                raise GraphError(
                    f"{entry}: of its {side}, {name!r} is {_words(has.get(name))} in the file, "
                    f"{_words(says.get(name))} in the manifest"
                )
        return session

    def nodes(self, entry: GraphEntry, kept: Sequence[int], batch: int, ways: Ways) -> int | None:
        """Return the number of nodes of a graph in these ways; None: it has loops."""
        return graph_nodes(fitted(entry, self._checked_file(entry), kept, batch, ways))

    def _opsets(self, entry: GraphEntry) -> dict[str, int]:
        """Return the operator sets that a graph may use, by domain."""
        return {**(CONTRIBUTED if entry.places else {}), "": self.manifest.opset}

    def _release(self) -> None:
        if self._lean:
            release_code(_state.__file__)

    def _checked_file(self, entry: GraphEntry) -> bytes:
        if entry.sha256 not in self._files:
            raise GraphError(f"the file of {entry} is not here: fetch it first")
        data = self._files[entry.sha256]
        if len(data) != entry.size_bytes:
            raise GraphError(
                f"the file of {entry} has {len(data)} bytes; the manifest says {entry.size_bytes}"
            )
        if (digest := hashlib.sha256(data).hexdigest()) != entry.sha256:
            raise GraphError(
                f"the file of {entry} has hash {digest[:12]}…: it was damaged or altered"
            )
        ir_version, opsets = graph_opsets(data)
        wanted = {"": self.manifest.opset}
        if entry.places:  # their defaults use standard operators alone
            more = opsets.items() <= self._opsets(entry).items()
            left, _ = entry.without(entry.options(NO_WAYS, (), 1))
            opsets = graph_opsets(without_ways(data, left))[1] if more else opsets
        if opsets != wanted or ir_version != self.manifest.ir_version:
            raise GraphError(
                f"the file of {entry} has opsets {opsets} and IR {ir_version}; the manifest says "
                f"{wanted} and IR {self.manifest.ir_version}"
            )
        return data


class OnnxBackend:
    """A `Backend` on onnxruntime."""

    def __init__(
        self,
        plan: ModelPlan,
        manifest: Manifest,
        files: Mapping[str, bytes],
        *,
        providers: Sequence[str] = CPU,
        threads: int = 1,
        precision: Precision = "auto",
        lean: bool = False,
    ) -> None:
        """See `Graphs`; `threads` are those that one graph runs on. `precision`: of the products,
        where the task has graphs for it. `lean` is for a process that is a device's own: what comes
        back to memory would count as that of a training in a process with several.
        """
        self._kind = gradient_kind(manifest, providers, precision)
        self._graphs = Graphs(
            plan, manifest, files, providers=providers, threads=threads, lean=lean
        )

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""
        return self._graphs.plan

    @property
    def precision(self) -> str:
        """Precision of the products of a training step: fp32 or fp16."""
        return "fp16" if self._kind == "gradient-fp16" else "fp32"

    @property
    def data(self) -> DataSpec:
        """Format of the task's data."""
        return self._graphs.manifest.data

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers: those in use once a graph has run, before that those requested."""
        return self._graphs.providers

    @property
    def has_ways(self) -> bool:
        """True if a training step's values can be computed in several ways, on these providers."""
        entries = self._graphs.manifest.graphs
        places = any(entry.places for entry in entries if entry.kind == self._kind)
        return places and self._graphs.providers == CPU

    @property
    def tuned(self) -> tuple[Tuned, ...]:
        """Ways in which values are computed, by level; without any, each takes its default.

        Each way rounds differently: equal bits need equal ways. Ways that the runtime fails in are
        forgotten.
        """
        return self._graphs.tuned

    @tuned.setter
    def tuned(self, tuned: Sequence[Tuned]) -> None:
        self._graphs.tuned = tuple(tuned)
        self._graphs.close()

    def close(self) -> None:
        """Close all graphs, which lets go of their memory; a training opens its own again."""
        self._graphs.close()

    def tune(
        self,
        job: Job,
        batch: Batch,
        *,
        level: float,
        limit_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Tuned | None:
        """Measure in which ways a job's step takes the least time here; None: nothing to choose.

        `level`: the job's. Takes about `limit_s`, or less; nothing is trained, and `tuned` stays
        as it is. Raises `TrainingStopped` when told to stop, `NonFiniteError` if no way can be
        compared with the default, and what `train` raises.
        """
        if not self.has_ways:
            return None
        objective = _Objective(self._graphs, job, self._kind)
        objective.batch(batch)
        entry, kept, size = objective.entry, objective.kept, objective.size
        if not entry.places:
            return None

        def open_session(ways: Ways, profile: str | None) -> Any:
            return self._graphs.session(entry, kept, size, ways, profile)

        def nodes(ways: Ways) -> int | None:
            return self._graphs.nodes(entry, kept, size, ways)

        weights = {name: np.asarray(array) for name, array in job.weights.items()}
        feeds = objective.feeds(weights)
        try:
            return fastest(
                entry,
                kept,
                size,
                open_session,
                feeds,
                (GraphError, *RUNTIME_ERRORS),
                nodes=nodes,
                level=level,
                limit_s=limit_s,
                should_stop=should_stop,
            )
        except RUNTIME_ERRORS as error:
            raise TrainingError(f"{entry} failed: {error}") from error

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """See `Backend.train`; also raises `GraphError` when no graph fits."""
        plan = self.plan
        plan.check(job.weights, job.groups)
        plan.check_buffers(job.buffers, job.groups)
        if job.correction is not None:
            plan.check(job.correction, job.groups)
        start = job.weights if job.owned else _copies(job.weights)
        # With the start at hand again later, the model is in memory twice, else three times.
        subtract = job.subtract_start if job.owned and job.rule.proximal == 0 else None
        weights: Arrays = dict(start)
        if subtract is None:
            weights = _copies(start, job.spare)
            job = replace(job, spare=None)
        self._graphs.max_sessions = max(MAX_SESSIONS, 2 * (1 + len(job.widths)))
        own = _Objective(self._graphs, job, self._kind)
        objective: Objective = own
        if job.is_nested:
            objective = NestedObjective(
                plan,
                job,
                own,
                lambda narrow: _Objective(self._graphs, narrow, self._kind),
                np.zeros_like,
            )
        # A diverging training shows in its loss; numpy need not warn on the way.
        with np.errstate(over="ignore", invalid="ignore"):
            steps = LocalSteps(job.rule, start, job.correction)
            metrics = take_steps(objective, steps, weights, batches, should_stop)
            # The memory that they may lie in takes the starting weights next.
            statistics = {
                buffer.name: np.array(own.buffers[buffer.name])
                for buffer in plan.buffers
                if buffer.statistic
            }
            if subtract is not None:
                del steps  # and with it the velocity
                subtract(weights, own.spare)
            else:
                for name in weights:
                    weights[name] -= start[name]
        check_movement(weights)
        check_movement(statistics)
        return Trained(weights, statistics, metrics, own.spare)


class _Objective:
    """Loss and gradients of the current batch, as `LocalSteps` asks for them."""

    def __init__(self, graphs: Graphs, job: Job, kind: Kind = "gradient") -> None:
        plan = graphs.plan
        self.buffers = _copies(job.buffers)
        """Buffers after the last pass."""
        self._graphs = graphs
        self.kept = plan.kept_atoms(plan.choose(job.groups))
        self._scales = scale_feeds(plan, job.groups, job.rule.rescale)
        self._stream = job.mask_stream
        self._kind: Kind = "distillation" if job.distils else kind
        self._kappa = job.rule.distillation
        self._job = job
        self._held = HeldOutputs(job.spare)
        self._samples: int | None = None
        """Size of the batches that it is settled for."""
        self.outputs: Array | None = None
        self.teacher: Array | None = None

    @property
    def spare(self) -> Raw | None:
        """Memory of the gradients, when these are not needed any more, or what they left of it."""
        return self._held.spare

    def batch(self, batch: Batch) -> bool:
        """See `Objective`."""
        self._graphs.manifest.data.check(batch)
        size = len(batch.targets)
        if size != self._samples:
            self._settle(size)
        arrays = {f"x{number}": array for number, array in enumerate(batch.inputs)}
        arrays["targets"] = batch.targets
        for mask, shape in self._masks:
            arrays[mask.port] = draw_mask(self._stream, mask.probability, shape)
        self._feeds = fed(self.entry, arrays, self.kept, size) | self._settled
        return True

    def _settle(self, size: int) -> None:
        """Find the graph for batches of this size, and what it takes with all of them."""
        entry = self._graphs.manifest.pick(self._kind, self.kept, size)
        self.entry = entry
        self.size = size if entry.batch is None else entry.batch
        self._graphs.open(entry, self.kept, self.size)
        ports = {port.name: port for port in entry.inputs}
        self._masks = [
            (mask, _real_shape(entry, ports[mask.port], self.kept, size)) for mask in entry.masks
        ]
        settled = {"sample_weights": (np.arange(self.size) < size).astype(np.float32)}
        if "classes" in ports:
            settled["classes"] = self._job.class_mask(*ports["classes"].shape(self.kept, size))
        elif self._job.rule.classes != "all":
            raise GraphError(
                f"{entry} takes no classes: the task was compiled for runs with classes = all"
            )
        self._settled = {
            name: array for name, array in (settled | self._scales).items() if name in ports
        }
        self._samples = size

    def __call__(self, weights: Arrays) -> tuple[float, Arrays]:
        """Return (mean loss, gradients) at these weights."""
        outputs = self._graphs.run(
            self.entry, self.feeds(weights), self.kept, self.size, self._held
        )
        self.outputs = outputs.get("outputs")
        for name in self.buffers:
            if (key := f"n:{name}") in outputs:
                self.buffers[name] = outputs[key]
        return float(outputs["loss"]), {name: outputs[f"g:{name}"] for name in weights}

    def feeds(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return the graph's inputs with these weights and the batch of now."""
        taken = self.entry.input_names
        feeds = dict(self._feeds)
        feeds |= {
            key: np.asarray(weights[n], order="C") for n in weights if (key := f"w:{n}") in taken
        }
        feeds |= {key: self.buffers[n] for n in self.buffers if (key := f"b:{n}") in taken}
        if self._kind == "distillation":
            feeds |= self._taught()
        return feeds

    def _taught(self) -> dict[str, Array]:
        """Return the teacher's outputs and their share; zeros for the widest, which has none."""
        if self.teacher is not None:
            return {"teacher": self.teacher, "kappa": np.array(self._kappa, dtype=np.float32)}
        (port,) = (port for port in self.entry.inputs if port.name == "teacher")
        zeros = np.zeros(port.shape(self.kept, self.size), dtype=port.dtype)
        return {"teacher": zeros, "kappa": np.array(0, dtype=np.float32)}


class HeldOutputs:
    """Arrays for the large outputs of a graph, from run to run, in one piece of memory."""

    def __init__(self, room: Raw | None = None) -> None:
        """`room`: memory for the first piece, if it is large enough."""
        self._room = room
        self.whole: Raw | None = None
        """The piece, which has room for all outputs and a little more; None: nothing is large."""
        self._arrays: dict[str, Array] = {}
        self._shapes: Mapping[str, tuple[int, ...]] | None = None
        """The shapes that the arrays are for."""

    @property
    def spare(self) -> Raw | None:
        """The piece, or the room for it if nothing is large; None: there is neither."""
        return self._room if self.whole is None else self.whole

    def arrays(
        self,
        entry: GraphEntry,
        shapes: Mapping[str, tuple[int, ...]],
        feeds: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Return an array for every large output. One that is an input now, too, is not written
        over: the run gets another.
        """
        if shapes is not self._shapes:
            self._fit(entry, shapes)
            self._shapes = shapes
        if not self._arrays:
            return {}
        inputs = {id(each) for each in feeds.values()}
        return {
            name: np.empty_like(array) if id(array) in inputs else array
            for name, array in self._arrays.items()
        }

    def _fit(self, entry: GraphEntry, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make the arrays, unless there are such already."""
        wanted = {port.name: (shapes[port.name], np.dtype(port.dtype)) for port in entry.outputs}
        sizes = {name: math.prod(shape) * kind.itemsize for name, (shape, kind) in wanted.items()}
        large = {name: wanted[name] for name, size in sizes.items() if size >= LARGE_BYTES}
        known = {name: (array.shape, array.dtype) for name, array in self._arrays.items()}
        if large != known:
            small = sum(size for name, size in sizes.items() if name not in large)
            self._arrays, self.whole = {}, None
            if large:
                room, self._room = self._room, None
                self._arrays, self.whole = arrays_in_one(large, small + ROOM_BYTES, room)


def _session_key(
    entry: GraphEntry, kept: Sequence[int], batch: int, ways: Ways
) -> tuple[object, ...]:
    """Return a key of the file that a session is opened with."""
    taken = entry.options(ways, kept, batch)
    _, slots = entry.without(taken)
    # Sizes inside the file make it a graph of its own for these widths.
    sizes = (slot.size.value(kept, batch) for slot in slots)
    return (entry.sha256, *(option.start for option in taken), *sizes)


def gradient_kind(manifest: Manifest, providers: Sequence[str], precision: Precision) -> Kind:
    """Return the kind of graph that training steps run in."""
    gains = bool(providers) and providers[0] in GAINING
    wanted = precision == "fp16" or (precision == "auto" and gains)
    there = any(entry.kind == "gradient-fp16" for entry in manifest.graphs)
    return "gradient-fp16" if wanted and there else "gradient"


def _run_bound(
    session: Any, names: Sequence[str], feeds: Mapping[str, Array], large: Mapping[str, Array]
) -> list[Array]:
    """Run a session that reads its inputs where they are and writes large outputs to arrays."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    for name in names:
        if name in large:
            array = large[name]
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    # Copied: the runtime's own outputs end with the binding.
    return [
        large[name] if name in large else np.array(value.numpy())
        for name, value in zip(names, binding.get_outputs(), strict=True)
    ]


def scale_feeds(plan: ModelPlan, groups: Groups, rescale: float) -> dict[str, Array]:
    """Return the scale of every axis, by the name of its input."""
    scales = axis_scales(plan, groups, rescale)
    return {f"s:{name}": np.array(scale, dtype=np.float32) for name, scale in scales.items()}


def fed(
    entry: GraphEntry, arrays: Mapping[str, Array], kept: Sequence[int], size: int
) -> dict[str, Array]:
    """Return the batch's arrays that the graph takes, checked, and padded to its batch size.

    Padding repeats the last sample: unlike zeros, it is certainly valid data for the model.
    """
    feeds = {}
    for port in entry.inputs:
        if port.name in arrays:
            array = arrays[port.name]
            _check_array(port.name, array, port.dtype, _real_shape(entry, port, kept, size))
            array = array.astype(port.dtype, copy=False)  # in this machine's byte order
            if array.shape != (shape := port.shape(kept, size)):
                rows = np.broadcast_to(array[-1:], (shape[0] - len(array), *shape[1:]))
                array = np.concatenate([array, rows])
            feeds[port.name] = array
    return feeds


def _real_shape(entry: GraphEntry, port: Port, kept: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the shape before padding: the first dimension is the batch, or a multiple of it."""
    shape = port.shape(kept, size)
    if entry.batch in (None, size) or not shape or shape[0] % entry.batch:
        return shape
    return (shape[0] // entry.batch * size, *shape[1:])


def _check_array(name: str, array: Any, dtype: str, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise TensorError(f"{name!r} is {type(array).__name__}, not a numpy array")
    if array.dtype != dtype and array.dtype.name != dtype:  # asking for a name is slow
        raise TensorError(f"{name!r} is {array.dtype.name}; the graph takes {dtype}")
    if array.shape != shape:
        raise TensorError(f"{name!r} has shape {array.shape}; the graph takes {shape}")


def _check_runtime(manifest: Manifest, version: str) -> None:
    needed, has = (
        tuple(int(part) for part in re.findall(r"[0-9]+", text)[:3])
        for text in (manifest.min_onnxruntime, version)
    )
    if has < needed:
        raise GraphError(
            f"the graphs need onnxruntime {manifest.min_onnxruntime} or newer; this is {version}"
        )


def _copies(arrays: Mapping[str, Array], room: Raw | None = None) -> dict[str, Array]:
    """Copy arrays in C order: neither side's later changes reach the other.

    `room`: memory for the copies, if it is large enough.
    """
    wanted = {name: (each.shape, each.dtype) for name, each in arrays.items()}
    copies, _ = arrays_in_one(wanted, room=room)
    for name, array in arrays.items():
        copies[name][...] = array
    return copies


def numpy_dtype(ort_type: str) -> str:
    """Return numpy's name for a type that onnxruntime calls `tensor(float)`."""
    inner = ort_type.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(inner, inner)


def _words(port: tuple[str, int] | None) -> str:
    return "absent" if port is None else f"{port[0]} with {port[1]} dimensions"
