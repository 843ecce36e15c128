"""Trace a task into plain operators: loss, gradients and new statistics at one size.

torch differentiates; its own decompositions then reduce the result to few kinds of operators.
Nothing is computed: the tensors are fake and only their shapes matter.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from coordinator.task.graphs.decompositions import (
    adaptive_max_pool,
    batch_norm,
    circular_pad,
    decompositions,
    instance_norm,
    normalise,
    one_hot,
    windows,
)
from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.recurrence import recurrent_layer
from coordinator.task.task import Task
from coordinator.task.tracing.capture.recurrent import LAYERS
from coordinator.task.tracing.moments import SeenMoments, in_buffers
from coordinator.task.tracing.program import SubmodelForward, in_rows, in_stacks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim
from edge_sdk.protocol.task.data_spec import ArraySpec
from edge_sdk.train.torch import distilled, masked

aten = torch.ops.aten

KeptSizes = tuple[int, ...]

ADAPTIVE = tuple(getattr(aten, f"adaptive_max_pool{n}d").default for n in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph of plain operators at one size; names follow placeholder and output order."""

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    masks: tuple[float, ...]
    constants: dict[str, torch.Tensor]
    """Values of inputs that are constants made in forward()."""
    moments: tuple[str, ...] = ()
    """Outputs of a statistics graph, which follow the others: the mean over the batch and then the
    variance (divided by n) that every BatchNorm sees."""


