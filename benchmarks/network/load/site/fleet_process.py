"""Devices that share a process: one interpreter and one onnxruntime, but nothing else.

    python -m benchmarks.network.load.site.fleet_process CONFIG CONFIG …

Each is a `DeviceService` with its own settings, folder, connections and threads. The process ends
with code 1 when the first of them fails, and otherwise when asked to.
"""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from edge_sdk.device.config import load_config
from edge_sdk.device.service.service import DeviceService


def main(paths: Sequence[str]) -> int:
    """Run the devices with these settings and return the exit code."""
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(message)s")
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    services = [DeviceService(load_config(Path(path), environment={})) for path in paths]
    for service in services:
        Thread(target=_run, args=(service, ended), daemon=True).start()
    print(ended.get(), file=sys.stderr)
    return 1


def _run(service: DeviceService, ended: queue.SimpleQueue[str]) -> None:
    """Run a device until it ends, which none should: their runs have no last round."""
    why = "it ended"
    try:
        service.run()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    ended.put(f"{service.config.name}: {why}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
