"""The decision a device would make on a round that opened now, explained: `tessera-device explain`.

Shows everything a decision is made of, in order: sensor values, the gates, the cost of each level,
the decision, and what keeps the device from the next level up. Costs need the task, which is on
disk once the device has taken part in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from edge_sdk.data.source import open_data
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import Decision, Sight, Verdict, decide, gates, verdicts
from edge_sdk.decide.gates import Gate
from edge_sdk.decide.observer import Observer, local_minute
from edge_sdk.device.advice.seeing import seen_lines
from edge_sdk.device.advice.standing import pause_words
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.participation import CONVERTED, NOTICE, OPENED, load_task
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.movements import device_path
from edge_sdk.device.stores.pause import REASON
from edge_sdk.device.transfer.chunk_cache import read_chunk
from edge_sdk.device.weighing import HISTORY, make_costing, make_probe
from edge_sdk.machine.snapshot import Probe, Snapshot
from edge_sdk.program.plain import to_plain
from edge_sdk.protocol.chunks import Blob, join_blob
from edge_sdk.protocol.errors import MessageError, TesseraError
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.transfer import TaskNotice
from edge_sdk.protocol.messages.wire import decode_message
from edge_sdk.train.tuning import Tuned

SETTLE_S = 6.0
"""Seconds given to slow sensors that run a command, such as a phone's battery."""
MB = 1e6


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision and everything it was made of."""

    snapshot: Snapshot
    gates: list[Gate]
    costs: tuple[Cost, ...]
    verdicts: list[Verdict]
    decision: Decision
    missing: str | None
    """The reason why levels were not weighed; None: they were."""
    paused: str | None = None
    """Since and until when the device is paused; None: it is not."""
    tuned: tuple[Tuned, ...] | None = ()
    """The fastest ways to compute on this machine, by level, with which costs were measured; empty:
    the default ones, None: these, too, until the device has looked for faster ones.
    """
    only_default: str | None = None
    """The reason why there are no other ways to compute; None: there are, or it is not known."""

    def lines(self) -> Iterator[str]:
        """Write the explanation for a person."""
        yield "seen"
        yield from (f"  {line}" for line in seen_lines(self.snapshot))
        if self.paused is not None:
            yield "paused"
            yield f"  {self.paused}"
        yield "gates"
        for gate in self.gates:
            yield f"  {gate.name:<8} {'open  ' if gate.open else 'CLOSED'}  {gate.reason}"
        yield "levels"
        if self.missing is not None:
            yield f"  not weighed: {self.missing}"
        else:
            yield f"  {'':>5} {'seconds':>8} {'joules':>8} {'MB':>6} {'MB down':>8} {'MB up':>7}"
            said = {verdict.level: verdict for verdict in self.verdicts}
            for cost in self.costs:
                joules = "?" if cost.joules is None else f"{cost.joules:.3g}"
                verdict = said.get(cost.level)
                why = "more than the owner allows" if verdict is None else verdict.reason
                yield (
                    f"  {cost.level:>5.0%} {cost.seconds:>8.3g} {joules:>8} "
                    f"{cost.peak_bytes / MB:>6.0f} {cost.bytes_down / MB:>8.2f} "
                    f"{cost.bytes_up / MB:>7.2f}  {why}"
                )
        if self.tuned:
            yield "ways to compute"
            yield from (f"  {each.level:>5.0%}  {each}" for each in self.tuned)
        elif self.tuned is None:
            yield "ways to compute"
            yield "  the default ones; the device looks for faster ones when it has nothing to do"
        elif self.only_default is not None:
            yield "ways to compute"
            yield f"  the default ones: {self.only_default}"
        yield "decision"
        yield f"  {self.decision.reason}"
        yield "for the next level up"
        yield f"  {self.short_of()}"

    def short_of(self) -> str:
        """Name the change that a larger level needs."""
        if self.paused is not None:
            return "its owner has to resume it: tessera-device resume"
        closed = next((gate for gate in self.gates if not gate.open), None)
        if closed is not None:
            return f"the gate {closed.name} has to open: {closed.reason}"
        if self.missing is not None:
            return self.missing
        level = self.decision.level or 0.0
        above = [verdict for verdict in self.verdicts if verdict.level > level]
        if above:
            return f"level {above[-1].level:.0%} {above[-1].reason}"
        if level < 1:
            return "the owner allows no more: set level"
        return "there is none: this is the whole model"

    def to_dict(self) -> dict[str, Any]:
        """Write the explanation for a program."""
        return {
            "snapshot": self.snapshot.to_dict(),
            "gates": [
                {"name": gate.name, "open": gate.open, "reason": gate.reason} for gate in self.gates
            ],
            "levels": [
                {each.name: _finite(getattr(cost, each.name)) for each in fields(Cost)}
                for cost in self.costs
            ],
            "verdicts": [
                {"level": each.level, "share": each.share, "code": each.code, "reason": each.reason}
                for each in self.verdicts
            ],
            "ways": None if self.tuned is None else [to_plain(each) for each in self.tuned],
            "level": self.decision.level,
            "code": self.decision.code,
            "passes": self.decision.passes,
            "reason": self.decision.reason,
            "short_of": self.short_of(),
            "not_weighed": self.missing,
            "paused": self.paused,
        }


def explain(config: DeviceConfig, probe: Probe | None = None) -> Explanation:
    """Explain what this device would answer now. May measure costs, which takes seconds.

    `probe` None: this machine's sensors. Changes nothing but the kept costs. Raises `ConfigError`.
    """
    if probe is None:
        probe = make_probe(config)
        probe.snapshot()  # asks the slow sensors
        settle = getattr(probe, "settle", None)
        if settle is not None:
            settle(SETTLE_S)
    folder = device_path(config.state_dir, config.task, config.name)
    found = _find(config, probe, folder)
    sight, config = found.sight, found.config
    household = Household(config.state_dir, config.name)
    account = household.account if config.emulate is None else None
    observer = Observer(config.policy, history=folder / HISTORY, account=account)
    history = observer.history.heard(sight.now_s)
    decision = decide(config.policy, sight, history, device=config.name, round=1, seed=config.seed)
    terms = household.pause.terms
    paused = None if terms is None else pause_words(asdict(terms), sight.now_s)
    if paused is not None:
        decision = Decision(None, f"skip: {REASON}", "paused", 0.0, history)
    return Explanation(
        sight.snapshot,
        gates(config.policy, sight),
        sight.costs,
        verdicts(config.policy, sight, history),
        decision,
        found.missing,
        paused,
        found.tuned,
        found.only_default,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Facts that a decision is made of; see `Explanation`."""

    sight: Sight
    config: DeviceConfig
    """With the levels that the task has graphs for, if it is known."""
    missing: str | None = None
    tuned: tuple[Tuned, ...] | None = ()
    only_default: str | None = None


