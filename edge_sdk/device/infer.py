"""`tessera-device infer`: predictions with the delivered model of a task, or an exported one."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_sdk.protocol.errors import ConfigError, TensorError

if TYPE_CHECKING:
    from edge_sdk.device.config import DeviceConfig
    from edge_sdk.protocol.plan.layout import Array
    from edge_sdk.protocol.task.data_spec import DataSpec

OUTPUT_FORMATS = (".npy", ".json")
SHOWN = 8
"""Most predictions to show one by one on the terminal, and most classes to count there."""


def add_infer(commands: Any) -> None:
    """Add the command."""
    infer = commands.add_parser(
        "infer",
        help="predict with the model that was delivered to this device, or with an exported one",
        description=(
            "Runs a model on data and prints how accurate it is, if the data has labels. --task: "
            "the model that tessera-device run keeps ready (deliver in the configuration), also "
            "while it runs. --model: an ONNX file with its weights inside, such as one written by "
            "tessera-coordinator export. Needs onnxruntime, but neither torch nor the model's code."
        ),
        epilog=(
            "examples:\n"
            "  tessera-device infer --task digits --data new.npz --out scores.json\n"
            "  tessera-device infer --config device.toml --data new.csv\n"
            "  tessera-device infer --model model.onnx --data data.npz --out scores.npy"
        ),
    )
    which = infer.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="FILE", help="an ONNX file")
    which.add_argument("--task", metavar="NAME", help="the task (default: that of --config)")
    infer.add_argument("--config", type=Path, metavar="FILE", help="the device's settings")
    infer.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="the device's state_dir (default: that of --config, or tessera-state)",
    )
    infer.add_argument(
        "--device", metavar="NAME", help="the device's name, if several share the state_dir"
    )
    infer.add_argument(
        "--data",
        type=Path,
        metavar="PLACE",
        required=True,
        help=(
            "a table, a folder of images or sounds, as for training (docs/data.md); .npy: the "
            "input; .npz: x, or x0, x1 …; with labels (y), the accuracy is computed"
        ),
    )
    infer.add_argument(
        "--out", type=Path, metavar="FILE", help="file for the outputs: .npy or .json"
    )
    infer.add_argument(
        "--batch-size",
        type=int,
        default=256,
        help="samples at a time, unless the model fixes it (default %(default)s)",
    )
    infer.add_argument(
        "--provider",
        metavar="NAME",
        default="CPUExecutionProvider",
        help="onnxruntime's execution provider (default %(default)s)",
    )
    infer.set_defaults(run=_infer)


def _infer(arguments: argparse.Namespace) -> int:
    import numpy as np

    from edge_sdk.train.inference import accuracy

    _check_out(arguments.out, arguments.data)
    if arguments.model is not None:
        outputs, labels, classes, facts = _run_exported(arguments)
    else:
        outputs, labels, classes, facts = _run_delivered(arguments)
    share = None if labels is None else accuracy(outputs, labels)
    facts["accuracy"] = share
    names = [classes[number] for number in outputs.argmax(1)] if _names(classes, outputs) else []
    if arguments.out is not None and arguments.out.suffix == ".npy":
        np.save(arguments.out, outputs, allow_pickle=False)
    elif arguments.out is not None:
        if not np.isfinite(outputs).all():
            raise TensorError("some outputs are not finite, which JSON cannot express: use .npy")
        predicted = {"predicted": names} if names else {}
        text = json.dumps({**facts, **predicted, "outputs": outputs.tolist()})
        arguments.out.write_text(text + "\n")
    if labels is None:
        del facts["accuracy"]
    elif share is None:
        facts["accuracy"] = (
            f"none: labels are {labels.dtype.name} of shape {labels.shape}, "
            f"outputs {outputs.dtype.name} of shape {outputs.shape}"
        )
    else:
        facts["accuracy"] = f"{share:.2%} of {labels.size}"
    if names:
        facts["predicted"] = _counted(names)
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:<18} {shown if shown not in ('', None) else '–'}")
    return 0


def _counted(names: Sequence[str]) -> str:
    """Write few predictions one by one, and of many how often each class was predicted."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    counts = Counter(names)
    text = ", ".join(f"{name}: {number}×" for name, number in counts.most_common(SHOWN))
    more = len(counts) - SHOWN
    return text if more <= 0 else f"{text}; {more} more class{'' if more == 1 else 'es'}"