def trace_gradient(
    task: Task,
    kept: KeptSizes,
    batch: int,
    *,
    distils: bool = False,
    class_masks: bool = False,
    loss_scale: float = 1.0,
) -> Traced:
    """Trace loss, gradients, new statistics and moments of the submodel with `kept` atoms per axis.

    `distils`: a wider model's outputs have a share in its targets, and its own are given.
    `class_masks`: scores of classes can be left out. `loss_scale` multiplies the loss before it is
    differentiated, and divides the gradients at the end.
    """
    plan = task.plan
    forward = task.train_program.at(kept, batch, True)
    statistics = [index for index, buffer in enumerate(plan.buffers) if buffer.statistic]
    names: list[str] = []

    def gradient(arguments: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        def objective(weights: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            rows = [row.clone() for row in in_rows(arguments["buffers"], forward.buffer_rows)]
            run = _TrainingRun(forward.module)
            own = in_rows(weights, forward.weight_rows)
            outputs = run.outputs({**arguments, "weights": own, "buffers": rows})
            if class_masks:
                outputs = masked(outputs, *arguments["classes"])
            losses = task.loss(outputs, arguments["batch"][0])
            if distils:
                losses = distilled(losses, outputs, *arguments["teacher"])
            mean = weighted_mean(losses, arguments["batch"][1])
            _name_backward(mean, run.origins)
            buffers = in_stacks(rows, forward.buffer_rows)
            new = [buffers[index] for index in statistics]
            moments = in_buffers(run.moments(), rows, forward.buffer_rows)
            names[:] = [f"n:{plan.buffers[index].name}" for index, _ in moments]
            new += [outputs] if distils else []
            scaled = mean if loss_scale == 1 else mean * loss_scale
            return scaled, [mean, *new, *(value for _, value in moments)]

        grads, (_, (loss, *new)) = torch.func.grad_and_value(objective, has_aux=True)(
            arguments["weights"]
        )
        if loss_scale != 1:
            grads = [grad * (1 / loss_scale) for grad in grads]
        return [loss, *grads, *new]

    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = _arguments(task, forward, kept, batch)
        arguments["batch"] = [_empty(batch, task.data.targets), torch.empty(batch)]
        if distils:
            wide = torch.empty(batch, *task.train_program.output_shape)
            arguments["teacher"] = [wide, torch.empty(())]
        if class_masks:
            arguments["classes"] = [torch.empty(task.train_program.output_shape[0])]
    inputs = (*_names(plan, arguments), "targets", "sample_weights")
    inputs += ("teacher", "kappa") if distils else ()
    inputs += ("classes",) if class_masks else ()
    outputs = (
        "loss",
        *(f"g:{tensor.name}" for tensor in plan.tensors),
        *(f"n:{plan.buffers[index].name}" for index in statistics),
        *(["outputs"] if distils else []),
    )
    graph = _trace(gradient, arguments)
    masks = tuple(probability for probability, _ in forward.masks)
    return Traced(graph, inputs, outputs, masks, _constants(forward), tuple(names))


def trace_evaluation(task: Task, kept: KeptSizes, batch: int) -> Traced:
    """Trace the outputs of the submodel in evaluation mode."""
    forward = task.traced.evaluate.at(kept, batch, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = _arguments(task, forward, kept, batch)

    def outputs(given: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        weights = in_rows(given["weights"], forward.weight_rows)
        buffers = in_rows(given["buffers"], forward.buffer_rows)
        run = _Run(forward.module)
        return [run.outputs({**given, "weights": weights, "buffers": buffers})]

    graph = _trace(outputs, arguments)
    return Traced(graph, _names(task.plan, arguments), ("outputs",), (), _constants(forward))


def weighted_mean(losses: torch.Tensor, sample_weights: torch.Tensor) -> torch.Tensor:
    """Σ wᵢ lᵢ / Σ wᵢ."""
    return (losses * sample_weights).sum() / sample_weights.sum()


def _trace(
    function: Callable[[dict[str, list[torch.Tensor]]], list[torch.Tensor]],
    arguments: dict[str, list[torch.Tensor]],
) -> fx.Graph:
    functional = torch.func.functionalize(function, remove="mutations_and_views")
    traced = make_fx(functional, tracing_mode="fake", decomposition_table=decompositions())
    # Fused kernels for attention and recurrent layers have no plain form; the textbook ones do.
    with (
        sdpa_kernel(SDPBackend.MATH),
        _without_mkldnn(),
        _without_collection(),
        fx.traceback.preserve_node_meta(),
    ):
        try:
            graph: fx.Graph = traced(arguments).graph
        except GraphCompileError as error:
            # fx appends the whole node to the text of whatever is raised.
            raise GraphCompileError(str(error).partition("\n")[0]) from error
        except Exception as error:  # torch may raise anything here; it is reported, not hidden
            reason = str(error).strip().partition("\n")[0] or repr(error)
            raise GraphCompileError(f"torch cannot differentiate the task: {reason}") from error
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return graph


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's search for cycles: it takes a fifth of a trace's time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _arguments(
    task: Task, forward: SubmodelForward, kept: KeptSizes, batch: int
) -> dict[str, list[torch.Tensor]]:
    plan = task.plan

    def empty(dims: Sequence[Dim], dtype: str) -> torch.Tensor:
        return torch.empty([dim.at(kept) for dim in dims], dtype=getattr(torch, dtype))

    return {
        "weights": [empty(tensor.dims, tensor.dtype) for tensor in plan.tensors],
        "buffers": [empty(buffer.dims, buffer.dtype) for buffer in plan.buffers],
        "constants": [torch.empty(c.shape, dtype=c.dtype) for c in forward.constants],
        "inputs": [_empty(batch, spec) for spec in task.train_program.inputs],
        "scales": [torch.empty(()) for _ in plan.axes],
        "masks": [torch.empty(shape) for _, shape in forward.masks],
    }


def _empty(batch: int, spec: ArraySpec) -> torch.Tensor:
    return torch.empty(batch, *spec.shape, dtype=getattr(torch, spec.dtype))


def _names(plan: ModelPlan, arguments: dict[str, list[torch.Tensor]]) -> tuple[str, ...]:
    return (
        *(f"w:{tensor.name}" for tensor in plan.tensors),
        *(f"b:{buffer.name}" for buffer in plan.buffers),
        *(f"c:{index}" for index in range(len(arguments["constants"]))),
        *(f"x{index}" for index in range(len(arguments["inputs"]))),
        *(f"s:{axis.name}" for axis in plan.axes),
        *(f"m{index}" for index in range(len(arguments["masks"]))),
    )


def _constants(forward: SubmodelForward) -> dict[str, torch.Tensor]:
    return {f"c:{index}": constant for index, constant in enumerate(forward.constants)}


class _Run(fx.Interpreter):
    """Runs a forward pass, node by node so that operators remember their module.

    torch's BatchNorm and InstanceNorm change statistics without declaring it in their schemas, so
    tracing would lose the change; here they are written out in operators that do declare it. Others
    are written out because torch's own gradient for them has no translation.
    """

    trains = False
    """A gradient may be taken."""
    origins: dict[int, dict[str, Any]]
    """Module each operation came from, by its autograd sequence number."""

    def outputs(self, given: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        """Run the forward pass and return the model's outputs."""
        self.origins = {}
        order = ("weights", "buffers", "constants", "inputs", "scales", "masks")
        (output,) = self.run(*(tensor for kind in order for tensor in given[kind]))
        result: torch.Tensor = output
        return result

    def run_node(self, n: fx.Node) -> Any:
        first = torch._C._autograd._get_sequence_nr()
        stack = n.meta.get("nn_module_stack")
        try:
            result = super().run_node(n)
        except GraphCompileError as error:
            name = list(stack.values())[-1][0] if stack else ""
            where = f"module {name!r}" if name else "the model's own forward()"
            raise GraphCompileError(f"{where}: {error}") from error
        if stack:
            numbers = range(first, torch._C._autograd._get_sequence_nr())
            self.origins.update(dict.fromkeys(numbers, stack))
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "out" in kwargs:  # spectral_norm keeps its vectors so
            raise GraphCompileError(
                f"{target} writes its result into a given tensor (`out=`), which has no "
                "translation; in place of spectral_norm use weight_norm, or train with torch"
            )
        if target is aten.batch_norm.default:
            return batch_norm(*args, **kwargs)
        if target is aten.instance_norm.default:
            return instance_norm(*args, **kwargs)
        if target is aten.one_hot.default:
            return one_hot(*args, **kwargs)
        if target in LAYERS:
            return _recurrent(self.trains, LAYERS[target], *args, **kwargs)
        if target is aten.unfold.default:
            return windows(*args)
        if target in ADAPTIVE:
            return adaptive_max_pool(*args)
        if target is aten.pad.default and "circular" in args:
            return circular_pad(*args[:2])
        return super().call_function(target, args, kwargs)


def _recurrent(
    trains: bool,
    kind: str,
    x: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    _layers: int,
    _dropout: float,
    _train: bool,
    _bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Run one recurrent layer in one direction: tracing leaves no others."""
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    return recurrent_layer(
        kind,
        x,
        states,
        params,
        has_biases=has_biases,
        batch_first=batch_first,
        trains=trains,
    )


class _TrainingRun(_Run):
    """Runs a forward pass and notes the mean and variance that each BatchNorm sees."""

    trains = True

    def outputs(self, given: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        self._seen: dict[tuple[int, int], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        return super().outputs(given)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.batch_norm.default and args[5] and args[3] is not None:
            x = args[0].detach()
            _, mean, _, var = normalise(x, None, None, args[7])
            self._seen.setdefault((id(args[3]), id(args[4])), []).append(
                (x[0, 0].numel(), mean, var)
            )
        return super().call_function(target, args, kwargs)

    def moments(self) -> SeenMoments:
        """Return mean and variance, by the arrays they are kept in.

        A layer that runs several times in a pass sees all of its inputs as one batch.
        """
        found = {}
        for places, seen in self._seen.items():
            if len(seen) == 1:
                found[places] = seen[0][1:]
                continue
            positions = sum(count for count, _, _ in seen)
            mean = torch.stack([own * (count / positions) for count, own, _ in seen]).sum(0)
            squares = [(var + (own - mean) ** 2) * (n / positions) for n, own, var in seen]
            found[places] = (mean, torch.stack(squares).sum(0))
        return found


def _name_backward(loss: torch.Tensor, origins: dict[int, dict[str, Any]]) -> None:
    """Make the operators of each backward step remember the module it belongs to."""

    def remember(number: int) -> Callable[[Any], None]:
        return lambda _: fx.traceback.get_current_meta().update(
            nn_module_stack=origins.get(number, {})
        )

    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
            node.register_prehook(remember(node._sequence_nr()))
