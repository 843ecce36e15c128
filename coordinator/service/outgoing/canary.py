"""Canary delivery: a new model for inference goes to some devices first, and they decide.

    made ──▶ tried by a share of the devices ──▶ promoted: all devices get it
                                             └─▶ rolled back: all go on with the last promoted one

Rules:
- One model is tried at a time. Models that are made meanwhile are not delivered; after the decision
  the next one is tried.
- The devices that try a model are drawn by their names and the model, as each of them can compute
  by itself (`canary_draw`); every model has others.
- A device that can compare the new model with the one it has answers with both, on the same samples
  of its own data. Worse by more than `tolerance` is a vote against the model; each device has one
  vote, so that a few cannot outvote the others. A device without data, or without a model to
  compare with, has none.
- Too many votes against it end the trial at once. Enough votes for it promote it. At the end of the
  time the votes decide that are there; too few are a rollback.

Nothing here performs anything: state and event in, state out (`rollout.py` performs).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from edge_sdk.device.delivering import Judgement
from edge_sdk.program.settings import Count, Example, Share, Within, check_fields
from edge_sdk.protocol.messages.delivery import canary_draw
from edge_sdk.protocol.messages.transfer import MAX_LOSS, Evaluation

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """Who tries a new model, and how it is judged. Raises `ConfigError`."""

    share: Annotated[Share | None, Example(0.1)] = None
    """Share of the devices that get a new model first, and decide whether the others get it;
    without it, all get every model at once."""
    min_devices: Count = 3
    """Least devices that try a model, and least answers for a decision."""
    tolerance: Annotated[float, Within(least=0, most=100)] = 2.0
    """Points of accuracy that a new model may be worse than the previous one on the same device;
    percent of the loss for tasks without accuracy."""
    success: Annotated[float, Within(above=0, most=1)] = 0.5
    """Share of the trying devices that have to find it no worse: then the others get it, too."""
    errors: Annotated[float, Within(least=0, below=1)] = 0.34
    """Share of the trying devices that may find it worse; more end the trial at once."""
    hours: Annotated[float, Within(above=0)] = 24.0
    """Hours after which the answers that are there decide; too few are a rollback."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTrial:
    """A model that some devices try."""

    round: int
    """The round that made it."""
    share: float
    """Devices whose draw is below this try it."""
    members: int
    """Devices that were expected to try it, at least `min_devices`."""
    since: float
    """Unix seconds."""
    accuracy: float | None = None
    """As the run measured it."""
    votes: Mapping[str, bool] = field(default_factory=dict)
    """By device: True if it found the model no worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryState:
    """The models that devices have for inference."""

    promoted: int | None = None
    """Round of the model that all devices get; None: there is none."""
    best: tuple[int, float] | None = None
    """Round and accuracy of the best promoted model whose accuracy is known."""
    decided: int = 0
    """Newest round whose model was promoted or rolled back."""
    trial: CanaryTrial | None = None

    @property
    def rounds(self) -> frozenset[int]:
        """Rounds whose models are needed."""
        found = {self.promoted, None if self.best is None else self.best[0]}
        found.add(None if self.trial is None else self.trial.round)
        return frozenset(each for each in found if each is not None)


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """The end of a trial."""

    promoted: bool
    words: str
    """Why."""


def begin(
    settings: CanarySettings,
    state: CanaryState,
    run: str,
    round: int,
    accuracy: float | None,
    devices: Collection[str],
    now: float,
) -> CanaryState:
    """Begin the trial of a model; `devices` are those that may try it.

    At least `min_devices` of them do, if there are so many.
    """
    draws = sorted(canary_draw(run, name, round) for name in devices)
    wanted = max(settings.min_devices, math.ceil((settings.share or 1.0) * len(draws)))
    share = settings.share or 1.0
    if len(draws) < settings.min_devices:
        share = 1.0
    elif draws:
        share = max(share, math.nextafter(draws[min(wanted, len(draws)) - 1], 2.0))
    members = max(settings.min_devices, sum(draw < share for draw in draws))
    trial = CanaryTrial(
        round=round, share=min(share, 1.0), members=members, since=now, accuracy=accuracy
    )
    return replace(state, trial=trial)


def vote(
    settings: CanarySettings, state: CanaryState, run: str, device: str, found: Evaluation
) -> CanaryState:
    """Note a device's answer; the state as it is if the answer does not count."""
    trial = state.trial
    if trial is None or found.round != trial.round or device in trial.votes:
        return state
    if canary_draw(run, device, trial.round) >= trial.share:
        return state
    before = found.before_loss is not None or found.before_accuracy is not None
    if state.promoted is not None and not before:
        return state  # nothing to compare with
    new = Judgement(found.accuracy, found.loss if abs(found.loss) < MAX_LOSS else math.inf)
    old = Judgement(found.before_accuracy, found.before_loss) if before else None
    good = new.falls_short(old, settings.tolerance / 100) is None
    return replace(state, trial=replace(trial, votes={**trial.votes, device: good}))


