"""A survey as a state machine without I/O: devices run the levels of a model on their own data.

    event     effect on the state
    --------  ------------------------------------------------------------------------------------
    SurveyFinding   kept, if it is sound and the first of its device for its level; a device with a
              finding for every level is no longer awaited
    Joined    awaited, unless it has answered, is not asked, or was silent in the last survey
    Left      no longer awaited; its findings stay
    Tick      –

A survey is over when nobody is awaited and somebody has answered, or at its deadline. Rules:
- A finding that is not of this survey is ignored: it is late, or early. One that does not fit the
  plan raises `MessageError` and changes nothing.
- Moments are merged in the order of device names, in float64: the result does not depend on who
  was first.
- A device that let a survey pass without a word, perhaps because it does not know the message, is
  not awaited in the next one; what it says still counts.
- A level that no device could run has no statistics. None are invented.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from coordinator.rounds.events import Joined, Left, Tick
from coordinator.rounds.fleet import FleetRecord
from coordinator.rounds.persistent import PersistentMap, PersistentSet
from coordinator.task.levels import LevelScore, LevelScores, between_devices
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding, Wants
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.statistics import Moments, read_moments

SurveyEvent = SurveyFinding | Joined | Left | Tick


@dataclass(frozen=True, slots=True)
class HeardFinding:
    """A device's sound finding for one level; `samples` 0: it did not run the level."""

    samples: int
    moments: Moments | None = None
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class SurveyState:
    """Everything that is known of a survey. Made by `begin_survey`."""

    survey: Survey
    deadline: float
    """Latest time to send `Tick`."""
    awaited: PersistentSet[str] = field(default_factory=PersistentSet)
    found: PersistentMap[tuple[str, float], HeardFinding] = field(default_factory=PersistentMap)
    """By device and level."""
    silent: Set[str] = frozenset()
    """Devices that did not answer the last survey."""

    def is_over(self, now: float) -> bool:
        """True if nothing more is waited for."""
        return now >= self.deadline or (bool(self.found) and not self.awaited)

    def asks(self, device: str) -> bool:
        """True if a device is asked."""
        return not self.survey.devices or device in self.survey.devices

    @property
    def heard(self) -> set[str]:
        """Devices that answered."""
        return {device for device, _ in self.found}

    @property
    def now_silent(self) -> frozenset[str]:
        """Devices not to wait for next time."""
        return frozenset((self.silent | self.awaited) - self.heard)


def begin_survey(
    survey: Survey, devices: Set[str], now: float, silent: Set[str] = frozenset()
) -> SurveyState:
    """Begin to wait for these devices, as far as they are asked and not known to be silent."""
    state = SurveyState(survey, now + survey.wait_s, silent=silent)
    awaited = (name for name in devices if state.asks(name) and name not in silent)
    return replace(state, awaited=PersistentSet(awaited))


def handle_survey(plan: ModelPlan, state: SurveyState, event: SurveyEvent) -> SurveyState:
    """Return the state after an event. Raises `MessageError` for an unsound finding."""
    match event:
        case SurveyFinding():
            return _on_finding(plan, state, event)
        case Joined(device):
            waits = state.asks(device) and device not in state.silent
            done = all((device, level) in state.found for level in state.survey.levels)
            return (
                replace(state, awaited=state.awaited.adding(device))
                if waits and not done
                else state
            )
        case Left(device):
            return replace(state, awaited=state.awaited.dropping(device))
        case Tick():
            return state


def _on_finding(plan: ModelPlan, state: SurveyState, finding: SurveyFinding) -> SurveyState:
    survey, key = state.survey, (finding.device, finding.level)
    this = (finding.round, finding.wants) == (survey.round, survey.wants)
    if not this or finding.level not in survey.levels or not state.asks(finding.device):
        return state
    if key in state.found:
        return state
    state = replace(state, found=state.found.putting(key, _checked(plan, survey, finding)))
    if all((finding.device, level) in state.found for level in survey.levels):
        state = replace(state, awaited=state.awaited.dropping(finding.device))
    return state


