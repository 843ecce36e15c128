"""Tasks ready to be served: traced and compiled before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.models import FAMILIES, Family, mlp
from coordinator.task.graphs.compilation import MIN_ONNXRUNTIME, compile_graphs
from coordinator.task.graphs.onnx.translation import IR_VERSION, OPSET
from coordinator.task.saved_model import SavedModel
from coordinator.task.task import make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.graphs import Manifest

BATCH_SIZE = 32
GROUPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTask:
    """A model from which runs are made, and data to train it with."""

    name: str
    model: SavedModel
    data: ArrayData

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.model.plan.parameters

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole model's weights in fp32."""
        return 4 * self.parameters

    @property
    def file_bytes(self) -> int:
        """Bytes devices fetch of the task besides the model: plan, manifest, graphs."""
        model = self.model
        files = (model.plan.encoded, model.manifest.encoded, *model.files.values())
        return sum(len(each) for each in files)


def prepare_family(name: str) -> PreparedTask:
    """Prepare one of `FAMILIES`."""
    return _prepare(name, FAMILIES[name])


def prepare_perceptron(widths: tuple[int, ...]) -> PreparedTask:
    """Prepare a perceptron of these widths, including inputs and outputs."""
    return _prepare("perceptron", Family(lambda: mlp(*widths), (widths[0],), widths[-1]))


def prepare_untrained(widths: tuple[int, ...]) -> PreparedTask:
    """Prepare a perceptron that nobody trains: its graphs, which take long, are not compiled."""
    family = Family(lambda: mlp(*widths), (widths[0],), widths[-1])
    task = make_task(family.model(), family.inputs(2), groups=GROUPS)
    manifest = Manifest(
        plan_hash=task.plan.hash,
        opset=OPSET,
        ir_version=IR_VERSION,
        min_onnxruntime=MIN_ONNXRUNTIME,
        loss=task.loss_name,
        tolerance=0.0,
        data=task.data,
        graphs=(),
    )
    saved = SavedModel(task.plan, task.weights, task.buffers, manifest, {})
    return _with_data("untrained", family, saved)


def _prepare(name: str, family: Family) -> PreparedTask:
    task = make_task(family.model(), family.inputs(2), groups=GROUPS)
    graphs = compile_graphs(task, levels=(1.0,), batch_sizes=(BATCH_SIZE,))
    saved = SavedModel(task.plan, task.weights, task.buffers, graphs.manifest, graphs.files)
    return _with_data(name, family, saved)


def _with_data(name: str, family: Family, saved: SavedModel) -> PreparedTask:
    labels = stream(0, "wire", "labels").integers(family.classes, size=2 * BATCH_SIZE)
    inputs = np.ascontiguousarray(family.inputs(2 * BATCH_SIZE).numpy())
    return PreparedTask(name, saved, ArrayData((inputs,), labels))
