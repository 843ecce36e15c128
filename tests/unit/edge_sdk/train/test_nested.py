"""Steps that train several widths, on both backends, against autograd with slices by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count as numbers
from itertools import islice
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime
import torch
from torch import nn
from torch.nn import functional as F

from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import LOSSES, Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import GraphError, GroupError, TrainingError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job, Trained
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.unit.edge_sdk.train.handmade import CLASSES, INPUTS, Handmade, bundle

Tensors = dict[str, torch.Tensor]
Choice = dict[str, tuple[int, ...]]

DROPPED = 0.25
UNITS = 8
OWN = (0, 1, 3)
"""Of four groups of two units; the submodel of them keeps units 0, 1, 2, 3, 6 and 7."""
WIDTHS = {"a run": ((0, 1), (0,)), "gaps": ((0, 3), (3,))}
POSITIONS = {0: [0, 1], 1: [2, 3], 3: [4, 5]}
"""Units of each group among those six."""

PLAIN = LocalRule(learning_rate=0.1, rescale=0.5)
ORDERED = replace(PLAIN, widths="ordered-dropout")
SANDWICH = replace(PLAIN, widths="sandwich")


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, UNITS),
        nn.Tanh(),
        nn.Dropout(DROPPED),
        nn.Linear(UNITS, UNITS),
        nn.Tanh(),
        nn.Linear(UNITS, 3),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, UNITS, 3),
        nn.BatchNorm2d(UNITS),
        nn.SiLU(),
        nn.Conv2d(UNITS, UNITS, 3),
        nn.BatchNorm2d(UNITS),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(UNITS, 3),
    )


def mlp_outputs(
    w: Tensors,
    b: Tensors,
    x: torch.Tensor,
    at: list[int],
    scale: float,
    random: np.random.Generator,
) -> torch.Tensor:
    """The forward pass of the units `at`, sliced out of the assigned submodel's weights."""
    h = torch.tanh(x @ w["0.weight"][at].T + w["0.bias"][at])
    kept = random.random(tuple(h.shape), dtype=np.float32) >= DROPPED
    h = h * torch.from_numpy(kept) / (1 - DROPPED)
    h = torch.tanh(scale * h @ w["3.weight"][at][:, at].T + w["3.bias"][at])
    return scale * h @ w["5.weight"][:, at].T + w["5.bias"]


def cnn_outputs(
    w: Tensors,
    b: Tensors,
    x: torch.Tensor,
    at: list[int],
    scale: float,
    random: np.random.Generator,
) -> torch.Tensor:
    """The same for the convolutions; running statistics are changed in place."""

    def norm(h: torch.Tensor, layer: str) -> torch.Tensor:
        mean, var = b[f"{layer}.running_mean"], b[f"{layer}.running_var"]
        weight, bias = w[f"{layer}.weight"][at], w[f"{layer}.bias"][at]
        return F.silu(F.batch_norm(h, mean, var, weight, bias, training=True))

    h = norm(F.conv2d(x, w["0.weight"][at], w["0.bias"][at]), "1")
    h = norm(F.conv2d(scale * h, w["3.weight"][at][:, at], w["3.bias"][at]), "4")
    return scale * h.mean((2, 3)) @ w["8.weight"][:, at].T + w["8.bias"]


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    outputs: Callable[
        [Tensors, Tensors, torch.Tensor, list[int], float, np.random.Generator], torch.Tensor
    ]
    shape: tuple[int, ...]


CASES = {"mlp": Case(mlp, mlp_outputs, (5,)), "cnn": Case(cnn, cnn_outputs, (2, 7, 7))}


@cache
def compiled(name: str) -> tuple[Task, CompiledGraphs]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = CASES[name].model()
        task = make_task(model, torch.randn(2, *CASES[name].shape), groups=4)
    return task, compile_graphs(task, distillation=name == "mlp", class_masks=name == "mlp")


