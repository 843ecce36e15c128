"""The torch backend against dense training with zero masks, and how it stops and fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import FAMILIES, Family, ViT, cnn
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import (
    GroupError,
    NonFiniteError,
    TensorError,
    TrainingError,
    TrainingStopped,
)
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job, Trained
from edge_sdk.train.torch import TorchBackend
from tests.unit.edge_sdk.train import dense
from tests.unit.edge_sdk.train.dense import Choice, held

TOLERANCE = 1e-5
"""Of the largest movement. Narrow and dense sums have the same terms, in another order and with
zeros between them; float32 rounds at 6e-8, and some hundred terms, a dozen layers and five steps
make that a few 1e-6. A wrong norm, sign or factor is off by 1e-2 or more."""

ROUNDING = 5 * 2.0**-23
"""Of the largest weight: a movement is a difference of weights, each rounded at every step."""

PLAIN = LocalRule(learning_rate=0.05, rescale=0)
RULES: dict[str, LocalRule] = {
    "plain": PLAIN,
    "momentum": replace(PLAIN, momentum=0.9, weight_decay=0.02),
    "clip": replace(PLAIN, clip_norm=0.2),
    "sam": replace(PLAIN, sam_radius=0.1),
    "proximal": replace(PLAIN, learning_rate=0.1, proximal=0.5),
    "all": LocalRule(
        learning_rate=0.1,
        momentum=0.5,
        weight_decay=0.01,
        clip_norm=0.2,
        sam_radius=0.1,
        proximal=0.2,
        rescale=0,
    ),
}
BATCH_SIZES = (8, 8, 8, 8, 3)
TRAINED: dict[str, Family] = {
    "mlp": FAMILIES["mlp"],
    "lenet": FAMILIES["lenet-28"],
    "cnn": Family(lambda: cnn(side=16), (3, 16, 16), 10),
    "depthwise-cnn": replace(FAMILIES["depthwise-cnn"], shape=(3, 16, 16)),
    "text": FAMILIES["text"],
    "resnet-gn": replace(FAMILIES["resnet-gn"], shape=(3, 12, 12)),
    "vit": Family(lambda: ViT(depth=2), (3, 32, 32), 10),
}


@pytest.fixture(autouse=True, scope="module")
def smooth() -> Iterator[None]:
    """No kinks while these tests run: SiLU for ReLU, mean for max.

    At a kink a difference in the last bit turns a whole gradient on or off, on one processor and
    not on another; what is tested here is ours, not torch's ReLU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", lambda x, inplace=False: F.silu(x))
        patch.setattr(F, "max_pool2d", lambda x, size, *_, **__: F.avg_pool2d(x, size))
        yield


