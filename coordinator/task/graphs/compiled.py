"""Compiled graphs, in memory and in a folder. Loads neither torch nor onnx.

    <name>                inputs and outputs of the graphs   (`edge_sdk.protocol.task.codec`)
    graphs/<sha256>.onnx  the graphs it names

The manifest is written last: a manifest that exists has all of its graphs. Reading checks every
byte against a hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from coordinator.task.graphs.errors import GraphCompileError
from edge_sdk.program.files import make_folder, remove_leftovers, write_whole
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.graphs import Manifest

BATCH_SIZES = (32,)
"""Batch sizes to compile for where the batch cannot stay open."""

GRAPHS = "graphs"
ABANDONED_S = 86400.0
"""A draft that is older belongs to nobody who still writes."""


@dataclass(frozen=True)
class CompiledGraphs:
    """A manifest and the files it names, by SHA-256."""

    manifest: Manifest
    files: dict[str, bytes]


def check_wanted(levels: Sequence[float], batch_sizes: Sequence[int]) -> None:
    """Raise `GraphCompileError` when no level or no batch size is requested."""
    if not levels or not batch_sizes or min(batch_sizes) < 1:
        raise GraphCompileError("give at least one level and one batch size of 1 or more")


def write_graphs(graphs: CompiledGraphs, folder: Path, name: str) -> None:
    """Write the graphs and a manifest of this name, replacing existing files."""
    make_folder(folder / GRAPHS)
    for each in (folder, folder / GRAPHS):
        remove_leftovers(each, older_than_s=ABANDONED_S)
    for digest, data in graphs.files.items():
        write_whole(_graph_path(folder, digest), data)
    write_whole(folder / name, graphs.manifest.encoded)


def read_graphs(folder: Path, name: str, plan: ModelPlan) -> CompiledGraphs:
    """Read the graphs of this plan from a folder.

    Raises `OSError` when a file is missing, `GraphError` when one is damaged or of another plan.
    """
    manifest = decode_manifest((folder / name).read_bytes())
    manifest.check(plan)
    files = {}
    for entry in manifest.graphs:
        data = _graph_path(folder, entry.sha256).read_bytes()
        if len(data) != entry.size_bytes or sha256(data).hexdigest() != entry.sha256:
            raise GraphError(f"the file of {entry} is damaged: its hash does not match")
        files[entry.sha256] = data
    return CompiledGraphs(manifest, files)


def _graph_path(folder: Path, digest: str) -> Path:
    return folder / GRAPHS / f"{digest}.onnx"
