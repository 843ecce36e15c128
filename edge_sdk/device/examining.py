"""Performs surveys: runs levels of the global model forward, on the device's own data.

Every level is fetched, run over some fixed samples and forgotten, one after the other. Nothing here
decides whether the device can afford it; `DeviceApp` does before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.errors import ProtocolError, TesseraError, TrainingError
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.train.statistics import (
    LevelRuntime,
    survey_moments,
    survey_rows,
    write_moments,
)

ShouldStop = Callable[[], bool]


class UnfetchedError(TesseraError):
    """A level did not come: it may when the coordinator asks again."""


class LevelSource(Protocol):
    """The origin of the levels that a survey names."""

    def fetch_level(self, survey: Survey, number: int) -> tuple[Blocks, dict[str, Array]]:
        """Return the blocks and buffers of the survey's level of this number.

        For an evaluation, the buffers include the statistics that were computed for the level.
        """


class Examiner:
    """One device's part in surveys."""

    def __init__(
        self,
        name: str,
        data: ArrayData,
        source: LevelSource,
        make_runtime: Callable[[], LevelRuntime],
        *,
        evaluates: bool = True,
        spend: Callable[[float], object] = lambda _: None,
    ) -> None:
        """`make_runtime` is called for the first level that is run. `evaluates` False: the owner
        allows no evaluations. `spend` is told the multiply-accumulates of every pass.
        """
        self._name = name
        self._data = data
        self._source = source
        self._make_runtime = make_runtime
        self._runtime: LevelRuntime | None = None
        self._evaluates = evaluates
        self._spend = spend

    def refusal(self, survey: Survey) -> str | None:
        """Return why this device answers no survey of this kind; None: it does."""
        if not len(self._data):
            return "there is no data"
        if survey.wants == "evaluation" and not self._evaluates:
            return "the owner allows no evaluations (evaluate_every)"
        return None

    def find(self, survey: Survey, number: int, should_stop: ShouldStop) -> SurveyFinding:
        """Run the level of this number.

        Raises `UnfetchedError` if it does not come, `TrainingStopped`, and as the runtime does.
        """
        groups = survey.groups[number]
        try:
            if self._runtime is None:
                self._runtime = self._make_runtime()
            blocks, buffers = self._source.fetch_level(survey, number)
        except (ProtocolError, TrainingError):
            raise  # it came, and is not what it should be
        except TesseraError as error:
            raise UnfetchedError(str(error)) from error
        plan = self._runtime.plan
        rows = survey_rows(len(self._data), survey.samples)
        inputs = tuple(array[rows] for array in self._data.inputs)
        level = _Level(self._runtime, plan.assemble(blocks, groups), buffers, survey, number)
        finding = SurveyFinding(
            device=self._name,
            round=survey.round,
            wants=survey.wants,
            level=survey.levels[number],
            samples=len(rows),
            run=survey.run,
        )
        if survey.wants == "evaluation":
            data = ArrayData(inputs, self._data.targets[rows])
            finding = replace(finding, accuracy=level.accuracy(data, should_stop))
        else:
            finding = level.with_moments(finding, inputs, should_stop)
        self._spend(finding.samples * plan.submodel_macs(groups))
        return finding


class _Level:
    """A level that is run."""

    def __init__(
        self,
        runtime: LevelRuntime,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        survey: Survey,
        number: int,
    ) -> None:
        self._runtime = runtime
        self._weights = weights
        self._buffers = buffers
        self._survey = survey
        self._groups = survey.groups[number]

    def accuracy(self, data: ArrayData, should_stop: ShouldStop) -> float | None:
        # Imported here: it loads onnxruntime, which is optional and slow to load.
        from edge_sdk.train.evaluation import level_accuracies

        found = level_accuracies(
            self._runtime,
            self._weights,
            self._buffers,
            data,
            groups=self._groups,
            rescale=self._survey.rescale,
            should_stop=should_stop,
        )
        return None if found is None else float(found.mean())

    def with_moments(
        self, finding: SurveyFinding, inputs: tuple[Array, ...], should_stop: ShouldStop
    ) -> SurveyFinding:
        moments = survey_moments(
            self._runtime,
            self._weights,
            self._buffers,
            inputs,
            groups=self._groups,
            rescale=self._survey.rescale,
            batch_size=self._survey.batch_size,
            should_stop=should_stop,
        )
        if moments is None:
            raise TrainingError("the model has no BatchNorm")
        means, m2s = write_moments(self._runtime.plan, moments)
        return replace(finding, samples=moments.count, means=means, m2s=m2s)
