"""Capture a torch module as an ATen graph with `torch.export`, at a batch size we choose."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.weight_norm import WeightNorm

from coordinator.errors import TraceError
from coordinator.task.tracing.capture.calls import Call, calling
from coordinator.task.tracing.capture.recurrent import WholeLayers, split_layers
from coordinator.task.tracing.capture.simplify import simplify

TORCH, TRACING = Path(torch.__file__).parent, Path(__file__).parent.parent

TRACE_BATCH = 11
"""Batch size for tracing: a prime, so that no reshape can split it unnoticed."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph and the meaning of its placeholders.

    Parameters with `requires_grad=False` are not trained, so they count as buffers.
    """

    graph: fx.Graph
    weights: dict[str, fx.Node]
    buffers: dict[str, fx.Node]
    constants: dict[fx.Node, torch.Tensor]
    inputs: list[fx.Node]


def capture(model: torch.nn.Module, call: Call, *, train: bool) -> Captured:
    """Trace the model in training or evaluation mode. The model itself is not changed."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(train)
    try:
        # On failure torch prints its graph to stderr, and logs, before it raises.
        with (
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),
            _quiet_torch(),
            WholeLayers(),
        ):
            # nn.LSTM and similar modules rebuild a list of weights on every call; it is harmless.
            warnings.filterwarnings("ignore", message="The tensor attributes? .*_flat_weights")
            if _computes_weights(model):
                warnings.filterwarnings("ignore", message="The tensor attributes? .*assigned")
            with calling(model, call):
                exported = torch.export.export(model, call.arguments, call.keywords, strict=False)
            simplify(exported.graph_module)
    except TraceError:
        raise
    except Exception as error:  # torch.export may raise anything; it is reported, not hidden
        raise TraceError(
            f"the model cannot be traced: {type(error).__name__} in {_place_of(error, model)}: "
            f"{first_line(error)}{_hint(error)}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    return _sort_placeholders(exported, named_arrays(model), call.names)


def named_arrays(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name; tied ones appear under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)


def check_arrays(model: torch.nn.Module, call: Call) -> None:
    """Raise `TraceError` for weights, buffers or inputs that have no usable values."""
    given = (("the example", tensor) for tensor in call.tensors)
    for name, array in (*named_arrays(model).items(), *given):
        if isinstance(array, (UninitializedParameter, UninitializedBuffer)):
            raise TraceError(f"{name!r} is not initialised yet; run the model once on a batch")
        if array.is_meta:
            raise TraceError(f"{name!r} is on the meta device and has no values; load them first")
        if array.dtype is torch.bfloat16 and not array.requires_grad:
            raise TraceError(f"{name!r} is bfloat16; convert it with .float()")


def _sort_placeholders(
    exported: torch.export.ExportedProgram,
    arrays: Mapping[str, torch.Tensor],
    keywords: Sequence[str],
) -> Captured:
    weights: dict[str, fx.Node] = {}
    buffers: dict[str, fx.Node] = {}
    constants, inputs = {}, []
    first_names: dict[int, str] = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            array = arrays[spec.target]
            kind = weights if array.requires_grad else buffers
            name = first_names.setdefault(id(array), spec.target)
            if name in kind:  # torch.export uses the last of a tied tensor's names
                exported.graph.erase_node(kind[name])
            kind[name] = node
        elif spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            constants[node] = exported.constants[spec.target]
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        else:
            raise TraceError(f"the model has an input that cannot be traced: {spec}")
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    if not isinstance(output.args[0][0], fx.Node):
        raise TraceError("forward() returns a constant: its output does not depend on its input")
    if keywords:  # torch.export orders keywords as forward() declares them
        by_name = {str(node.target): node for node in inputs}
        inputs = [by_name[name] for name in keywords]
    split_layers(exported.graph)
    # Discarded results (nn.MultiheadAttention's averaged maps) must not decide what can be
    # narrowed. In-place operators stay.
    exported.graph.eliminate_dead_code()
    return Captured(exported.graph, weights, buffers, constants, inputs)


def _computes_weights(model: torch.nn.Module) -> bool:
    """Tell whether hooks compute weights before each call, as torch's older weight_norm does."""
    return any(
        isinstance(hook, WeightNorm)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


@contextmanager
def _quiet_torch() -> Iterator[None]:
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    heard = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    parent = logging.getLogger("torch")
    level = parent.level
    parent.setLevel(logging.CRITICAL)  # for loggers that are made meanwhile
    for logger in heard:
        logger.disabled = True  # setting a level clears the caches of all loggers
    try:
        yield
    finally:
        parent.setLevel(level)
        for logger in heard:
            logger.disabled = False


def _hint(error: BaseException) -> str:
    if not isinstance(error, GuardOnDataDependentSymNode):
        return ""
    return (
        "\nforward() makes a decision based on a tensor's values (an `if`, a loop, .item(), or "
        "indexing by a condition); use torch.where, or multiply by the condition"
    )


def _place_of(error: BaseException, model: torch.nn.Module) -> str:
    """Name the model's innermost module that was running, and its line of code if known."""
    names = {id(module): name for name, module in model.named_modules()}
    found, line, inside = "", "", False
    trace: Any = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if id(owner) in names:
            found, inside = names[id(owner)] or found, True
        file = Path(trace.tb_frame.f_code.co_filename)
        # The model's own code runs below a module's call, and torch's and ours below that.
        others = file.is_relative_to(TORCH) or file.is_relative_to(TRACING)
        if inside and not others and file.exists():
            line = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return (f"module {found!r}" if found else "the model's own forward()") + line
