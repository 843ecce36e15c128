"""Bytes of activations: what the manifest says against traces and against the runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from coordinator.graphs.gradient import target_example, trace_gradient

from .oracle import LEVELS, Compiled, compiled, feeds_of

NAMES = ["mlp", "cnn", "depthwise-cnn", "text", "resnet-bn", "vit-small"]


def traced_bytes(made: Compiled, kept: tuple[int, ...], batch: int) -> int:
    """The same sum over a trace at exactly this size; scattering takes a tensor of zeros more."""
    graph = trace_gradient(made.task, target_example(made.task, None), kept, batch).graph
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
    model = onnx.load_from_string(made.graphs.files[entry.sha256])
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
def test_activation_bytes_are_those_of_a_trace_at_that_size(name: str) -> None:
    made = compiled(name)
    for level in LEVELS:
        kept = made.task.plan.kept_atoms(made.task.plan.choose(made.groups(level, seed=0)))
        for batch in (3, 8):
            entry = made.graphs.manifest.pick("gradient", kept, batch)
            said = entry.activation_bytes(kept, batch)
            assert said == traced_bytes(made, kept, entry.batch or batch) > 0


@pytest.mark.parametrize("name", NAMES)
def test_activation_bytes_bound_what_lives_at_once(name: str) -> None:
    made = compiled(name)
    for level in LEVELS:
        groups = made.groups(level, seed=0)
        kept = made.task.plan.kept_atoms(made.task.plan.choose(groups))
        bound = made.entry("gradient", groups, 8).activation_bytes(kept, 8)
        assert 0 < live_bytes(made, level, 8) <= bound
