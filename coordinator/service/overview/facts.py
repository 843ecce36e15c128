"""Facts about a run: its settings and its length, as the overview shows them.

settings.json    in the run's folder: those of the process that served it last, for commands
                 that look at a stopped run; a run goes on without it
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.aggregate.pairings import rule_name
from coordinator.checksums import open_json, seal_json
from coordinator.masks import masks_name
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.state import RoundsConfig
from coordinator.run.folder import Run
from coordinator.run.lines import PRIVATE
from coordinator.run.steering.settings import length_of, values_of
from edge_sdk.program.files import write_whole
from edge_sdk.protocol.plan.plan import ModelPlan

log = logging.getLogger(__name__)

SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that do not change while it is served."""

    task: str
    run: str
    folder: Path | None
    plan: ModelPlan
    asynchronous: bool = False
    rounds: int | None = None
    """Rounds, or updates, that the run is to have; None: not known."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    served: bool = True
    """False: the overview is made of the folder of a run that nobody serves."""
    starting: bool = False
    """True: it is not served yet, and a process is about to."""
    finished: int | None = None
    """The round with which the run was complete; None: it was not."""


def facts_of(run: Run, machine: RoundsConfig | FragmentsConfig) -> RunFacts:
    """Return the facts of a run that is about to be served."""
    asynchronous = isinstance(machine, FragmentsConfig)
    return RunFacts(
        task=run.about.task,
        run=run.about.run,
        folder=run.folder,
        plan=run.plan,
        asynchronous=asynchronous,
        rounds=machine.updates if isinstance(machine, FragmentsConfig) else machine.rounds,
        settings=settings_of(machine),
    )


def settings_of(machine: RoundsConfig | FragmentsConfig) -> dict[str, Any]:
    """Return the settings of a run that its operator wants to see."""
    rule = machine.local_rule
    found: dict[str, Any] = {
        **values_of(machine),
        "rule": rule_name(machine.rule),
        "masks": masks_name(machine.masks),
        "learning_rate": rule.learning_rate,
        "momentum": rule.momentum,
        "steps": machine.steps,
        "batch_size": machine.batch_size,
        "widths": rule.widths,
        "levels": list(machine.levels),
        "up": str(machine.up),
        "min_devices": machine.min_devices,
        "bid_s": machine.bid_s,
        "train_deadline_s": machine.train_deadline_s,
        "seed": machine.seed,
    }
    if isinstance(machine, RoundsConfig):
        found["participants"] = machine.participants
        found["robust"] = machine.robust.name
        found["server_optimizer"] = machine.server_optimizer.name
    found.pop(length_of(found))
    return found


def keep_facts(folder: Path, facts: RunFacts) -> None:
    """Write the facts for commands that look at the run when it is stopped."""
    content = {
        "asynchronous": facts.asynchronous,
        "rounds": facts.rounds,
        "settings": dict(facts.settings),
        "finished": facts.finished,
    }
    try:
        write_whole(folder / SETTINGS, seal_json(content), mode=PRIVATE)
    except OSError as error:
        log.warning(
            "%s cannot be written, which status of a stopped run needs: %s", SETTINGS, error
        )


def kept_facts(folder: Path) -> Mapping[str, Any]:
    """Read what was kept of a run's facts; nothing if it was not, or cannot be read."""
    try:
        found = open_json((folder / SETTINGS).read_bytes())
        return {
            "asynchronous": bool(found["asynchronous"]),
            "rounds": None if found["rounds"] is None else int(found["rounds"]),
            "settings": dict(found["settings"]),
            "finished": None if found["finished"] is None else int(found["finished"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
