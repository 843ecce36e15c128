"""Values that a graph can compute in several ways: each equals autograd, and can be cut out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from benchmarks.models import Family
from coordinator.task.graphs import check, compilation
from coordinator.task.graphs.errors import WrongGraphError
from coordinator.task.graphs.onnx.operators import blocked
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.codec import fitted, graph_opsets
from edge_sdk.protocol.task.graphs import CONTRIBUTED, GraphEntry
from tests.unit.coordinator.task.graphs.oracle import (
    Compiled,
    assert_close,
    autograd,
    compile_family,
    feeds_of,
)

SIDE = (8, 10)


class Between(nn.Module):
    """A layer between a convolution, whose channels are a width, and a head."""

    def __init__(self, layer: nn.Module, channels: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels, 1)
        self.layer = layer
        out = layer(torch.zeros(1, channels, *SIDE))
        self.head = nn.Linear(out[0].numel(), 3)
        assert out.shape[1] == after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        found: torch.Tensor = self.head(torch.tanh(self.layer(self.first(x))).flatten(1))
        return found


def compiled(layer: Callable[[], nn.Module], channels: int = 16, after: int = 16) -> Compiled:
    return compile_family(Family(lambda: Between(layer(), channels, after), (2, *SIDE), 3))


def run(
    made: Compiled, level: float, batch: int, ways: dict[str, str]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The gradient graph's outputs in these ways, and autograd's."""
    groups = made.groups(level, seed=1)
    feeds = feeds_of(made, groups, batch, seed=batch)
    entry = made.entry("gradient", groups, batch)
    plan = made.task.plan
    kept = plan.kept_atoms(plan.choose(groups))
    data = fitted(entry, made.graphs.files[entry.sha256], kept, batch, ways)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in entry.outputs]
    values = session.run(names, {port.name: feeds[port.name] for port in entry.inputs})
    return dict(zip(names, values, strict=True)), autograd(made.task, groups, feeds)


def gradient_of(made: Compiled) -> GraphEntry:
    return made.entry("gradient", made.task.plan.all_groups(), 16)


