"""Surveys of a run: performs `coordinator/rounds/survey.py` for both courses.

A model's levels get their statistics in one survey and their accuracies in a second, for which the
merged statistics are published. Each is said once everything it names is published (`proceed`).
Nothing of a survey is stored: the commit that it belongs to waits for its result, and is made anew
after a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Set

from coordinator.rounds import events
from coordinator.rounds.config import RunConfig
from coordinator.rounds.fleet import FleetRecord
from coordinator.rounds.survey import (
    SurveyEvent,
    SurveyState,
    begin_survey,
    handle_survey,
    make_survey,
    with_accuracies,
    with_statistics,
)
from coordinator.service.outgoing.outlet import ModelOutlet
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.survey import Survey, Wants
from edge_sdk.protocol.streams import stream

log = logging.getLogger(__name__)


class Surveying:
    """The surveys of one run, one at a time."""

    def __init__(self, config: RunConfig, outlet: ModelOutlet) -> None:
        self._config = config
        self._outlet = outlet
        self._round = 0
        self._scores = LevelScores()
        self._fleet: FleetRecord
        self._due: Survey | None = None
        """The survey that is said once everything is published."""
        self._state: SurveyState | None = None
        self._silent: Set[str] = frozenset()
        self._named: tuple[str, ...] = ()

    @property
    def under_way(self) -> bool:
        """True while levels are surveyed."""
        return self._due is not None or self._state is not None

    @property
    def deadline(self) -> float | None:
        """Latest time to send `Tick`; None if there is no deadline."""
        return None if self._state is None else self._state.deadline

    def asks(self, survey: Survey) -> bool:
        """True if answers to this survey are still of use."""
        return self._state is not None and self._state.survey == survey

    def begin(self, round: int, scores: LevelScores, devices: Set[str], fleet: FleetRecord) -> None:
        """Survey the levels of the model that a round made, which is being published.

        `devices` are those that may answer; some of them are drawn if they are many.
        """
        self._round, self._scores, self._fleet = round, scores, fleet
        most, self._named = self._config.survey_devices, ()
        if len(devices) > most:
            names, draws = sorted(devices), stream(self._config.seed, "survey", round)
            drawn = draws.choice(len(names), most, replace=False)
            self._named = tuple(sorted(names[number] for number in drawn))
        self._due = self._survey("statistics")

    def proceed(self, devices: Set[str], now: float) -> list[events.Broadcast]:
        """Say the survey that is due; everything that it names is published.

        `devices` are those to wait for, as far as they are asked.
        """
        if self._due is None:
            return []
        survey, self._due = self._outlet.survey(self._due), None
        self._state = begin_survey(survey, devices, now, self._silent)
        return [events.Broadcast(survey)]

    def handle(self, event: SurveyEvent, now: float) -> LevelScores | None:
        """Handle an event; return the levels when all is known of them that can be.

        Raises `MessageError` for an unsound finding.
        """
        if self._state is None:
            return None
        self._state = handle_survey(self._config.plan, self._state, event)
        return self._conclude(self._state) if self._state.is_over(now) else None

    def _conclude(self, state: SurveyState) -> LevelScores | None:
        self._silent, self._state = state.now_silent, None
        if state.survey.wants == "evaluation":
            return with_accuracies(self._scores, state)
        self._scores = with_statistics(self._config.plan, self._scores, state, self._fleet)
        self._report()
        self._due = self._survey("evaluation")
        if self._due is None:
            return self._scores
        self._outlet.publish_statistics(
            {each.level: each.statistics for each in self._scores.levels if each.statistics}
        )
        return None

    def _survey(self, wants: Wants) -> Survey | None:
        config = self._config
        return make_survey(
            config.plan,
            self._scores,
            wants,
            round=self._round,
            samples=config.survey_samples,
            batch_size=config.batch_size,
            wait_s=config.survey_s,
            devices=self._named,
        )

    def _report(self) -> None:
        for each in self._scores.levels:
            devices, share = each.statistics_devices, each.statistics_share
            facts = {"event": "statistics", "round": self._round, "level": each.level}
            extra = {"facts": {**facts, "devices": devices, "share": share}}
            if each.statistics:
                said = "" if share is None else f", which have {share:.0%} of the data"
                words = "level %g: BatchNorm statistics from %d devices%s"
                log.info(words, each.level, devices, said, extra=extra)
            else:
                words = "level %g has no BatchNorm statistics: no device could run it"
                log.warning(words, each.level, extra=extra)