def _find(config: DeviceConfig, probe: Probe, folder: Path) -> _Found:
    """Look at the device, and at the task that it took part in last."""
    now = time.time()
    alone = Sight(snapshot=probe.snapshot(), now_s=now, minute=local_minute(now))
    if not config.weigh:
        return _Found(alone, config, "weigh is false")
    try:
        notice, opened = last_task(folder)
        task = load_task(notice, config, KeptChunks(folder / "chunks").fetch)
        backend, manifest = task
        config = task.fitted(config)
        samples = 0
        if config.data is not None:
            source = open_data(config.data, config.format)
            limit = None if config.data_mb is None else config.data_mb * 2**20
            cache = folder / CONVERTED
            samples = len(source.read(manifest.data, cache=cache, limit_bytes=limit).data)
        costs = make_costing(config, probe, backend, manifest, folder, samples or opened.batch_size)
        # The round on disk is old: how far the model has grown since is not known.
        whole = replace(opened, largest=1.0)
        tuned = None if costs.seeks else costs.tuned
        half = backend.precision == "fp16" and not backend.has_ways
        why = "graphs in fp16 (precision) have no others" if half else None
        sight = Observer(config.policy, probe, costs).look(whole)
        return _Found(sight, config, None, tuned, why)
    except FileNotFoundError:
        why = f"costs are known once this device has taken part in {config.task}"
        return _Found(alone, config, why)
    except TesseraError as error:
        return _Found(alone, config, f"costs are not known: {error}")


def last_task(folder: Path) -> tuple[TaskNotice, RoundOpen]:
    """Return the task and the round taken up last. Raises `OSError` or `MessageError`."""
    notice = decode_message((folder / NOTICE).read_bytes())
    opened = decode_message((folder / OPENED).read_bytes())
    if not isinstance(notice, TaskNotice) or not isinstance(opened, RoundOpen):
        raise MessageError(f"{folder}: {NOTICE} and {OPENED} are not what they are called")
    return notice, opened


class KeptChunks:
    """Blobs from the cached chunks of the device program, which may run at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, hash: bytes) -> bytes:
        return read_chunk(self._folder, hash)

    def fetch(self, blob: Blob, max_bytes: int, what: str) -> bytes:
        """See `load_task`."""
        if blob.size > max_bytes:
            raise MessageError(f"{what} has {blob.size} bytes, more than {max_bytes}")
        return join_blob(blob, self)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
