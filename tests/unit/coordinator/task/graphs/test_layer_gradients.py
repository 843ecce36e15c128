"""Gradients of convolutions, pooling and products on each way they are translated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import Family, mlp
from tests.unit.coordinator.task.graphs.oracle import (
    Compiled,
    assert_close,
    autograd,
    compile_family,
    feeds_of,
)


class Layers(nn.Module):
    """A convolution to some channels, the layer in question, classes."""

    def __init__(self, channels: int, layer: nn.Module, side: tuple[int, int]) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels, 1)
        self.layer = layer
        features = layer(torch.zeros(1, channels, *side)).numel()
        self.head = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.flatten(self.layer(self.first(x)), 1))
        return out


def compiled(
    layer: Callable[[int], nn.Module], channels: int = 4, side: tuple[int, int] = (8, 9)
) -> Compiled:
    return compile_family(Family(lambda: Layers(channels, layer(channels), side), (2, *side), 3))


def operators(made: Compiled) -> Counter[str]:
    """Count the operators of the gradient graph in its default ways."""
    groups = made.task.plan.all_groups()
    model = onnx.load_from_string(made.file(made.entry("gradient", groups, 3), groups))
    return Counter(node.op_type for node in model.graph.node)


def assert_gradients_equal(made: Compiled) -> None:
    for level, batch in ((1.0, 3), (0.5, 5)):
        groups = made.groups(level, seed=batch)
        feeds = feeds_of(made, groups, batch, seed=batch)
        assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation", "products"),
    [
        (4, 3, 1, 1, 1, 3),  # three positions make 12 rows
        (16, (2, 3), 1, 0, 1, 6),  # every position alone
        (4, (3, 2), (2, 3), (1, 0), 1, 1),  # all together; strides that do not divide the image
        (4, 3, 1, 2, 2, 3),
        (4, 1, 2, 0, 1, 0),  # within each sample
        (4, 6, 1, 0, 1, 0),  # 36 positions: a convolution
    ],
)
def test_convolution_gradient_equals_autograd(
    channels: int,
    kernel: int | tuple[int, int],
    stride: int | tuple[int, int],
    padding: int | tuple[int, int],
    dilation: int,
    products: int,
) -> None:
    made = compiled(lambda c: nn.Conv2d(c, 4, kernel, stride, padding, dilation), channels)
    others = 1  # the head's forward pass
    assert operators(made)["Gemm"] == others + products
    assert_gradients_equal(made)


@pytest.mark.parametrize(
    ("kernel", "side", "tiled"),
    [
        (2, (8, 6), True),
        ((1, 3), (5, 9), True),
        ((3, 2), (9, 4), True),
        (2, (7, 6), False),  # a row is left over
        (4, (8, 8), False),  # 16 places: too many to compare one by one
        (1, (4, 4), False),
    ],
)
def test_pooling_gradient_equals_autograd(
    kernel: int | tuple[int, int], side: tuple[int, int], tiled: bool
) -> None:
    made = compiled(lambda _: nn.MaxPool2d(kernel), side=side)
    found = operators(made)
    assert found["MaxUnpool"] == tiled
    loss = 1  # the class that is right
    assert found["ScatterElements"] == loss + (not tiled)
    assert_gradients_equal(made)


@pytest.mark.parametrize("kernel", [2, (1, 3), (3, 1), (2, 3), (4, 4)])
def test_pooling_gradient_goes_to_the_first_of_equals(kernel: int | tuple[int, int]) -> None:
    """Sums of two small whole numbers tie often, and from different numbers.

    Which of them is taken shows in the gradient of the convolution that adds them.
    """
    made = compiled(lambda _: nn.MaxPool2d(kernel), side=(12, 12))
    groups = made.task.plan.all_groups()
    feeds = feeds_of(made, groups, 6)
    rng = np.random.default_rng(1)
    feeds["x0"] = rng.integers(0, 3, feeds["x0"].shape).astype(np.float32)
    feeds["w:first.weight"] = np.ones_like(feeds["w:first.weight"])
    feeds["w:first.bias"] = np.zeros_like(feeds["w:first.bias"])
    assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


class Products(nn.Module):
    """Two matrices of one's own, which no transpose follows, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 24).reshape(4, 6))
        self.second = nn.Parameter(torch.linspace(1, -1, 48).reshape(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(torch.tanh(x @ self.first) @ self.second))
        return out


def test_matrix_gradient_equals_autograd() -> None:
    assert_gradients_equal(compile_family(Family(Products, (4,), 3)))


def test_linear_gradient_is_not_transposed(tmp_path: Path) -> None:
    """Whatever is transposed in the file, onnxruntime can make part of a product."""
    made = compile_family(Family(lambda: mlp(4, 6, 8, 3), (4,), 3))
    entry = made.entry("gradient", made.task.plan.all_groups(), 3)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(
        made.graphs.files[entry.sha256], options, providers=["CPUExecutionProvider"]
    )
    optimised = onnx.load(tmp_path / "optimised.onnx")
    found = Counter(node.op_type for node in optimised.graph.node)
    assert found["FusedMatMul"] == 3
    assert found["Transpose"] == 0
