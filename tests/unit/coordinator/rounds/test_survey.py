"""Surveys as the coordinator sees them: who is awaited, what counts, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.events import Joined, Left, Tick
from coordinator.rounds.fleet import FleetRecord, new_fleet
from coordinator.rounds.survey import (
    SurveyState,
    begin_survey,
    handle_survey,
    make_survey,
    with_accuracies,
    with_statistics,
)
from coordinator.task.levels import LevelScore, LevelScores
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding, Wants, write_floats
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor

MEAN, VAR = "norm.running_mean", "norm.running_var"
DIM = (Dim(4, 0),)
PLAN = ModelPlan(
    axes=(Axis("a", (2, 2)),),
    tensors=(Tensor("w", "float32", DIM),),
    buffers=(
        Buffer(MEAN, "float32", DIM, statistic=True),
        Buffer(VAR, "float32", DIM, statistic=True),
        Buffer("norm.num_batches_tracked", "int64", (), statistic=True),
    ),
    macs=(),
)
LEVELS = LevelScores((LevelScore(1.0, {"a": (0, 1)}), LevelScore(0.5, {"a": (1,)})), rescale=0.5)


def survey(wants: Wants = "statistics", scores: LevelScores = LEVELS, **changes: Any) -> Survey:
    usual: dict[str, Any] = {"round": 3, "samples": 100, "batch_size": 8, "wait_s": 10.0}
    made = make_survey(PLAN, scores, wants, **{**usual, **changes})
    assert made is not None
    return made


def finding(device: str, level: float, samples: int = 0, **changes: Any) -> SurveyFinding:
    usual: dict[str, Any] = {"round": 3, "wants": "statistics"}
    return SurveyFinding(device=device, level=level, samples=samples, **{**usual, **changes})


def moments(device: str, level: float, values: Any, **changes: Any) -> SurveyFinding:
    rows = np.asarray(values, dtype=np.float64)
    means, m2s = rows.mean(0), rows.var(0) * len(rows)
    return finding(
        device,
        level,
        len(rows),
        **{"means": {MEAN: write_floats(means)}, "m2s": {VAR: write_floats(m2s)}, **changes},
    )


def begun(*devices: str, **changes: Any) -> SurveyState:
    return begin_survey(survey(**changes), set(devices), now=100.0)


def heard(state: SurveyState, *findings: SurveyFinding) -> SurveyState:
    for each in findings:
        state = handle_survey(PLAN, state, each)
    return state


def fleet(**samples: int) -> FleetRecord:
    bids = [
        Bid(device=name, round=1, level=None, reason="skip", samples=number)
        for name, number in samples.items()
    ]
    return new_fleet(PLAN).heard(bids)


def test_survey_is_over_when_everybody_has_answered_for_every_level() -> None:
    state = begun("a", "b")
    state = heard(state, finding("a", 1.0), finding("a", 0.5), finding("b", 1.0))
    assert not state.is_over(105.0)
    assert heard(state, finding("b", 0.5)).is_over(105.0)
    assert handle_survey(PLAN, state, Left("b")).is_over(105.0)
    assert state.is_over(110.0)


def test_survey_without_an_answer_waits_for_its_deadline() -> None:
    state = handle_survey(PLAN, begun("a"), Left("a"))
    assert not state.is_over(109.0)
    state = handle_survey(PLAN, state, Joined("b"))  # a newcomer finds it retained
    assert state.awaited == {"b"}
    assert handle_survey(PLAN, state, Tick()) is state
    assert state.is_over(110.0)


def test_silent_device_is_not_awaited_next_time_but_still_heard() -> None:
    state = heard(begun("a", "old"), finding("a", 1.0), finding("a", 0.5))
    assert state.now_silent == {"old"}
    after = begin_survey(survey(), {"a", "old"}, 0.0, state.now_silent)
    assert after.awaited == {"a"}
    assert handle_survey(PLAN, after, Joined("old")).awaited == {"a"}
    assert heard(after, finding("old", 1.0)).now_silent == {"a"}


def test_only_named_devices_are_asked() -> None:
    state = begun("a", "b", "c", devices=("a", "c"))
    assert state.awaited == {"a", "c"}
    assert heard(state, finding("b", 1.0)) is state
    assert handle_survey(PLAN, state, Joined("b")) is state


@pytest.mark.parametrize(
    "late", [{"round": 2}, {"round": 4}, {"wants": "evaluation"}, {"level": 0.25}]
)
def test_finding_of_another_survey_is_ignored(late: dict[str, Any]) -> None:
    state = begun("a")
    assert handle_survey(PLAN, state, replace(finding("a", 1.0), **late)) is state


def test_first_finding_of_a_device_counts() -> None:
    one = moments("a", 0.5, [[1, 2], [3, 4]])
    state = heard(begun("a", "b"), one)
    assert heard(state, one, moments("a", 0.5, [[9, 9], [9, 9]])) == state


NAN, INF = float("nan"), float("inf")
GOOD = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 101}, "101 samples"),
        ({"means": {}}, "not the moments"),
        ({"m2s": {VAR: write_floats(np.ones(2)), "more": bytes(8)}}, "not the moments"),
        ({"means": {VAR: write_floats(np.ones(2))}}, "not the moments"),
        ({"means": {MEAN: write_floats(np.ones(4))}}, "16 bytes; its shape is"),
        ({"m2s": {VAR: b""}}, "0 bytes; its shape is"),
        ({"means": {MEAN: write_floats(np.array([NAN, 1]))}}, "not finite"),
        ({"m2s": {VAR: write_floats(np.array([INF, 1]))}}, "not finite"),
        ({"m2s": {VAR: write_floats(np.array([-1e-6, 1]))}}, "below 0"),
        ({"m2s": {VAR: write_floats(np.array([3e30, 1]))}}, "impossible"),
        ({"means": {MEAN: write_floats(np.array([1, -2e15]))}}, "beyond"),
    ],
)
def test_unsound_finding_is_refused_and_changes_nothing(
    changes: dict[str, Any], words: str
) -> None:
    state = begun("a")
    with pytest.raises(MessageError, match=words):
        handle_survey(PLAN, state, replace(moments("a", 0.5, GOOD), **changes))
    assert not state.found


def test_evaluation_has_no_moments() -> None:
    scores = replace(LEVELS, levels=(replace(LEVELS.levels[1], statistics={MEAN: np.zeros(2)}),))
    state = begin_survey(survey("evaluation", scores), {"a"}, 0.0)
    assert state.survey.levels == (0.5,)  # the other one has no statistics to evaluate it with
    with pytest.raises(MessageError, match="no moments"):
        handle_survey(PLAN, state, moments("a", 0.5, GOOD, wants="evaluation"))


@pytest.mark.parametrize("order", [1, -1])
def test_statistics_are_those_of_all_samples_together_in_any_order(order: int) -> None:
    random = np.random.default_rng(4)
    rows = {name: random.normal(3, 2, (7 + n, 4)).astype("f4") for n, name in enumerate("abc")}
    findings = [moments(name, 1.0, rows[name]) for name in "abc"]
    findings += [finding("a", 0.5, reason="level 50 % needs 9 MB, 8 MB free")]
    state = heard(begun("a", "b", "c"), *findings[::order])
    scores = with_statistics(PLAN, LEVELS, state, fleet(a=30, b=10, c=10, gone=50))
    whole, half = scores.levels
    together = np.concatenate(list(rows.values())).astype(np.float64)
    np.testing.assert_allclose(whole.statistics[MEAN], together.mean(0), rtol=1e-6)
    np.testing.assert_allclose(whole.statistics[VAR], together.var(0), rtol=1e-6)
    assert list(whole.statistics) == [MEAN, VAR]  # the counter is none of them
    assert whole.statistics[MEAN].dtype == np.float32
    assert (whole.statistics_devices, whole.statistics_share) == (3, 0.5)
    # Nobody could run the other level, and nothing is invented for it.
    assert (dict(half.statistics), half.statistics_devices) == ({}, 0)
    again = with_statistics(PLAN, LEVELS, heard(begun(), *findings), fleet())
    assert again.levels[0].statistics[VAR].tobytes() == whole.statistics[VAR].tobytes()
    assert again.levels[0].statistics_share is None
    assert make_survey(
        PLAN, scores, "evaluation", round=3, samples=1, batch_size=8, wait_s=1.0
    ) == survey("evaluation", scores, samples=8, wait_s=1.0)


def test_largest_moments_that_are_taken_merge_to_finite_statistics() -> None:
    wide = {VAR: write_floats(np.full(2, 1.99e30))}
    far = [
        finding(name, 0.5, 2, means={MEAN: write_floats(np.full(2, mean))}, m2s=wide)
        for name, mean in (("a", 9.9e14), ("b", -9.9e14))
    ]
    scores = with_statistics(PLAN, LEVELS, heard(begun("a", "b"), *far), fleet())
    statistics = scores.levels[1].statistics
    assert list(statistics) == [MEAN, VAR]
    assert all(np.isfinite(array).all() for array in statistics.values())


def test_accuracy_is_weighted_by_samples() -> None:
    known = replace(LEVELS.levels[0], statistics={MEAN: np.zeros(4)})
    scores = replace(LEVELS, levels=(known, LEVELS.levels[1]))
    state = begin_survey(survey("evaluation", scores), {"a"}, 0.0)
    says = {"wants": "evaluation"}
    state = heard(
        state,
        finding("a", 1.0, 30, accuracy=0.5, **says),
        finding("b", 1.0, 10, accuracy=1.0, **says),
        finding("c", 1.0, 0, reason="hot", **says),
        finding("d", 1.0, 10, **says),
    )
    scored = with_accuracies(scores, state)
    assert scored.accuracies == {1.0: 0.625}
    assert scored.deploy == 1.0
    # Between devices, each counts once.
    assert (scored.levels[0].own_accuracy, scored.levels[0].own_deviation) == (0.75, 0.25)


def test_survey_of_no_levels_is_not_made() -> None:
    asked = {"round": 1, "samples": 1, "batch_size": 1, "wait_s": 1.0}
    assert make_survey(PLAN, LEVELS, "evaluation", **asked) is None  # type: ignore[arg-type]