def _read(
    place: Path, spec: DataSpec | None, config: DeviceConfig | None
) -> tuple[dict[str, Array], Array | None]:
    """Read inputs and labels in the form that the model takes, as training does, and say how.

    Arrays are taken as they are if the model's file does not describe its data.
    """
    from edge_sdk.data.files import read_data
    from edge_sdk.data.source import open_data

    if spec is None and place.suffix in (".npy", ".npz"):
        return read_data(place)
    if spec is None:
        raise TensorError(
            f"the model's file does not describe its data, so {place} cannot be converted: give a "
            ".npy or .npz file"
        )
    source = open_data(str(place), None if config is None else config.format)
    found = source.read(spec, labelled=False)
    for each in (*found.notes, *found.warnings):
        print(f"{'data':<18} {each}")
    inputs = {f"x{number}": array for number, array in enumerate(found.data.inputs)}
    return inputs, found.data.targets if found.labelled else None


def _run_exported(
    arguments: argparse.Namespace,
) -> tuple[Array, Array | None, tuple[str, ...], dict[str, Any]]:
    """Return an exported model's outputs, the labels, the names of classes, and facts to show."""
    from edge_sdk.device.config import load_config
    from edge_sdk.train.inference import ExportedModel

    config = None if arguments.config is None else load_config(arguments.config)
    model = ExportedModel(arguments.model, providers=[arguments.provider])
    data, labels = _read(arguments.data, model.data, config)
    result = model.predict(data, batch_size=arguments.batch_size)
    return (
        result.outputs,
        labels,
        model.classes,
        {
            "rows": len(result.outputs),
            "batches": len(result.batch_seconds),
            "seconds_per_batch": round(result.seconds_per_batch, 6),
            "providers": list(model.providers),
        },
    )


def _run_delivered(
    arguments: argparse.Namespace,
) -> tuple[Array, Array | None, tuple[str, ...], dict[str, Any]]:
    """Return a delivered model's outputs, the labels, the names of classes, and facts to show."""
    from edge_sdk.device.config import load_config
    from edge_sdk.train.delivered import Model

    task, state_dir, device = arguments.task, arguments.state_dir, arguments.device
    config = None
    if arguments.config is not None:
        config = load_config(arguments.config)
        task, state_dir = task or config.task, state_dir or config.state_dir
        device = device or config.name
    if task is None:
        raise ConfigError("name a model: --task NAME, --config FILE or --model FILE")
    model = Model.open(
        state_dir or "tessera-state", task, device=device, providers=[arguments.provider]
    )
    data, labels = _read(arguments.data, model.delivered.manifest.data, config)
    places = [f"x{number}" for number in range(len(data))]
    if set(places) != set(data):
        raise TensorError(f"the data has {', '.join(data)}: name inputs x, or x0, x1 …")
    start = time.perf_counter()
    outputs = model(*(data[name] for name in places), batch_size=arguments.batch_size)
    return (
        outputs,
        labels,
        model.classes,
        {
            "task": task,
            "run": model.run,
            "round": model.round,
            "level": model.level,
            "rows": len(outputs),
            "seconds": round(time.perf_counter() - start, 6),
            "providers": list(model.predictor.providers),
        },
    )


def _names(classes: tuple[str, ...], outputs: Array) -> bool:
    """True if each row of the outputs has a score for each of these classes."""
    return len(classes) > 1 and outputs.ndim == 2 and outputs.shape[1] == len(classes)


def _check_out(path: Path | None, data: Path) -> None:
    """Check the output path before the work, not after it."""
    if path is None:
        return
    if path.suffix not in OUTPUT_FORMATS:
        raise TensorError(f"--out must end in one of {', '.join(OUTPUT_FORMATS)}, not {path.name}")
    if path.resolve() == data.resolve():
        raise TensorError(f"--out {path} would replace the data")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise TensorError(f"cannot write {path}: name a file in an existing folder")
