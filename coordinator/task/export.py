"""Export a saved model in common formats: ONNX, safetensors, a torch state_dict.

The ONNX file is the evaluation graph of a level with its weights inside: inputs x0, x1 …, output
`outputs`. It accepts any number of samples if the graph does, otherwise only the number it was
compiled for. Weights and buffers keep the names they have in the torch module; tied weights appear
under each of their names. A level below 1 is a narrower model, with BatchNorm statistics of its
own; where it has fewer blocks of a chain, they have the names of the first ones, as in a module
that was made with fewer.

Every format but torch's own says of itself, in metadata, what it is (`export_facts`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coordinator.errors import ConfigError
from coordinator.task.levels import LevelModel, LevelScore, best_level, level_model
from coordinator.task.saved_model import SavedModel, contiguous
from edge_sdk import __version__
from edge_sdk.program.files import write_whole
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.protocol.task.codec import fitted
from edge_sdk.protocol.task.graphs import GraphEntry, Port
from edge_sdk.train.delivered import arrays_digest
from edge_sdk.train.local import axis_scales

if TYPE_CHECKING:
    import onnx

MAX_ONNX_BYTES = 2**31 - 1
"""Largest protobuf message, in bytes."""

BATCH = "batch"
"""Name of the open sample dimension in an exported file."""

_DATA = re.compile(r"x[0-9]+")


def export_model(
    model: SavedModel,
    format: str,
    path: Path,
    *,
    level: float | None = None,
    samples: Sequence[Array] | None = None,
    force: bool = False,
    untrained: bool = False,
) -> LevelModel:
    """Write a level of the model to a file in one of `FORMATS`, completely or not at all.

    `force` replaces an existing file, `untrained` permits weights that no device ever trained; see
    `pick_level` for the others. Returns what was written. Raises `ConfigError` for an unusable
    path, format or level, and `GraphError` when the model has no graph to export.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    # A device such as /dev/null would be replaced, too.
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: name a file in an existing folder")
    if path.exists() and not force:
        raise ConfigError(f"{path} already exists: name another file, or replace it with --force")
    part = pick_level(model, level, samples)
    if not untrained:
        _check_trained(model, part)
    write_whole(path, FORMATS[format](model, part))
    return part


def _check_trained(model: SavedModel, part: LevelModel) -> None:
    """Raise `ConfigError` if a level has weights that are known to be as they were at the start."""
    origin = model.origin
    if origin is None:
        return
    if not origin.trained.any():
        raise ConfigError(
            f"no device has trained this model: run {origin.run} has committed no round that "
            "counts. Wait for the first one (tessera-coordinator history shows it), or export the "
            "initial weights with --untrained"
        )
    missing = _untrained_share(model, part.groups)
    if missing:
        whole = [
            each.level for each in model.levels.levels if not _untrained_share(model, each.groups)
        ]
        smaller = f"a level without such weights (--level {max(whole):g})" if whole else None
        raise ConfigError(
            f"no device ever trained {missing:.2g} % of the weights of level {part.level:g}: "
            f"export {smaller or 'a later round'}, or all of them with --untrained"
        )


def _untrained_share(model: SavedModel, groups: Groups) -> float:
    """Percent of a submodel's weights that no device ever trained."""
    if model.origin is None:
        return 0.0
    held = model.plan.covers(model.plan.choose(groups))
    sizes = model.plan.block_sizes
    return 100 * float(sizes[held & ~model.origin.trained].sum() / sizes[held].sum())


def _level_to_deploy(model: SavedModel) -> float:
    scores = model.levels.accuracies
    trained = {
        each.level: scores[each.level]
        for each in model.levels.levels
        if each.level in scores and not _untrained_share(model, each.groups)
    }
    return best_level(trained or scores) if scores else 1.0


def pick_level(
    model: SavedModel, level: float | None = None, samples: Sequence[Array] | None = None
) -> LevelModel:
    """Return a level as a model of its own.

    `level` None means the one to deploy: the most accurate of those whose weights were all trained,
    or of all if none is; the whole model if no accuracy is known. The statistics
    of BatchNorm are computed from `samples`, unlabelled inputs; without these, they are those that
    were computed when the level was last evaluated, here or by devices. Raises `ConfigError` if
    there are none.
    """
    plan, known = model.plan, model.levels.by_level
    if level is None:
        level = _level_to_deploy(model)
    level = next((each for each in known if f"{each:g}" == f"{level:g}"), level)
    if level not in known and level != 1:
        levels = ", ".join(f"{each:g}" for each in known) or "1 alone"
        raise ConfigError(f"the model has no level {level:g}; its levels are {levels}")
    groups = known[level].groups if level in known else plan.full_groups()
    rescale = model.levels.rescale
    if samples is not None:
        # onnxruntime is optional, and slow to load.
        from edge_sdk.train.inference import Predictor

        runtime = Predictor(plan, model.manifest, model.files)
        return level_model(
            runtime, model.weights, model.buffers, level, groups, rescale=rescale, samples=samples
        )
    score = known.get(level, LevelScore(level, groups))
    own = score.statistics
    needed = any(entry.kind == "statistics" for entry in model.manifest.graphs)
    if level != 1 and not own and needed:
        why = "none were computed"
        if score.statistics_devices == 0:
            why = "no device could run it to compute them"
        raise ConfigError(
            f"level {level:g} needs BatchNorm statistics of its own, and {why}: give unlabelled "
            "data (--samples FILE.npz), or evaluation data to the run (task.evaluation). Devices "
            "compute them at the end of a run, and every survey_every rounds"
        )
    buffers = {**plan.cut_buffers(model.buffers, groups), **own}
    return LevelModel(
        level,
        groups,
        plan.cut(model.weights, groups),
        buffers,
        rescale,
        own,
        score.statistics_devices,
        score.statistics_share,
    )