LAYERS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "plain": (lambda: nn.Conv2d(16, 16, 3, padding=1), {"blocked", "samples"}),
    "wide-kernel": (lambda: nn.Conv2d(16, 16, 5, padding=2), {"blocked", "samples"}),
    "uneven": (lambda: nn.Conv2d(16, 16, (3, 2), padding=(0, 1)), {"blocked", "samples"}),
    "strided": (lambda: nn.Conv2d(16, 16, 3, 2, 1, bias=False), {"blocked", "samples"}),
    "left-over": (lambda: nn.Conv2d(16, 16, 3, 3), {"blocked", "samples"}),
    "pointwise": (lambda: nn.Conv2d(16, 16, 1), {"products"}),
    "skipping": (lambda: nn.Conv2d(16, 16, 1, 2), {"products"}),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), {"blocked"}),
    "depthwise-uneven": (lambda: nn.Conv2d(16, 16, (5, 3), groups=16, bias=False), {"blocked"}),
    "depthwise-strided": (lambda: nn.Conv2d(16, 16, 3, 2, 1, groups=16), {"blocked"}),
    "depthwise-left-over": (lambda: nn.Conv2d(16, 16, 2, 3, groups=16), {"blocked"}),
    "dilated": (lambda: nn.Conv2d(16, 16, 3, padding=2, dilation=2), {"samples"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_way_equals_autograd(name: str) -> None:
    layer, kinds = LAYERS[name]
    made = compiled(layer)
    places = [place for place in gradient_of(made).places if place.name.startswith("layer")]
    assert {way.name for place in places for way in place.options[1:]} == kinds
    for place in places:
        for option in place.options[1:]:
            for level, batch in ((1.0, 16), (0.5, 4)):
                got, wanted = run(made, level, batch, {place.name: option.name})
                assert_close(got, wanted)


def test_first_layer_with_few_channels_has_a_blocked_way() -> None:
    made = compiled(nn.Identity)
    assert gradient_of(made).places[0].name == "first weight gradient"  # pointwise: no blocks
    family = Family(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(16 * 36, 3)
        ),
        (3, 6, 6),
        3,
    )
    made = compile_family(family)
    ways = {place.name: place.options[-1].name for place in gradient_of(made).places}
    assert ways == {"0 forward": "blocked", "0 weight gradient": "blocked"}
    assert_close(*run(made, 0.5, 8, ways))


def test_sizes_that_fill_no_blocks_take_the_default() -> None:
    """A batch of 3 with 8 channels are 24 images of one channel, which is no multiple of 16."""
    made = compiled(LAYERS["depthwise"][0])
    entry = gradient_of(made)
    ways = {place.name: "blocked" for place in entry.places}
    usual = {place.options[0].name for place in entry.places if "layer" in place.name}
    for batch, wanted in ((3, usual), (4, {"blocked"})):
        taken = dict(zip(entry.places, entry.options(ways, (8,), batch), strict=True))
        assert {way.name for at, way in taken.items() if "layer" in at.name} == wanted
        assert_close(*run(made, 0.5, batch, ways))


def test_channels_that_are_never_aligned_have_no_blocked_way() -> None:
    made = compiled(lambda: nn.Conv2d(16, 6, 3), after=6)
    entry = gradient_of(made)
    groups = made.groups(1.0, seed=1)
    kept = made.task.plan.kept_atoms(made.task.plan.choose(groups))
    ways = {place.name: "blocked" for place in entry.places}
    assert "blocked" not in {way.name for way in entry.options(ways, kept, 16)}


def test_default_file_is_standard_and_others_import_what_they_use() -> None:
    made = compiled(LAYERS["plain"][0])
    entry = gradient_of(made)
    file = made.graphs.files[entry.sha256]
    usual = fitted(entry, file, (16, 16), 16)
    assert graph_opsets(usual)[1] == {"": 18}
    onnx.checker.check_model(onnx.load_from_string(usual), full_check=True)
    blocked = fitted(entry, file, (16, 16), 16, {"layer forward": "blocked"})
    assert graph_opsets(blocked)[1] == {"": 18, **CONTRIBUTED}
    samples = fitted(entry, file, (16, 16), 16, {"layer weight gradient": "samples"})
    assert graph_opsets(samples)[1] == {"": 18}


def test_only_graphs_that_train_have_ways() -> None:
    made = compiled(LAYERS["plain"][0])
    assert {entry.kind: bool(entry.places) for entry in made.graphs.manifest.graphs} == {
        "gradient": True,
        "evaluate": False,
    }


def test_same_place_twice_has_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.hidden = nn.Linear(4 * 36, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.hidden(torch.tanh(self.conv(self.conv(x))).flatten(1))
            found: torch.Tensor = self.head(torch.tanh(hidden))
            return found

    entry = gradient_of(compile_family(Family(Twice, (4, 6, 6), 3)))
    names = [place.name for place in entry.places if "forward" in place.name]
    assert names == ["conv forward", "conv forward 2"]


def test_wrong_way_is_refused_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def doubled(builder: Any, filters: str, *rest: Any) -> str:
        found = usual(builder, filters, *rest)
        return str(builder.emit("Add", found, found))

    usual = blocked._filled
    monkeypatch.setattr(blocked, "_filled", doubled)
    with caplog.at_level(logging.WARNING):
        made = compiled(LAYERS["plain"][0])
    assert "default ways alone" in caplog.text
    assert "differs from torch" in caplog.text
    entry = gradient_of(made)
    assert not entry.places
    assert not entry.slots
    groups = made.groups(0.5, seed=1)
    feeds = feeds_of(made, groups, 4)
    assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


def test_way_that_works_at_no_checked_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "WAYS_BATCH", 3)
    seen: list[str] = []

    def kept(task: Any, entry: GraphEntry, data: bytes) -> float:
        try:
            return check.check_ways(task, entry, data)
        except WrongGraphError as error:
            seen.append(str(error))
            raise

    monkeypatch.setattr(compilation, "check_ways", kept)
    made = compiled(lambda: nn.Conv2d(8, 8, 3, groups=8), 8, 8)  # 24 images: not 16, nor 32
    assert not gradient_of(made).places
    assert any("cannot be checked" in text for text in seen)


def test_norm_leaves_the_statistics_it_was_given_alone() -> None:
    """onnxruntime writes new statistics over the old ones, which here are the caller's arrays."""
    family = Family(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
        ),
        (2, 6, 6),
        3,
    )
    made = compile_family(family)
    groups = made.groups(1.0, seed=0)
    feeds = feeds_of(made, groups, 5)
    before = {name: np.array(array) for name, array in feeds.items()}
    assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))
    for name, array in before.items():
        np.testing.assert_array_equal(feeds[name], array, err_msg=name)