def backends(name: str) -> dict[str, Backend]:
    task, graphs = compiled(name)
    return {
        "torch": TorchBackend(task),
        "onnx": OnnxBackend(task.plan, graphs.manifest, graphs.files),
    }


def choice_of(task: Task, groups: tuple[int, ...]) -> Choice:
    return {axis.name: groups for axis in task.plan.axes}


def job_of(
    name: str, rule: LocalRule, widths: Sequence[tuple[int, ...]] = (), passes: int = 2
) -> Job:
    task, _ = compiled(name)
    own = choice_of(task, OWN)
    return Job(
        groups=own,
        weights=task.plan.cut(task.weights, own),
        buffers=task.plan.cut_buffers(task.buffers, own),
        rule=rule,
        mask_stream=stream(4, "masks"),
        widths=tuple(choice_of(task, each) for each in widths),
        width_stream=stream(5, "widths"),
        passes=passes,
    )


def batches_of(name: str, steps: int = 6) -> list[Batch]:
    rng = np.random.default_rng(3)
    shape = (9, *CASES[name].shape)
    return [
        Batch((rng.standard_normal(shape, dtype=np.float32),), rng.integers(3, size=9))
        for _ in range(steps)
    ]


@dataclass
class Oracle:
    movement: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    own_losses: list[float]


def by_hand(
    name: str, job: Job, batches: Sequence[Batch], steps: Sequence[tuple[tuple[int, ...], ...]]
) -> Oracle:
    """Train by autograd on the whole assigned submodel; `steps` are the groups of each pass."""
    rule, masks = job.rule, stream(4, "masks")
    start = {key: torch.tensor(array) for key, array in job.weights.items()}
    weights = {key: tensor.clone().requires_grad_() for key, tensor in start.items()}
    buffers = {key: torch.tensor(array) for key, array in job.buffers.items()}
    optimizer = torch.optim.SGD(
        weights.values(), rule.learning_rate, rule.momentum, weight_decay=rule.weight_decay
    )
    losses = []
    for batch, passes in zip(batches, steps, strict=True):
        state = masks.bit_generator.state

        def backward(
            batch: Batch = batch, passes: tuple[tuple[int, ...], ...] = passes
        ) -> dict[tuple[int, ...], float]:
            optimizer.zero_grad(set_to_none=False)
            told, wide = {}, None
            for groups in passes:
                at = [unit for group in groups for unit in POSITIONS[group]]
                kept = buffers
                if groups != OWN:
                    kept = {key: tensor[at] for key, tensor in buffers.items() if tensor.ndim}
                scale = (UNITS / len(at)) ** rule.rescale
                outputs = CASES[name].outputs(
                    weights, kept, torch.tensor(batch.inputs[0]), at, scale, masks
                )
                if rule.classes == "own":
                    absent = [each for each in range(3) if each not in job.classes]
                    outputs = outputs.index_fill(1, torch.tensor(absent), 0.0)
                loss = F.cross_entropy(outputs, torch.tensor(batch.targets))
                if wide is not None:
                    taught = F.cross_entropy(outputs, wide)
                    loss = (1 - rule.distillation) * loss + rule.distillation * taught
                if rule.distillation:
                    wide = torch.softmax(outputs.detach(), 1)
                loss.backward()  # type: ignore[no-untyped-call]
                told[groups] = loss.item()
            return told

        told = backward()
        losses += [told[OWN]] if OWN in told else []
        if rule.sam_radius:
            grads = [w.grad.clone() for w in weights.values() if w.grad is not None]
            here = [w.detach().clone() for w in weights.values()]
            norm = torch.sqrt(sum((grad**2).sum() for grad in grads))  # type: ignore[arg-type]
            with torch.no_grad():
                for weight, grad in zip(weights.values(), grads, strict=True):
                    weight += rule.sam_radius * grad / norm
            masks.bit_generator.state = state
            backward()
            with torch.no_grad():
                for weight, before in zip(weights.values(), here, strict=True):
                    weight.copy_(before)
        optimizer.step()
    return Oracle(
        {key: (weights[key].detach() - start[key]).numpy() for key in start},
        {key: tensor.numpy() for key, tensor in buffers.items()},
        losses,
    )


