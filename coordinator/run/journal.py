"""The journal of the open round, which makes a stop in mid-round harmless.

`round.json` is written before devices hear of the round, again before the first assignment is
sent, when a device withdraws or is refused, and when the round is closed and is to be committed.
With it and the kept movements (`receiving.py`), a restarted process resumes the same round, with
the same devices and the same draws: where devices were bidding, they bid again; where they train,
they continue, and a device with a receipt sends nothing again. A round that was closed closes
again with what was kept.
The file also holds the round's terms, which must not change: movements made under other terms would
not fit. (While devices bid, nothing was made yet: then the round is void, and the next one has the
new terms.) Settings that an operator changed while the run was served are kept with them, as they
were when the round opened: what was changed since holds from the next round on (`steering/`).

A round that is void, because too few offered, leaves no file. Where a power cut brings one back,
the counters say that its round is over. Late movements that arrived for memory wait for the next
commit. (A replay that arrived for it is a copy of a movement that counted in its own round.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from coordinator.aggregate.rules import Scaffold
from coordinator.checksums import open_json, seal_json
from coordinator.rounds.state import OpenRound, RoundsConfig
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.lines import PRIVATE
from edge_sdk.program.files import remove, write_whole
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import Bid

Terms = Mapping[str, str | float | None]
"""Settings by which devices train in a round, by key."""


def terms_of(config: RoundsConfig) -> Terms:
    """Settings that must not change while a round is open."""
    several = config.local_rule.widths != "own"
    return {
        **asdict(config.local_rule),
        **({"levels": ", ".join(map(str, config.levels))} if several else {}),
        "steps": config.steps,
        "batch_size": config.batch_size,
        "up": str(config.up),
        "variates": isinstance(config.rule, Scaffold),
        "plan": config.plan.hash,
    }


class Journal:
    """The open round in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, opened: OpenRound, terms: Terms) -> None:
        """Write a round's assignments and terms to disk."""
        content = {
            "round": opened.round,
            "selected": sorted(opened.selected),
            "bids": [asdict(opened.bids[name]) for name in sorted(opened.bids)],
            "assigned": {name: dict(groups) for name, groups in opened.assigned.items()},
            "refused": dict(opened.refused),
            "closed": opened.closed,
            "bidding": opened.bidding,
            "terms": dict(terms),
            "settings": dict(opened.settings),
            "orders": opened.orders,
            "newcomers": sorted(opened.newcomers),
        }
        write_whole(self._path, seal_json(content), mode=PRIVATE)

    def disown(self, device: str, reason: str) -> None:
        """Note that a device skips the open round, if it has work there; its terms stay."""
        opened = self.read()
        if opened is None or device not in opened.assigned:
            return
        content = open_json(self._path.read_bytes())
        del content["assigned"][device]
        skip = Bid(device=device, round=opened.round, level=None, reason=reason)
        others = [each for each in content["bids"] if each["device"] != device]
        content["bids"] = sorted([*others, asdict(skip)], key=lambda bid: str(bid["device"]))
        write_whole(self._path, seal_json(content), mode=PRIVATE)

    def read(self) -> OpenRound | None:
        """Read the open round; None if there is none. Raises `RunError` if the file is damaged."""
        if not self._path.is_file():
            return None
        try:
            content = open_json(self._path.read_bytes())
            dict(content["terms"])  # used only by `check_terms`
            bids = [Bid(**each) for each in content["bids"]]
            return OpenRound(
                round=int(content["round"]),
                selected=frozenset(content["selected"]),
                bids={bid.device: bid for bid in bids},
                assigned={
                    name: {axis: tuple(ids) for axis, ids in groups.items()}
                    for name, groups in content["assigned"].items()
                },
                refused={str(k): str(v) for k, v in content.get("refused", {}).items()},
                closed=bool(content.get("closed", False)),
                bidding=bool(content.get("bidding", False)),
                settings=dict(content.get("settings", {})),
                orders=int(content.get("orders", 0)),
                newcomers=frozenset(content.get("newcomers", ())),
            )
        except (ValueError, KeyError, TypeError, AttributeError, MessageError) as error:
            raise RunError(
                f"{self._path} is damaged ({error!r}): {repair_advice(self._path.parent)}"
            ) from error

    def check_terms(self, terms: Terms) -> None:
        """Raise `RunError` if the round returned by `read` has other terms."""
        content = open_json(self._path.read_bytes())
        for name, was in content["terms"].items():
            if terms.get(name) != was:
                raise RunError(
                    f"round {content['round']} is open with {name} {was}, but the settings say "
                    f"{terms.get(name)}; restore the old value until the round closes, or roll "
                    "back. tessera-coordinator set changes it from the next round on"
                )

    def clear(self) -> None:
        """Remove the file: the round is committed or void."""
        remove(self._path)
