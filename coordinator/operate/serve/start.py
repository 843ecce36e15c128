"""Facts of a run's last start, kept in its folder: settings and versions.

    <run>/start.json    {"time", "settings": {"run.rounds": 50, …}, "versions", "authority"}

`authority` is the folder of the authority that signs devices' certificates, which `pack` looks for.
Only settings that say how a run trains are kept, so that nothing secret is among them. A run does
not need the file: without it, less is known of the run.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.checksums import open_json
from coordinator.run.folder import START, write_json
from edge_sdk import __version__
from edge_sdk.program.settings.types import keys

TABLES = ("task", "inputs", "run", "rule", "server_optimizer", "robust", "mask", "round", "devices")
"""Tables of run.toml that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """Facts of the last start; empty where nothing is known."""

    time: float = 0.0
    """Unix seconds."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """By the path of their keys, such as `run.rounds`."""
    versions: Mapping[str, str] = field(default_factory=dict)


def note_start(folder: Path, config: Any) -> None:
    """Keep the settings and versions of a start."""
    import numpy as np

    found = {}
    for key in keys(type(config)):
        if key.path[0] in TABLES:
            value = config
            for part in key.path:
                value = getattr(value, part, None)
            found[".".join(key.path)] = _plain(value)
    versions = {
        "tessera-fl": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    content = {
        "time": round(time.time(), 3),
        "settings": found,
        "versions": versions,
        "authority": str(config.authority.absolute()),
    }
    write_json(folder / START, content)


def read_start(folder: Path) -> StartFacts:
    """Read them. A file that is damaged or not there says nothing."""
    try:
        content = open_json((folder / START).read_bytes())
        return StartFacts(
            time=float(content["time"]),
            settings=dict(content["settings"]),
            versions=dict(content["versions"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return StartFacts()


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