def steps_by_hand(
    widths: Sequence[tuple[int, ...]], count: int, *, sandwich: bool
) -> list[tuple[tuple[int, ...], ...]]:
    """The groups of every pass of every step, drawn as the rules say."""
    random = stream(5, "widths")
    cards = list(widths) if sandwich else [OWN, *widths]
    dealt: list[tuple[int, ...]] = []
    while len(dealt) < count:
        dealt += [cards[number] for number in random.permutation(len(cards))]
    return [(OWN, each) if sandwich else (each,) for each in dealt[:count]]


def assert_equal(got: Trained, wanted: Oracle) -> None:
    largest = max(np.abs(array).max() for array in wanted.movement.values())
    assert largest > 1e-2
    for key, array in wanted.movement.items():
        np.testing.assert_allclose(got.movement[key], array, rtol=0, atol=2e-5 * largest)
    for key, array in got.statistics.items():
        np.testing.assert_allclose(array, wanted.buffers[key], rtol=1e-4, atol=1e-5)
    losses = wanted.own_losses
    metrics = got.metrics
    assert (metrics.first_loss, metrics.last_loss) == pytest.approx((losses[0], losses[-1]), 1e-5)
    assert metrics.mean_loss == pytest.approx(np.mean(losses), 1e-5)


RULES = {
    "momentum": replace(PLAIN, momentum=0.9, weight_decay=0.02),
    "sam": replace(PLAIN, sam_radius=0.1),
}


@pytest.mark.parametrize("backend", ["torch", "onnx"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", ["ordered-dropout", "sandwich"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_movement_equals_autograd_through_slices(
    name: str, rule: str, kind: str, widths: str, backend: str
) -> None:
    sandwich = kind == "sandwich"
    used = replace(RULES[rule], widths="sandwich" if sandwich else "ordered-dropout")
    job, batches = job_of(name, used, WIDTHS[widths]), batches_of(name)
    steps = steps_by_hand(WIDTHS[widths], len(batches), sandwich=sandwich)
    assert len({each for passes in steps for each in passes}) > 1
    got = backends(name)[backend].train(job, batches)
    assert_equal(got, by_hand(name, job, batches, steps))


@pytest.mark.parametrize(("name", "backend"), [("mlp", "torch"), ("mlp", "onnx"), ("cnn", "torch")])
@pytest.mark.parametrize("rule", RULES)
def test_narrow_learns_from_wide_outputs(name: str, backend: str, rule: str) -> None:
    used = replace(RULES[rule], widths="sandwich", distillation=0.7)
    job, batches = job_of(name, used, WIDTHS["gaps"]), batches_of(name)
    steps = steps_by_hand(WIDTHS["gaps"], len(batches), sandwich=True)
    got = backends(name)[backend].train(job, batches)
    assert_equal(got, by_hand(name, job, batches, steps))
    plain = replace(job, rule=replace(used, distillation=0), mask_stream=stream(4, "masks"))
    other = backends(name)[backend].train(plain, batches).movement
    assert max(np.abs(other[key] - array).max() for key, array in got.movement.items()) > 1e-3


@pytest.mark.parametrize(("name", "backend"), [("mlp", "torch"), ("mlp", "onnx"), ("cnn", "torch")])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="alone"),
        pytest.param({"widths": "sandwich", "distillation": 0.7}, id="distilled"),
    ],
)
def test_scores_of_absent_classes_take_no_part(
    name: str, backend: str, change: dict[str, Any]
) -> None:
    """The oracle's loss is of scores in which those of absent classes are replaced by 0."""
    used = replace(PLAIN, classes="own", weight_decay=0.0, **change)
    widths = WIDTHS["gaps"] if change else ()
    job = replace(job_of(name, used, widths), classes=(0, 2))
    batches = [
        each._replace(targets=np.where(each.targets == 1, 2, each.targets))
        for each in batches_of(name)
    ]
    alone: list[tuple[tuple[int, ...], ...]] = [(OWN,)] * len(batches)
    steps = steps_by_hand(widths, len(batches), sandwich=True) if widths else alone
    got = backends(name)[backend].train(job, batches)
    assert_equal(got, by_hand(name, job, batches, steps))
    *_, head = (key for key in got.movement if key.endswith("weight"))
    assert not got.movement[head][1].any()
    assert got.movement[head][0].any()
    everything = replace(job, rule=replace(used, classes="all"), mask_stream=stream(4, "masks"))
    assert backends(name)[backend].train(everything, batches).movement[head][1].any()


