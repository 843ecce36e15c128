"""`tessera-device`: the command line on the device."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from edge_sdk import TesseraError, __version__
from edge_sdk.protocol.errors import TensorError

BACKENDS = {"onnx": "onnxruntime", "torch": "torch"}
EXIT_INTERRUPTED = 130
OUTPUT_FORMATS = (".npy", ".json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("tessera-device: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TesseraError as error:
        print(f"tessera-device: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"tessera-device: {error.name} is not installed; "
            "this command needs: pip install 'tessera-fl[onnx]'",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"tessera-device: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-device",
        description="Federated learning that fits the device: the device's side.",
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    info = commands.add_parser(
        "info",
        help="what this installation and this machine have to train with",
        description=(
            "Prints the versions that are installed, which training backends they make possible, "
            "and the cores and memory of this machine. Loads neither torch nor onnxruntime."
        ),
    )
    info.add_argument("--json", action="store_true", help="as JSON, for scripts")
    info.set_defaults(run=_info)
    infer = commands.add_parser(
        "infer",
        help="run an exported model on data of this device",
        description=(
            "Runs an ONNX file that has its weights inside, such as tessera-coordinator export "
            "writes, on numpy data. Needs onnxruntime, and neither torch nor the model's code."
        ),
        epilog="example: tessera-device infer --model model.onnx --data data.npz --out scores.npy",
    )
    infer.add_argument("--model", type=Path, metavar="FILE", required=True, help="the ONNX file")
    infer.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        required=True,
        help=".npy: the input; .npz: x, or x0, x1 …, and labels y if accuracy is wanted",
    )
    infer.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the outputs: .npy or .json"
    )
    infer.add_argument(
        "--batch-size",
        type=int,
        default=256,
        help="samples at a time, if the model leaves it open (default %(default)s)",
    )
    infer.add_argument(
        "--provider",
        metavar="NAME",
        default="CPUExecutionProvider",
        help="onnxruntime's execution provider (default %(default)s)",
    )
    infer.set_defaults(run=_infer)
    return parser


def _infer(arguments: argparse.Namespace) -> int:
    import numpy as np

    from edge_sdk.infer import ExportedModel, accuracy, read_data

    _check_out(arguments.out, arguments.data)
    data, labels = read_data(arguments.data)
    model = ExportedModel(arguments.model, providers=[arguments.provider])
    result = model.predict(data, batch_size=arguments.batch_size)
    share = None if labels is None else accuracy(result.outputs, labels)
    facts: dict[str, str | int | float | list[str] | None] = {
        "rows": len(result.outputs),
        "batches": len(result.batch_seconds),
        "seconds_per_batch": round(result.seconds_per_batch, 6),
        "providers": list(model.providers),
        "accuracy": share,
    }
    if arguments.out is not None and arguments.out.suffix == ".npy":
        np.save(arguments.out, result.outputs, allow_pickle=False)
    elif arguments.out is not None:
        if not np.isfinite(result.outputs).all():
            raise TensorError("some outputs are not finite, which JSON cannot say: use .npy")
        text = json.dumps({**facts, "outputs": result.outputs.tolist()})
        arguments.out.write_text(text + "\n")
    if labels is None:
        del facts["accuracy"]
    elif share is None:
        facts["accuracy"] = (
            f"none: labels are {labels.dtype.name} of shape {labels.shape}, "
            f"outputs {result.outputs.dtype.name} of shape {result.outputs.shape}"
        )
    else:
        facts["accuracy"] = f"{share:.2%} of {labels.size}"
    _print_facts(facts, width=18)
    return 0


def _check_out(path: Path | None, data: Path) -> None:
    """Before the work, not after it."""
    if path is None:
        return
    if path.suffix not in OUTPUT_FORMATS:
        raise TensorError(f"--out must end in one of {', '.join(OUTPUT_FORMATS)}, not {path.name}")
    if path.resolve() == data.resolve():
        raise TensorError(f"--out {path} would replace the data")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise TensorError(f"cannot write {path}: name a file in a folder that exists")


def _info(arguments: argparse.Namespace) -> int:
    facts = gather_info()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    _print_facts(facts, width=16)
    if not facts["backends"]:
        print("No training backend: pip install 'tessera-fl[onnx]' (or [torch]).")
    return 0


def _print_facts(facts: Mapping[str, str | int | float | list[str] | None], *, width: int) -> None:
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:<{width}} {shown if shown not in ('', None) else '–'}")


def gather_info() -> dict[str, str | int | list[str] | None]:
    """Versions, backends, cores and memory; None where something is not installed."""
    import psutil

    versions = {
        name: _version(name) for name in ("numpy", "msgpack", "paho-mqtt", *BACKENDS.values())
    }
    return {
        "tessera-fl": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **versions,
        "backends": [name for name, package in BACKENDS.items() if versions[package]],
        "cores": os.cpu_count(),
        "memory_mb": psutil.virtual_memory().total // 2**20,
        "available_mb": psutil.virtual_memory().available // 2**20,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
