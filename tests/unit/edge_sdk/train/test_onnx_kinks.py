"""The onnx backend against torch with the real activations, whose slopes jump.

Over many steps a jump cannot be compared: at a kink a difference in the last bit turns a gradient
on or off, and what follows drifts apart. So both backends take each of 50 steps from the same
weights, those of torch's own training. A step counts unless torch itself, at weights that differ by
a rounding, goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from benchmarks.models import FAMILIES, Family, cnn
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend

STEPS = 50
COMPARED = 40
"""Steps that must count. One value in a million is near a kink; a step has some ten thousand."""
TOLERANCE = 2e-5
"""Of the step's largest movement."""
ROUNDING = 2.0**-23

TRAINED: dict[str, Family] = {
    "mlp": FAMILIES["mlp"],
    "lenet-28": FAMILIES["lenet-28"],
    "cnn": Family(lambda: cnn(side=16), (3, 16, 16), 10),
    "sensor-cnn": FAMILIES["sensor-cnn"],
    "text": FAMILIES["text"],
    "resnet-gn": replace(FAMILIES["resnet-gn"], shape=(3, 12, 12)),
    "resnet-bn": replace(FAMILIES["resnet-bn"], shape=(3, 12, 12)),
}
RULE = LocalRule(learning_rate=0.05, rescale=0.5)


def moved(
    backend: Backend, job: Job, weights: Mapping[str, Array], batch: Batch
) -> Mapping[str, Array]:
    return backend.train(replace(job, weights=weights), [batch]).movement


def flat(movement: Mapping[str, Array]) -> Array:
    return np.concatenate([movement[name].ravel() for name in sorted(movement)])


@pytest.mark.parametrize("name", TRAINED)
def test_step_equals_torch_away_from_kinks(name: str) -> None:
    family = TRAINED[name]
    task = make_task(family.model(seed=1), family.inputs(2), groups=4)
    graphs = compile_graphs(task, levels=(1.0,))
    torch_backend = TorchBackend(task)
    onnx_backend = OnnxBackend(task.plan, graphs.manifest, graphs.files)
    groups = {axis.name: (0, 2, 3) for axis in task.plan.axes}
    rng = np.random.default_rng(7)
    weights = task.plan.cut(task.weights, groups)
    job = Job(
        groups=groups,
        weights=weights,
        buffers=task.plan.cut_buffers(task.buffers, groups),
        rule=RULE,
        mask_stream=stream(0, "no dropout"),
    )
    compared = 0
    for step in range(STEPS):
        batch = Batch((family.inputs(4, seed=step).numpy(),), rng.integers(family.classes, size=4))
        movement = moved(torch_backend, job, weights, batch)
        wanted = flat(movement)
        bound = TOLERANCE * np.abs(wanted).max() + ROUNDING * max(
            np.abs(array).max() for array in weights.values()
        )
        beside = {
            key: array * (1 + 4 * ROUNDING * rng.choice([-1, 1], array.shape)).astype(np.float32)
            for key, array in weights.items()
        }
        if np.abs(flat(moved(torch_backend, job, beside, batch)) - wanted).max() <= bound:
            got = flat(moved(onnx_backend, job, weights, batch))
            np.testing.assert_allclose(got, wanted, rtol=0, atol=bound, err_msg=f"step {step}")
            compared += 1
        weights = {key: array + movement[key] for key, array in weights.items()}
    assert compared >= COMPARED