def test_own_classes_without_scores_or_graphs_refused() -> None:
    own = replace(PLAIN, classes="own")
    task = replace(compiled("mlp")[0], loss=LOSSES["mse"])
    with pytest.raises(TrainingError, match=r"classes needs scores of classes, .* the loss is mse"):
        TorchBackend(task).train(job_of("mlp", own), batches_of("mlp"))
    job = replace(job_of("cnn", own), classes=(0,))
    with pytest.raises(GraphError, match="takes no classes"):
        backends("cnn")["onnx"].train(job, batches_of("cnn"))
    for backend in backends("mlp").values():
        with pytest.raises(TrainingError, match="none of the device's classes"):
            backend.train(job_of("mlp", own), batches_of("mlp"))


def test_device_that_makes_one_pass_does_not_distil() -> None:
    """It needs no graph for it: the CNN has none."""
    rule, batches = replace(SANDWICH, distillation=0.7), batches_of("cnn")
    job = job_of("cnn", rule, WIDTHS["gaps"], passes=1)
    got = backends("cnn")["onnx"].train(job, batches).movement
    wanted = backends("cnn")["onnx"].train(replace(job, rule=ORDERED), batches).movement
    for key, array in wanted.items():
        assert got[key].tobytes() == array.tobytes()
    with pytest.raises(GraphError, match="no distillation graph"):
        backends("cnn")["onnx"].train(replace(job, passes=2), batches)


