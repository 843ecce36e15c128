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
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_sdk import TesseraError, __version__
from edge_sdk.device.advice.commands import add_owner_commands
from edge_sdk.device.infer import add_infer
from edge_sdk.join.commands import add_commands as add_join_commands
from edge_sdk.program.command import LaterParser, run_command
from edge_sdk.program.completion import add_completion

if TYPE_CHECKING:
    from edge_sdk.device.config import DeviceConfig
    from edge_sdk.device.service.service import DeviceService

log = logging.getLogger("edge_sdk.cli")

BACKENDS = {"onnx": "onnxruntime", "torch": "torch"}
FLAGS = ("task", "name", "data", "state_dir", "level", "log_format", "log_level")
"""Keys that `run` takes as flags too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    return run_command(make_parser, argv, "onnx")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tessera-device",
        description="Federated learning that fits the device: the device.",
        epilog=(
            "examples:\n"
            "  tessera-device join CODE --data samples     joins a task, and takes part\n"
            "  tessera-device check --config device.toml   says what is missing, and what to do\n"
            "  tessera-device run --config device.toml     takes part again\n"
            "  tessera-device status --config device.toml  says what it does, and why\n"
            "  tessera-device pause --config device.toml --for 2h\n"
            "  tessera-device infer --config device.toml --data new.csv\n"
            "  tessera-device run --help                   options, exit codes"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=LaterParser)
    _add_run(commands)
    add_join_commands(commands, lambda path: main(["run", "--config", str(path)]))
    _add_init(commands)
    _add_check(commands)
    _add_explain(commands)
    add_owner_commands(commands)
    info = commands.add_parser(
        "info",
        help="show what this installation and this machine can train with",
        description=(
            "Prints the installed versions, the training backends they support, and the cores "
            "and memory of this machine. Loads neither torch nor onnxruntime."
        ),
        epilog="example: tessera-device info --json",
    )
    info.add_argument("--json", action="store_true", help="as JSON, for scripts")
    info.set_defaults(run=_info)
    add_infer(commands)
    add_completion(commands, parser)
    return parser


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="find out what would keep this device from taking part, and what to do",
        description=(
            "Checks configuration, backend, disk, clock, certificate, broker, task, plan, data and "
            "memory, and prints a line for each: ✓, or ! for what is odd, or ✗ for what has to be "
            "mended, with what to do. Shows how many samples of each class there are, and draws "
            "one where it is an image. Connects to the broker for a moment; a device that is "
            "running with a certificate of its own connects again afterwards. The exit code is "
            "that of run for the first ✗, or 0."
        ),
        epilog="example: tessera-device check --config device.toml",
    )
    check.add_argument("--config", type=Path, metavar="FILE", help="the device's settings")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.advice.checking import CheckLine, check_device
    from edge_sdk.device.config import load_config
    from edge_sdk.device.service.ending import EXIT_CONFIG
    from edge_sdk.protocol.errors import ConfigError

    try:
        config = load_config(arguments.config)
    except ConfigError as error:
        print("\n".join(CheckLine("configuration", "bad", str(error)).lines()))
        return EXIT_CONFIG
    code = 0
    for each in config.by_task():
        for line in check_device(each):
            print("\n".join(line.lines()), flush=True)
            code = code or line.code
    return code


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
    run: LaterParser = commands.add_parser(
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
    )

    def fill() -> None:
        from edge_sdk.device.config import DeviceConfig
        from edge_sdk.program.settings.reference import add_flags

        run.add_argument("--config", type=Path, metavar="FILE", help="see tessera-device init")
        add_flags(run, DeviceConfig, FLAGS)

    run.set_defaults(run=_run)
    run.fill_later(fill)


def _add_init(commands: Any) -> None:
    init = commands.add_parser(
        "init",
        help="write a commented configuration as a starting point",
        description=(
            "Writes a commented configuration, and 60 handwritten digits (digits.csv) as data for "
            "a first try. Never replaces an existing file."
        ),
        epilog="example: tessera-device init device.toml",
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
    from edge_sdk.device.config import DIGITS, write_default

    write_default(arguments.file)
    print(f"{arguments.file} is written, and {DIGITS} beside it: data for a first try.")
    print("Set task, data and broker, then see what is missing, and run:")
    print(f"  tessera-device check --config {arguments.file}")
    print(f"  tessera-device run --config {arguments.file}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.advice.checking import check_known_data, raise_bad
    from edge_sdk.device.config import load_config
    from edge_sdk.device.service.answering import answering
    from edge_sdk.device.service.ending import ending_of
    from edge_sdk.device.service.service import DeviceService
    from edge_sdk.device.service.several import SeveralTasks
    from edge_sdk.device.stores.household import Household
    from edge_sdk.device.stores.movements import device_path
    from edge_sdk.program.files import held_folder
    from edge_sdk.program.logs import configure_logging, fact
    from edge_sdk.program.watchdog import Watchdog

    config = load_config(arguments.config, flags={name: getattr(arguments, name) for name in FLAGS})
    if find_spec("onnxruntime") is None:
        raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
    configure_logging(config.log_format, config.log_level)
    try:
        for line in raise_bad(config):
            log.warning("%s: %s; %s", line.name, line.text, line.advice, extra=fact("check"))
        watchdog = Watchdog.from_environment()
        household = Household(
            config.state_dir, config.name, config.priorities() if config.tasks else None
        )
        whole: DeviceService | SeveralTasks
        if config.tasks:
            whole = SeveralTasks(config, household=household, watchdog=watchdog)
            services = whole.services
        else:
            whole = DeviceService(config, household=household, watchdog=watchdog)
            services = [whole]
        for each in services:
            if wrong := check_known_data(each.config, each.source):
                log.warning("%s", wrong, extra=fact("data_warning"))
        before = signal.signal(signal.SIGTERM, lambda *_: whole.stop())
        try:
            _report(config, services)
            with ExitStack() as held:
                for each in services:
                    folder = device_path(config.state_dir, each.config.task, config.name)
                    held.enter_context(held_folder(folder))
                held.enter_context(answering(config, household, services))
                whole.run()
        finally:
            signal.signal(signal.SIGTERM, before)
    except (KeyboardInterrupt, TesseraError) as error:
        ending = ending_of(error)
        level = logging.INFO if isinstance(error, KeyboardInterrupt) else logging.ERROR
        log.log(level, "%s", ending.said, extra=fact(ending.event))
        return ending.code
    return 0


def _report(config: DeviceConfig, services: Sequence[DeviceService]) -> None:
    """Report what is about to run: a table for people, one log line for machines."""
    sources = [each.source.describe() for each in services]
    facts: dict[str, str | int | float | list[str] | None] = {
        "name": config.name,
        "task": ", ".join(each.config.task for each in services),
        "broker": config.broker.address + (" (TLS)" if config.broker.tls else ""),
        "data": "; ".join(dict.fromkeys(sources)),
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


def _explain(arguments: argparse.Namespace) -> int:
    from edge_sdk.device.advice.explanation import explain
    from edge_sdk.device.config import load_config

    flags = {} if arguments.config is not None else {"task": "none"}
    config = load_config(arguments.config, flags=flags)
    explained = {each.task: explain(each) for each in config.by_task()}
    if arguments.json:
        told = {task: each.to_dict() for task, each in explained.items()}
        print(json.dumps(told if config.tasks else told[config.task], indent=2))
        return 0
    for task, each in explained.items():
        if config.tasks:
            print(f"task {task}")
        print("\n".join(each.lines()))
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
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
