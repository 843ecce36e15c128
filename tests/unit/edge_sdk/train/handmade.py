"""A small model whose gradient graph is written by hand, and the same in numpy's float64.

    h = tanh(x w1ᵀ + b1)      logits = temperature · (h · mask · scale) w2ᵀ      cross-entropy

`mean`, where asked for, is a running mean of h. tanh has no kinks: a difference in the last bit
stays one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.graphs import GraphEntry, Kind, Manifest, MaskSpec, Port, SizeTerm

INPUTS, UNITS, CLASSES = 4, 6, 3
OPSET, IR = 18, 9
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


@dataclass(frozen=True)
class Handmade:
    """Which of the model's graphs: with dropout, with a statistic, for which widths and batch."""

    dropout: float = 0.0
    statistic: bool = False
    kept: int | None = None
    batch: int | None = None
    opset: int = OPSET

    @property
    def plan(self) -> ModelPlan:
        mean = Buffer("mean", "float32", (Dim(UNITS, 0),), statistic=True)
        return ModelPlan(
            axes=(Axis("hidden", (2, 2, 1, 1)),),
            tensors=(
                Tensor("w1", "float32", (Dim(UNITS, 0), Dim(INPUTS))),
                Tensor("b1", "float32", (Dim(UNITS, 0),)),
                Tensor("w2", "float32", (Dim(CLASSES), Dim(UNITS, 0))),
                Tensor("temperature", "float32", ()),
            ),
            buffers=(mean,) if self.statistic else (),
        )

    def graph(self, kind: Kind) -> tuple[GraphEntry, bytes]:
        """One graph and its description."""
        batch = SizeTerm(1, (), True) if self.batch is None else SizeTerm(self.batch)
        width = SizeTerm(1, (0,)) if self.kept is None else SizeTerm(self.kept)
        sizes = {"w1": (width, SizeTerm(INPUTS)), "b1": (width,), "temperature": ()}
        sizes["w2"] = (SizeTerm(CLASSES), width)
        floats = {"x0": (batch, SizeTerm(INPUTS)), "s:hidden": ()}
        floats |= {f"w:{name}": dims for name, dims in sizes.items()}
        if kind == "gradient":
            floats["sample_weights"] = (batch,)
            if self.dropout:
                floats["m0"] = (batch, width)
            if self.statistic:
                floats["b:mean"] = (width,)
        inputs = [Port(name, "float32", dims) for name, dims in floats.items()]
        if kind == "gradient":
            inputs.append(Port("targets", "int64", (batch,)))
            outputs = [Port("loss", "float32")]
            outputs += [Port(f"g:{name}", "float32", dims) for name, dims in sizes.items()]
            if self.statistic:
                outputs.append(Port("n:mean", "float32", (width,)))
        else:
            outputs = [Port("outputs", "float32", (batch, SizeTerm(CLASSES)))]
        data = self._model(kind, inputs, outputs)
        entry = GraphEntry(
            kind=kind,
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            kept=None if self.kept is None else (self.kept,),
            batch=self.batch,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            masks=(MaskSpec("m0", self.dropout),) if "m0" in floats else (),
        )
        return entry, data

    def _model(self, kind: Kind, inputs: list[Port], outputs: list[Port]) -> bytes:
        nodes = [*_forward(bool(self.dropout) and kind == "gradient")]
        if kind == "gradient":
            nodes += _backward(bool(self.dropout))
            if self.statistic:
                nodes += _statistic()
        else:
            nodes.append(("Identity", "logits", "outputs", {}))
        graph = helper.make_graph(
            [
                helper.make_node(op, taken.split(), [given], **options)
                for op, taken, given, options in nodes
            ],
            "handmade",
            [_value(port) for port in inputs],
            [_value(port) for port in outputs],
            initializer=[
                helper.make_tensor("classes", TensorProto.INT64, [], [CLASSES]),
                helper.make_tensor("off_on", TensorProto.FLOAT, [2], [0, 1]),
                helper.make_tensor("one", TensorProto.FLOAT, [], [1]),
                helper.make_tensor("old", TensorProto.FLOAT, [], [0.9]),
                helper.make_tensor("new", TensorProto.FLOAT, [], [0.1]),
                helper.make_tensor("first", TensorProto.INT64, [1], [0]),
                helper.make_tensor("last", TensorProto.INT64, [1], [1]),
            ],
        )
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR)
        onnx.checker.check_model(model)
        data: bytes = model.SerializeToString()
        return data


Node = tuple[str, str, str, dict[str, Any]]


