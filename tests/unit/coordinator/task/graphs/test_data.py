"""The data a task wants, as its manifest states it and as a device is told."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.errors import TensorError
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.train.inference import Predictor
from tests.unit.coordinator.task.graphs.oracle import MODELS, CompiledModel


@pytest.mark.parametrize("name", ["mlp", "text", "tied-weights"])
def test_manifest_states_the_data_of_the_family(name: str, compiled: CompiledModel) -> None:
    made, family = compiled(name), MODELS[name]
    inputs = (
        ArraySpec("int64", family.shape, family.vocabulary - 1)
        if family.vocabulary
        else ArraySpec("float32", family.shape)
    )
    wanted = DataSpec((inputs,), ArraySpec("int64", (), family.classes - 1))
    manifest = decode_manifest(made.graphs.manifest.encoded)
    assert manifest.data == made.task.data == wanted
    samples = family.inputs(3).numpy()
    manifest.data.check(ArrayData((samples,), np.arange(3)))
    with pytest.raises(TensorError, match=f"label {family.classes} at sample 2"):
        manifest.data.check(ArrayData((samples,), np.array([0, 1, family.classes])))


@pytest.mark.parametrize("stray", [-1, 30])
def test_predictor_refuses_ids_that_are_not_in_the_vocabulary(
    stray: int, compiled: CompiledModel
) -> None:
    """Without the check, −1 would be the last row."""
    made = compiled("embedding-mean")
    predictor = Predictor(made.task.plan, made.graphs.manifest, made.graphs.files)
    ids = made.family.inputs(4).numpy()
    assert predictor.predict(made.task.weights, made.task.buffers, [ids]).shape == (4, 4)
    ids[2, 5] = stray
    with pytest.raises(TensorError, match=rf"id {stray} at sample 2, place \[5\]"):
        predictor.predict(made.task.weights, made.task.buffers, [ids])
