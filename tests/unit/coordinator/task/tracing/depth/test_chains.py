"""Which residual blocks of a graph make a chain, and why others do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import TransformerBlock, resnet
from coordinator.errors import TraceError
from coordinator.task.tracing.capture.calls import make_call
from coordinator.task.tracing.capture.capture import TRACE_BATCH, capture
from coordinator.task.tracing.depth.chains import find_chains
from coordinator.task.tracing.trace import trace_plan

WIDTH = 4


class Residual(nn.Module):
    """x + f(x), with one hidden layer."""

    def __init__(self, hidden: int = 6, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(x)))) * self.scale
        return out


class Plain(Residual):
    """The same without the shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class PostNorm(Residual):
    """The norm behind the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(x))
        return out


class Cast(Residual):
    """A type that it has already, as stock language models say once more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float32)


class Parallel(Residual):
    """Two branches from one value."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.other(x)
        return out


class Stack(nn.Module):
    """Blocks between two layers."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


class Leaky(Stack):
    """The value between the second and the third block is used at the end, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                kept = x
        out: Tensor = self.last(x + kept)
        return out


class Gated(Stack):
    """All blocks use a value that is computed once, before them."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x.sum(1, keepdim=True))
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x) * gate
        out: Tensor = self.last(x)
        return out


def alternating() -> nn.Module:
    """Two kinds of blocks in turn, as windows that are shifted and not."""
    return Stack(*(Residual(6 if number % 2 else 5) for number in range(6)))


def shared() -> nn.Module:
    """One block that runs three times."""
    return Stack(*[Residual()] * 3)


def encoder(norm_first: bool) -> Callable[[], nn.Module]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, 0.0, batch_first=True, norm_first=norm_first)
    return lambda: nn.Sequential(
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Flatten(), nn.Linear(8, 2)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[list[str]]]] = {
    "residual": (lambda: Stack(*(Residual() for _ in range(4))), (WIDTH,), [["0", "1", "2", "3"]]),
    "post-norm": (lambda: Stack(*(PostNorm() for _ in range(3))), (WIDTH,), [["0", "1", "2"]]),
    "cast": (lambda: Stack(*(Cast() for _ in range(3))), (WIDTH,), [["0", "1", "2"]]),
    "parallel": (lambda: Stack(*(Parallel() for _ in range(3))), (WIDTH,), [["0", "1", "2"]]),
    "plain": (lambda: Stack(*(Plain() for _ in range(3))), (WIDTH,), []),
    "shared": (shared, (WIDTH,), []),
    "alternating": (alternating, (WIDTH,), [["0", "2", "4"]]),
    "two kinds": (
        lambda: Stack(Residual(5), Residual(5), Residual(), Residual(), Residual()),
        (WIDTH,),
        [["0", "1"], ["2", "3", "4"]],
    ),
    "one alone": (lambda: Stack(Residual(), Plain(), Residual()), (WIDTH,), []),
    "leaky": (
        lambda: Leaky(*(Residual() for _ in range(5))),
        (WIDTH,),
        [["0", "1"], ["2", "3", "4"]],
    ),
    "gated": (lambda: Gated(*(Plain() for _ in range(3))), (WIDTH,), [["0", "1", "2"]]),
    "dropout of its own": (
        lambda: Stack(Residual(dropout=0.1), Residual(dropout=0.1), Residual(dropout=0.2)),
        (WIDTH,),
        [["0", "1"]],
    ),
    "pre-norm encoder": (encoder(norm_first=True), (2, WIDTH), [["0", "1", "2"]]),
    "post-norm encoder": (encoder(norm_first=False), (2, WIDTH), [["0", "1", "2"]]),
    "resnet": (lambda: resnet(nn.BatchNorm2d, (4, 8), 3), (3, 8, 8), [["3", "4", "5"], ["7", "8"]]),
}


@pytest.mark.parametrize("name", CASES)
def test_chain_is_a_run_of_blocks_that_can_stand_for_one_another(name: str) -> None:
    make, shape, wanted = CASES[name]
    model = make()
    example = make_call(model, torch.randn(2, *shape), None).tiled(TRACE_BATCH)
    captured = capture(model, example, train=True)
    found = []
    for chain in find_chains(captured):
        parts = [names[0].split(".") for names in chain.names(captured)]
        (number,) = (column for column in zip(*parts, strict=True) if len(set(column)) > 1)
        found.append(list(number))
        assert len({len(names) for names in chain.names(captured)}) == 1
    assert found == wanted


def test_swin_like_blocks_go_together_in_pairs() -> None:
    """Names of both blocks of a pair differ from pair to pair; stacks keep their own names."""
    plan = trace_plan(alternating(), torch.randn(2, WIDTH), regions="depth")
    assert [(axis.name, axis.groups) for axis in plan.axes] == [("blocks", (1, 1, 1))]
    stacks = {tensor.name: tensor.members for tensor in plan.tensors if tensor.members}
    assert stacks["blocks.*.up.weight"] == tuple(f"blocks.{n}.up.weight" for n in (0, 2, 4))
    assert stacks["blocks.*.up.weight#2"] == tuple(f"blocks.{n}.up.weight" for n in (1, 3, 5))


def test_chain_of_more_blocks_than_an_axis_has_groups_is_two_axes() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(2) for _ in range(66))
            self.last = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            for scale in self.scales:
                x = x + torch.tanh(x * scale)
            out: Tensor = self.last(x)
            return out

    plan = trace_plan(Scales(), torch.randn(2, 2), regions="depth")
    found = [(axis.name, len(axis.groups)) for axis in plan.axes]
    assert found == [("scales", 64), ("scales#2", 2)]
    assert [tensor.shape for tensor in plan.tensors] == [(64, 2), (2, 2), (2, 2), (2,)]


@pytest.mark.parametrize("regions", ["depth", "both"])
def test_model_without_a_chain_is_refused_with_the_cure(regions: str) -> None:
    with pytest.raises(TraceError, match=r'no chain of residual blocks.*use regions = "width"'):
        trace_plan(Stack(Plain(), Plain()), torch.randn(2, WIDTH), groups=2, regions=regions)  # type: ignore[arg-type]


def test_blocks_that_differ_in_a_constant_are_named() -> None:
    model = Stack(Residual(dropout=0.1), Residual(dropout=0.2))
    with pytest.raises(TraceError, match=r"dropout, module 'blocks.0.dropout'.*0\.1.*and.*0\.2"):
        trace_plan(model, torch.randn(2, WIDTH), regions="depth")


def test_regions_and_groups_are_checked_before_anything_is_traced() -> None:
    model, example = Stack(Residual(), Residual()), torch.randn(2, WIDTH)
    with pytest.raises(TraceError, match="regions are width, depth, both, not 'height'"):
        trace_plan(model, example, groups=2, regions="height")  # type: ignore[arg-type]
    for regions in ("width", "both"):
        with pytest.raises(TraceError, match="give either groups"):
            trace_plan(model, example, regions=regions)


def test_widths_of_twins_are_one_axis() -> None:
    model = nn.Sequential(
        *(TransformerBlock(8, 2, 12) for _ in range(3)), nn.Flatten(), nn.Linear(16, 2)
    )
    plan = trace_plan(model, torch.randn(2, 2, 8), groups=2, regions="both")
    assert [(axis.name, axis.groups, axis.depth) for axis in plan.axes] == [
        ("*.qkv", (1, 1), False),
        ("*.fc1", (6, 6), False),
        ("blocks", (1, 1, 1), True),
    ]
    assert plan.regions == "both"
