"""Orders for a run that nobody serves: they are put down in its folder, for the next start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.errors import ConfigError
from coordinator.rounds.reputation import quarantined
from coordinator.run.folder import Run
from coordinator.run.steering.orders import OrderedStanding, Steered, Steering
from coordinator.run.steering.settings import length_of
from edge_sdk.program.settings.reader import nearest

Answer = dict[str, Any]
"""A JSON value, as the helm of a served run gives it."""


@contextmanager
def steering_of(folder: Path) -> Iterator[tuple[Run, Steering]]:
    """Open a stopped run. Raises `ConfigError`, and `RunError` if it is open elsewhere."""
    with Run(folder) as run:
        steering = Steering(run)
        steering.settle()
        yield run, steering


def pause(folder: Path, by: str) -> Answer:
    """Let no round open once the run is served again."""
    with steering_of(folder) as (_, steering):
        return _state(steering.pause(by), steering.steered)


def resume(folder: Path, by: str) -> Answer:
    """Let rounds open once the run is served again."""
    with steering_of(folder) as (_, steering):
        return _state(steering.resume(by), steering.steered)


def lengthen(folder: Path, rounds: int, by: str) -> Answer:
    """Add rounds, or updates."""
    with steering_of(folder) as (_, steering):
        changed = steering.lengthen(rounds, by)
        name = length_of(steering.names)
        value = steering.steered.value(name)
        return {"changed": changed, "name": name, "value": value, "note": None}


def change(folder: Path, name: str, value: object, by: str) -> Answer:
    """Change a setting. Whether it fits the others is known at the next start."""
    with steering_of(folder) as (_, steering):
        was = steering.steered.value(name)
        changed = steering.change(name, value, by)
        now, file = steering.steered.value(name), steering.steered.file.get(name)
        return {"changed": changed, "name": name, "value": now, "was": was, "file": file}


def quarantine(folder: Path, device: str, reason: str, by: str) -> Answer:
    """Quarantine a device."""
    with steering_of(folder) as (run, steering):
        newest = run.latest()
        if device not in newest.devices:
            known = sorted(newest.devices)
            raise ConfigError(f"the run has no device {device!r}{nearest(device, known)}")
        if device in (each["device"] for each in _quarantined(run, steering.steered)):
            raise ConfigError(f"{device!r} is quarantined already: tessera-coordinator quarantined")
        return _row(steering.quarantine(device, reason, by, saved=newest.orders))


def allow(folder: Path, device: str, by: str) -> Answer:
    """Release a device from quarantine; return its row from now on, whose `since` is None."""
    with steering_of(folder) as (run, steering):
        rows = [each["device"] for each in _quarantined(run, steering.steered)]
        if device not in rows:
            known = ", ".join(rows) or "none"
            raise ConfigError(f"{device!r} is not quarantined; quarantined devices: {known}")
        return _row(steering.allow(device, by, saved=run.latest().orders))


def list_quarantined(folder: Path) -> list[Answer]:
    """Return the devices whose bids are declined."""
    with steering_of(folder) as (run, steering):
        return _quarantined(run, steering.steered)


def _quarantined(run: Run, steered: Steered) -> list[Answer]:
    newest = run.latest()
    rows = {
        name: {
            "device": name,
            "since": each.quarantined,
            "refusals": each.refusals,
            "reason": each.reason,
        }
        for name, each in quarantined(newest.fleet.standings).items()
    }
    for each in steered.judged_since(newest.orders):
        rows.pop(each.device, None)
        if each.quarantined:
            rows[each.device] = _row(each)
    return [rows[name] for name in sorted(rows)]


def _row(judgement: OrderedStanding) -> Answer:
    since = judgement.round if judgement.quarantined else None
    said = {"since": since, "refusals": 0, "reason": judgement.words}
    return {"device": judgement.device, **said}


def _state(changed: bool, steered: Steered) -> Answer:
    return {
        "changed": changed,
        "paused": None if steered.paused is None else asdict(steered.paused),
        "stopping": None if steered.stopping is None else steered.stopping.when,
        "changes": {name: asdict(each) for name, each in steered.changes.items()},
        "waits_for": None,
    }
