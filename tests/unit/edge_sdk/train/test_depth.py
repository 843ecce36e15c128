"""Blocks left out, by both backends, against the whole module with identities in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

from benchmarks.models import Family, ViT, resnet
from coordinator.masks.policies.static import StaticMasks
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.observer import Observer
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.delivering import Delivering
from edge_sdk.device.service.participation import LoadedTask
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan, Regions
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job, Trained
from edge_sdk.train.delivered import Model, read_delivered
from edge_sdk.train.inference import Predictor
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.unit.coordinator.task.graphs.oracle import compiled_once
from tests.unit.coordinator.task.tracing.oracle import roughen
from tests.unit.edge_sdk.train import dense

Choice = dict[str, tuple[int, ...]]
LEVELS = (1.0, 0.67)
"""Three blocks and two; one block always has a graph."""

TOLERANCE = 1e-5
"""Of the largest number, after a few steps: the same terms in another order."""


class Encoder(nn.Module):
    """torch's own encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.2, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(x).mean(1))
        return out


FAMILIES: dict[str, tuple[Family, Regions]] = {
    "vit": (Family(lambda: ViT(8, 4, 8, 3, 2, 12, 3), (3, 8, 8), 3), "both"),
    "resnet": (Family(lambda: resnet(nn.BatchNorm2d, (4,), 3), (3, 6, 6), 10), "depth"),
    "encoder": (Family(Encoder, (4, 8), 3), "depth"),
}
NAMES = ["vit", "resnet"]


@cache
def made(name: str) -> tuple[nn.Module, Task]:
    family, regions = FAMILIES[name]
    model = roughen(family.model(seed=1), seed=2)
    return model, make_task(model, family.inputs(2), groups=2, regions=regions)


CompiledModel = Callable[[str], CompiledGraphs]


@pytest.fixture(scope="module")
def compiled(shared: Path) -> CompiledModel:
    return cache(lambda name: compiled_once(made(name)[1], shared, levels=LEVELS))


def choices(plan: ModelPlan) -> list[Choice]:
    """Two of three blocks, all of them; and one of two groups of every width, at random."""
    rng = np.random.default_rng(5)
    found = []
    for blocks in ((0, 2), (1, 2), (0, 1, 2)):
        widths: Choice = {
            axis.name: (int(rng.integers(2)),) for axis in plan.axes if not axis.depth
        }
        found.append({**widths, "blocks": blocks})
    return found


def with_identities(model: nn.Module, blocks: tuple[int, ...]) -> nn.Module:
    """A copy of the module that has other blocks replaced by identities."""
    other = copy.deepcopy(model)
    chain = other.blocks if isinstance(other, ViT) else other
    first = 0 if isinstance(other, ViT) else 3
    assert isinstance(chain, nn.Sequential)
    for number in set(range(3)) - set(blocks):
        chain[first + number] = nn.Identity()
    return other


def masks_of(plan: ModelPlan, choice: Choice, dense_model: nn.Module) -> dict[str, Array]:
    """By the module's names, True where the submodel has the element."""
    masks: dict[str, Array] = {}
    for tensor in plan.tensors:
        held = dense.held(plan, tensor, choice)
        masks |= (
            dict(zip(tensor.members, held, strict=True)) if tensor.members else {tensor.name: held}
        )
    return {name: masks[name] for name, _ in dense_model.named_parameters()}


