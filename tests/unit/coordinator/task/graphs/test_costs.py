"""Costs: what the manifest says against hand counts, torch's own counter, traces, the runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.gradient import trace_gradient
from coordinator.task.task import make_task
from edge_sdk.protocol.plan.specs import Tensor
from tests.unit.coordinator.task.graphs.oracle import LEVELS, Compiled, CompiledModel, feeds_of

NAMES = ["mlp", "cnn", "depthwise-cnn", "text", "resnet-bn", "vit-small"]


def traced_bytes(made: Compiled, kept: tuple[int, ...], batch: int) -> int:
    """The same sum over a trace at exactly this size; scattering takes a tensor of zeros more."""
    traced = trace_gradient(made.task, kept, batch)
    graph = traced.graph
    given: Any = graph.output_node().args[0]
    graph.output_node().args = (given[: len(traced.outputs)],)  # without those of statistics
    graph.eliminate_dead_code()
    nodes = list(graph.nodes)
    outputs = set(nodes[-1].all_input_nodes)
    total = 0
    for node in nodes:
        if node.op == "call_function" and "getitem" not in str(node.target):
            value = node.meta["val"]
            name = str(node.target)
            times = int(node not in outputs)
            if "backward" in name and ("embedding" in name or "max_pool" in name):
                times += 1
            for part in [value] if isinstance(value, torch.Tensor) else value:
                if part is not None and part.is_floating_point():
                    total += times * part.nelement() * part.element_size()
    return total


def live_bytes(made: Compiled, level: float, batch: int) -> int:
    """The most bytes of floats that live at once when the runtime goes node by node."""
    groups = made.groups(level, seed=0)
    feeds = feeds_of(made, groups, batch)
    entry = made.entry("gradient", groups, batch)
    model = onnx.load_from_string(made.file(entry, groups))
    outputs = {value.name for value in model.graph.output}
    # An output is an Identity of what was computed, which the runtime does not copy.
    named = {n.input[0] for n in model.graph.node if n.op_type == "Identity"} - outputs
    order = [[name for name in node.output if name] for node in model.graph.node]
    between = [name for names in order for name in names if name not in outputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in between)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = session.run(between, {port.name: feeds[port.name] for port in entry.inputs})
    sizes = {
        name: value.nbytes
        for name, value in zip(between, values, strict=True)
        if np.issubdtype(value.dtype, np.floating) and name not in named
    }
    last = {name: at for at, node in enumerate(model.graph.node) for name in node.input}
    live, peak = 0, 0
    for at, (names, node) in enumerate(zip(order, model.graph.node, strict=True)):
        live += sum(sizes.get(name, 0) for name in names)
        peak = max(peak, live)
        live -= sum(sizes.get(name, 0) for name in set(node.input) if last[name] == at)
        live -= sum(sizes.get(name, 0) for name in names if name not in last)
    assert live == 0
    return peak


@pytest.mark.parametrize("name", NAMES)
def test_activation_bytes_are_those_of_a_trace_at_that_size(
    name: str, compiled: CompiledModel
) -> None:
    made = compiled(name)
    for level in LEVELS:
        kept = made.task.plan.kept_atoms(made.task.plan.choose(made.groups(level, seed=0)))
        for batch in (3, 8):
            entry = made.graphs.manifest.pick("gradient", kept, batch)
            said = entry.activation_bytes(kept, batch)
            assert said == traced_bytes(made, kept, entry.batch or batch) > 0


@pytest.mark.parametrize("name", NAMES)
def test_activation_bytes_bound_what_lives_at_once(name: str, compiled: CompiledModel) -> None:
    made = compiled(name)
    for level in LEVELS:
        groups = made.groups(level, seed=0)
        kept = made.task.plan.kept_atoms(made.task.plan.choose(groups))
        bound = made.entry("gradient", groups, 8).activation_bytes(kept, 8)
        assert 0 < live_bytes(made, level, 8) <= bound


def counted_macs(made: Compiled, kept: tuple[int, ...], batch: int) -> tuple[int, int]:
    """(evaluation, loss with gradients): half of what torch's counter of flops sees go by."""
    task, plan = made.task, made.task.plan

    def empty(tensor: Tensor) -> torch.Tensor:
        return torch.ones([dim.at(kept) for dim in tensor.dims], dtype=getattr(torch, tensor.dtype))

    weights = [empty(tensor).requires_grad_() for tensor in plan.tensors]
    buffers = [empty(buffer) for buffer in plan.buffers]
    inputs = [made.family.inputs(batch)]
    scales = [torch.ones(()) for _ in plan.axes]
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            task.traced.evaluate.at(kept, batch)(weights, buffers, inputs, scales)
        with FlopCounterMode(display=False) as step:
            program = task.train_program.at(kept, batch, True)
            masks = [torch.ones(shape) for _, shape in program.masks]
            outputs = program(weights, buffers, inputs, scales, masks)
            loss = task.loss(outputs, torch.zeros(batch, dtype=torch.int64)).mean()
            torch.autograd.grad(loss, weights, allow_unused=True)
    return forward.get_total_flops() // 2, step.get_total_flops() // 2


# torch's counter takes the weight gradient of a grouped convolution for that of a full one.
@pytest.mark.parametrize("name", [*(n for n in NAMES if n != "depthwise-cnn"), "autoencoder"])
def test_macs_are_those_that_torch_counts(name: str, compiled: CompiledModel) -> None:
    made = compiled(name)
    plan, manifest = made.task.plan, made.graphs.manifest
    for level, batch in zip(LEVELS, (5, 8), strict=True):
        kept = plan.kept_atoms(plan.choose(made.groups(level, seed=0)))
        cost = manifest.cost_at(plan, level, batch)
        assert (cost.forward_macs, cost.step_macs) == counted_macs(made, kept, batch)
        assert cost.weight_bytes == 4 * plan.cost_at(level).parameters


def test_macs_of_an_mlp_by_hand() -> None:
    """Forward once, each weight's gradient once, each input's but the batch's once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    task = make_task(model, torch.zeros(2, 7), groups=2)
    cost = compile_graphs(task).manifest.cost_at(task.plan, 0.5, 10)
    first, second, third = 7 * 3, 3 * 2, 2 * 3
    assert cost.forward_macs == 10 * (first + second + third)
    assert cost.step_macs == 10 * (2 * first + 3 * second + 3 * third)
    assert cost.weight_bytes == 4 * (first + 3 + second + 2 + third + 3)


def test_macs_of_convolutions_by_hand() -> None:
    """3×3 kernels on 6×5 places; a kernel a channel there; 2×2 on each place, transposed."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.ConvTranspose2d(4, 2, 2, 2),
        nn.Flatten(),
        nn.Linear(240, 5),
    )
    task = make_task(model, torch.zeros(2, 3, 8, 7), groups=2)
    cost = compile_graphs(task, levels=(0.5,)).manifest.cost_at(task.plan, 0.5, 3)
    places = 6 * 5
    first, own, second, third = (2 * places) * 27, (2 * places) * 9, (2 * places) * 4, 120 * 5
    assert cost.forward_macs == 3 * (first + own + second + third)
    assert cost.step_macs == 3 * (2 * first + 3 * own + 3 * second + 3 * third)
