"""The build check: compare a compiled graph with torch at sizes where it was not traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnxruntime
import torch
from torch.nn import functional as F

from coordinator.task.graphs.errors import WrongGraphError
from coordinator.task.graphs.gradient import weighted_mean
from coordinator.task.task import CUSTOM, Task
from coordinator.task.tracing.moments import batch_moments
from coordinator.task.tracing.program import SubmodelForward, TracedProgram
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.codec import NO_WAYS, fitted
from edge_sdk.protocol.task.data_spec import ArraySpec
from edge_sdk.protocol.task.graphs import GraphEntry, Kind, Ways
from edge_sdk.train.onnx import RUNTIME_ERRORS

TOLERANCE = 1e-4
"""Largest accepted difference from torch, relative to the largest gradient."""

HALF_TOLERANCE = 5e-2
"""The same for a graph that multiplies in float16. Its numbers are 5e-4 apart, so more ReLUs and
nearly tied maxima flip."""

MOST_ROUNDING = 0.03
"""Largest error of torch in float32 that excuses a graph's; with more, the numbers show nothing."""

TRIES = 3
"""Points to try before a graph fails. Rounding can flip a ReLU or a nearly tied maximum at one
point; a wrong graph is wrong everywhere."""

WAYS_BATCH = 16
"""Batch size at which ways that are no defaults are checked: some need blocks of so many."""

BATCHES = (5, 1)
"""Batch sizes at which a graph that takes any batch is checked."""


@dataclass(frozen=True)
class CheckCase:
    """A submodel and a batch, under the names of a graph's inputs."""

    kept: tuple[int, ...]
    batch: int
    feeds: dict[str, Array]
    double: bool = False
    """Compute in float64: the reference that float32 is judged by."""

    def tensors(self, names: list[str]) -> list[torch.Tensor]:
        """Return these inputs as torch tensors (copies)."""
        found = [torch.tensor(self.feeds[name]) for name in names]
        if not self.double:
            return found
        return [each.double() if each.dtype is torch.float32 else each for each in found]

    def forward(self, program: TracedProgram) -> SubmodelForward:
        """Return a program's pass at this case's sizes."""
        found = program.at(self.kept, self.batch, True)
        return found.in_double() if self.double else found


def make_case(
    task: Task,
    *,
    level: float,
    batch: int,
    seed: int,
    class_masks: bool = False,
    made: Sequence[int] | None = None,
) -> CheckCase:
    """Make a case: a random submodel with weights near the task's, random data and scales.

    `class_masks`: about half of the classes are left out. `made`: the atoms per axis that the graph
    was made for; only the numbers of blocks are read from it.
    """
    plan, rng = task.plan, np.random.default_rng(seed)
    groups = {}
    for number, axis in enumerate(plan.axes):
        count = axis.wanted(level)
        if axis.depth and made is not None and made[number]:
            count = made[number] * len(axis.groups) // axis.atoms
        groups[axis.name] = rng.choice(len(axis.groups), count, replace=False).tolist()
    kept = plan.kept_atoms(plan.choose(groups))
    weights = plan.cut(task.weights, groups)
    feeds: dict[str, Array] = {}
    for name, array in weights.items():
        noise = rng.normal(0, 0.05, array.shape)
        feeds[f"w:{name}"] = (array + noise).astype(array.dtype)
    for name, array in plan.cut_buffers(task.buffers, groups).items():
        feeds[f"b:{name}"] = array
    for index, spec in enumerate(task.data.inputs):
        feeds[f"x{index}"] = _random(rng, batch, spec)
    for axis in plan.axes:
        feeds[f"s:{axis.name}"] = np.asarray(rng.uniform(0.8, 1.6), dtype=np.float32)
    feeds["targets"] = _random_targets(task, rng, batch)
    feeds["sample_weights"] = rng.uniform(0.2, 1, batch).astype(np.float32)
    if batch > 2:
        feeds["sample_weights"][1] = 0
    for index, (p, shape) in enumerate(task.train_program.at(kept, batch, True).masks):
        feeds[f"m{index}"] = (rng.random(shape) >= p).astype(np.float32) / np.float32(1 - p)
    outputs = (batch, *task.train_program.output_shape)
    feeds["teacher"] = rng.normal(0, 2, outputs).astype(np.float32)
    feeds["kappa"] = np.asarray(rng.uniform(0.2, 0.8), dtype=np.float32)
    if class_masks:
        feeds["classes"] = rng.integers(0, 1, outputs[1], endpoint=True).astype(np.float32)
    return CheckCase(kept, batch, feeds)


