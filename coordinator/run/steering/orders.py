"""Orders of operators: what they changed of a run, so that it outlives any stop.

    steering.json    what holds now, and the last order; run.toml's values at the last start

Rules:
- An order is carried out once this file is replaced; only then is it answered. Its lines in the
  audit and in the history follow. After a crash in between, the next start writes them (`settle`).
- A changed setting holds until it is changed again, also if run.toml says otherwise. It is
  undone by setting it back to what run.toml says, and by an edit of that setting in run.toml: the
  newest word counts, and an edit counts from the start that reads it (`begin`).
- A run that was paused stays paused when it is started again. A stop that was asked for is carried
  out by the next process if a crash came first, and is then done with.
- A device's quarantine and release become part of the fleet's record. Until a checkpoint has that
  record, the order here is what counts: a checkpoint names the newest one it has (`orders`).
- An order that changes nothing is answered, and leaves no trace.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from coordinator.checksums import open_json
from coordinator.errors import ConfigError
from coordinator.rounds.config import SettingValue
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.folder import Run, write_json
from coordinator.run.steering.audit import Audit, AuditEntry
from coordinator.run.steering.settings import Settings, check_name, length_of, read_value

STEERING = "steering.json"
FILE = "run.toml"
"""Author of a change that an edit of the file made."""
MAX_WORDS = 200
"""Most characters of a reason or of an account's name."""

