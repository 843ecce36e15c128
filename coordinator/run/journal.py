"""The journal that makes a stop in mid-round harmless: each device's part in it, on disk.

`round.json` is written before the first assignment leaves, and again when a device withdraws. With
it, and the movements that were kept (`receiving.py`), a process that is started again goes on with
the same round: devices train on, and whoever got a receipt is counted without sending anything.
It goes on by the same terms, which are in the file too: movements made by others would not fit.

A round of which there are no assignments yet is void, and the next one is opened; late movements
that came for memory in it wait for the next commit. (A replay that came early is the copy of a
movement that was counted in its own round.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from coordinator.rounds.state import OpenRound, RoundsConfig
from coordinator.run.folder import RunError
from edge_sdk.program.files import remove, write_whole
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import Bid

Terms = Mapping[str, str | float | None]
"""By what devices train in a round, under the names that the settings have."""


def terms_of(config: RoundsConfig) -> Terms:
    """Settings that must not change while a round is open."""
    return {
        **asdict(config.local_rule),
        "steps": config.steps,
        "batch_size": config.batch_size,
        "up": str(config.up),
        "plan": config.plan.hash,
    }


class Journal:
    """The open round in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, opened: OpenRound, terms: Terms) -> None:
        """Make what is known of a round durable."""
        content = {
            "round": opened.round,
            "selected": sorted(opened.selected),
            "bids": [asdict(opened.bids[name]) for name in sorted(opened.bids)],
            "assigned": {name: dict(groups) for name, groups in opened.assigned.items()},
            "terms": dict(terms),
        }
        write_whole(self._path, (json.dumps(content, allow_nan=False) + "\n").encode())

    def read(self) -> OpenRound | None:
        """The round that was open; None: none was. Raises `RunError` if the file is damaged."""
        if not self._path.is_file():
            return None
        try:
            content = json.loads(self._path.read_text())
            dict(content["terms"])  # of use to `check_terms` alone
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

    def check_terms(self, terms: Terms) -> None:
        """Raises `RunError` if the round that `read` gave has other terms."""
        content = json.loads(self._path.read_text())
        for name, was in content["terms"].items():
            if terms.get(name) != was:
                raise RunError(
                    f"round {content['round']} is open with {name} {was}, "
                    f"the settings say {terms.get(name)}; put it back until it has closed, "
                    "or roll back"
                )

    def clear(self) -> None:
        """The round is committed, or void."""
        remove(self._path)