def torch_gradient(task: Task, case: CheckCase, *, distils: bool = False) -> dict[str, Array]:
    """Compute the outputs of a gradient or a distillation graph with torch's autograd."""
    plan = task.plan
    forward = case.forward(task.train_program)
    weights = case.tensors([f"w:{tensor.name}" for tensor in plan.tensors])
    for weight in weights:
        weight.requires_grad_()
    buffers = case.tensors([f"b:{buffer.name}" for buffer in plan.buffers])
    outputs = forward(
        weights,
        buffers,
        case.tensors([f"x{index}" for index in range(len(task.data.inputs))]),
        case.tensors([f"s:{axis.name}" for axis in plan.axes]),
        case.tensors([f"m{index}" for index in range(len(forward.masks))]),
    )
    targets, sample_weights, teacher, kappa = case.tensors(
        ["targets", "sample_weights", "teacher", "kappa"]
    )
    if "classes" in case.feeds:
        (classes,) = case.tensors(["classes"])
        outputs = outputs.movedim(1, -1).masked_fill(classes == 0, 0).movedim(-1, 1)
    losses = task.loss(outputs, targets)
    if distils:
        wide = F.cross_entropy(outputs, teacher.softmax(1), reduction="none")
        losses = losses + kappa * (wide.reshape(case.batch, -1).mean(1) - losses)
    loss = weighted_mean(losses, sample_weights)
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    found = {"loss": loss.detach().numpy()}
    for tensor, grad in zip(plan.tensors, grads, strict=True):
        found[f"g:{tensor.name}"] = grad.numpy()
    for buffer, value in zip(plan.buffers, buffers, strict=True):
        if buffer.statistic:
            found[f"n:{buffer.name}"] = value.numpy()
    if distils:
        found["outputs"] = outputs.detach().numpy()
    return found


def torch_outputs(task: Task, case: CheckCase) -> dict[str, Array]:
    """Compute an evaluation graph's outputs with torch."""
    plan = task.plan
    with torch.no_grad():
        outputs = case.forward(task.traced.evaluate)(
            case.tensors([f"w:{tensor.name}" for tensor in plan.tensors]),
            case.tensors([f"b:{buffer.name}" for buffer in plan.buffers]),
            case.tensors([f"x{index}" for index in range(len(task.data.inputs))]),
            case.tensors([f"s:{axis.name}" for axis in plan.axes]),
        )
    return {"outputs": outputs.numpy()}


def torch_statistics(task: Task, case: CheckCase) -> dict[str, Array]:
    """Compute a statistics graph's outputs with torch."""
    plan = task.plan
    names = [f"n:{buffer.name}" for buffer in plan.buffers]
    forward = case.forward(task.train_program)
    moments = batch_moments(
        forward,
        case.tensors([f"w:{tensor.name}" for tensor in plan.tensors]),
        case.tensors([f"b:{buffer.name}" for buffer in plan.buffers]),
        case.tensors([f"x{index}" for index in range(len(task.data.inputs))]),
        case.tensors([f"s:{axis.name}" for axis in plan.axes]),
        case.tensors([f"m{index}" for index in range(len(forward.masks))]),
    )
    return {names[number]: value.numpy() for number, value in moments}


ORACLES: dict[Kind, Callable[[Task, CheckCase], dict[str, Array]]] = {
    "gradient": torch_gradient,
    "evaluate": torch_outputs,
    "statistics": torch_statistics,
    "distillation": partial(torch_gradient, distils=True),
    "gradient-fp16": torch_gradient,
}


