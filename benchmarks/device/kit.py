"""A kit: files with which devices train the benchmarks' models, compiled where torch is.

    <kit>/kit.json             version, batch, levels, families
    <kit>/<family>/plan, manifest, <hash>.onnx       as a coordinator sends them
    <kit>/<family>/index, chunks/<hash>              the model in fp32, as chunks
    <kit>/<family>/data.npz                          random inputs and targets, two batches
    <kit>/digits.npz                                 scikit-learn's digits, to learn from

    TesseraError
    └── KitError      a folder that is not a kit, or lacks something; says what to do

Writing a kit needs torch and the coordinator; everything else works without.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.data import Dataset, load_data
from benchmarks.report.progress import Begin, silent
from edge_sdk import TesseraError
from edge_sdk.data.arrays import ArrayData
from edge_sdk.program.plain import ProfileError, from_plain, to_plain
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.codec import decode_plan, encode_plan
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.codec import decode_manifest, encode_manifest
from edge_sdk.protocol.task.graphs import Manifest

VERSION = 1
FILE = "kit.json"
DIGITS = "digits.npz"
GROUPS = 4
BATCH = 32
CHUNK_BYTES = 2**18


class KitError(TesseraError):
    """A folder that is not a kit, or lacks something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """Description of a kit."""

    version: int = VERSION
    tessera: str
    """Version that wrote it."""
    batch: int
    levels: tuple[float, ...]
    families: tuple[str, ...]


