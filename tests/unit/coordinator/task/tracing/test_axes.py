"""Which widths are found, what an atom is, and what stays whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.task.tracing.trace import trace_plan
from tests.unit.coordinator.task.tracing.oracle import RATIOS, traced
from tests.unit.coordinator.task.tracing.zoo import MODELS

LENET = {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84}
RESNET18 = {
    "0": 16, "3.conv1": 16, "4.conv1": 16, "5.conv1": 16, "5.conv2": 16, "6.conv1": 16,
    "7.conv1": 16, "7.conv2": 16, "8.conv1": 16, "9.conv1": 16, "9.conv2": 16, "10.conv1": 16,
}  # fmt: skip
ENCODER = {
    f"encoder.layers.{n}.{part}": atoms
    for n in range(2)
    for part, atoms in (("self_attn", 4), ("linear1", 24))
}

MOBILENET = {
    **{"0": 32, "3.block.0": 128, "4.block.0": 128, "4.block.6": 64},
    **{"5.block.0": 256, "6.block.0": 256, "6.block.6": 96, "7": 256},
}

AXES: dict[str, dict[str, int]] = {
    "mlp": {"1": 200, "3": 200},
    "mlp-200": {"1": 200},
    "mlp-2048": {"1": 2048, "3": 2048},
    "lenet-28": LENET,
    "lenet-32": LENET,
    "lenet-dropout": LENET,
    "cnn": {"0": 32, "3": 64, "7": 128},
    # 64 channels behind "11" go through a convolution with 8 groups: 8 atoms
    "depthwise-cnn": {"0": 16, "5": 32, "11": 8},
    "cnn-5x5": {"0": 32, "3": 64, "7": 512},
    "separable-cnn": {"0": 32, "6": 64, "12": 128, "18": 128},
    # a stream of channels for each width, the inside of each block, and the head
    "mobilenet": MOBILENET,
    "text": {"embedding": 64, "hidden": 64},
    "news": {"embedding": 64, "hidden": 64},
    "sensor-cnn": {"0": 32, "3": 64, "7": 64},
    # one axis for each residual stream, one for the inside of each block; an atom is a norm group
    "resnet18-gn": RESNET18,
    "resnet-bn": {"0": 16, "3.conv1": 16, "4.conv1": 32, "4.conv2": 32},
    "resnet-gn": {"0": 4, "3.conv1": 4, "4.conv1": 4, "4.conv2": 4},
    # the stream is LayerNorm'd; heads and the hidden layers of the MLPs are widths
    "vit-small": {
        f"blocks.{n}.{part}": atoms for n in range(4) for part, atoms in (("qkv", 4), ("fc1", 128))
    },
    "multihead": {"attention": 4, "attention.out_proj": 32},
    "encoder": ENCODER,
    "encoder-norm-first": ENCODER,
    "attention-manual": {"q": 4},
    "attention-unfused": {"q": 4},
    "squeeze-excite": {"conv": 16, "squeeze": 8},
    "channel-shuffle": {"first": 4, "pointwise": 8},
    "shuffled-units": {"first": 4},
    "bilinear": {"hidden": 12},
    "glu-chunk": {"up": 16},
    "glu-split": {"up": 16},
    "embedding-mean": {"embedding": 32, "hidden": 12},
    "positions": {"embedding": 32, "hidden": 12},
    "tied-weights": {"embedding": 32, "hidden": 12},
    "instance-norm": {"0": 8, "3": 12},
    "prelu": {"0": 8, "3": 12},
    "called-twice": {"first": 32},
    "shared-norm": {"0": 16},
    "partly-frozen": {"0": 16, "2": 12},
    "residual-mlp": {"0": 16},
    "layer-norm-mlp": {"1.inner.1": 12},
    "concatenated": {"left": 8, "right": 8, "hidden": 12},
    "dense-blocks": {"stem": 8, "grow": 12, "squeeze": 8},
    # of the two further pieces of `wide`, no weight shows one alone: the other stays whole
    "pieces": {"gate": 8, "stem": 4, "stem#2": 12, "part": 4, "wide": 8},
    "shuffled-branches": {"left": 8},
    "cells": {"lstm": 12, "gru": 8, "tanh": 8, "tanh#2": 8, "relu": 8},
    "lstm": {"lstm": 10, "hidden": 12},
    # two layers of two directions, each with its own width
    "gru": {"gru": 5, "gru#2": 5, "gru#3": 5, "gru#4": 5, "hidden": 12},
    "batch-norm-tokens": {"hidden": 12},
    "group-norm-tokens": {"hidden": 12},
    "instance-norm-tokens": {"hidden": 12},
    "pooled-units": {"hidden": 12},
    "shifted-channels": {"second": 12},
    "squeezed": {"first": 4},
    "class-token": {"token": 16},
    "attention-einsum": {"qkv": 4, "out": 32},
    "writes-input": {"first": 8},
    "repeated": {"0": 12, "6": 12},
    "autoencoder": {"0": 8, "2": 12},
}

WHOLE = None
Cut = tuple[str, int, int] | None
"""Axis, repeats outside an atom, elements inside an atom."""

Segments = list[tuple[str | None, int, int]]
"""Axis, size and elements inside an atom of every segment."""

_EVERY: Segments = [("stem", 8, 1), ("grow", 12, 1), ("squeeze", 8, 1), (None, 3, 1)]
DIMENSIONS: dict[tuple[str, str], tuple[Cut | Segments, ...]] = {
    ("mlp", "1.weight"): (("1", 1, 1), WHOLE),  # an input of the model
    ("mlp", "3.weight"): (("3", 1, 1), ("1", 1, 1)),
    ("mlp", "5.weight"): (WHOLE, ("3", 1, 1)),  # class scores
    ("mlp", "5.bias"): (WHOLE,),
    ("lenet-28", "conv2.weight"): (("conv2", 1, 1), ("conv1", 1, 1), WHOLE, WHOLE),
    ("lenet-28", "fc1.weight"): (("fc1", 1, 1), ("conv2", 1, 16)),  # behind a 4 × 4 image
    ("cnn", "7.weight"): (("7", 1, 1), ("3", 1, 64)),
    ("sensor-cnn", "7.weight"): (("7", 1, 1), ("3", 1, 8)),
    ("depthwise-cnn", "2.weight"): (("0", 1, 1), WHOLE, WHOLE, WHOLE),
    ("depthwise-cnn", "14.weight"): (("11", 1, 8), WHOLE, WHOLE, WHOLE),
    ("depthwise-cnn", "12.running_var"): (("11", 1, 8),),
    ("depthwise-cnn", "12.num_batches_tracked"): (),
    ("text", "embedding.weight"): (WHOLE, ("embedding", 1, 1)),
    ("resnet-gn", "0.weight"): (("0", 1, 4), WHOLE, WHOLE, WHOLE),
    ("resnet-gn", "4.shortcut.0.weight"): (("4.conv2", 1, 8), ("0", 1, 4), WHOLE, WHOLE),
    ("vit-small", "blocks.2.qkv.weight"): (("blocks.2.qkv", 3, 16), WHOLE),
    ("vit-small", "blocks.2.proj.weight"): (WHOLE, ("blocks.2.qkv", 1, 16)),
    ("vit-small", "positions"): (WHOLE, WHOLE, WHOLE),
    ("vit-small", "norm.weight"): (WHOLE,),
    ("multihead", "attention.in_proj_weight"): (("attention", 3, 8), WHOLE),
    ("encoder", "encoder.layers.1.self_attn.in_proj_bias"): (("encoder.layers.1.self_attn", 3, 8),),
    ("encoder", "encoder.layers.0.linear2.weight"): (WHOLE, ("encoder.layers.0.linear1", 1, 1)),
    ("encoder", "encoder.layers.0.norm1.weight"): (WHOLE,),
    ("attention-manual", "v.weight"): (("q", 1, 8), WHOLE),
    ("attention-unfused", "k.bias"): (("q", 1, 8),),
    ("squeeze-excite", "excite.weight"): (("conv", 1, 1), ("squeeze", 1, 1)),
    ("channel-shuffle", "grouped.weight"): (("first", 1, 6), WHOLE, WHOLE, WHOLE),
    ("channel-shuffle", "depthwise.weight"): (("first", 6, 1), WHOLE, WHOLE, WHOLE),
    ("glu-chunk", "up.weight"): (("up", 2, 1), WHOLE),
    ("positions", "table"): (WHOLE, ("embedding", 1, 1)),
    ("tied-weights", "embedding.weight"): (WHOLE, ("embedding", 1, 1)),
    ("prelu", "1.weight"): (("0", 1, 1),),
    ("prelu", "4.weight"): (WHOLE,),
    ("called-twice", "shared.weight"): (("first", 1, 1), ("first", 1, 1)),
    ("residual-mlp", "2.inner.0.weight"): (("0", 1, 1), ("0", 1, 1)),
    ("shared-norm", "3.weight"): (("0", 1, 1), ("0", 1, 1)),
    ("partly-frozen", "0.weight"): (("0", 1, 1), WHOLE),
    ("partly-frozen", "4.weight"): (WHOLE, ("2", 1, 1)),
    ("layer-norm-mlp", "0.weight"): (WHOLE, WHOLE),
    ("concatenated", "left.weight"): (("left", 1, 1), WHOLE),
    ("concatenated", "hidden.weight"): (("hidden", 1, 1), [("left", 8, 1), ("right", 8, 1)]),
    ("dense-blocks", "norm.running_var"): ([("stem", 8, 1), ("grow", 12, 1)],),
    ("dense-blocks", "mix.weight"): (_EVERY, _EVERY, WHOLE, WHOLE),
    ("dense-blocks", "head.weight"): (
        WHOLE,
        [("stem", 32, 4), ("grow", 48, 4), ("squeeze", 32, 4), (None, 12, 1)],
    ),
    ("bilinear", "first.weight"): (WHOLE, WHOLE),
    ("lstm", "lstm.weight_ih_l0"): (("lstm", 4, 1), WHOLE),
    ("lstm", "lstm.weight_hh_l0"): (("lstm", 4, 1), ("lstm", 1, 1)),
    ("lstm", "lstm.bias_hh_l0"): (("lstm", 4, 1),),
    ("lstm", "hidden.weight"): (("hidden", 1, 1), ("lstm", 1, 1)),
    ("gru", "gru.weight_hh_l0"): (("gru", 3, 1), ("gru", 1, 1)),
    ("gru", "gru.weight_ih_l1"): (("gru#3", 3, 1), [("gru", 5, 1), ("gru#2", 5, 1)]),
    ("gru", "gru.weight_hh_l1_reverse"): (("gru#4", 3, 1), ("gru#4", 1, 1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_axes_of_model(name: str) -> None:
    plan = traced(name)[1].plan
    assert {axis.name: axis.atoms for axis in plan.axes} == AXES[name]
    for axis in plan.axes:
        assert len(axis.groups) == 4
        assert max(axis.groups) - min(axis.groups) <= 1


@pytest.mark.parametrize(("name", "tensor"), DIMENSIONS)
def test_dimensions_of_tensor(name: str, tensor: str) -> None:
    plan = traced(name)[1].plan
    (found,) = (each for each in (*plan.tensors, *plan.buffers) if each.name == tensor)
    cuts = tuple(
        [
            (None if each.axis is None else plan.axes[each.axis].name, each.size, each.inner)
            for each in dim.segments
        ]
        if dim.segments
        else None
        if dim.axis is None
        else (plan.axes[dim.axis].name, dim.outer, dim.inner)
        for dim in found.dims
    )
    assert cuts == DIMENSIONS[name, tensor]


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_what_is_trained(name: str) -> None:
    """Once each, by their first name; all else is a buffer."""
    model, trace = traced(name)
    named = dict(model.named_parameters())
    trained = {key: tuple(each.shape) for key, each in named.items() if each.requires_grad}
    fixed = {key for key, each in named.items() if not each.requires_grad}
    assert {tensor.name: tensor.shape for tensor in trace.plan.tensors} == trained
    buffers = {buffer.name for buffer in trace.plan.buffers}
    assert buffers == fixed | {key for key, _ in model.named_buffers()}


def test_reasons_of_what_stayed_whole() -> None:
    """Of hidden widths alone: inputs, outputs, kernels and what has an axis need no reason."""
    normed = "it is normalised over as a whole (layer_norm, module '1.inner.0')"
    reasons = traced("layer-norm-mlp")[1].reasons
    assert reasons[:2] == (f"0.weight, dimension 0: {normed}", f"0.bias, dimension 0: {normed}")
    assert f"1.inner.1.weight, dimension 1: {normed}" in reasons
    assert not any("1.inner.1.weight, dimension 0" in reason for reason in reasons)
    for name in ("concatenated", "dense-blocks", "mlp", "lenet-28", "text", "autoencoder"):
        assert traced(name)[1].reasons == ()


@pytest.mark.parametrize(
    "activation",
    [
        *(nn.CELU(), nn.ELU(), nn.GELU(), nn.Hardshrink(), nn.Hardsigmoid(), nn.Hardswish()),
        *(nn.Hardtanh(), nn.LeakyReLU(), nn.LogSigmoid(), nn.Mish(), nn.ReLU6(), nn.SELU()),
        *(nn.SiLU(), nn.Softplus(), nn.Softshrink(), nn.Softsign(), nn.Tanhshrink()),
        *(nn.Threshold(0.1, 0.2), nn.Threshold(0.1, 0.2, inplace=True), nn.ReLU6(inplace=True)),
    ],
    ids=str,
)
def test_axes_behind_activation(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3))
    plan = trace_plan(model, torch.randn(2, 6), groups=np.int64(4))
    assert [(axis.name, axis.groups) for axis in plan.axes] == [("0", (2, 2, 2, 2))]


BATCH_NORMS = {"depthwise-cnn": (3, 6, 9, 12), "shared-norm": (1,), "instance-norm": (1,)}


@pytest.mark.parametrize("name", [*BATCH_NORMS, "positions", "partly-frozen"])
def test_statistics_are_the_buffers_that_training_moves(name: str) -> None:
    plan = traced(name)[1].plan
    norms = BATCH_NORMS.get(name, ())
    wanted = {f"{norm}.running_{moment}" for norm in norms for moment in ("mean", "var")}
    assert {buffer.name for buffer in plan.buffers if buffer.statistic} == wanted


def test_groups_fewer_where_atoms_are_few() -> None:
    plan = traced("encoder", 64)[1].plan
    heads, hidden = (axis.groups for axis in plan.axes[:2])
    assert heads == (1, 1, 1, 1)
    assert hidden == (1,) * 24
    units = traced("mlp", 64)[1].plan.axes[0].groups
    assert (units.count(4), units.count(3), len(units)) == (8, 56, 64)  # 200 units


def test_groups_by_ratios() -> None:
    plan = traced("mlp", RATIOS)[1].plan
    assert [axis.groups for axis in plan.axes] == [(10, 20, 40, 60, 70)] * 2
    heads, hidden = (axis.groups for axis in traced("encoder", RATIOS)[1].plan.axes[:2])
    assert heads == (1, 1, 1, 1)
    assert sum(hidden) == 24
    exact = (1.2, 2.4, 4.8, 7.2, 8.4)
    assert all(abs(got - want) < 1 for got, want in zip(hidden, exact, strict=True))


PLANS_THAT_COULD_WAVER = ("lenet-28", "encoder", "attention-manual", "shuffled-units", "bilinear")


def test_plan_is_the_same_in_another_process() -> None:
    code = (
        "from tracing.zoo import MODELS; from coordinator.task.tracing.trace import trace_plan\n"
        f"for name in {PLANS_THAT_COULD_WAVER}:\n"
        "    print(trace_plan(MODELS[name].model(), MODELS[name].inputs(3), groups=4).hash)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    families = [MODELS[name] for name in PLANS_THAT_COULD_WAVER]
    # neither weights nor the size of the example decide anything
    again = [trace_plan(family.model(8), family.inputs(1), groups=4).hash for family in families]
    assert output.split() == again
    assert again == [traced(name)[1].plan.hash for name in PLANS_THAT_COULD_WAVER]