def test_distillation_without_scores_of_classes_refused() -> None:
    task = replace(compiled("mlp")[0], loss=LOSSES["mse"])
    job = job_of("mlp", replace(SANDWICH, distillation=0.7), WIDTHS["gaps"])
    with pytest.raises(TrainingError, match="the loss is mse"):
        TorchBackend(task).train(job, batches_of("mlp"))
    assert all(entry.kind != "distillation" for entry in compiled("cnn")[1].manifest.graphs)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_sandwich_moves_by_both_gradients(backend: str) -> None:
    """One plain step; without dropout, so that each pass can be made alone."""
    trainer, (batch, *_) = backends("cnn")[backend], batches_of("cnn")
    both = trainer.train(job_of("cnn", SANDWICH, [(0, 1)]), [batch]).movement
    own = trainer.train(job_of("cnn", PLAIN), [batch]).movement
    task, _ = compiled("cnn")
    job = job_of("cnn", PLAIN)
    narrow = choice_of(task, (0, 1))
    at = task.plan.places_within(job.groups, narrow)
    cut = replace(
        job,
        groups=narrow,
        weights={key: array[at[key]].copy() for key, array in job.weights.items()},
        buffers={key: array[at[key]].copy() for key, array in job.buffers.items()},
    )
    alone = trainer.train(cut, [batch]).movement
    for key, array in own.items():
        wanted = array.copy()
        wanted[at[key]] += alone[key]
        np.testing.assert_allclose(both[key], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
@pytest.mark.parametrize("passes", [1, 2])
def test_ordered_dropout_leaves_other_weights_alone(backend: str, passes: int) -> None:
    """Steps that draw only narrower widths; a sandwich of one pass is no different."""
    rule = ORDERED if passes == 2 else SANDWICH
    streams = (stream(seed, "widths") for seed in numbers())
    jobs = (
        replace(job_of("cnn", rule, [(0, 1), (0,)], passes), width_stream=each) for each in streams
    )
    job = next(each for each in jobs if (0,) not in islice(each.drawn(), 2))
    got = backends("cnn")[backend].train(job, batches_of("cnn", 2))
    for key in ("0.weight", "1.bias", "8.weight"):
        moved = np.moveaxis(got.movement[key], 1 if key == "8.weight" else 0, 0)
        assert moved[:2].any()
        assert not moved[4:].any()
    for key, array in got.statistics.items():
        np.testing.assert_array_equal(array, job.buffers[key])
    assert got.metrics.steps == 2


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_rule_of_one_width_ignores_narrower_ones(backend: str) -> None:
    trainer, batches = backends("mlp")[backend], batches_of("mlp")
    with_widths = trainer.train(job_of("mlp", PLAIN, [(0,)]), batches).movement
    without = trainer.train(job_of("mlp", PLAIN), batches).movement
    none_narrower = trainer.train(job_of("mlp", SANDWICH), batches).movement
    for key, array in without.items():
        assert with_widths[key].tobytes() == array.tobytes() == none_narrower[key].tobytes()


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_width_outside_the_groups_refused(backend: str) -> None:
    trainer, batches = backends("mlp")[backend], batches_of("mlp")
    with pytest.raises(GroupError, match=r"groups \[2\] are not all among \[0, 1, 3\]"):
        trainer.train(job_of("mlp", SANDWICH, [(2,)]), batches)
    with pytest.raises(TrainingError, match="stream"):
        trainer.train(replace(job_of("mlp", SANDWICH, [(0,)]), width_stream=None), batches)


def test_widths_come_in_turns_drawn_anew_and_the_same_for_everybody() -> None:
    job = job_of("mlp", ORDERED, [(0, 1), (0,)])
    one, same = ([width for (width,) in islice(job.drawn(), 3000)] for _ in range(2))
    assert one == same
    turns = np.reshape(one, (1000, 3))
    np.testing.assert_array_equal(np.sort(turns, axis=1), [[0, 1, 2]] * 1000)
    orders = Counter(map(tuple, turns.tolist()))
    assert len(orders) == 6
    assert min(orders.values()) > 100
    pairs = set(islice(replace(job, rule=SANDWICH).drawn(), 40))
    assert pairs == {(0, 1), (0, 2)}
    plan = compiled("mlp")[0].plan
    macs = [plan.submodel_macs(each) for each in (job.groups, *job.widths)]
    assert list(islice(job.step_macs(plan), 9)) == [macs[width] for width in one[:9]]


def test_one_graph_per_width_opens_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five widths, more than a device that trains one submodel keeps open."""
    plan, manifest, files = bundle(*(Handmade(kept=kept) for kept in (6, 5, 4, 3, 2)))
    narrower = [(0, 1, 2), (0, 1), (0, 2), (0,)]
    rng = np.random.default_rng(6)
    shapes = {each.name: each.shape for each in plan.tensors}
    job = Job(
        groups=plan.all_groups(),
        weights={key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()},
        buffers={},
        rule=SANDWICH,
        mask_stream=stream(4, "masks"),
        widths=tuple({"hidden": groups} for groups in narrower),
        width_stream=stream(5, "widths"),
    )
    batches = [
        Batch((rng.normal(size=(8, INPUTS)).astype(np.float32),), rng.integers(CLASSES, size=8))
        for _ in range(24)
    ]
    opened = []
    session = onnxruntime.InferenceSession

    def counting(*given: Any, **options: Any) -> Any:
        opened.append(given)
        return session(*given, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", counting)
    got = OnnxBackend(plan, manifest, files).train(job, batches).movement
    assert len(opened) == 5
    open_widths = OnnxBackend(*bundle(Handmade())).train(job, batches).movement
    for key, array in open_widths.items():
        np.testing.assert_allclose(got[key], array, rtol=1e-5, atol=1e-6)
