"""`tessera-coordinator serve`, with the times of the parts of a close in a file.

    python metered_serve.py FILE serve --config run.toml

FILE gets a line of JSON for every call of a part: the part, its beginning and end in seconds of the
monotonic clock, and its CPU seconds. Parts may lie within others and run beside them. A part that a
version does not have is left out.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from typing import Any

KEPT = "keeping"
"""Part at whose end a movement is on disk."""
PARTS = {
    KEPT: ["coordinator.service.receiving:Receiving.keep"],
    "rule": ["coordinator.aggregate.rules.ram_fed:RamFed.move"],
    "memory": [
        "coordinator.aggregate.memory.newest:Memory.advance",
        "coordinator.aggregate.memory.newest:Memory.write",
        "coordinator.aggregate.memory.newest:Memory.prepare",
        "coordinator.aggregate.memory.newest:Memory.commit",
    ],
    "digest": ["coordinator.aggregate.model:GlobalModel.digest"],
    "checkpoint": ["coordinator.run.folder:Run.save"],
    "evaluation": ["coordinator.service.courses.parts:Parts.score"],
    "history": ["coordinator.run.folder:Run.record_line"],
    "packing": ["coordinator.run.chunk_store:ChunkStore.add"],
    "publishing": ["coordinator.service.outgoing.sending:ChunkSending.pump"],
    "deleting": [
        "coordinator.service.receiving:Receiving.clear_kept",
        "coordinator.run.folder:Run.prune",
        "coordinator.run.chunk_store:ChunkStore.drop",
    ],
}
"""Parts of a close and the calls that they are; a name is that of a method or a property."""


def meter(place: str, part: str, write: Any) -> None:
    """Note the times of a method or property, where there is one."""
    module, _, path = place.partition(":")
    owner_name, name = path.split(".")
    owner = getattr(importlib.import_module(module), owner_name, None)
    found = vars(owner).get(name)
    if found is None:
        return
    inner: Any = found.fget if isinstance(found, property) else found

    @functools.wraps(inner)
    def metered(*arguments: Any, **named: Any) -> Any:
        began, cpu = time.monotonic(), time.thread_time()
        try:
            return inner(*arguments, **named)
        finally:
            write(json.dumps([part, began, time.monotonic(), time.thread_time() - cpu]) + "\n")

    setattr(owner, name, property(metered) if isinstance(found, property) else metered)


def main(path: str, *arguments: str) -> int:
    """Run the program."""
    program = importlib.import_module("coordinator.cli")
    importlib.import_module("coordinator.operate.serve.serving")
    with open(path, "a", encoding="utf-8", buffering=1) as file:
        for part, places in PARTS.items():
            for place in places:
                meter(place, part, file.write)
        code: int = program.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
