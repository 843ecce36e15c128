"""Evaluation whose test data is read once devices are answered.

A task's function for test data may take many seconds, because its process imports torch; nobody
asks for an evaluation before the first round is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.service.admission.requests import Requests
from coordinator.service.courses.parts import Evaluate
from coordinator.service.service import Service
from coordinator.task.levels import LevelScores


class LateEvaluator:
    """An evaluator that is being made; whoever evaluates waits for it."""

    def __init__(self, make: Callable[[], Evaluate], requests: Requests[Service]) -> None:
        """`make` is called in a thread. If it fails, the run's loop raises the error, and ends."""
        self._made: Future[Evaluate] = Future()
        self._requests = requests
        self._thread = Thread(target=self._make, args=(make,), name="evaluation", daemon=True)

    def begin(self) -> None:
        """Begin to make it."""
        self._thread.start()

    def __call__(self, model: GlobalModel, levels: LevelScores) -> LevelScores:
        """See `Evaluate`."""
        return self._made.result()(model, levels)

    def close(self) -> None:
        """Wait until it is made, or cannot be; nobody is asked any more."""
        self._requests.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _make(self, make: Callable[[], Evaluate]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as error:  # a task's code may do anything, such as exit
            failure = error if isinstance(error, Exception) else _ended_by(error)
            self._made.set_exception(failure)
            with suppress(CoordinatorError):  # the run ends anyway
                self._requests.ask(lambda service: service.fail(failure))


def _ended_by(error: BaseException) -> ConfigError:
    """Return the error of a task's code that wanted to end the process."""
    return ConfigError(f"the test data (task.evaluation) could not be read: {error!r}")