def verdict(settings: CanarySettings, state: CanaryState, now: float) -> CanaryVerdict | None:
    """Decide on the trial; None: not yet, or there is none."""
    trial = state.trial
    if trial is None:
        return None
    answers, good = len(trial.votes), sum(trial.votes.values())
    bad = answers - good
    said = f"{good} of {answers} devices found it no worse"
    if bad > settings.errors * trial.members:
        return CanaryVerdict(promoted=False, words=said)
    enough = answers >= settings.min_devices and bad <= settings.errors * answers
    if enough and good >= settings.success * trial.members:
        return CanaryVerdict(promoted=True, words=said)
    if now < trial.since + settings.hours * HOUR_S:
        return None
    if answers < settings.min_devices:
        words = f"only {answers} of {settings.min_devices} devices answered in {settings.hours:g} h"
        return CanaryVerdict(promoted=False, words=words)
    return CanaryVerdict(promoted=enough, words=said)


def ended(state: CanaryState, verdict: CanaryVerdict) -> CanaryState:
    """Return the state after a trial."""
    trial = state.trial
    if trial is None:
        return state
    after = replace(state, trial=None, decided=trial.round)
    if not verdict.promoted:
        return after
    best = state.best
    if trial.accuracy is not None and (best is None or trial.accuracy > best[1]):
        best = trial.round, trial.accuracy
    return replace(after, promoted=trial.round, best=best)


def shown_trial(state: CanaryState, judges: int, advice: str | None = None) -> dict[str, Any]:
    """Return what operators see; `judges` devices are here that can judge a model."""
    trial = state.trial
    return {
        "round": None if trial is None else trial.round,
        "since": None if trial is None else trial.since,
        "answers": 0 if trial is None else len(trial.votes),
        "members": 0 if trial is None else trial.members,
        "promoted": state.promoted,
        "judges": judges,
        "advice": advice,
    }


def pack_state(state: CanaryState) -> dict[str, Any]:
    """Write the state as JSON values. Inverse of `unpack_state`."""
    trial = state.trial
    return {
        "promoted": state.promoted,
        "best": None if state.best is None else list(state.best),
        "decided": state.decided,
        "trial": None
        if trial is None
        else {
            "round": trial.round,
            "share": trial.share,
            "members": trial.members,
            "since": trial.since,
            "accuracy": trial.accuracy,
            "votes": dict(trial.votes),
        },
    }


def unpack_state(content: Mapping[str, Any]) -> CanaryState:
    """Read it. Raises `KeyError`, `TypeError`, `ValueError`."""
    best, trial = content["best"], content["trial"]
    return CanaryState(
        promoted=None if content["promoted"] is None else int(content["promoted"]),
        best=None if best is None else (int(best[0]), float(best[1])),
        decided=int(content["decided"]),
        trial=None if trial is None else CanaryTrial(**trial),
    )