def _forward(dropout: bool) -> list[Node]:
    return [
        ("Gemm", "x0 w:w1 w:b1", "a", {"transB": 1}),
        ("Tanh", "a", "h", {}),
        ("Mul", "h m0" if dropout else "h one", "dropped", {}),
        ("Mul", "dropped s:hidden", "scaled", {}),
        ("Gemm", "scaled w:w2", "z", {"transB": 1}),
        ("Mul", "z w:temperature", "logits", {}),
    ]


def _backward(dropout: bool) -> list[Node]:
    return [
        ("LogSoftmax", "logits", "logs", {"axis": 1}),
        ("OneHot", "targets classes off_on", "hot", {"axis": 1}),
        ("Mul", "logs hot", "picked", {}),
        ("ReduceSum", "picked last", "scores", {"keepdims": 0}),
        ("ReduceSum", "sample_weights", "total", {"keepdims": 0}),
        ("Div", "sample_weights total", "shares", {}),
        ("Mul", "scores shares", "parts", {}),
        ("ReduceSum", "parts", "gain", {"keepdims": 0}),
        ("Neg", "gain", "loss", {}),
        ("Exp", "logs", "chances", {}),
        ("Sub", "chances hot", "wrong", {}),
        ("Unsqueeze", "shares last", "column", {}),
        ("Mul", "wrong column", "d_logits", {}),
        ("Mul", "d_logits z", "per_logit", {}),
        ("ReduceSum", "per_logit", "g:temperature", {"keepdims": 0}),
        ("Mul", "d_logits w:temperature", "d_z", {}),
        ("Gemm", "d_z scaled", "g:w2", {"transA": 1}),
        ("MatMul", "d_z w:w2", "d_scaled", {}),
        ("Mul", "d_scaled s:hidden", "d_dropped", {}),
        ("Mul", "d_dropped m0" if dropout else "d_dropped one", "d_h", {}),
        ("Mul", "h h", "squares", {}),
        ("Sub", "one squares", "slopes", {}),
        ("Mul", "d_h slopes", "d_a", {}),
        ("Gemm", "d_a x0", "g:w1", {"transA": 1}),
        ("ReduceSum", "d_a first", "g:b1", {"keepdims": 0}),
    ]


def _statistic() -> list[Node]:
    return [
        ("ReduceMean", "h first", "mean_h", {"keepdims": 0}),
        ("Mul", "mean_h new", "newer", {}),
        ("Mul", "b:mean old", "older", {}),
        ("Add", "newer older", "n:mean", {}),
    ]


def _value(port: Port) -> onnx.ValueInfoProto:
    shape = [
        "batch" if dim.batch else f"axis{dim.axes[0]}" if dim.axes else dim.coefficient
        for dim in port.dims
    ]
    return helper.make_tensor_value_info(port.name, _TYPES[port.dtype], shape)


def bundle(*models: Handmade, **changes: Any) -> tuple[ModelPlan, Manifest, dict[str, bytes]]:
    """What a device is given: gradient and evaluate graphs of these, as one task's."""
    graphs = [model.graph(kind) for model in models for kind in ("gradient", "evaluate")]
    manifest = Manifest(
        plan_hash=models[0].plan.hash,
        opset=models[0].opset,
        ir_version=IR,
        min_onnxruntime="1.23.0",
        loss="cross-entropy",
        tolerance=1e-6,
        data=DataSpec((ArraySpec("float32", (INPUTS,)),), ArraySpec("int64", highest=CLASSES - 1)),
        graphs=tuple(entry for entry, _ in graphs),
    )
    files = {entry.sha256: data for entry, data in graphs}
    return models[0].plan, replace(manifest, **changes), files


@dataclass
class Reference:
    """The model in float64, by the chain rule, and by differences for whoever doubts it."""

    scale: float = 1.0

    def logits(self, w: Mapping[str, Array], x: Array, mask: Array | float = 1.0) -> Array:
        h = np.tanh(x @ w["w1"].T + w["b1"]) * mask * self.scale
        out: Array = (h @ w["w2"].T) * w["temperature"]
        return out

    def loss(self, w: Mapping[str, Array], x: Array, y: Array, mask: Array | float = 1.0) -> float:
        z = self.logits(w, x, mask)
        z = z - z.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))

    def gradients(
        self, w: Mapping[str, Array], x: Array, y: Array, mask: Array | float = 1.0
    ) -> dict[str, Array]:
        """Central differences of the loss: slow, and nothing in common with the graph."""
        step, grads = 1e-6, {}
        for name, array in w.items():
            grad = np.zeros_like(array)
            for place in np.ndindex(array.shape):
                sides = []
                for sign in (1, -1):
                    moved = {key: np.array(each) for key, each in w.items()}
                    moved[name][place] += sign * step
                    sides.append(self.loss(moved, x, y, mask))
                grad[place] = (sides[0] - sides[1]) / (2 * step)
            grads[name] = grad
        return grads
