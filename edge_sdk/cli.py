"""`tessera-device`: the command line on the device."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from edge_sdk import __version__

BACKENDS = {"onnx": "onnxruntime", "torch": "torch"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    arguments = _parser().parse_args(argv)
    code: int = arguments.run(arguments)
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
    return parser


def _info(arguments: argparse.Namespace) -> int:
    facts = gather_info()
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:<16} {shown if shown not in ('', None) else '–'}")
    if not facts["backends"]:
        print("No training backend: pip install 'tessera-fl[onnx]' (or [torch]).")
    return 0


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
