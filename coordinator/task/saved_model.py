"""The global model on disk: a folder that needs neither torch nor the model's code to read.

    plan.bin              the plan                        (`edge_sdk.protocol.plan.codec`)
    weights.safetensors   weights and buffers, by the names they have in the torch module: the rows
                          of a stack are arrays of their own
    levels.safetensors    levels that are models too: groups, accuracy, statistics; may be absent
    names.json            names of a torch `state_dict`, where they are not those of the plan
    manifest.bin          inputs and outputs of the graphs (`edge_sdk.protocol.task.codec`)
    graphs/<sha256>.onnx  the graphs that the manifest names

Everything is checked when read: the plan and the manifest against their hashes and each other, the
weights against the plan, the graphs against the manifest. Nothing is ever executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import ConfigError
from coordinator.task.levels import LevelScores, pack_levels, unpack_levels
from edge_sdk.program.files import make_folder, whole_folder, write_whole
from edge_sdk.protocol.errors import GraphError, ProtocolError, TensorError
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.graphs import GraphEntry, Manifest

PLAN = "plan.bin"
WEIGHTS = "weights.safetensors"
LEVELS = "levels.safetensors"
NAMES = "names.json"
MANIFEST = "manifest.bin"
GRAPHS = "graphs"
_FACTS = "levels"

SAFETENSORS_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The run and the round that made a model."""

    task: str
    run: str
    round: int
    """The round; in an asynchronous run, the number of updates. 0: before the first."""
    trained: NDArray[np.bool_]
    """Per block of the plan, whether any device ever trained it."""


@dataclass(frozen=True)
class SavedModel:
    """The contents of a saved model's folder. `files` holds the graphs by SHA-256."""

    plan: ModelPlan
    weights: Mapping[str, Array]
    buffers: Mapping[str, Array]
    manifest: Manifest
    files: Mapping[str, bytes]
    levels: LevelScores = field(default_factory=LevelScores)
    """Its levels, largest first; none if they are not known."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the torch module's `state_dict`, and the name of each in the plan. Tied weights have
    several; buffers that torch does not save have none. Empty: the names of the plan."""
    origin: Origin | None = None
    """None: not known."""

    def __post_init__(self) -> None:
        self.plan.check(self.weights)
        self.plan.check_buffers(self.buffers)
        if unknown := [name for name in self.names.values() if name not in self.arrays]:
            raise TensorError(f"{NAMES} names {unknown[0]!r}, which the plan does not have")
        self.manifest.check(self.plan)
        for entry in self.manifest.graphs:
            _check_file(entry, self.files)
        for each in self.levels.levels:
            buffers = self.plan.cut_buffers(self.buffers, each.groups)
            self.plan.check_buffers({**buffers, **each.statistics}, each.groups)

    def with_statistics(self) -> SavedModel:
        """Return the model with the statistics that were computed for the whole of it, if any."""
        whole = self.levels.by_level.get(1.0)
        own = {} if whole is None else whole.statistics
        return replace(self, buffers={**self.buffers, **own})

    @property
    def arrays(self) -> dict[str, Array]:
        """Return weights and buffers together, as in a torch `state_dict`."""
        return self.plan.unstacked({**self.weights, **self.buffers})