def export_facts(model: SavedModel, part: LevelModel) -> dict[str, str]:
    """Return what an exported file says of itself: where it comes from, what goes in and out."""
    facts = {
        "tessera.plan": model.plan.hash,
        "tessera.loss": model.manifest.loss,
        "tessera.level": f"{part.level:g}",
        "tessera.hash": arrays_digest({**part.weights, **part.buffers}),
        "tessera.data": json.dumps(model.manifest.data.to_dict()),
    }
    if model.origin is not None:
        facts |= {
            "tessera.task": model.origin.task,
            "tessera.run": model.origin.run,
            "tessera.round": str(model.origin.round),
        }
    score = model.levels.by_level.get(part.level)
    if score is not None and score.accuracy is not None:
        facts["tessera.accuracy"] = f"{score.accuracy:g}"
    if part.statistics and part.statistics_devices is not None:
        facts["tessera.statistics_devices"] = str(part.statistics_devices)
        if part.statistics_share is not None:
            facts["tessera.statistics_share"] = f"{part.statistics_share:g}"
    return facts


def _arrays(model: SavedModel, part: LevelModel) -> dict[str, Array]:
    """Return weights and buffers together, by their names in a torch `state_dict`.

    Raises `ConfigError` if they are not the whole model.
    """
    scales = axis_scales(model.plan, part.groups, part.rescale)
    if any(scale != 1 for scale in scales.values()):
        raise ConfigError(
            f"level {part.level:g} was trained with scaled inputs (rescale = {part.rescale:g}), "
            "which weights alone cannot express: export it with --format onnx, or the whole model "
            "with --level 1"
        )
    arrays = model.plan.unstacked({**part.weights, **part.buffers})
    if not model.names:
        return arrays
    return {name: arrays[known] for name, known in model.names.items() if known in arrays}


def _safetensors_bytes(model: SavedModel, part: LevelModel) -> bytes:
    from safetensors.numpy import save

    # One entry: several would be written in any order.
    facts = {"tessera": json.dumps(export_facts(model, part))}
    encoded: bytes = save(contiguous(_arrays(model, part)), metadata=facts)
    return encoded


def _torch_bytes(model: SavedModel, part: LevelModel) -> bytes:
    import torch

    data = BytesIO()
    arrays = _arrays(model, part)
    torch.save({n: torch.from_numpy(np.array(a)) for n, a in arrays.items()}, data)
    return data.getvalue()


def _onnx_bytes(model: SavedModel, part: LevelModel) -> bytes:
    size = sum(array.nbytes for array in (*part.weights.values(), *part.buffers.values()))
    if size > MAX_ONNX_BYTES:
        raise ConfigError(
            f"the model has {size} bytes of weights, but an ONNX file holds at most "
            f"{MAX_ONNX_BYTES}: export to safetensors instead"
        )
    encoded: bytes = inference_graph(model, part).SerializeToString(deterministic=True)
    return encoded


FORMATS: dict[str, Callable[[SavedModel, LevelModel], bytes]] = {
    "onnx": _onnx_bytes,
    "safetensors": _safetensors_bytes,
    "torch": _torch_bytes,
}


def inference_graph(model: SavedModel, part: LevelModel) -> onnx.ModelProto:
    """Return a level's evaluation graph with weights, buffers and scales inside."""
    import onnx
    from onnx import helper, numpy_helper

    plan, manifest = model.plan, model.manifest
    kept = plan.kept_atoms(plan.choose(part.groups))
    largest = manifest.largest_batch("evaluate", kept)
    entry = manifest.pick("evaluate", kept, largest or 1)
    proto = onnx.load_from_string(fitted(entry, model.files[entry.sha256], kept))
    scales = axis_scales(plan, part.groups, part.rescale)
    values = {f"s:{name}": np.array(scale, np.float32) for name, scale in scales.items()}
    values |= {f"w:{name}": array for name, array in part.weights.items()}
    values |= {f"b:{name}": array for name, array in part.buffers.items()}
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
        _name_sizes(value, ports[value.name], entry, kept)
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in inputs]
    del graph.input[:]
    graph.input.extend(copies)
    proto.producer_name, proto.producer_version = "tessera-fl", __version__
    helper.set_model_props(proto, export_facts(model, part))
    onnx.checker.check_model(proto)
    return proto


def _name_sizes(
    value: onnx.ValueInfoProto, port: Port, entry: GraphEntry, kept: tuple[int, ...]
) -> None:
    """Fix the widths, which are known now; only the number of samples stays open."""
    dims = value.type.tensor_type.shape.dim
    if len(dims) != len(port.dims):
        raise GraphError(f"{entry}: {port.name!r} has {len(dims)} dimensions, not {len(port.dims)}")
    for dim, term in zip(dims, port.dims, strict=True):
        factor = term.value(kept, 1)
        if not term.batch:
            dim.dim_value = factor
        elif factor == 1:
            dim.dim_param = BATCH
        else:
            dim.dim_param = f"{factor}*{BATCH}"