StopWhen = Literal["round", "now"]
"""When a run stops: after the open round, or at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBy:
    """Who asked for something, and when (seconds since 1970)."""

    by: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange(GivenBy):
    """A setting with another value than run.toml gives it."""

    value: SettingValue


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder(GivenBy):
    """A stop that was asked for and is not carried out yet."""

    when: StopWhen


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedStanding(GivenBy):
    """An operator's word about a device: quarantined for a reason, or allowed again."""

    device: str
    number: int
    """Number of the order."""
    round: int
    """Newest round that was open then."""
    quarantined: bool
    reason: str = ""

    @property
    def words(self) -> str:
        """The reason, and whose it is."""
        return f"{self.reason or 'no reason given'} ({self.by})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """Everything that operators asked of a run and that still holds."""

    number: int = 0
    """Orders so far."""
    file: Settings = field(default_factory=dict)
    """Values in run.toml at the last start; empty: the run was not served yet."""
    changes: Mapping[str, SettingChange] = field(default_factory=dict)
    paused: GivenBy | None = None
    stopping: StopOrder | None = None
    judgements: tuple[OrderedStanding, ...] = ()
    """The last word about each device, and earlier ones that no checkpoint has; in their order."""
    last: AuditEntry | None = None
    """The last order."""
    at: int = 0
    """Bytes of the history before its line."""

    @property
    def settings(self) -> dict[str, SettingValue]:
        """Values of the settings that were changed."""
        return {name: each.value for name, each in self.changes.items()}

    def value(self, name: str) -> SettingValue:
        """Return the value of a setting, changed or not."""
        return self.changes[name].value if name in self.changes else self.file.get(name)

    def judged_since(self, number: int) -> list[OrderedStanding]:
        """Return the words about devices that came after an order, in their order."""
        return [each for each in self.judgements if each.number > number]


def read_steered(folder: Path) -> Steered:
    """Read what holds in a run, even if it is open elsewhere. Raises `RunError` for damage."""
    path = folder / STEERING
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Steered()
    try:
        content = open_json(data)
        paused, stopping, last = (content[each] for each in ("paused", "stopping", "last"))
        return Steered(
            number=int(content["number"]),
            file=dict(content["file"]),
            changes={name: SettingChange(**each) for name, each in content["changes"].items()},
            paused=None if paused is None else GivenBy(**paused),
            stopping=None if stopping is None else StopOrder(**stopping),
            judgements=tuple(OrderedStanding(**each) for each in content["judgements"]),
            last=None if last is None else AuditEntry(**last),
            at=int(content["at"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged ({error!r}): {repair_advice(folder)}") from error


class Steering:
    """The orders of a run that is open in this process. Each method is done when it returns.

    Methods that give an order return True if it changed anything; they raise `ConfigError`, and
    nothing has changed, if the order cannot be carried out. `by` is the account that gives it.
    """

    def __init__(self, run: Run, wall: Callable[[], float] = time.time) -> None:
        """Raises `RunError` if the file is damaged."""
        self._run = run
        self._wall = wall
        self._audit = Audit(run.folder)
        self._steered = read_steered(run.folder)

    @property
    def steered(self) -> Steered:
        """Everything that holds now."""
        return self._steered

    @property
    def names(self) -> list[str]:
        """Names of the settings that can be changed, as the last start had them."""
        return list(self._steered.file)

    @property
    def line(self) -> dict[str, Any] | None:
        """The last order's line of history; None: there was none."""
        last = self._steered.last
        return None if last is None else {"steered": {**asdict(last), "round": self._run.opened}}

    def settle(self) -> None:
        """Write the lines of the last order, as far as a crash kept them from being written."""
        if (last := self._steered.last) is not None:
            self._audit.put(last)
            history, at = self._run.history, self._steered.at
            if last.id.encode() not in history.read(at, max(0, history.trim() - at)):
                self._record()

    def begin(self, file: Settings) -> None:
        """Note run.toml's values at a start; an edit undoes what was changed before it."""
        self.settle()
        before = self._steered.file
        for name, change in self._steered.changes.items():
            if name not in file or (name in before and before[name] != file[name]):
                others = {n: each for n, each in self._steered.changes.items() if n != name}
                details = {"name": name, "value": file.get(name), "was": change.value}
                self._give(
                    FILE, "set", details, file={**before, name: file.get(name)}, changes=others
                )
        if dict(self._steered.file) != dict(file):
            self._write(replace(self._steered, file=dict(file)))

    # -- orders -----------------------------------------------------------------------------

    def pause(self, by: str) -> bool:
        """Let no further round open."""
        if self._steered.paused is not None:
            return False
        return self._give(by, "pause", {}, paused=GivenBy(by=_author(by), time=self._now()))

    def resume(self, by: str) -> bool:
        """Let rounds open again; a stop that was asked for is called off."""
        if self._steered.paused is None and self._steered.stopping is None:
            return False
        return self._give(by, "resume", {}, paused=None, stopping=None)

    def stop(self, when: str, by: str) -> bool:
        """Let the process end, after the open round or at once."""
        if when not in get_args(StopWhen):
            raise ConfigError(f'when = {when!r:.80}: must be "round" or "now"')
        now = self._steered.stopping
        if now is not None and (now.when == "now" or when == "round"):
            return False
        chosen: StopWhen = "now" if when == "now" else "round"
        order = StopOrder(when=chosen, by=_author(by), time=self._now())
        return self._give(by, "stop", {"when": when}, stopping=order)

    def stopped(self) -> None:
        """Note that a stop was carried out."""
        if self._steered.stopping is not None:
            self._write(replace(self._steered, stopping=None))

    def lengthen(self, more: object, by: str) -> bool:
        """Add rounds to the run; in an asynchronous one, updates."""
        name = length_of(self._known())
        if not isinstance(more, int) or isinstance(more, bool) or more < 1:
            raise ConfigError(f"{more!r:.80}: give the {name} to add as a whole number above 0")
        was = self._steered.value(name)
        total = int(was or 0) + more
        details = {"name": name, "value": total, "was": was, "add": more}
        return self._give(by, "rounds", details, changes=self._changed(name, total, by))

    def preview(self, name: str, value: object) -> dict[str, SettingValue]:
        """Return all changed settings, as they will be once one is set. Raises `ConfigError`."""
        check_name(name, self._known())
        return {
            key: each.value
            for key, each in self._changed(name, read_value(name, value), "").items()
        }

    def change(self, name: str, value: object, by: str) -> bool:
        """Give a setting another value from the next round on."""
        check_name(name, self._known())
        new, was = read_value(name, value), self._steered.value(name)
        if new == was:
            return False
        details = {"name": name, "value": new, "was": was}
        return self._give(by, "set", details, changes=self._changed(name, new, by))

    def quarantine(self, device: str, reason: str, by: str, *, saved: int) -> OrderedStanding:
        """Quarantine a device: its bids are declined from now on.

        `saved` is the number of the newest such order that a checkpoint has.
        """
        reason = _words("reason", reason)
        details = {"device": device, "reason": reason}
        return self._judge("quarantine", by, details, saved, quarantined=True)

    def allow(self, device: str, by: str, *, saved: int) -> OrderedStanding:
        """Hold nothing against a device any more; `saved` as for `quarantine`."""
        return self._judge("allow", by, {"device": device}, saved, quarantined=False)

    # -- the file ---------------------------------------------------------------------------

    def _known(self) -> Iterable[str]:
        if not self._steered.file:
            raise ConfigError(
                f"{self._run.folder} was not served by this version yet, so its settings are not "
                "known: serve it once, or edit run.toml"
            )
        return self._steered.file

    def _changed(self, name: str, value: SettingValue, by: str) -> dict[str, SettingChange]:
        """Return the changes with another one; a value that run.toml gives is none."""
        changes = {key: each for key, each in self._steered.changes.items() if key != name}
        if value == self._steered.file.get(name):
            return changes
        return {**changes, name: SettingChange(value=value, by=_author(by), time=self._now())}

    def _judge(
        self, what: str, by: str, details: Mapping[str, str], saved: int, *, quarantined: bool
    ) -> OrderedStanding:
        judgement = OrderedStanding(
            **details,
            number=self._steered.number + 1,
            round=self._run.opened,
            quarantined=quarantined,
            by=_author(by),
            time=self._now(),
        )
        kept = [
            each
            for each in self._steered.judgements
            if each.device != judgement.device or each.number > saved
        ]
        self._give(by, what, details, judgements=(*kept, judgement))
        return judgement

    def _give(self, by: str, what: str, details: Mapping[str, Any], **changes: Any) -> bool:
        """Carry an order out: from here on it is on disk."""
        entry = AuditEntry(
            id=secrets.token_hex(8),
            time=self._now(),
            by=_author(by),
            what=what,
            details=details,
        )
        at, number = self._run.history.trim(), self._steered.number + 1
        self._write(replace(self._steered, **changes, number=number, last=entry, at=at))
        self._audit.put(entry)
        self._record()
        return True

    def _record(self) -> None:
        """Append the last order to the history."""
        if (line := self.line) is not None:
            self._run.record(line)

    def _write(self, steered: Steered) -> None:
        write_json(self._run.folder / STEERING, asdict(steered))
        self._steered = steered

    def _now(self) -> float:
        return round(self._wall(), 3)


def _author(by: str) -> str:
    return _words("by", by) or "?"


def _words(name: str, text: object) -> str:
    """Return words of an operator without what could forge lines. Raises `ConfigError`."""
    if not isinstance(text, str):
        raise ConfigError(f"{name} = {text!r:.80}: must be a text")
    clean = "".join(each if each.isprintable() else " " for each in text).strip()
    if len(clean) > MAX_WORDS:
        raise ConfigError(f"{name}: at most {MAX_WORDS} characters, not {len(clean)}")
    return clean
