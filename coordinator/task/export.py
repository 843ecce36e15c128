"""Export a saved model in common formats: ONNX, safetensors, a torch state_dict.

The ONNX file is the evaluation graph of the whole model with its weights inside: inputs x0, x1 …,
output `outputs`. It accepts any number of samples if the graph does, otherwise only the number it
was compiled for. Weights and buffers keep the names they have in the torch module.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coordinator.errors import ConfigError
from coordinator.task.saved_model import SavedModel, contiguous
from edge_sdk import __version__
from edge_sdk.program.files import write_whole
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.task.graphs import GraphEntry, Port

if TYPE_CHECKING:
    import onnx

MAX_ONNX_BYTES = 2**31 - 1
"""Largest protobuf message, in bytes."""

BATCH = "batch"
"""Name of the open sample dimension in an exported file."""

_DATA = re.compile(r"x[0-9]+")


def export_model(model: SavedModel, format: str, path: Path, *, force: bool = False) -> None:
    """Write the model to a file in one of `FORMATS`, completely or not at all.

    `force` replaces an existing file. Raises `ConfigError` for an unusable path or format,
    and `GraphError` when the model has no graph to export.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: name a file in an existing folder")
    if path.exists() and not force:
        raise ConfigError(f"{path} already exists: name another file, or replace it with --force")
    write_whole(path, FORMATS[format](model))


def _safetensors_bytes(model: SavedModel) -> bytes:
    from safetensors.numpy import save

    encoded: bytes = save(contiguous(model.arrays))
    return encoded


def _torch_bytes(model: SavedModel) -> bytes:
    import torch

    data = BytesIO()
    torch.save({n: torch.from_numpy(np.array(a)) for n, a in model.arrays.items()}, data)
    return data.getvalue()


def _onnx_bytes(model: SavedModel) -> bytes:
    size = sum(array.nbytes for array in model.arrays.values())
    if size > MAX_ONNX_BYTES:
        raise ConfigError(
            f"the model has {size} bytes of weights, but an ONNX file holds at most "
            f"{MAX_ONNX_BYTES}: export to safetensors instead"
        )
    encoded: bytes = inference_graph(model).SerializeToString(deterministic=True)
    return encoded


FORMATS: dict[str, Callable[[SavedModel], bytes]] = {
    "onnx": _onnx_bytes,
    "safetensors": _safetensors_bytes,
    "torch": _torch_bytes,
}


def inference_graph(model: SavedModel) -> onnx.ModelProto:
    """Return the whole model's evaluation graph with weights and buffers inside."""
    import onnx
    from onnx import helper, numpy_helper

    plan, manifest = model.plan, model.manifest
    whole = tuple(axis.atoms for axis in plan.axes)
    largest = manifest.largest_batch("evaluate", whole)
    entry = manifest.pick("evaluate", whole, largest or 1)
    proto = onnx.load_from_string(model.files[entry.sha256])
    # Nothing is left out, so nothing is rescaled.
    values = {f"s:{axis.name}": np.ones((), dtype=np.float32) for axis in plan.axes}
    values |= {f"w:{name}": array for name, array in model.weights.items()}
    values |= {f"b:{name}": array for name, array in model.buffers.items()}
    ports = {port.name: port for port in (*entry.inputs, *entry.outputs)}
    graph, inputs = proto.graph, []
    for given in graph.input:
        if given.name in values:
            array = np.array(values[given.name], order="C")
            graph.initializer.append(numpy_helper.from_array(array, given.name))
        elif _DATA.fullmatch(given.name) and given.name in ports:
            inputs.append(given)
        else:
            raise GraphError(f"{entry} takes {given.name!r}, which is neither data nor a weight")
    for value in (*inputs, *graph.output):
        _name_sizes(value, ports[value.name], entry, whole)
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in inputs]
    del graph.input[:]
    graph.input.extend(kept)
    proto.producer_name, proto.producer_version = "tessera-fl", __version__
    helper.set_model_props(proto, {"tessera.plan": plan.hash, "tessera.loss": manifest.loss})
    onnx.checker.check_model(proto)
    return proto


def _name_sizes(
    value: onnx.ValueInfoProto, port: Port, entry: GraphEntry, whole: tuple[int, ...]
) -> None:
    """Fix the widths, which are known now; only the number of samples stays open."""
    dims = value.type.tensor_type.shape.dim
    if len(dims) != len(port.dims):
        raise GraphError(f"{entry}: {port.name!r} has {len(dims)} dimensions, not {len(port.dims)}")
    for dim, term in zip(dims, port.dims, strict=True):
        factor = term.value(whole, 1)
        if not term.batch:
            dim.dim_value = factor
        elif factor == 1:
            dim.dim_param = BATCH
        else:
            dim.dim_param = f"{factor}*{BATCH}"
