"""Trace a task into plain operators: loss, gradients and new statistics at one size.

torch differentiates; its own decompositions then reduce the result to few kinds of operators.
Nothing is computed: the tensors are fake and only their shapes matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.task import Task
from coordinator.task.tracing.program import SubmodelForward
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim
from edge_sdk.protocol.task.data_spec import ArraySpec
from edge_sdk.train.torch import distilled, masked

aten = torch.ops.aten

KeptSizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph of plain operators at one size; names follow placeholder and output order."""

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    masks: tuple[float, ...]
    constants: dict[str, torch.Tensor]
    """Values of inputs that are constants made in forward()."""


def trace_gradient(
    task: Task, kept: KeptSizes, batch: int, *, distils: bool = False, class_masks: bool = False
) -> Traced:
    """Trace loss, gradients and new statistics of the submodel with `kept` atoms per axis.

    `distils`: a wider model's outputs have a share in its targets, and its own are given.
    `class_masks`: scores of classes can be left out.
    """
    plan = task.plan
    forward = task.train_program.at(kept, batch, True)
    statistics = [index for index, buffer in enumerate(plan.buffers) if buffer.statistic]

    def gradient(arguments: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        def objective(weights: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            buffers = [buffer.clone() for buffer in arguments["buffers"]]
            run = _Run(forward.module)
            outputs = run.outputs({**arguments, "weights": weights, "buffers": buffers})
            if class_masks:
                outputs = masked(outputs, *arguments["classes"])
            losses = task.loss(outputs, arguments["batch"][0])
            if distils:
                losses = distilled(losses, outputs, *arguments["teacher"])
            mean = weighted_mean(losses, arguments["batch"][1])
            _name_backward(mean, run.origins)
            new = [buffers[index] for index in statistics]
            return mean, [*new, outputs] if distils else new

        grads, (loss, new) = torch.func.grad_and_value(objective, has_aux=True)(
            arguments["weights"]
        )
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
    return Traced(graph, inputs, outputs, masks, _constants(forward))


def trace_statistics(task: Task, kept: KeptSizes, batch: int) -> Traced | None:
    """Trace the moments that every BatchNorm sees in training mode; None if there is no BatchNorm.

    Outputs come in pairs: a layer's mean over the batch, then its variance (divided by n).
    """
    plan = task.plan
    forward = task.train_program.at(kept, batch, True)
    names: list[str] = []

    def statistics(arguments: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        run = _StatisticsRun(forward.module)
        run.outputs(arguments)
        found = run.moments(arguments["buffers"])
        names[:] = [f"n:{plan.buffers[index].name}" for index, _ in found]
        return [value for _, value in found]

    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = _arguments(task, forward, kept, batch)
    graph = _trace(statistics, arguments)
    if not names:
        return None
    masks = tuple(probability for probability, _ in forward.masks)
    return Traced(graph, _names(plan, arguments), tuple(names), masks, _constants(forward))


def trace_evaluation(task: Task, kept: KeptSizes, batch: int) -> Traced:
    """Trace the outputs of the submodel in evaluation mode."""
    forward = task.traced.evaluate.at(kept, batch, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = _arguments(task, forward, kept, batch)
    graph = _trace(lambda given: [_Run(forward.module).outputs(given)], arguments)
    return Traced(graph, _names(task.plan, arguments), ("outputs",), (), _constants(forward))


def weighted_mean(losses: torch.Tensor, sample_weights: torch.Tensor) -> torch.Tensor:
    """Σ wᵢ lᵢ / Σ wᵢ."""
    return (losses * sample_weights).sum() / sample_weights.sum()


def _trace(
    function: Callable[[dict[str, list[torch.Tensor]]], list[torch.Tensor]],
    arguments: dict[str, list[torch.Tensor]],
) -> fx.Graph:
    functional = torch.func.functionalize(function, remove="mutations_and_views")
    traced = make_fx(functional, tracing_mode="fake", decomposition_table=_decompositions())
    # Fused kernels for attention and recurrent layers have no plain form; the textbook ones do.
    with sdpa_kernel(SDPBackend.MATH), _without_mkldnn(), fx.traceback.preserve_node_meta():
        try:
            graph: fx.Graph = traced(arguments).graph
        except GraphCompileError as error:
            # fx appends the whole node to the text of whatever is raised.
            raise GraphCompileError(str(error).partition("\n")[0]) from error
        except Exception as error:  # torch may raise anything here; it is reported, not hidden
            reason = str(error).strip().partition("\n")[0] or repr(error)
            raise GraphCompileError(f"torch cannot differentiate the task: {reason}") from error
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


def _arguments(
    task: Task, forward: SubmodelForward, kept: KeptSizes, batch: int
) -> dict[str, list[torch.Tensor]]:
    plan = task.plan

    def empty(dims: Sequence[Dim], dtype: str) -> torch.Tensor:
        sizes = [
            dim.size if dim.axis is None else dim.outer * kept[dim.axis] * dim.inner for dim in dims
        ]
        return torch.empty(sizes, dtype=getattr(torch, dtype))

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
    tracing would lose the change; here they are written out in operators that do declare it.
    """

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
        if target is aten.batch_norm.default:
            return _batch_norm(*args, **kwargs)
        if target is aten.instance_norm.default:
            return _instance_norm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


class _StatisticsRun(_Run):
    """Runs a forward pass and notes the mean and variance that each BatchNorm computes."""

    def outputs(self, given: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        self._seen: dict[tuple[int, int], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        return super().outputs(given)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.batch_norm.default and args[5] and args[3] is not None:
            x, weight, bias, running_mean, running_var, _, _, eps = args[:8]
            out, mean, _, var = _normalise(x, weight, bias, eps)
            self._seen.setdefault((id(running_mean), id(running_var)), []).append(
                (x[0, 0].numel(), mean, var)
            )
            return out
        return super().call_function(target, args, kwargs)

    def moments(self, buffers: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Return (number of the buffer, value) in pairs of mean and variance.

        A layer that runs several times in a pass sees all of its inputs as one batch.
        """
        numbers = {id(buffer): number for number, buffer in enumerate(buffers)}
        found = []
        for (first, second), seen in self._seen.items():
            positions = sum(count for count, _, _ in seen)
            mean = torch.stack([own * (count / positions) for count, own, _ in seen]).sum(0)
            squares = [(var + (own - mean) ** 2) * (n / positions) for n, own, var in seen]
            var = torch.stack(squares).sum(0)
            found += [(numbers[first], mean), (numbers[second], var)]
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


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = False,
) -> torch.Tensor:
    if training:
        if mean is None or var is None:
            out = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
        else:
            out = aten._native_batch_norm_legit.default(
                x, weight, bias, mean, var, True, momentum, eps
            )
        first: torch.Tensor = out[0]
        return first
    if mean is None or var is None:
        raise GraphCompileError("BatchNorm without running statistics cannot be evaluated")
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * scale.reshape(shape) + shift.reshape(shape)


def _instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = False,
) -> torch.Tensor:
    if not use_input_stats:
        return _batch_norm(x, weight, bias, mean, var, False, momentum, eps)
    dims = list(range(2, x.ndim))
    own_mean = x.mean(dims, keepdim=True)
    centred = x - own_mean
    own_var = (centred * centred).mean(dims, keepdim=True)
    out = centred * torch.rsqrt(own_var + eps)
    shape = [1, -1] + [1] * (x.ndim - 2)
    if weight is not None:
        out = out * weight.reshape(shape)
    if bias is not None:
        out = out + bias.reshape(shape)
    if mean is not None and var is not None:
        # New statistics are the mean over samples of each sample's own.
        count = x[0, 0].numel()
        new_var = own_var.detach().mean(0).flatten() * (count / (count - 1))
        mean.copy_(momentum * own_mean.detach().mean(0).flatten() + (1 - momentum) * mean)
        var.copy_(momentum * new_var + (1 - momentum) * var)
    return out


def _batch_norm_functional(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    _training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """torch's decomposition, with n / (n − 1) computed in the graph because n follows the batch."""
    out, mean, rstd, var = _normalise(x, weight, bias, eps)
    count = torch.full((), float(x.numel() // x.shape[1]))
    unbiased = var * (count / (count - 1))
    new_mean = momentum * mean + (1 - momentum) * running_mean
    new_var = momentum * unbiased + (1 - momentum) * running_var
    return out, mean, rstd, new_mean, new_var


def _batch_norm_no_stats(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _training: bool,
    _momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return _normalise(x, weight, bias, eps)[:3]


def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1] + [1] * (x.ndim - 2)
    mean = x.mean(dims)
    centred = x - mean.reshape(shape)
    var = (centred * centred).mean(dims)
    rstd = torch.rsqrt(var + eps)
    scale = rstd if weight is None else rstd * weight
    out = centred * scale.reshape(shape)
    if bias is not None:
        out = out + bias.reshape(shape)
    return out, mean, rstd, var


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: int,
    channels: int,
    _pixels: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """torch's decomposition, without its use of strides."""
    parts = x.reshape(batch, groups, -1)
    mean = parts.mean(2, keepdim=True)
    centred = parts - mean
    rstd = torch.rsqrt((centred * centred).mean(2, keepdim=True) + eps)
    out = (centred * rstd).reshape(x.shape)
    shape = [1, channels] + [1] * (x.ndim - 2)
    if weight is not None:
        out = out * weight.reshape(shape)
    if bias is not None:
        out = out + bias.reshape(shape)
    return out, mean.reshape(batch, groups), rstd.reshape(batch, groups)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.softmax(x, dim, dtype=dtype)


def _adaptive_max_pool(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool windows of one size; the image must be a multiple of the output."""
    kernel = _window(x, sizes)
    values, indices = aten.max_pool2d_with_indices.default(x, kernel, kernel)
    return values, indices


def _adaptive_max_pool_backward(
    grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    kernel = _window(x, grad.shape[-2:])
    found: torch.Tensor = aten.max_pool2d_with_indices_backward.default(
        grad, x, kernel, kernel, [0, 0], [1, 1], False, indices
    )
    return found


def _window(x: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    image = list(x.shape[-2:])
    if any(size % out for size, out in zip(image, sizes, strict=True)):
        raise GraphCompileError(
            f"adaptive_max_pool2d from {image} to {list(sizes)}: windows of different sizes have "
            "no translation"
        )
    return [size // out for size, out in zip(image, sizes, strict=True)]


def _upsample_nearest(x: torch.Tensor, sizes: list[int], *_scales: float | None) -> torch.Tensor:
    """Repeat every pixel; the output must be a multiple of the image."""
    times = _repeats(x.shape[2:], sizes)
    split = [part for size in x.shape[2:] for part in (size, 1)]
    whole = [part for size, n in zip(x.shape[2:], times, strict=True) for part in (size, n)]
    pixels = x.reshape(*x.shape[:2], *split).expand(*x.shape[:2], *whole)
    return pixels.reshape(*x.shape[:2], *sizes)


def _upsample_nearest_backward(
    grad: torch.Tensor, _sizes: list[int], shape: list[int], *_scales: float | None
) -> torch.Tensor:
    times = _repeats(shape[2:], grad.shape[2:])
    whole = [part for size, n in zip(shape[2:], times, strict=True) for part in (size, n)]
    return grad.reshape(*shape[:2], *whole).sum([3 + 2 * i for i in range(len(times))])


def _repeats(image: Sequence[int], sizes: Sequence[int]) -> list[int]:
    if any(out % size for size, out in zip(image, sizes, strict=True)):
        raise GraphCompileError(
            f"interpolation from {list(image)} to {list(sizes)}: only whole multiples can be "
            "translated"
        )
    return [out // size for size, out in zip(image, sizes, strict=True)]


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    more = [
        aten.gelu,
        aten.native_layer_norm,
        aten.silu,
        aten.hardswish,
        aten.hardsigmoid,
        aten.leaky_relu,
        aten.elu,
        aten.log_sigmoid_forward,
        aten.softplus,
        aten.mish,
        aten.std,
        aten.std_mean,
        aten.linalg_vector_norm,
    ]
    table.update(get_decompositions(more))
    by_hand = (
        aten.embedding_dense_backward,
        aten.select_backward,
        aten.slice_backward,
        aten.avg_pool2d_backward,
    )
    for packet in by_hand:
        table.pop(packet.default, None)
    table[aten._native_batch_norm_legit_functional.default] = _batch_norm_functional
    table[aten._native_batch_norm_legit.no_stats] = _batch_norm_no_stats
    table[aten.adaptive_max_pool2d.default] = _adaptive_max_pool
    table[aten.adaptive_max_pool2d_backward.default] = _adaptive_max_pool_backward
    for forward, backward in (
        (aten.upsample_nearest1d, aten.upsample_nearest1d_backward),
        (aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
    ):
        table.pop(forward.vec, None)  # torch's own rule leads to the other overload
        table[forward.default] = _upsample_nearest
        table[backward.default] = _upsample_nearest_backward
    table[aten.native_group_norm.default] = _group_norm
    table[aten._safe_softmax.default] = _safe_softmax
    return table