def run_graph(
    entry: GraphEntry, session: onnxruntime.InferenceSession, case: CheckCase
) -> dict[str, Array]:
    """Run the graph and return its outputs by name, after checking shapes against the manifest."""
    for port in entry.inputs:
        _check_shape(port.name, port.shape(case.kept, case.batch), case.feeds[port.name])
    names = [port.name for port in entry.outputs]
    values = session.run(names, {port.name: case.feeds[port.name] for port in entry.inputs})
    for port, value in zip(entry.outputs, values, strict=True):
        _check_shape(port.name, port.shape(case.kept, case.batch), value)
    return dict(zip(names, values, strict=True))


def open_session(data: bytes, *, literal: bool = False) -> onnxruntime.InferenceSession:
    """Open a session that uses one thread. `literal`: what is rounded to float16 stays so, although
    this machine has no products of float16 and its optimiser would leave the rounding out.
    """
    options = onnxruntime.SessionOptions()
    if literal:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what it would print is raised, too
    # Planning which tensor may use whose memory takes most of the time to open a large graph.
    options.enable_mem_reuse = False
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def difference(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """Largest error: gradients relative to the largest gradient, other outputs to themselves."""
    largest = max((_largest(wanted[name]) for name in wanted if name.startswith("g:")), default=0.0)
    errors = []
    for name, right in wanted.items():
        scale = largest if name.startswith("g:") else _largest(right)
        errors.append(_largest(got[name] - right) / max(scale, 1e-6))
    worst = float(np.max(errors))  # unlike max(), never skips a NaN
    return worst if np.isfinite(worst) else float("inf")


def check_graph(task: Task, entry: GraphEntry, data: bytes, tolerance: float = TOLERANCE) -> float:
    """Return the largest error of a graph; raises `WrongGraphError` above `tolerance`.

    A graph that takes any width or batch is checked at sizes where it was not traced. Where torch's
    own rounding is larger, the graph may be off by twice as much, but not at every size.
    """
    batches = BATCHES if entry.batch is None else (entry.batch,)
    run = _runner(entry, data, NO_WAYS)
    errors = [
        _error(task, entry, run, level, batch, tolerance)
        for level in _levels(task, entry)
        for batch in batches
    ]
    known = [error for error in errors if error is not None]
    if not known:
        raise WrongGraphError(
            f"{entry} cannot be checked: torch itself rounds by over {MOST_ROUNDING:.0%} of the "
            "largest gradient at every size tried"
        )
    return max(known)


def check_ways(task: Task, entry: GraphEntry, data: bytes) -> float:
    """Return the largest error of the ways that are no defaults, as `check_graph` does.

    All second ways are checked together, then all third ones and so on; at full width, too, if some
    do not work at others.
    """
    worst, most = 0.0, max((len(place.options) for place in entry.places), default=0)
    batch = WAYS_BATCH if entry.batch is None else entry.batch
    for number in range(1, most):
        there = [place for place in entry.places if number < len(place.options)]
        ways = {place.name: place.options[number].name for place in there}
        run, untried = _runner(entry, data, ways), set(ways)
        levels = _levels(task, entry)
        if entry.kept is None or 0 in entry.kept:
            levels += (1.0,)
        for level in levels:
            if not untried and level == 1:
                break
            kept = make_case(task, level=level, batch=batch, seed=0, made=entry.kept).kept
            untried -= {p.name for p in there if p.options[number].works(kept, batch)}
            worst = max(worst, _error(task, entry, run, level, batch, TOLERANCE) or 0.0)
        if untried:
            name = min(untried)
            raise WrongGraphError(f"{entry}: {name!r} by {ways[name]!r} cannot be checked")
    return worst


def _runner(entry: GraphEntry, data: bytes, ways: Ways) -> Callable[[CheckCase], dict[str, Array]]:
    """Return a function that runs the graph in these ways; one session serves alike files."""
    sessions: dict[bytes, onnxruntime.InferenceSession] = {}

    def run(case: CheckCase) -> dict[str, Array]:
        file = fitted(entry, data, case.kept, case.batch, ways)
        try:
            if file not in sessions:
                sessions[file] = open_session(file, literal=entry.kind == "gradient-fp16")
            return run_graph(entry, sessions[file], case)
        except RUNTIME_ERRORS as error:
            raise WrongGraphError(f"onnxruntime cannot run {entry}: {error}") from error

    return run


def _error(
    task: Task,
    entry: GraphEntry,
    run: Callable[[CheckCase], dict[str, Array]],
    level: float,
    batch: int,
    tolerance: float,
) -> float | None:
    """Return the first acceptable error of a few tries at one size; None if nothing is shown."""
    masks = "classes" in entry.input_names
    oracle, best, shown = ORACLES[entry.kind], float("inf"), True
    for seed in range(TRIES):
        case = make_case(
            task, level=level, batch=batch, seed=seed, class_masks=masks, made=entry.kept
        )
        wanted = oracle(task, case)
        if batch == 1 and not _finite(wanted):
            return 0.0  # one value has no variance: BatchNorm returns NaN in torch too
        got = run(case)
        error = difference(got, wanted)
        if error <= tolerance:
            return error
        exact, own = _exact_errors(task, oracle, case, got, wanted)
        if exact <= 2 * own + 1e-6:
            if own <= MOST_ROUNDING:
                return exact
            shown = False
        best = min(best, error)
    if not shown:
        return None
    raise WrongGraphError(
        f"{entry} differs from torch by {best:.1e} of the largest gradient at widths "
        f"{list(case.kept)} and batch {batch}; {tolerance:.0e} is allowed"
    )


def _exact_errors(
    task: Task,
    oracle: Callable[[Task, CheckCase], dict[str, Array]],
    case: CheckCase,
    got: Mapping[str, Array],
    wanted: Mapping[str, Array],
) -> tuple[float, float]:
    """Return the differences from torch in float64: the graph's, and that of torch in float32.

    BatchNorm over a few values, for one, amplifies rounding a thousandfold.
    """
    try:
        exact = oracle(task, replace(case, double=True))
    except RuntimeError:  # the model itself insists on float32 somewhere
        return float("inf"), 0.0
    return difference(got, exact), difference(wanted, exact)


def _finite(arrays: Mapping[str, Array]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays.values())


def _levels(task: Task, entry: GraphEntry) -> tuple[float, ...]:
    """Levels to check at: those of a fixed graph, else the narrowest and one in between."""
    axes = task.plan.axes
    if entry.kept is None or (0 in entry.kept):
        return (0.5, 0.01)
    widths = [(atoms, a) for atoms, a in zip(entry.kept, axes, strict=True) if not a.depth]
    return (max((atoms / axis.atoms for atoms, axis in widths), default=1.0),)


def _random(rng: np.random.Generator, batch: int, spec: ArraySpec) -> Array:
    shape = (batch, *spec.shape)
    if not spec.dtype.startswith("float"):
        highest = 1 if spec.highest is None else spec.highest  # 0 and 1 are always allowed
        return rng.integers(0, highest, shape, endpoint=True).astype(spec.dtype)
    if spec.highest is not None:
        return rng.uniform(0, spec.highest, shape).astype(spec.dtype)
    return rng.normal(0, 1, shape).astype(spec.dtype)


def _random_targets(task: Task, rng: np.random.Generator, batch: int) -> Array:
    """Random targets; a custom loss may accept few values, so its examples are used."""
    if task.loss_name == CUSTOM and task.example_targets is not None:
        examples: Array = task.example_targets.detach().cpu().numpy()
        return examples[rng.integers(0, len(examples), batch)]
    return _random(rng, batch, task.data.targets)


def _check_shape(name: str, wanted: tuple[int, ...], array: Array) -> None:
    if array.shape != wanted:
        raise WrongGraphError(f"{name!r} has shape {array.shape}, the manifest says {wanted}")


def _largest(array: Array) -> float:
    return float(np.abs(np.asarray(array, dtype=np.float64)).max(initial=0))