@cache
def task_of(name: str) -> tuple[nn.Module, Task]:
    """A model whose norms and biases are not the zeros and ones they start as; its task."""
    model = TRAINED[name].model(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(torch.empty_like(tensor).uniform_(-0.1, 0.1, generator=generator))
    return model, make_task(model, TRAINED[name].inputs(2), groups=4)


def some_groups(task: Task, seed: int) -> Choice:
    """One to three of the four groups of every axis."""
    rng = np.random.default_rng(seed)
    return {
        axis.name: tuple(sorted(rng.permutation(4)[: rng.integers(1, 4)].tolist()))
        for axis in task.plan.axes
    }


def job_of(task: Task, choice: Choice, rule: LocalRule, seed: int = 0) -> Job:
    return Job(
        groups=choice,
        weights=task.plan.cut(task.weights, choice),
        buffers=task.plan.cut_buffers(task.buffers, choice),
        rule=rule,
        mask_stream=stream(seed, "masks"),
    )


def batches_of(name: str, sizes: tuple[int, ...] = BATCH_SIZES) -> list[Batch]:
    rng = np.random.default_rng(3)
    family = TRAINED[name]
    return [
        Batch((family.inputs(size, seed=step).numpy(),), rng.integers(family.classes, size=size))
        for step, size in enumerate(sizes)
    ]


def assert_close(
    got: Mapping[str, Array], wanted: Mapping[str, Array], start: Mapping[str, Array]
) -> None:
    assert set(got) == set(wanted)
    movement, weight = (max(np.abs(a).max() for a in each.values()) for each in (wanted, start))
    assert movement > 1e-3
    bound = TOLERANCE * movement + ROUNDING * weight
    for name, array in wanted.items():
        assert got[name].shape == array.shape
        np.testing.assert_allclose(got[name], array, rtol=0, atol=bound, err_msg=name)


# -- the oracle ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TRAINED)
def test_movement_equals_masked_dense_training(name: str, rule: str) -> None:
    model, task = task_of(name)
    plan, batches = task.plan, batches_of(name)
    choice = some_groups(task, seed=len(name))
    masks = {each.name: held(plan, each, choice) for each in (*plan.tensors, *plan.buffers)}
    wanted = dense.train(model, masks, RULES[rule], batches)
    assert max(wanted.norms) > 2 * (RULES[rule].clip_norm or 0), "there was nothing to clip"

    job = job_of(task, choice, RULES[rule])
    got = TorchBackend(task).train(job, batches)

    shapes = {key: array.shape for key, array in (*job.weights.items(), *job.buffers.items())}
    for array_name, array in wanted.movement.items():
        assert not array[~masks[array_name]].any()
    assert_close(
        got.movement,
        {key: each[masks[key]].reshape(shapes[key]) for key, each in wanted.movement.items()},
        job.weights,
    )
    statistics = {buffer.name for buffer in plan.buffers if buffer.statistic}
    assert set(got.statistics) == statistics
    for key in statistics:
        array = wanted.buffers[key][masks[key]].reshape(shapes[key])
        np.testing.assert_allclose(got.statistics[key], array, rtol=1e-4, atol=1e-5)
    losses = (wanted.losses[0], sum(wanted.losses) / len(wanted.losses), wanted.losses[-1])
    metrics = got.metrics
    assert (metrics.first_loss, metrics.mean_loss, metrics.last_loss) == pytest.approx(losses, 1e-5)
    assert (metrics.steps, metrics.samples) == (len(BATCH_SIZES), sum(BATCH_SIZES))


# -- rescale ------------------------------------------------------------------------------------


class Multiplied(nn.Module):
    """A layer whose input is multiplied first."""

    def __init__(self, factor: float, layer: nn.Module) -> None:
        super().__init__()
        self.factor = factor
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * self.factor)
        return out


def small_mlp(first: int, second: int, scale_1: float = 1, scale_2: float = 1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, first),
        nn.ReLU(),
        Multiplied(scale_1, nn.Linear(first, second)),
        nn.Tanh(),
        Multiplied(scale_2, nn.Linear(second, 3)),
    )


def small_cnn(first: int, second: int, scale_1: float = 1, scale_2: float = 1) -> nn.Module:
    """The depthwise convolution sums over nothing that is cut: it is not a consumer."""
    return nn.Sequential(
        nn.Conv2d(2, first, 3),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, first, 3, groups=first),
        nn.ReLU(),
        Multiplied(scale_1, nn.Conv2d(first, second, 1)),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        Multiplied(scale_2, nn.Linear(4 * second, 3)),
    )


@pytest.mark.parametrize("rescale", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("build", "shape"), [(small_mlp, (6,)), (small_cnn, (2, 8, 8))], ids=["mlp", "cnn"]
)
def test_rescale_multiplies_the_inputs_of_consumers(
    build: Callable[..., nn.Module], shape: tuple[int, ...], rescale: float
) -> None:
    torch.manual_seed(4)
    task = make_task(build(10, 12), torch.randn(2, *shape), groups=4)
    first, second = (axis.name for axis in task.plan.axes)
    assert [axis.groups for axis in task.plan.axes] == [(3, 3, 2, 2), (3, 3, 3, 3)]
    choice = {first: (0, 3), second: (1,)}
    narrow = build(5, 3, (10 / 5) ** rescale, (12 / 3) ** rescale)
    rng = np.random.default_rng(5)
    batches = [
        Batch(
            (rng.standard_normal((6, *shape), dtype=np.float32),),
            rng.integers(3, size=6),
        )
        for _ in range(4)
    ]
    rule = LocalRule(learning_rate=0.01, momentum=0.9, rescale=rescale)
    job = job_of(task, choice, rule)
    state = {**job.weights, **job.buffers}
    narrow.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})

    got = TorchBackend(task).train(job, batches)

    everything = {name: np.ones(array.shape, dtype=bool) for name, array in job.weights.items()}
    wanted = dense.train(narrow, everything, rule, batches)
    assert_close(got.movement, wanted.movement, job.weights)
    for name, array in got.statistics.items():
        np.testing.assert_allclose(array, wanted.buffers[name], rtol=1e-5, atol=1e-6)


