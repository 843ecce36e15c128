"""A folder of graphs that were compiled before: manifests `<key>.bin` and their `graphs/`.

The key covers everything the graphs depend on: the traced model, the loss, the requested levels,
batch sizes and kinds, and the software that compiles. Weights are graph inputs, so the key omits
them, and the names of classes and inputs, which no graph depends on.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from coordinator.task.graphs.compilation import MIN_ONNXRUNTIME, compile_graphs
from coordinator.task.graphs.compiled import (
    BATCH_SIZES,
    CompiledGraphs,
    read_graphs,
    write_graphs,
)
from coordinator.task.graphs.onnx.translation import IR_VERSION, OPSET
from coordinator.task.task import CUSTOM, Task
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.plan import LEVELS

logger = logging.getLogger(__name__)


def compiled_graphs(
    task: Task,
    *,
    cache_dir: Path,
    levels: Sequence[float] = LEVELS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    distillation: bool = False,
    class_masks: bool = False,
    half: bool = False,
) -> CompiledGraphs:
    """Return what `compile_graphs` returns, from the cache where possible.

    A damaged entry is compiled again. Several processes may share the folder.
    """
    key = cache_key(task, levels, batch_sizes, distillation, class_masks, half)
    try:
        graphs = read_graphs(cache_dir, f"{key}.bin", task.plan)
        return replace(graphs, manifest=replace(graphs.manifest, data=task.data))
    except FileNotFoundError:
        logger.info("graphs %s… are not in the cache: compiling", key[:12])
    except (ProtocolError, OSError) as error:
        logger.warning("cached graphs %s… are unusable, compiling again: %s", key[:12], error)
    graphs = compile_graphs(
        task,
        levels=levels,
        batch_sizes=batch_sizes,
        distillation=distillation,
        class_masks=class_masks,
        half=half,
    )
    write_graphs(graphs, cache_dir, f"{key}.bin")
    return graphs


def cache_key(
    task: Task,
    levels: Sequence[float],
    batch_sizes: Sequence[int],
    distillation: bool = False,
    class_masks: bool = False,
    half: bool = False,
) -> str:
    """Name of a task's graphs in the cache, 64 hex digits."""
    whole = tuple(axis.atoms for axis in task.plan.axes)
    train, evaluate = task.train_program.at(whole, 2, True), task.traced.evaluate.at(whole, 2)
    parts = (
        task.plan.hash,
        (task.data.inputs, task.data.targets),
        *(_structure(form.module) for form in (train, evaluate)),
        *(_contents(form.constants) for form in (train, evaluate)),
        train.masks,
        _loss(task),
        [float(level) for level in levels],
        [int(size) for size in batch_sizes],
        (distillation, class_masks, half),
        (OPSET, IR_VERSION, MIN_ONNXRUNTIME),
        (str(torch.__version__), onnx.__version__, translator_version()),
    )
    return sha256(repr(parts).encode()).hexdigest()


TRANSLATOR = ("coordinator/task", "edge_sdk/protocol", "edge_sdk/train")
"""Folders with the code that traces, translates and describes graphs."""


@cache
def translator_version() -> str:
    """Hash of the code that traces and translates; changing that code makes every entry stale."""
    root = Path(__file__).parents[3]
    digest = sha256()
    for path in sorted(path for folder in TRANSLATOR for path in (root / folder).rglob("*.py")):
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _structure(module: fx.GraphModule) -> tuple[str, Any]:
    attributes = [node.target for node in module.graph.nodes if node.op == "get_attr"]
    held = [getattr(module, str(name)) for name in attributes]
    return str(module.graph), _contents([value for value in held if torch.is_tensor(value)])


def _contents(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    arrays = [tensor.detach().cpu().numpy() for tensor in tensors]
    return [(a.dtype.str, a.shape, sha256(a.tobytes()).hexdigest()) for a in arrays]


def _loss(task: Task) -> tuple[Any, ...]:
    if task.loss_name != CUSTOM:
        return (task.loss_name,)
    loss: Any = task.loss
    try:
        source = inspect.getsource(loss)
    except (OSError, TypeError):  # typed at a prompt, or a callable object
        source = ""
    # The source does not show the values it refers to, such as a factor of an enclosing function.
    targets = task.data.targets
    outputs = torch.full((2, *task.train_program.output_shape), 0.5)
    ones = torch.ones((2, *targets.shape), dtype=getattr(torch, targets.dtype))
    where = getattr(loss, "__module__", ""), getattr(loss, "__qualname__", type(loss).__qualname__)
    return (CUSTOM, where, source, _structure(make_fx(loss)(outputs, ones)))
