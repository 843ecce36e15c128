"""The overview of a run from its folder alone, and of one that is about to be served."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.state import RoundsConfig
from coordinator.run.errors import RunError
from coordinator.run.folder import (
    MODEL,
    Checkpoint,
    Run,
    checkpoint_path,
    checkpoint_rounds,
    is_starting,
    read_about,
    read_checkpoint,
    read_counters,
    read_history,
)
from coordinator.run.steering.orders import Steered, read_steered
from coordinator.service.outgoing.rollout import read_trial
from coordinator.service.overview.facts import RunFacts, facts_of, kept_facts
from coordinator.service.overview.overview import Overview
from coordinator.task.saved_model import read_plan
from edge_sdk.protocol.plan.plan import ModelPlan

log = logging.getLogger(__name__)

TRIES = 3
"""Attempts to read the newest checkpoint of a run that may go on meanwhile."""


def overview_of(folder: Path) -> Overview:
    """Return the overview of a run that is not served, from its folder alone.

    Its state is `finished` or `stopped`, or `starting` if a process is about to serve it. No device
    is present, and what only a served run knows is unknown. Raises `ConfigError` if there is no
    run, `RunError` if its identity is damaged.
    """
    history = _lines(folder)  # first: it checks the folder
    about, _ = read_about(folder)
    plan = read_plan(folder / MODEL)
    facts = RunFacts(
        task=about.task,
        run=about.run,
        folder=folder.absolute(),
        plan=plan,
        served=False,
        starting=is_starting(folder),
        **kept_facts(folder),
    )
    overview = Overview(facts, history=history)
    checkpoint = _newest(folder, plan)
    if checkpoint is not None:
        overview.known(checkpoint.devices)
        overview.model(checkpoint.fleet, checkpoint.round)
    overview.at("", read_counters(folder).opened, None)
    try:
        trial = read_trial(folder)
    except RunError as error:
        log.warning("the overview lacks the trial of a model: %s", error)
    else:
        if trial is not None:
            overview.delivery(trial)
    steered = _steered(folder)
    if steered.paused is not None:
        overview.paused(steered.paused.by, steered.paused.time)
    changed = steered.settings
    length = changed.pop("updates" if facts.asynchronous else "rounds", None)
    overview.settings({**facts.settings, **changed}, None if length is None else int(length))
    return overview


def _steered(folder: Path) -> Steered:
    """Return what operators asked of a run; nothing if it cannot be read."""
    try:
        return read_steered(folder)
    except RunError as error:
        log.warning("the overview lacks the orders of operators: %s", error)
        return Steered()


def overview_for(run: Run, machine: RoundsConfig | FragmentsConfig) -> Overview:
    """Return the overview of a run that is about to be served, filled from its history."""
    return Overview(facts_of(run, machine), history=_lines(run.folder))


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Give the lines of history up to one that is damaged; those that look after it say more."""
    entries = read_history(folder)

    def each() -> Iterator[dict[str, Any]]:
        try:
            yield from entries
        except RunError as error:
            log.warning("the overview lacks the rounds from there on: %s", error)

    return each()


def _newest(folder: Path, plan: ModelPlan) -> Checkpoint | None:
    for _ in range(TRIES):
        rounds = checkpoint_rounds(folder)
        if not rounds:
            return None
        try:
            return read_checkpoint(checkpoint_path(folder, rounds[-1]), plan)
        except RunError as error:
            log.debug("cannot read the newest checkpoint: %s", error)
    return None
