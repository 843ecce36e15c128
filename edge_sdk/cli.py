"""`tessera-device`: the command line on the device."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_sdk import TesseraError, __version__
from edge_sdk.program.command import EXIT_INTERRUPTED, run_command
from edge_sdk.protocol.errors import TensorError

if TYPE_CHECKING:
    from edge_sdk.device.service.service import DeviceService

log = logging.getLogger("edge_sdk.cli")

BACKENDS = {"onnx": "onnxruntime", "torch": "torch"}
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_BROKER = 4
EXIT_TASK = 5
EXIT_REPLACED = 6
EXIT_DENIED = 7
FLAGS = ("task", "name", "data", "state_dir", "level", "log_format", "log_level")
"""Keys that `run` takes as flags too."""
OUTPUT_FORMATS = (".npy", ".json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    return run_command(make_parser, argv, "onnx")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tessera-device",
        description="Federated learning that fits the device: the device.",
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_run(commands)
    _add_init(commands)
    _add_explain(commands)
    info = commands.add_parser(
        "info",
        help="show what this installation and this machine can train with",
        description=(
            "Prints the installed versions, the training backends they support, and the cores "
            "and memory of this machine. Loads neither torch nor onnxruntime."
        ),
    )
    info.add_argument("--json", action="store_true", help="as JSON, for scripts")
    info.set_defaults(run=_info)
    infer = commands.add_parser(
        "infer",
        help="run an exported model on this device's data",
        description=(
            "Runs an ONNX file with its weights inside, such as one written by "
            "tessera-coordinator export, on numpy data. Needs only onnxruntime: neither torch nor "
            "the model's code."
        ),
        epilog="example: tessera-device infer --model model.onnx --data data.npz --out scores.npy",
    )
    infer.add_argument("--model", type=Path, metavar="FILE", required=True, help="the ONNX file")
    infer.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        required=True,
        help=".npy: the input; .npz: x, or x0, x1 …, and labels y to compute accuracy",
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
    return parser


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show what this device would train if a round opened now, and why",
        description=(
            "Prints the state of this machine (battery, memory, heat, power, network), the gates, "
            "the cost of each level, the decision, and what is missing for the next larger level. "
            "Makes no connection. Costs are known once the device has taken part in the task; "
            "otherwise it may measure them first, which takes a few seconds, and keeps them."
        ),
        epilog="example: tessera-device explain --config device.toml",
    )
    explain.add_argument("--config", type=Path, metavar="FILE", help="the device's settings")
    explain.add_argument("--json", action="store_true", help="as JSON, for scripts")
    explain.set_defaults(run=_explain)


def _add_run(commands: Any) -> None:
    from edge_sdk.device.config import DeviceConfig
    from edge_sdk.program.settings.reference import add_flags

    run = commands.add_parser(
        "run",
        help="take part in training a task",
        description=(
            "Connects to the broker, waits for the task's coordinator and takes part in its rounds "
            "until the run is finished. Flags override variables (TESSERA_NAME, "
            "TESSERA_BROKER_HOST …), and variables the file; docs/configuration.md lists all."
        ),
        epilog=(
            "exit codes:\n"
            "  0    the run is finished, or was stopped by SIGTERM\n"
            "  1    a file or the disk failed\n"
            "  2    the configuration is wrong, or onnxruntime is not installed\n"
            "  3    the data cannot be loaded or does not fit the task\n"
            "  4    the broker cannot be reached within connect_s, or does not let us take part\n"
            "  5    this device cannot train the task\n"
            "  6    a program started later uses this device's name\n"
            "  7    the broker refuses this device's name, password or certificate\n"
            "  130  interrupted (Ctrl-C)\n"
            "\n"
            "example: tessera-device run --config device.toml --log-format json"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--config", type=Path, metavar="FILE", help="see tessera-device init")
    add_flags(run, DeviceConfig, FLAGS)
    run.set_defaults(run=_run)


def _add_init(commands: Any) -> None:
    init = commands.add_parser(
        "init",
        help="write a commented configuration as a starting point",
        description="Writes a commented configuration. Never replaces an existing file.",
    )
    init.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=Path("device.toml"),
        metavar="FILE",
        help="default %(default)s",
    )
    init.set_defaults(run=_init)


def _init(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.config import write_default

    write_default(arguments.file)
    print(f"{arguments.file} is written: set task, data and broker, then run")
    print(f"tessera-device run --config {arguments.file}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from edge_sdk.data.folder import DataError
    from edge_sdk.device.config import load_config
    from edge_sdk.device.service.service import BrokerError, DeviceService, ReplacedError
    from edge_sdk.program.logs import configure_logging, fact
    from edge_sdk.program.watchdog import Watchdog
    from edge_sdk.transport.settings import DeniedError, LinkError

    config = load_config(arguments.config, flags={name: getattr(arguments, name) for name in FLAGS})
    if find_spec("onnxruntime") is None:
        raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
    configure_logging(config.log_format, config.log_level)
    try:
        service = DeviceService(config, watchdog=Watchdog.from_environment())
        before = signal.signal(signal.SIGTERM, lambda *_: service.stop())
        try:
            _report(service)
            service.run()
        finally:
            signal.signal(signal.SIGTERM, before)
    except KeyboardInterrupt:
        log.info("interrupted")
        return EXIT_INTERRUPTED
    except TesseraError as error:
        for kind, said, event, code in (
            (DataError, "", "data", EXIT_DATA),
            (BrokerError, "", "broker", EXIT_BROKER),
            (DeniedError, "", "denied", EXIT_DENIED),
            (ReplacedError, "", "replaced", EXIT_REPLACED),
            (LinkError, "[broker] ", "link", EXIT_CONFIG),
            (TesseraError, "this device cannot train the task: ", "task", EXIT_TASK),
        ):
            if isinstance(error, kind):
                log.error("%s%s", said, error, extra=fact(event))
                return code
    return 0


def _report(service: DeviceService) -> None:
    """Report what is about to run: a table for people, one log line for machines."""
    config, data = service.config, service.data
    facts: dict[str, str | int | float | list[str] | None] = {
        "name": config.name,
        "task": config.task,
        "broker": config.broker.address + (" (TLS)" if config.broker.tls else ""),
        "data": f"{len(data)} samples, " + ", ".join(_array_words(each) for each in data.inputs),
        "level": config.policy.level,
        "participation": config.policy.participation,
        "backend": f"onnxruntime {_version('onnxruntime')}",
        "providers": list(config.providers),
        "threads": config.threads,
        "state": str(config.state_dir),
    }
    if config.log_format == "json":
        log.info("starting", extra={"facts": facts})
    else:
        _print_facts(facts, width=16)
        sys.stdout.flush()


def _array_words(array: Any) -> str:
    return f"{array.dtype.name} {'×'.join(map(str, array.shape[1:])) or 'numbers'}"


def _infer(arguments: argparse.Namespace) -> int:
    import numpy as np

    from edge_sdk.data.files import read_data
    from edge_sdk.train.inference import ExportedModel, accuracy

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
            raise TensorError("some outputs are not finite, which JSON cannot express: use .npy")
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
    """Check the output path before the work, not after it."""
    if path is None:
        return
    if path.suffix not in OUTPUT_FORMATS:
        raise TensorError(f"--out must end in one of {', '.join(OUTPUT_FORMATS)}, not {path.name}")
    if path.resolve() == data.resolve():
        raise TensorError(f"--out {path} would replace the data")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise TensorError(f"cannot write {path}: name a file in an existing folder")


def _explain(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.config import load_config
    from edge_sdk.device.explanation import explain

    flags = {} if arguments.config is not None else {"task": "none"}
    explanation = explain(load_config(arguments.config, flags=flags))
    if arguments.json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        print("\n".join(explanation.lines()))
    return 0


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
    """Return versions, backends, cores and memory; None where something is not installed."""
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