def check_folder_free(path: Path, what: str = "save the model") -> None:
    """Raise `ConfigError` unless a folder can be made there without overwriting anything.

    `what` is to be done there, in the words of the error.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"cannot {what} in {path}: it is a file, not a folder")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"cannot {what} in {path}: it is not empty; name another folder")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot {what} in {path}: its parent folder does not exist")


def save_model(model: SavedModel, path: Path) -> None:
    """Write the folder completely, or leave nothing under this name. Raises `ConfigError`."""
    from safetensors.numpy import save

    check_folder_free(path)
    with whole_folder(path) as draft:
        make_folder(draft / GRAPHS)
        write_whole(draft / PLAN, model.plan.encoded)
        write_whole(draft / WEIGHTS, save(contiguous(model.arrays)))
        write_whole(draft / MANIFEST, model.manifest.encoded)
        if model.names:
            write_whole(draft / NAMES, json.dumps(dict(model.names)).encode())
        if model.levels.levels:
            content, arrays = pack_levels(model.levels)
            described = {_FACTS: json.dumps(content)}
            write_whole(draft / LEVELS, save(contiguous(arrays), metadata=described))
        for entry in model.manifest.graphs:
            write_whole(_graph_path(draft, entry), model.files[entry.sha256])


def read_model(path: Path) -> SavedModel:
    """Read the model in a folder.

    Raises `ConfigError` when the folder is not a saved model, and a `ProtocolError` that names the
    file when part of it is damaged or does not belong to the rest.
    """
    if not path.is_dir():
        raise ConfigError(f"no saved model: {path} is {'a file' if path.exists() else 'not there'}")
    for name in (PLAN, WEIGHTS, MANIFEST):
        if not (path / name).is_file():
            raise ConfigError(
                f"{path} is not a saved model: it has no {name}; "
                "tessera-coordinator demo --save DIR makes one"
            )
    with _naming(path / PLAN):
        plan = decode_plan((path / PLAN).read_bytes())
    with _naming(path / MANIFEST):
        manifest = decode_manifest((path / MANIFEST).read_bytes())
    weights, buffers = load_weights(path / WEIGHTS, plan)
    files = {
        entry.sha256: _graph_path(path, entry).read_bytes()
        for entry in manifest.graphs
        if _graph_path(path, entry).is_file()
    }
    levels, names = _read_levels(path / LEVELS), _read_names(path / NAMES)
    with _naming(path):
        return SavedModel(plan, weights, buffers, manifest, files, levels, names)


def read_plan(path: Path) -> ModelPlan:
    """Read the plan of the model in a folder, and nothing else. Raises as `read_model`."""
    if not (path / PLAN).is_file():
        raise ConfigError(f"{path} is not a saved model: it has no {PLAN}")
    with _naming(path / PLAN):
        return decode_plan((path / PLAN).read_bytes())


def load_weights(
    path: Path, plan: ModelPlan, *, buffers: Mapping[str, Array] | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Read (weights, buffers) from a .safetensors file or a `torch.save`d state_dict.

    `buffers` replace those missing from the file, such as constants that torch leaves out of a
    state_dict. Raises `ConfigError` when the file does not exist, `TensorError` when it cannot be
    read or its names, types or shapes do not match the plan.
    """
    if not path.is_file():
        raise ConfigError(f"cannot read weights: {path} is not a file")
    if path.suffix in SAFETENSORS_SUFFIXES:
        arrays = _read_safetensors(path)
    elif path.suffix in TORCH_SUFFIXES:
        arrays = _read_torch(path)
    else:
        known = ", ".join((*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES))
        raise ConfigError(f"cannot read weights from {path}: its name must end in one of {known}")
    with _naming(path):
        arrays = plan.stacked(arrays)
    names = {buffer.name for buffer in plan.buffers}
    weights = {name: array for name, array in arrays.items() if name not in names}
    found = {name: array for name, array in arrays.items() if name in names}
    found = {**(buffers or {}), **found}
    with _naming(path):
        plan.check(weights)
        plan.check_buffers(found)
    return weights, found


def contiguous(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays in C order, sorted by name, so that safetensors writes equal bytes."""
    return {name: np.array(arrays[name], order="C") for name in sorted(arrays)}


def _read_levels(path: Path) -> LevelScores:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return LevelScores()
    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return unpack_levels(json.loads(file.metadata()[_FACTS]), arrays)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise TensorError(f"{path} does not describe the levels of a model: {error}") from error


def _read_names(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        names = json.loads(path.read_bytes())
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise ValueError("it is not a map of names")
    except ValueError as error:
        raise TensorError(f"{path} cannot be read: {error}") from error
    return names


def _read_safetensors(path: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: dict[str, Array] = load(path.read_bytes())
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise TensorError(f"{path} is not a readable safetensors file: {error}") from error
    return arrays


def _read_torch(path: Path) -> dict[str, Array]:
    import pickle

    import torch

    try:
        # Only tensors and plain containers: loading never runs code from the file.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n")[0]
        raise TensorError(f"{path} is not a state_dict torch can load safely: {first}") from error
    if not isinstance(state, dict):
        raise TensorError(f"{path} holds {type(state).__name__}, not a state_dict")
    arrays: dict[str, Array] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TensorError(f"{path}: entry {name!r} is {type(value).__name__}, not a tensor")
        if value.dtype == torch.bfloat16:
            raise TensorError(f"{path}: tensor {name!r} is bfloat16, which plans do not support")
        arrays[name] = value.detach().numpy().copy()
    return arrays


def _graph_path(folder: Path, entry: GraphEntry) -> Path:
    return folder / GRAPHS / f"{entry.sha256}.onnx"


def _check_file(entry: GraphEntry, files: Mapping[str, bytes]) -> None:
    if entry.sha256 not in files:
        raise GraphError(f"the file of {entry} is missing")
    if (digest := hashlib.sha256(files[entry.sha256]).hexdigest()) != entry.sha256:
        raise GraphError(f"the file of {entry} has hash {digest[:12]}…: it is damaged or altered")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix errors with the file's name."""
    try:
        yield
    except ProtocolError as error:
        raise type(error)(f"{path}: {error}") from error