def write_kit(
    folder: Path,
    families: Sequence[str],
    *,
    levels: Sequence[float] = LEVELS,
    batch: int = BATCH,
    begin: Begin = silent,
) -> Kit:
    """Compile these families into a new folder, or replace an older kit there.

    `begin` is called with each family, and its result once. Raises `KitError` for a folder with
    other contents.
    """
    from edge_sdk import __version__

    if batch < 1:
        raise KitError(f"a batch has at least 1 sample, not {batch}")
    _check_levels(levels)
    old = None
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / FILE).exists():
            raise KitError(f"{folder} has other files in it, and is not a kit: name a new folder")
        old = read_kit(folder)
    kit = Kit(tessera=__version__, batch=batch, levels=tuple(levels), families=tuple(families))
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".kit-", dir=folder) as temporary:
        new = Path(temporary)
        for family in families:
            tick = begin(family)
            (new / family).mkdir()
            write_task(family, batch, new / family, levels)
            tick()
        digits = load_data(None)
        np.savez_compressed(
            new / DIGITS,
            x=digits.train.inputs[0],
            y=digits.train.targets,
            test_x=digits.test.inputs[0],
            test_y=digits.test.targets,
        )
        # Removes only what an older kit lists as its own.
        for name in () if old is None else old.families:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (*families, DIGITS):
            (new / name).replace(folder / name)
    text = json.dumps(to_plain(kit), indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")
    return kit


def write_task(family: str, batch: int, folder: Path, levels: Sequence[float] = LEVELS) -> None:
    """Write one family's files on a device: plan, graphs, a model in chunks, data."""
    from benchmarks.models import FAMILIES
    from coordinator.task.graphs.compilation import compile_graphs
    from coordinator.task.task import make_task
    from edge_sdk.protocol.encoding.encoded_model import encode_model
    from edge_sdk.protocol.encoding.encoding import Encoding
    from edge_sdk.protocol.packs.index import encode_index, pack_model
    from edge_sdk.protocol.streams import stream

    model = FAMILIES[family]
    task = make_task(model.model(), model.inputs(2), groups=GROUPS)
    sizes = (max(1, batch // 4), batch)
    compiled = compile_graphs(task, levels=levels, batch_sizes=sizes)
    (folder / "plan").write_bytes(encode_plan(task.plan))
    (folder / "manifest").write_bytes(encode_manifest(compiled.manifest))
    for digest, data in compiled.files.items():
        (folder / f"{digest}.onnx").write_bytes(data)
    draws = stream(0, "costs", "model")
    encoded = encode_model(task.plan, task.plan.flatten(task.weights), Encoding(), draws)
    index, chunks = pack_model(task.plan, encoded, task.buffers, CHUNK_BYTES)
    (folder / "index").write_bytes(encode_index(task.plan, index))
    (folder / "chunks").mkdir()
    for name, chunk in chunks.items():
        (folder / "chunks" / name.hex()).write_bytes(chunk)
    samples = 2 * batch
    labels = draws.integers(model.classes, size=samples)
    np.savez(folder / "data.npz", x0=model.inputs(samples).numpy(), targets=labels)


def read_kit(folder: Path) -> Kit:
    """Read the kit in a folder. Raises `KitError`."""
    advice = "make one with `tessera-bench kit --out DIR` where torch is installed"
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        kit = from_plain(Kit, content, FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise KitError(f"{folder} is not a kit: it has no {FILE}; {advice}") from error
    except (OSError, ValueError, RecursionError, ProfileError) as error:
        raise KitError(f"{folder} is not a kit that can be read: {error}; {advice}") from error
    if strange := [name for name in kit.families if not re.fullmatch(r"[a-z0-9_-]+", name)]:
        raise KitError(f"{folder / FILE}: {strange[0]!r} is no family's name; {advice}")
    if kit.version != VERSION:
        raise KitError(f"{folder}: a kit of version {kit.version}, not {VERSION}; {advice}")
    return kit


def kit_digits(folder: Path) -> Dataset:
    """Load the kit's digits, for machines without scikit-learn. Raises `KitError`."""
    try:
        with np.load(folder / DIGITS, allow_pickle=False) as arrays:
            train = ArrayData((arrays["x"],), arrays["y"])
            test = ArrayData((arrays["test_x"],), arrays["test_y"])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise KitError(f"{folder / DIGITS} cannot be read: {error}; make the kit again") from error
    return Dataset("digits", "digits", train, test, classes=10)


def read_task(folder: Path, family: str) -> tuple[ModelPlan, Manifest]:
    """Read a family's plan and manifest. Raises `KitError`."""
    try:
        plan = decode_plan((folder / family / "plan").read_bytes())
        return plan, decode_manifest((folder / family / "manifest").read_bytes())
    except (OSError, TesseraError) as error:
        raise KitError(f"{folder / family} cannot be read: {error}; make the kit again") from error


def _check_levels(levels: Sequence[float]) -> None:
    """Raise `KitError` for a level that would be trained as another: widths have `GROUPS` parts."""
    if between := [level for level in levels if level * GROUPS % 1]:
        whole = ", ".join(f"{part / GROUPS:g}" for part in range(1, GROUPS + 1))
        raise KitError(
            f"there is no level {between[0]:g}: models are cut into {GROUPS} groups, so levels "
            f"are {whole}"
        )


def check_kit(
    folder: Path, kit: Kit, families: Sequence[str], levels: Sequence[float], batch: int
) -> None:
    """Raise `KitError` unless all of this can be trained with the kit."""
    _check_levels(levels)
    if missing := [family for family in families if family not in kit.families]:
        raise KitError(
            f"{folder} has no family {missing[0]!r}: it has {', '.join(kit.families)}; "
            f"make one with `tessera-bench kit --families {','.join(families)}`"
        )
    if missing_levels := [level for level in levels if level not in kit.levels]:
        raise KitError(
            f"{folder} was made for levels {', '.join(map(str, kit.levels))}, "
            f"not {missing_levels[0]:g}; make one with `tessera-bench kit --levels …`"
        )
    if batch != kit.batch:
        raise KitError(
            f"{folder} was made for batches of {kit.batch}, not {batch}: leave --batch out, or "
            f"make one with `tessera-bench kit --batch {batch}`"
        )