def _checked(plan: ModelPlan, survey: Survey, finding: SurveyFinding) -> HeardFinding:
    """Raise `MessageError` unless a finding fits the survey."""
    if finding.samples > survey.samples:
        raise MessageError(
            f"a finding of {finding.samples} samples; the survey asks for {survey.samples}"
        )
    if not finding.samples:
        return HeardFinding(0)
    if survey.wants == "evaluation":
        if finding.means or finding.m2s:
            raise MessageError("a finding of an evaluation has no moments")
        return HeardFinding(finding.samples, accuracy=finding.accuracy)
    groups = survey.groups[survey.levels.index(finding.level)]
    return HeardFinding(finding.samples, read_moments(plan, groups, finding))


# -- results -------------------------------------------------------------------------------------


def make_survey(
    plan: ModelPlan,
    scores: LevelScores,
    wants: Wants,
    *,
    round: int,
    samples: int,
    batch_size: int,
    wait_s: float,
    devices: tuple[str, ...] = (),
) -> Survey | None:
    """Make the survey of a model's levels; None if there is nothing to ask.

    Levels without statistics are not evaluated.
    """
    asked = [each for each in scores.levels if wants == "statistics" or each.statistics]
    if not asked:
        return None
    return Survey(
        round=round,
        plan_hash=plan.hash,
        wants=wants,
        levels=tuple(each.level for each in asked),
        groups=tuple({axis: tuple(ids) for axis, ids in each.groups.items()} for each in asked),
        rescale=scores.rescale,
        samples=max(samples, batch_size),
        batch_size=batch_size,
        wait_s=wait_s,
        devices=devices,
    )


def with_statistics(
    plan: ModelPlan, scores: LevelScores, state: SurveyState, fleet: FleetRecord
) -> LevelScores:
    """Return the levels with the statistics of all devices that ran them."""

    def surveyed(each: LevelScore) -> LevelScore:
        names = _names(state, each.level)
        parts = [state.found[name, each.level].moments for name in names]
        merged = [part for part in parts if part is not None]
        statistics: Mapping[str, Array] = {}
        if merged:
            statistics = _filled(plan, each, reduce(Moments.merged, merged))
        total = fleet.total_samples
        held = sum(fleet.samples.get(name, 0) for name in names)
        return replace(
            each,
            statistics=statistics,
            statistics_devices=len(names),
            statistics_share=held / total if total else None,
        )

    return replace(scores, levels=tuple(map(surveyed, scores.levels)))


def with_accuracies(scores: LevelScores, state: SurveyState) -> LevelScores:
    """Return the levels with their mean accuracy over all samples of the devices that ran them."""

    def surveyed(each: LevelScore) -> LevelScore:
        found = [state.found[name, each.level] for name in _names(state, each.level)]
        told = [(one.samples, one.accuracy) for one in found if one.accuracy is not None]
        if not told:
            return each
        total = sum(samples for samples, _ in told)
        mean, deviation = between_devices([share for _, share in told])
        return replace(
            each,
            accuracy=sum(samples * share for samples, share in told) / total,
            own_accuracy=mean,
            own_deviation=deviation,
        )

    return replace(scores, levels=tuple(map(surveyed, scores.levels)))


def _names(state: SurveyState, level: float) -> list[str]:
    """Return the devices that ran a level, sorted."""
    return sorted(
        device for (device, each), found in state.found.items() if each == level and found.samples
    )


def _filled(plan: ModelPlan, level: LevelScore, moments: Moments) -> dict[str, Array]:
    named = {*moments.means, *moments.m2s}
    whole = {buffer.name: np.zeros(buffer.shape, buffer.dtype) for buffer in plan.buffers}
    buffers = plan.cut_buffers(whole, level.groups)
    return {name: each for name, each in moments.fill(buffers).items() if name in named}