# -- dropout ------------------------------------------------------------------------------------

UNITS, DROPPED = 4000, 0.3


def first_output(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]


@cache
def dropout_task(*, by_channel: bool) -> Task:
    """Ones into dropout, summed: the movement of the last weights is minus the mask."""
    layers = (
        [nn.Conv2d(1, UNITS, 1), nn.Dropout2d(DROPPED), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        if by_channel
        else [nn.Linear(1, UNITS), nn.Dropout(DROPPED)]
    )
    model = nn.Sequential(*layers, nn.Linear(UNITS, 1, bias=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("bias") else 0.0)
    example = torch.ones(2, 1, 3, 3) if by_channel else torch.ones(2, 1)
    return make_task(model, example, loss=first_output, groups=4)


def ones(task: Task, samples: int, *, by_channel: bool = False) -> Batch:
    shape = (samples, 1, 3, 3) if by_channel else (samples, 1)
    return Batch((np.ones(shape, dtype=np.float32),), np.zeros(samples, dtype=np.int64))


def dropout_masks(by_channel: bool, batches: int, samples: int, seed: int) -> Array:
    """What the movement of the last weights tells about the masks, summed over batches."""
    task = dropout_task(by_channel=by_channel)
    (axis,) = task.plan.axes
    job = job_of(task, {axis.name: (0, 2)}, LocalRule(learning_rate=1, rescale=0), seed)
    batch = ones(task, samples, by_channel=by_channel)
    movement = TorchBackend(task).train(job, [batch] * batches).movement
    (last,) = (name for name, array in movement.items() if array.shape == (1, UNITS // 2))
    mask: Array = -movement[last][0]
    return mask


@pytest.mark.parametrize("by_channel", [False, True], ids=["units", "channels"])
def test_dropout_drops_the_stated_share(by_channel: bool) -> None:
    mask = dropout_masks(by_channel, batches=1, samples=1, seed=6)
    kept = mask > 0.5
    np.testing.assert_allclose(mask, kept / (1 - DROPPED), rtol=1e-5)
    share = 1 - kept.mean()
    spread = np.sqrt(DROPPED * (1 - DROPPED) / len(mask))
    assert abs(share - DROPPED) < 4 * spread


@pytest.mark.parametrize(("batches", "samples"), [(1, 2), (2, 1)])
def test_dropout_masks_differ(batches: int, samples: int) -> None:
    """From sample to sample and from step to step: both, one or none of two masks keep a unit."""
    mask = dropout_masks(by_channel=False, batches=batches, samples=samples, seed=7)
    kept = np.rint(mask * (1 - DROPPED) * samples).astype(int)
    shares = np.bincount(kept, minlength=3) / len(kept)
    keep = 1 - DROPPED
    np.testing.assert_allclose(shares, [DROPPED**2, 2 * keep * DROPPED, keep**2], atol=0.05)


def test_dropout_masks_come_from_the_stream() -> None:
    one, same, other = (dropout_masks(False, 2, 3, seed) for seed in (8, 8, 9))
    assert one.tobytes() == same.tobytes()
    assert not np.array_equal(one, other)


def test_dropout_mask_stays_during_a_sam_step() -> None:
    """At w̃ the last weights are zero where the mask of w dropped a unit. Were it drawn again, some
    units would have a gradient in the last layer and none in the first."""
    task = dropout_task(by_channel=False)
    (axis,) = task.plan.axes
    rule = LocalRule(learning_rate=1, sam_radius=1, rescale=0)
    job = job_of(task, {axis.name: (1,)}, rule)
    movement = TorchBackend(task).train(job, [ones(task, 1)]).movement
    first, last = movement["0.bias"] != 0, movement["2.weight"][0] != 0
    assert 0 < last.sum() < len(last)
    np.testing.assert_array_equal(first, last)


def test_dropout_absent_from_evaluation() -> None:
    task = dropout_task(by_channel=False)
    weights = {name: np.ones_like(array) for name, array in task.weights.items()}
    outputs = task.traced.predict(weights, task.buffers, ones(task, 3).inputs)
    np.testing.assert_allclose(outputs, np.full((3, 1), 2.0 * UNITS), rtol=1e-6)


# -- stopping, failing, leaving things alone ----------------------------------------------------


def bits(trained: Trained) -> dict[str, bytes]:
    arrays = {**trained.movement, **trained.statistics}
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("steps_done", [0, 1, 4])
def test_stop_is_asked_before_every_step(steps_done: int) -> None:
    _, task = task_of("mlp")
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(len(asked))
        return len(asked) > steps_done

    job = job_of(task, task.plan.all_groups(), PLAIN)
    with pytest.raises(TrainingStopped) as stopped:
        TorchBackend(task).train(job, batches_of("mlp"), should_stop=should_stop)
    assert stopped.value.steps_done == steps_done
    assert len(asked) == steps_done + 1


def poisoned(batch: Batch) -> Batch:
    inputs = batch.inputs[0].copy()
    inputs.flat[0] = np.nan
    return Batch((inputs,), batch.targets)


def test_training_on_nan_fails() -> None:
    _, task = task_of("mlp")
    good, bad, *_ = batches_of("mlp")
    job = job_of(task, task.plan.all_groups(), PLAIN)
    with pytest.raises(NonFiniteError, match="the loss is nan at step 2"):
        TorchBackend(task).train(job, [good, poisoned(bad)])


@pytest.mark.parametrize(("steps", "what"), [(1, "movement of"), (3, "loss is")])
def test_training_that_overflows_fails(steps: int, what: str) -> None:
    _, task = task_of("mlp")
    rule = replace(PLAIN, learning_rate=1e38 if steps > 1 else 1e45)
    job = job_of(task, task.plan.all_groups(), rule)
    with pytest.raises(NonFiniteError, match=what):
        TorchBackend(task).train(job, batches_of("mlp")[:steps])


def test_statistics_that_are_not_finite_fail() -> None:
    """The loss is finite (ReLU6 is bounded) while the variance it was computed with is not."""
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU6(), nn.Linear(8, 3))
    task = make_task(model, torch.randn(2, 4), groups=4)
    job = job_of(task, task.plan.all_groups(), replace(PLAIN, learning_rate=1e-30))
    rng = np.random.default_rng(11)
    inputs = (1e25 * rng.standard_normal((6, 4))).astype(np.float32)
    with pytest.raises(NonFiniteError):
        TorchBackend(task).train(job, [Batch((inputs,), rng.integers(3, size=6))])


def test_training_without_batches_fails() -> None:
    _, task = task_of("mlp")
    job = job_of(task, task.plan.all_groups(), PLAIN)
    with pytest.raises(TrainingError, match="no data"):
        TorchBackend(task).train(job, [])


def test_backend_without_threads_refused() -> None:
    with pytest.raises(TrainingError, match="threads"):
        TorchBackend(task_of("mlp")[1], threads=0)


Change = Callable[[dict[str, Any], dict[str, Any]], object]

UNFIT: dict[str, Change] = {
    "missing weight": lambda weights, _: weights.pop("0.weight"),
    "unknown weight": lambda weights, _: weights.update(other=np.zeros(3, np.float32)),
    "full weight": lambda weights, _: weights.update({"0.bias": np.zeros(16, np.float32)}),
    "double weight": lambda weights, _: weights.update({"0.bias": np.zeros(8)}),
    "missing buffer": lambda _, buffers: buffers.pop("3.running_mean"),
    "full buffer": lambda _, buffers: buffers.update({"3.running_var": np.ones(16, np.float32)}),
}


@pytest.mark.parametrize("case", UNFIT)
def test_job_that_does_not_fit_refused(case: str) -> None:
    _, task = task_of("depthwise-cnn")
    choice = {axis.name: (0, 1) for axis in task.plan.axes}
    job = job_of(task, choice, PLAIN)
    weights, buffers = dict(job.weights), dict(job.buffers)
    UNFIT[case](weights, buffers)
    with pytest.raises(TensorError):
        TorchBackend(task).train(
            replace(job, weights=weights, buffers=buffers), batches_of("depthwise-cnn")
        )
    with pytest.raises(GroupError):
        TorchBackend(task).train(replace(job, groups={}), batches_of("depthwise-cnn"))


def test_training_changes_nothing_of_the_job_or_the_data() -> None:
    _, task = task_of("depthwise-cnn")
    job = job_of(task, some_groups(task, 12), RULES["all"])
    batches = batches_of("depthwise-cnn")
    data = [array for batch in batches for array in (*batch.inputs, batch.targets)]
    handed = [*job.weights.values(), *job.buffers.values(), *data]
    before = copy.deepcopy(handed)
    free = bits(TorchBackend(task).train(job, batches))
    for array, kept in zip(handed, before, strict=True):
        np.testing.assert_array_equal(array, kept)
    for array in handed:
        array.flags.writeable = False
    assert bits(TorchBackend(task).train(job, batches)) == free


def test_results_are_the_callers_own() -> None:
    _, task = task_of("depthwise-cnn")
    job = job_of(task, some_groups(task, 13), PLAIN)
    backend, batches = TorchBackend(task), batches_of("depthwise-cnn")
    first = backend.train(job, batches)
    kept = bits(first)
    second = backend.train(job, batches)
    theirs = [*job.weights.values(), *job.buffers.values(), *second.movement.values()]
    for array in (*first.movement.values(), *first.statistics.values()):
        assert array.dtype == np.float32
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert not any(np.may_share_memory(array, other) for other in theirs)
    assert bits(first) == kept


@pytest.mark.parametrize("name", ["cnn", "depthwise-cnn", "vit"])
def test_same_inputs_give_the_same_bits(name: str) -> None:
    """Also from a backend that has met a batch it could not train on."""
    _, task = task_of(name)
    choice, batches = some_groups(task, 14), batches_of(name)
    used = TorchBackend(task)
    with pytest.raises(NonFiniteError):
        used.train(job_of(task, choice, PLAIN), [poisoned(batches[0])])
    results = [
        bits(backend.train(job_of(task, choice, RULES["all"]), batches))
        for backend in (used, used, TorchBackend(task))
    ]
    assert results[0] == results[1] == results[2]


def test_threads_are_set_while_training_and_put_back() -> None:
    seen: list[int] = []

    def spying(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    _, task = task_of("mlp")
    task = replace(task, loss=spying)
    job = job_of(task, task.plan.all_groups(), PLAIN)
    batch, *_ = batches_of("mlp")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        TorchBackend(task, threads=2).train(job, [batch])
        assert torch.get_num_threads() == 3
        with pytest.raises(NonFiniteError):
            TorchBackend(task).train(job, [poisoned(batch)])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["mlp", "depthwise-cnn", "vit"])
def test_movement_on_cuda_equals_movement_on_cpu(name: str) -> None:
    _, task = task_of(name)
    choice, batches = some_groups(task, 15), batches_of(name)
    cpu, cuda = (
        TorchBackend(task, device=device).train(job_of(task, choice, RULES["all"]), batches)
        for device in ("cpu", "cuda")
    )
    largest = max(np.abs(array).max() for array in cpu.movement.values())
    for key, array in cpu.movement.items():  # TF32 and other algorithms are allowed to differ
        np.testing.assert_allclose(cuda.movement[key], array, rtol=0, atol=2e-2 * largest)


class Added(nn.Module):
    """Two weights that are only ever added, and one that is only summed: shared gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4))
        self.delta = nn.Parameter(torch.linspace(1, 0, 24).reshape(6, 4))
        self.shift = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(nn.functional.linear(x, self.base + self.delta))
        out: torch.Tensor = self.out(hidden) * self.shift.sum()
        return out


@pytest.mark.parametrize("rule", RULES)
def test_weights_that_share_a_gradient_move_as_dense_training_says(rule: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Added()
    task = make_task(model, torch.ones(2, 4), groups=2)
    everything = {
        each.name: np.ones(each.shape, dtype=bool)
        for each in (*task.plan.tensors, *task.plan.buffers)
    }
    rng = np.random.default_rng(4)
    batches = [
        Batch((rng.normal(size=(8, 4)).astype(np.float32),), rng.integers(3, size=8))
        for _ in range(5)
    ]
    wanted = dense.train(model, everything, RULES[rule], batches)
    got = TorchBackend(task).train(job_of(task, task.plan.all_groups(), RULES[rule]), batches)
    assert_close(got.movement, wanted.movement, task.weights)
