"""An evaluator that is made beside the loop: waited for, and its failure ends the run."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError
from coordinator.operate.serve.evaluation import LateEvaluator
from coordinator.service.admission.requests import Requests
from coordinator.service.courses.parts import Evaluate
from coordinator.service.service import Service
from coordinator.task.levels import LevelScores

MODEL = cast(GlobalModel, object())


class FailingService:
    """Takes the failure that the loop is to raise."""

    failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.failure = error


def test_whoever_evaluates_waits_until_the_evaluator_is_made() -> None:
    may_make, scores = threading.Event(), LevelScores()

    def make() -> Evaluate:
        assert may_make.wait(60)
        return lambda model, levels: scores if model is MODEL else levels

    evaluate = LateEvaluator(make, Requests())
    evaluate.begin()
    found: list[LevelScores] = []
    asking = threading.Thread(target=lambda: found.append(evaluate(MODEL, LevelScores())))
    asking.start()
    assert not found
    may_make.set()
    asking.join(60)
    assert found[0] is scores
    evaluate.close()


def test_failure_is_raised_by_the_loop_and_by_whoever_evaluates() -> None:
    requests: Requests[Any] = Requests()
    asked = threading.Event()
    requests.wake = asked.set

    def make() -> Evaluate:
        raise ConfigError("no such data")

    evaluate = LateEvaluator(make, cast("Requests[Service]", requests))
    evaluate.begin()
    assert asked.wait(60)
    service = FailingService()
    requests.serve(service)
    assert isinstance(service.failure, ConfigError)
    with pytest.raises(ConfigError, match="no such data"):
        evaluate(MODEL, LevelScores())
    evaluate.close()


def test_code_of_a_task_that_exits_leaves_nobody_waiting() -> None:
    def make() -> Evaluate:
        raise SystemExit(3)

    requests: Requests[Any] = Requests()
    requests.close()
    evaluate = LateEvaluator(make, requests)
    evaluate.begin()
    evaluate.close()
    with pytest.raises(ConfigError, match=r"task.evaluation.*SystemExit\(3\)"):
        evaluate(MODEL, LevelScores())


def test_evaluator_that_was_never_begun_can_be_closed() -> None:
    LateEvaluator(lambda: pytest.fail("it is not made"), Requests()).close()
