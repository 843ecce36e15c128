"""What makes a stop in the middle of a round harmless: who does what in it, on disk.

`round.json` is written before the first assignment leaves, and again when a device withdraws. With
it, and the movements that were kept (`receiving.py`), a process that is started again goes on with
the same round: devices train on, and whoever got a receipt is counted without sending anything.

A round of which there are no assignments yet has nothing to lose: it is void, and the next one is
opened. (A replay that came early is the copy of a movement that was counted in its own round.)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from coordinator.round_state import OpenRound
from coordinator.runs import RunError, write_durably
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages import Bid


class Journal:
    """The open round in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, opened: OpenRound) -> None:
        """Make what is known of a round durable."""
        content = {
            "round": opened.round,
            "selected": sorted(opened.selected),
            "bids": [asdict(opened.bids[name]) for name in sorted(opened.bids)],
            "assigned": {name: dict(groups) for name, groups in opened.assigned.items()},
        }
        write_durably(self._path, (json.dumps(content, allow_nan=False) + "\n").encode())

    def read(self) -> OpenRound | None:
        """The round that was open; None: none was. Raises `RunError` if the file is damaged."""
        if not self._path.is_file():
            return None
        try:
            content = json.loads(self._path.read_text())
            bids = [Bid(**each) for each in content["bids"]]
            return OpenRound(
                round=int(content["round"]),
                selected=frozenset(content["selected"]),
                bids={bid.device: bid for bid in bids},
                assigned={
                    name: {axis: tuple(ids) for axis, ids in groups.items()}
                    for name, groups in content["assigned"].items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError, MessageError) as error:
            raise RunError(
                f"{self._path} is damaged ({error!r}); remove it to go on with the next round"
            ) from error

    def clear(self) -> None:
        """The round is committed, or void."""
        self._path.unlink(missing_ok=True)