def in_plan(task: Task, found: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of a module with identities, as the plan has them; zeros for what is not there."""
    plan = task.plan
    names = {n for t in (*plan.tensors, *plan.buffers) for n in (t.members or (t.name,))}
    everything = plan.unstacked({**task.weights, **task.buffers})
    return plan.stacked({name: found.get(name, np.zeros_like(everything[name])) for name in names})


def assert_close(got: Mapping[str, Array], wanted: Mapping[str, Array], what: str) -> None:
    assert set(got) == set(wanted)
    largest = max(np.abs(array).max() for array in wanted.values())
    assert largest > 1e-3, "nothing happened: it shows nothing"
    for name, array in wanted.items():
        np.testing.assert_allclose(
            got[name], array, rtol=0, atol=TOLERANCE * largest, err_msg=f"{what}: {name}"
        )


def backends(name: str, graphs: CompiledGraphs) -> dict[str, Backend]:
    _, task = made(name)
    return {
        "torch": TorchBackend(task),
        "onnx": OnnxBackend(task.plan, graphs.manifest, graphs.files),
    }


def batches_of(name: str, sizes: tuple[int, ...]) -> list[Batch]:
    family, rng = FAMILIES[name][0], np.random.default_rng(3)
    return [
        Batch((family.inputs(size, seed=step).numpy(),), rng.integers(family.classes, size=size))
        for step, size in enumerate(sizes)
    ]


def train(backend: Backend, name: str, choice: Choice, rule: LocalRule, *widths: Choice) -> Trained:
    _, task = made(name)
    job = Job(
        groups=choice,
        weights=task.plan.cut(task.weights, choice),
        buffers=task.plan.cut_buffers(task.buffers, choice),
        rule=rule,
        mask_stream=stream(4, "masks"),
        widths=widths,
        width_stream=stream(4, "widths"),
    )
    return backend.train(job, batches_of(name, (6, 6, 4)))


@pytest.mark.parametrize("name", NAMES)
def test_submodel_computes_the_model_with_identities(name: str, compiled: CompiledModel) -> None:
    model, task = made(name)
    plan, graphs = task.plan, compiled(name)
    predictor = Predictor(plan, graphs.manifest, graphs.files)
    for choice in choices(plan):
        other = with_identities(model, choice["blocks"]).eval()
        masks = masks_of(plan, choice, other)
        inputs = FAMILIES[name][0].inputs(5, seed=7)
        with torch.no_grad():
            for key, parameter in other.named_parameters():
                parameter.mul_(torch.from_numpy(masks[key]))
            wanted = {"outputs": other(inputs).numpy()}
        arrays = plan.cut(task.weights, choice), plan.cut_buffers(task.buffers, choice)
        for runtime in (task.traced, predictor):
            got = runtime.predict(*arrays, [inputs.numpy()], groups=choice)
            assert_close({"outputs": got}, wanted, type(runtime).__name__)


@pytest.mark.parametrize(
    "rule",
    [
        LocalRule(learning_rate=0.05, rescale=0),
        LocalRule(learning_rate=0.05, momentum=0.9, weight_decay=0.02, sam_radius=0.1, rescale=0),
    ],
    ids=["plain", "SAM"],
)
@pytest.mark.parametrize("name", NAMES)
def test_training_moves_what_the_model_with_identities_moves(
    name: str, rule: LocalRule, compiled: CompiledModel
) -> None:
    model, task = made(name)
    plan, graphs = task.plan, compiled(name)
    for choice in choices(plan)[1:]:
        other = with_identities(model, choice["blocks"])
        result = dense.train(
            other, masks_of(plan, choice, other), rule, batches_of(name, (6, 6, 4))
        )
        moved = in_plan(task, {**result.movement, **result.buffers})
        wanted = plan.cut({each.name: moved[each.name] for each in plan.tensors}, choice)
        buffers = plan.cut_buffers({each.name: moved[each.name] for each in plan.buffers}, choice)
        statistics = {each.name: buffers[each.name] for each in plan.buffers if each.statistic}
        for kind, backend in backends(name, graphs).items():
            got = train(backend, name, choice, rule)
            assert_close(got.movement, wanted, kind)
            assert got.metrics.first_loss == pytest.approx(result.losses[0], rel=1e-5)
            if statistics:
                assert_close(got.statistics, statistics, kind)


@pytest.mark.parametrize("widths", ["ordered-dropout", "sandwich"])
def test_steps_with_fewer_blocks_train_them_alone(widths: str, compiled: CompiledModel) -> None:
    """Ordered dropout by depth: three blocks are assigned, and two of them trained in turn."""
    rule = LocalRule(learning_rate=0.05, rescale=0, widths=widths)  # type: ignore[arg-type]
    _, task = made("resnet")
    whole: Choice = {"blocks": (0, 1, 2)}
    fewer: Choice = {"blocks": (0, 2)}
    got = {
        kind: train(backend, "resnet", whole, rule, fewer)
        for kind, backend in backends("resnet", compiled("resnet")).items()
    }
    assert_close(got["onnx"].movement, got["torch"].movement, widths)
    own = train(TorchBackend(task), "resnet", whole, LocalRule(learning_rate=0.05, rescale=0))
    assert any((got["torch"].movement[n] != own.movement[n]).any() for n in own.movement)


def test_dropout_masks_are_those_of_the_blocks_that_stay(compiled: CompiledModel) -> None:
    graphs = compiled("encoder")
    counts = {
        entry.kept: len(entry.masks) for entry in graphs.manifest.graphs if entry.kind == "gradient"
    }
    assert counts == {(3,): 12, (2,): 8, (1,): 4}
    rule = LocalRule(learning_rate=0.05)
    got = [
        train(each, "encoder", {"blocks.layers": (1, 2)}, rule).movement
        for each in backends("encoder", graphs).values()
    ]
    assert_close(got[1], got[0], "with dropout")


def test_cost_shrinks_by_whole_blocks(compiled: CompiledModel) -> None:
    """In the plan and in the graphs: what a block costs is the same for every block."""
    _, task = made("encoder")
    plan, manifest = task.plan, compiled("encoder").manifest
    parameters = [plan.submodel_parameters({"blocks.layers": tuple(range(n))}) for n in (1, 2, 3)]
    macs = [plan.submodel_macs({"blocks.layers": tuple(range(n))}) for n in (1, 2, 3)]
    one = sum(p.numel() for p in Encoder().blocks.layers[0].parameters())
    assert np.diff(parameters).tolist() == [one, one]
    assert macs[2] - macs[1] == macs[1] - macs[0] > 0
    three, two = (manifest.cost_at(plan, level, 8) for level in LEVELS)
    assert three.weight_bytes - two.weight_bytes == 4 * one
    assert three.forward_macs is not None
    assert two.forward_macs is not None
    assert three.forward_macs - two.forward_macs == 8 * (macs[2] - macs[1])
    assert three.activation_bytes > two.activation_bytes


def test_level_without_a_graph_is_rounded_down_to_one_with(compiled: CompiledModel) -> None:
    """A device may name any level; what it bids can be weighed, and what it gets be trained."""
    _, task = made("encoder")
    plan, graphs = task.plan, compiled("encoder")
    left = tuple(entry for entry in graphs.manifest.graphs if entry.kept != (2,))
    manifest = replace(graphs.manifest, graphs=left)
    backend = OnnxBackend(plan, manifest, graphs.files)
    rule = LocalRule(learning_rate=0.05)
    with pytest.raises(GraphError, match=r"no gradient graph fits widths \[2\].*widths \[3\]"):
        train(backend, "encoder", {"blocks.layers": (0, 2)}, rule)
    owner = Policy(level=0.9, levels=(0.75, 0.1))
    config = DeviceConfig(task="toy", name="pi", policy=owner)
    policy = LoadedTask(backend, manifest).fitted(config).policy
    assert policy.offered_levels() == (1 / 3, 0.1)
    for level in policy.offered_levels():
        assert manifest.cost_at(plan, level, 8).step_macs > 0
        groups = StaticMasks().groups_at(plan, level)
        assert groups == {"blocks.layers": (0,)}
        assert train(backend, "encoder", groups, rule).movement
    whole = LoadedTask(OnnxBackend(plan, graphs.manifest, graphs.files), graphs.manifest)
    assert whole.fitted(config) == config


def test_model_with_open_widths_is_delivered_with_its_graph(
    compiled: CompiledModel, tmp_path: Path
) -> None:
    _, task = made("vit")
    plan, graphs, groups = task.plan, compiled("vit"), choices(task.plan)[0]
    weights, buffers = plan.cut(task.weights, groups), plan.cut_buffers(task.buffers, groups)

    class Source:
        def fetch_level(self, _survey: Survey, _number: int) -> tuple[Blocks, dict[str, Array]]:
            return plan.scatter(weights, groups), buffers

    notice = ModelNotice(
        round=1,
        plan_hash=plan.hash,
        levels=(0.67,),
        groups=(groups,),
        accuracies=(None,),
        rescale=0.0,
        run="0123456789abcdef",
        model=Blob(1, (bytes(16),)),
    )
    (batch,) = batches_of("vit", (6,))
    delivering = Delivering(tmp_path, most=1.0, margin=0.02)
    assert delivering.deliver(
        notice,
        task="toy",
        plan=plan,
        manifest=graphs.manifest,
        graphs=lambda: graphs.files,
        source=Source(),
        data=ArrayData(batch.inputs, batch.targets),
        observer=Observer(Policy()),
        should_stop=lambda: False,
    )
    held = read_delivered(delivering.path)
    assert len(held.graphs) == 1  # that of two blocks, and no other
    predictor = Predictor(plan, graphs.manifest, graphs.files)
    wanted = predictor.predict(weights, buffers, batch.inputs, groups=groups)
    np.testing.assert_allclose(Model(tmp_path, held)(*batch.inputs), wanted, rtol=1e-5, atol=1e-6)
