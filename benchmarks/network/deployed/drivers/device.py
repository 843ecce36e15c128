"""A device as `tessera-device run`, with the SDK of a checkout; metered if a file is named.

    python device.py CHECKOUT FILE|- run --config device.toml

Once the device is connected and after every round the file gets a line of JSON: CPU seconds of the
process and of its parts so far, and its calls of `fsync`. A part's seconds are those of its
threads, less those of other parts within it. Nothing of a checkout but the SDK is imported, and a
part that a checkout does not have is left out.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from typing import Any

PARTS = {
    "training": ["edge_sdk.train.onnx:OnnxBackend.train"],
    "deciding": ["edge_sdk.device.app:DeviceApp._decide"],
    "calibrating": ["edge_sdk.decide.costs.costing:Costing._measure"],
    "watching": [
        "edge_sdk.decide.observer:Observer.closed_gate",
        "edge_sdk.decide.costs.costing:Meter.__init__",
        "edge_sdk.decide.costs.costing:Meter.__enter__",
        "edge_sdk.decide.costs.costing:Meter.__exit__",
    ],
    "fetching": ["edge_sdk.device.app:DeviceApp._fetch"],
    "encoding": [
        "edge_sdk.device.app:DeviceApp._train",
        "edge_sdk.device.app:DeviceApp._encode",
        "edge_sdk.device.app:DeviceApp._keep",
        "edge_sdk.device.app:DeviceApp._again",
        "edge_sdk.device.service.participation:TakingPart._upload",
    ],
    "writing": [
        f"edge_sdk.program.files:{name}"
        for name in ("write_whole", "make_folder", "move", "remove", "sync_folder", "append_line")
    ],
}
"""Parts of a device and the calls that they are."""
LINK = ("mqtt", "MainThread")
"""Beginnings of the names of the threads that serve the link."""
CONNECTED = "edge_sdk.device.service.service:DeviceService._connected"
END_OF_ROUND = "edge_sdk.device.stores.movements:FolderMovements.forget"


class PartsMeter:
    """CPU seconds of parts, by the threads that they run in."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spent = defaultdict[str, float](float)
        self._counts = Counter[str]()
        self._running = threading.local()

    def meter(self, place: str, part: str) -> None:
        """Meter a function or method; functions wherever they were imported to."""
        owner, name = _find(place)
        if owner is None:
            return
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def metered(*arguments: Any, **named: Any) -> Any:
            stack = self._running.__dict__.setdefault("stack", [])
            now = time.thread_time()
            if stack:
                self._spent[stack[-1][0]] += now - stack[-1][1]
            stack.append([part, now])
            try:
                return inner(*arguments, **named)
            finally:
                now = time.thread_time()
                _, since = stack.pop()
                self._spent[part] += now - since
                if stack:
                    stack[-1][1] = now

        _replace(owner, name, metered)

    def count(self, owner: Any, name: str) -> None:
        """Count the calls of a function."""
        inner = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            self._counts[name] += 1
            return inner(*arguments)

        setattr(owner, name, counted)

    def after(self, place: str) -> None:
        """Write a line after every call of a method."""
        owner, name = _find(place)
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def told(*arguments: Any, **named: Any) -> Any:
            done = inner(*arguments, **named)
            self._tell()
            return done

        setattr(owner, name, told)

    def _tell(self) -> None:
        parts = dict[str, float](self._spent)
        for thread in threading.enumerate():
            if thread.name.startswith(LINK) and thread.ident is not None:
                spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                parts["link"] = parts.get("link", 0.0) + spent
        said = {"cpu_s": time.process_time(), "parts_s": parts, "counts": self._counts}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


def _find(place: str) -> tuple[Any, str]:
    """Return the owner and the name; the owner is None where there is no such call."""
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    owner: Any = None
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        return None, name
    for each in parents:
        owner = getattr(owner, each, None)
    return (owner if hasattr(owner, name) else None), name


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    for module in [each for key, each in sys.modules.items() if key.startswith("edge_sdk")]:
        if vars(module).get(name) is old:
            setattr(module, name, new)


def main(checkout: str, path: str, *arguments: str) -> int:
    """Run the device's program."""
    sys.path[0] = checkout
    if path != "-":
        meter = PartsMeter(path)
        importlib.import_module("edge_sdk.device.service.service")
        for part, places in PARTS.items():
            for place in places:
                meter.meter(place, part)
        meter.count(os, "fsync")
        meter.after(CONNECTED)
        meter.after(END_OF_ROUND)
    program = importlib.import_module("edge_sdk.cli")
    code: int = program.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
